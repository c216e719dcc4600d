"""What README and docs/ show works: Python and YAML blocks are executed, what they point to is there.

Python blocks run as they are printed, but for one step: the models that they name are there under their names, with
published vocabularies and chat templates and tiny random weights (tests/published.py). Those that train take some
minutes each, so only the README's is run always. Commands: tests/train/test_shown_commands.py.
"""

import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest
from made_once import made_once
from shown_commands import PAGES, ROOT, fenced

import podium
from podium.config.load import load
from podium.sharding import make_mesh

FOR_CONTRIBUTORS = [ROOT / "LOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "log").glob("*.md"))]
"""Pages for contributors: what they link to is there; the commands in them are not run."""
NOT_RUN = {
    "PeftModel.from_pretrained": "needs torch, peft and 16 GB of weights; tests/models/test_peft.py",
    "Sandbox(": "needs namespaces; tests/sandbox",
    "from trl import": "TRL's own code, to compare with: needs torch",
}


def blocks(language: str) -> list[Any]:
    """The code blocks of a language, by page and number."""
    found = []
    for page in PAGES:
        name, texts = str(page.relative_to(ROOT)), fenced(page, language)
        for number, text in enumerate(texts):
            trains = "podium.grpo(" in text
            if trains and name == "docs/from-trl.md":
                continue  # tests/train/test_from_trl_page.py runs them
            marks = [pytest.mark.long] if trains and name != "README.md" else []
            found.append(pytest.param(text, id=f"{name}-{number}", marks=marks))
    return found


@pytest.mark.parametrize("page", [*PAGES, *FOR_CONTRIBUTORS], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page):
    """Its links, footnotes, files of benches and tests, and tests by their names."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    assert set(re.findall(r"\[\^([\w-]+)\](?!:)", text)) == set(re.findall(r"^\[\^([\w-]+)\]:", text, re.MULTILINE))
    for file, name in re.findall(r"`((?:tests|benches|tools|examples)/[\w/]+\.py)(?:::(\w+))?`", text):
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), f"{file}::{name}"
    for result in re.findall(r"`([\w-]+-(?:cpu|planned))`", text):
        assert (ROOT / "benches" / "results" / f"{result}.json").exists(), result


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_yaml_block_is_settings(text, tmp_path):
    """Its keys and values are known; what it names of the reader's own is not looked for."""
    (tmp_path / "base.yaml").write_text("model: a/b\ntasks: [{name: arithmetic}, {name: gsm8k}]\n")
    (tmp_path / "block.yaml").write_text(text)
    load([tmp_path / "base.yaml", tmp_path / "block.yaml"], [], {})


@pytest.fixture
def printed(published_models: Path, small_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models of the pages are there; runs have one step and one device, in an empty folder."""
    monkeypatch.setattr("podium.train.setup.make_mesh", lambda text: make_mesh(text, jax.devices()[:1]))
    monkeypatch.chdir(tmp_path)
    grpo = podium.grpo

    def one_step(*arguments: Any, **options: Any) -> podium.Run:
        return grpo(*arguments, **{**options, "steps": 1})

    monkeypatch.setattr(podium, "grpo", one_step, raising=False)
    return tmp_path


@pytest.mark.parametrize("text", blocks("python"))
def test_a_python_block_runs(text, request):
    code = compile(textwrap.dedent(text), "block", "exec")
    if any(mark in text for mark in NOT_RUN):
        return
    if "podium.grpo(" in text:
        request.getfixturevalue("printed")
    with made_once():
        exec(code, {"__name__": "block"})
