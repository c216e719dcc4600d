"""The examples of docs/from-trl.md run as they stand, for one step, with published vocabularies and templates."""

import json
import re
import sys
from pathlib import Path

import pytest
from made_once import made_once
from shown_commands import FENCE, ROOT

from podium import cli

PAGE = ROOT / "docs" / "from-trl.md"
ALWAYS = ("GRPO",)
"""Sections that are run always; the others take as long, 7 to 25 s each."""
SECTIONS = [
    pytest.param(text, id=title, marks=[] if title in ALWAYS else [pytest.mark.long])
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    if FENCE.search(text)
]
ROWS = {
    "conversations.jsonl": {"messages": [{"role": "user", "content": "2 + 1"}, {"role": "assistant", "content": "3"}]},
    "pairs.jsonl": {"prompt": "What is 1 + 1 ?", "chosen": "2", "rejected": "3"},
}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder, with data; runs have one step."""
    for name, row in ROWS.items():
        (tmp_path / name).write_text(4 * f"{json.dumps(row)}\n")
    monkeypatch.setenv("PODIUM_STEPS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("one_device", "published_models")
@pytest.mark.parametrize("text", SECTIONS)
def test_what_a_section_shows_is_run(text, reader, monkeypatch):
    for kind, code in FENCE.findall(text):
        if kind == "python" and "from trl import" not in code:
            with made_once():
                exec(compile(code, "page", "exec"), {"__name__": "page"})
            assert any(reader.glob("runs/*/metrics.jsonl"))
        elif kind == "yaml":
            (reader / "my.yaml").write_text(code)
        elif kind == "":
            monkeypatch.setattr(sys, "argv", code.split())
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert not stopped.value.code
            assert any(reader.glob("runs/my-*/metrics.jsonl"))


def test_every_capability_has_its_example():
    sections = {parameter.id: str(parameter.values[0]) for parameter in SECTIONS}
    for title in ("GRPO", "Rewards", "SFT", "DPO", "LoRA", "Evaluation", "Tools and environments"):
        ours = [kind for kind, code in FENCE.findall(sections[title]) if "from trl import" not in code]
        assert ours, title
