"""What README and docs/ show works: Python and YAML blocks are executed, commands are parsed as the command line does.

Runs of Python blocks are short ones of a tiny model; what commands do is tested where they are.
"""

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

import podium
from benches.recipes import write_tiny_model
from podium import cli
from podium.config.load import load

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "podium" / "project" / "README.md"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TINY: dict[str, Any] = {
    "steps": 1,
    "prompts_per_step": 2,
    "group_size": 4,
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 8},
}


def blocks(language: str) -> list[Any]:
    """The code blocks of a language, by page and number."""
    found = []
    for page in PAGES:
        texts = [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]
        name = str(page.relative_to(ROOT))
        found += [pytest.param(text, id=f"{name}-{number}") for number, text in enumerate(texts)]
    return found


def commands() -> list[Any]:
    """Every line that begins with podium in a block without a language, or in a config's first comment."""
    lines = [line for param in blocks("") for line in str(param.values[0]).splitlines()]
    lines += [path.read_text().partition("\n")[0].lstrip("# ") for path in sorted((ROOT / "configs").glob("*.yaml"))]
    wanted = [re.sub(r"\s{2,}#.*|\s+\(.*|\s+#.*", "", line).strip() for line in lines]
    return sorted({line for line in wanted if line.startswith("podium ")})


@pytest.mark.parametrize("line", commands())
def test_a_command_is_one(line):
    command: click.Command = typer.main.get_command(cli.app)
    words, context = shlex.split(line)[1:], click.Context(command, info_name="podium")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        assert command is not None, f"no command {name}"
    command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_yaml_block_is_settings(text, tmp_path):
    """Its keys and values are known; what it names of the reader's own is not looked for."""
    (tmp_path / "base.yaml").write_text("model: a/b\ntasks: [{name: arithmetic}]\n")
    (tmp_path / "block.yaml").write_text(text)
    load([tmp_path / "base.yaml", tmp_path / "block.yaml"], [], {})


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """Calls of the API take a tiny model and few steps, in an empty folder."""
    write_tiny_model(tmp_path / "model")
    grpo, answers = podium.grpo, podium.Run.generate
    model = str(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(podium, "grpo", lambda _, **options: grpo(model, **{**options, **TINY}), raising=False)
    monkeypatch.setattr(podium.Run, "generate", lambda run, asked: answers(run, asked, max_new_tokens=3))
    return tmp_path


@pytest.mark.parametrize("text", blocks("python"))
def test_a_python_block_runs(text, tiny):
    exec(compile(textwrap.dedent(text), "block", "exec"), {"__name__": "block"})
