"""Answers to questions of mathematics with a careful reader's verdict, from tests/tasks/data/math_answers.txt."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from podium.tasks.math_answers.correctness import is_correct

CORPUS = Path(__file__).parent / "data" / "math_answers.txt"


class Pair(NamedTuple):
    kind: str
    is_right: bool
    reference: str
    answer: str


def read_corpus() -> Iterator[Pair]:
    kind = ""
    for line in CORPUS.read_text(encoding="utf8").splitlines():
        if line.startswith("## "):
            kind = line[3:]
        elif line.startswith(("+ ", "- ")):
            reference, answer = line[2:].split(" ;; ", 1)
            yield Pair(kind, line[0] == "+", reference, answer.replace("\u23ce", "\n"))


PAIRS = list(read_corpus())
KINDS = list(dict.fromkeys(pair.kind for pair in PAIRS))


def test_the_corpus_has_hundreds_of_right_and_of_wrong_answers_and_none_twice():
    assert sum(pair.is_right for pair in PAIRS) > 500
    assert sum(not pair.is_right for pair in PAIRS) > 500
    assert len({(pair.reference, pair.answer) for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_wrong_answer_earns(kind):
    assert [pair for pair in PAIRS if pair.kind == kind and not pair.is_right and earns(pair)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_right_answer_earns(kind):
    assert [pair for pair in PAIRS if pair.kind == kind and pair.is_right and not earns(pair)] == []


def test_every_reference_equals_itself_in_a_box():
    references = {pair.reference for pair in PAIRS if "boxed" not in pair.reference}
    assert [each for each in references if not is_correct(f"\\boxed{{{each}}}", each)] == []


def earns(pair: Pair) -> bool:
    return is_correct(pair.answer, pair.reference)
