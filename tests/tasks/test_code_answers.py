"""The corpus of answers with code: each gets the verdict of a careful reader."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from podium.sandbox.runs import Limits, Sandbox
from podium.tasks.code_task import Code
from podium.tasks.task import OutOfTime, TaskSource
from tests.sandbox.sandboxes import need_sandbox

DATA = Path(__file__).parent / "data"
HEAD = "=== "


class Pair(NamedTuple):
    task: str
    verdict: str
    note: str
    answer: str


def pairs() -> list[Pair]:
    """The answers of the corpus."""
    text = (DATA / "code_answers.txt").read_text("utf-8")
    found = []
    for part in f"\n{text}".split(f"\n{HEAD}")[1:]:
        head, _, answer = part.partition("\n")
        found.append(Pair(*head.split(" | "), answer))
    return found


@functools.cache
def tasks(folder: Path) -> dict[str, tuple[Code, object]]:
    """A task of one row for each row of the corpus, and its prompt."""
    rows = yaml.safe_load((DATA / "code_tasks.yaml").read_text("utf-8"))
    made = {}
    for name, row in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text(json.dumps(row))
        task = Code(TaskSource(path=str(path)), reward="all", timeout_s=1.0)
        made[name] = task, task.prompts("train")[0]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_sandbox()
    return tmp_path_factory.mktemp("code")


def test_the_corpus_is_large_and_says_each_verdict_often():
    found = pairs()
    assert len(found) >= 150
    assert {pair.verdict for pair in found} == {"right", "wrong"}
    assert min(sum(pair.verdict == verdict for pair in found) for verdict in ("right", "wrong")) >= 70
    assert len({(pair.task, pair.note) for pair in found}) == len(found)
    assert {pair.task for pair in found} == set(yaml.safe_load((DATA / "code_tasks.yaml").read_text("utf-8")))


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: f"{pair.task}: {pair.note}")
def test_an_answer_gets_the_verdict_of_a_careful_reader(pair: Pair, folder: Path):
    task, prompt = tasks(folder)[pair.task]
    try:
        earned = task.grade(prompt, pair.answer)
    except OutOfTime as late:
        earned = late.correct
    assert earned == float(pair.verdict == "right")
