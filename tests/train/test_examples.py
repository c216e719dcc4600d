"""The scripts and the notebook of examples/, each run whole, with a tiny model and one step where they train."""

import re
import runpy
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORTER = {  # sizes of test_shown_commands.py: the programs are the same
    '    "demo",': "    MODEL,",
    'podium.grpo("demo"': "podium.grpo(MODEL",
    '"steps": 10, "prompts_per_step": 8': '"steps": 1, "prompts_per_step": 2, "grading": {"workers": 0}',
    "steps=20": "steps=1, grading={'workers': 0}, eval__questions=2",
    "prompts_per_step=8": "prompts_per_step=2",
    "group_size=8": "group_size=4",
    '"max_prompt_tokens": 48, "max_new_tokens": 16': '"max_prompt_tokens": 60, "max_new_tokens": 3, "slots": 8',
    'eval={"questions": 20},': "",
    "max_new_tokens=16": "max_new_tokens=3",
}


def shortened(text: str, model: Path) -> str:
    """The code with little to do."""
    for found, instead in SHORTER.items():
        text = text.replace(found, instead.replace("MODEL", repr(str(model))))
    return text


@pytest.mark.usefixtures("one_device")
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
def test_an_example_runs(name, prints, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{name}.py"
    script.write_text(shortened((EXAMPLES / f"{name}.py").read_text(), tiny_model))
    runpy.run_path(str(script), run_name="__main__")
    assert prints in capsys.readouterr().out


def test_every_script_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"first", "reward", "task", "recipe", "evaluation", "plan"}


@pytest.fixture
def notebook(tiny_model) -> nbformat.NotebookNode:
    """The notebook with little to do."""
    found = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    for cell in found.cells:
        cell.source = shortened(cell.source, tiny_model)
    return found


@pytest.mark.usefixtures("one_device")
def test_the_code_of_the_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "cell", "exec"), session)
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
