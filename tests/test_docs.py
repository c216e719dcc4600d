"""What README and docs/ show works: Python and YAML blocks are executed, what they point to is there.

Runs of Python blocks are short ones of a tiny model. Commands: tests/train/test_shown_commands.py.
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
from benches.recipes import write_tiny_model
from podium.config.load import load
from podium.sharding import make_mesh

NOT_RUN = {
    "PeftModel.from_pretrained": "needs torch, peft and 16 GB of weights; tests/models/test_peft.py",
    "Sandbox(": "needs namespaces; tests/sandbox",
    "from trl import": "TRL's own code, to compare with: needs torch",
}
TINY: dict[str, Any] = {
    "steps": 1,
    "prompts_per_step": 2,
    "group_size": 4,
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 8},
}


CONTINUED = (
    "{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{{ ' <end> ' if message.role == 'assistant' else ' ' }}{% endfor %}"
)
"""A chat template by which conversations can be continued."""


def blocks(language: str) -> list[Any]:
    """The code blocks of a language, by page and number."""
    found = []
    for page in PAGES:
        name, texts = str(page.relative_to(ROOT)), fenced(page, language)
        found += [pytest.param(text, id=f"{name}-{number}") for number, text in enumerate(texts)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page):
    """Its links, footnotes, files of benches and tests, and tests by their names."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    assert set(re.findall(r"\[\^([\w-]+)\](?!:)", text)) == set(re.findall(r"^\[\^([\w-]+)\]:", text, re.MULTILINE))
    for file, name in re.findall(r"`((?:tests|benches|tools|examples)/[\w/]+\.py)(?:::(\w+))?`", text):
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), f"{file}::{name}"
    for result in re.findall(r"\| `([\w-]+-(?:cpu|planned))` \|$", text, re.MULTILINE):
        assert (ROOT / "benches" / "results" / f"{result}.json").exists(), result


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_yaml_block_is_settings(text, tmp_path):
    """Its keys and values are known; what it names of the reader's own is not looked for."""
    (tmp_path / "base.yaml").write_text("model: a/b\ntasks: [{name: arithmetic}]\n")
    (tmp_path / "block.yaml").write_text(text)
    load([tmp_path / "base.yaml", tmp_path / "block.yaml"], [], {})


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """Calls of the API take a tiny model, few steps and one device, in an empty folder."""
    monkeypatch.setattr("podium.train.setup.make_mesh", lambda text: make_mesh(text, jax.devices()[:1]))
    write_tiny_model(tmp_path / "model")
    grpo, answers = podium.grpo, podium.Run.generate
    model = str(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text(CONTINUED)

    def tiny_grpo(_: str, *data: Any, **options: Any) -> podium.Run:
        talks = {"chat_template": "chat.jinja"} if {"tools", "environment"} & options.keys() or data else {}
        return grpo(model, *data, **{**options, **TINY, **talks})

    monkeypatch.setattr(podium, "grpo", tiny_grpo, raising=False)
    monkeypatch.setattr(podium.Run, "generate", lambda run, asked: answers(run, asked, max_new_tokens=3))
    return tmp_path


@pytest.mark.parametrize("text", blocks("python"))
def test_a_python_block_runs(text, tiny):
    code = compile(textwrap.dedent(text), "block", "exec")
    if not any(mark in text for mark in NOT_RUN):
        with made_once():
            exec(code, {"__name__": "block"})
