"""The corpus of answers with code: each gets the verdict of a careful reader."""

import functools
import json
import random
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from podium.tasks.code.code_blocks import code_of
from podium.tasks.code.code_task import Code, parsed
from podium.tasks.task import OutOfTime, Prompt, TaskSource
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
        task, verdict, note = head.split(" | ")
        found.append(Pair(task, verdict, note, answer))
    return found


@functools.cache
def tasks(folder: Path) -> dict[str, tuple[Code, Prompt]]:
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


def test_the_solution_of_each_row_passes_its_tests(folder: Path):
    with_solution = {name: pair for name, pair in tasks(folder).items() if pair[1].answer}
    assert len(with_solution) >= 10
    earned = {name: task.grade(prompt, prompt.answer) for name, (task, prompt) in with_solution.items()}
    assert earned == dict.fromkeys(with_solution, 1.0)


def solutions() -> list[dict[str, object]]:
    """The rows with solutions of all kinds."""
    forms = yaml.safe_load((DATA / "code_solutions.yaml").read_text("utf-8"))
    return [{"text": "?", **row} if form == "mbpp" else row for form, rows in forms.items() for row in rows]


def test_solutions_of_the_kinds_of_known_sets_pass_and_others_do_not(folder: Path):
    rows = solutions()
    assert len(rows) >= 30
    path = folder / "solutions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = Code(TaskSource(path=str(path)), reward="all")
    prompts = task.prompts("train")
    assert [prompt.answer for prompt in prompts if task.grade(prompt, prompt.answer) != 1.0] == []
    for prompt in prompts:
        name = parsed(prompt.metadata).name
        wrong = f"def {name}(*a, **k): return [a, 0]"
        assert task.grade(prompt, wrong) == 0.0, name


def test_no_arrangement_of_fences_stops_the_grader():
    parts = [
        "```",
        "```python",
        "~~~",
        "````",
        "def f(x):",
        "    return x",
        "> ",
        "- ",
        "   ",
        "\n",
        "\r\n",
        "text ",
        "<answer>",
    ]
    parts += [
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "`",
        "~",
        "\t",
        ">>> f(1)",
        "class Solution:",
        "\x0c",
        "\ud800",
    ]
    generator = random.Random("fences")
    for _ in range(2_000):
        text = "".join(generator.choices(parts, k=generator.randint(0, 30)))
        for name in ("", "f"):
            code = code_of(text, name)
            assert all(isinstance(each, str) for each in (code.text, *code.others))


@pytest.mark.parametrize(
    "line",
    ["a" + "`" * 10**5, " " * 10**5 + "x", "> " * 10**5, "1" * 10**5, "```" * 50_000, "```a " * 30_000, "~" * 10**5],
)
def test_code_is_found_in_linear_time(line: str):
    begun = time.process_time()
    for name in ("", "f"):
        code_of(f"{line}\n{line}\ny\n{line}", name)
    assert time.process_time() - begun < 2.0
