"""Generated sums, differences and products of integers: the task of the demo and the tests."""

import hashlib
import random
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from podium.tasks.math_answers.final_answer import final_number
from podium.tasks.task import Prompt, TaskSource

Operation = Literal["add", "sub", "mul"]

MAX_PAIRS = 10_000
"""Maximum number of pairs per operation; if there are more, this many are sampled with a fixed seed."""


class Question(NamedTuple):
    """An expression and its value."""

    expression: str
    answer: int
    pair: str
    """The expression with sorted operands if their order does not matter: `3 + 4` for `3 + 4` and `4 + 3`.

    Questions of a pair are in the same split, because a model that knows 3 + 4 knows 4 + 3.
    """


class Arithmetic:
    """Questions like `What is 3 + 4?`: operands have `digits` digits without leading zeros; no result is negative.

    A fixed share of the questions is held out for evaluation, with `a + b` and `b + a` on the same side.
    """

    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        digits: Annotated[int, Field(ge=1, le=12)] = 1,
        operations: Annotated[Sequence[Operation], Field(min_length=1)] = ("add",),
        held_out: Annotated[float, Field(ge=0.05, le=0.9)] = 0.25,
    ) -> None:
        source.refuse("arithmetic")
        self.digits = digits
        self.operations = operations
        self.held_out = held_out

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All questions of `train` or `eval`; `eval` has the share `held_out`, and one more if that share would split a
        pair.
        """
        questions = [
            question for operation in dict.fromkeys(self.operations) for question in self._questions(operation)
        ]
        questions.sort(key=lambda question: (_digest(question.pair), question.expression))
        num_held_out = round(self.held_out * len(questions))
        if questions[num_held_out - 1].pair == questions[num_held_out].pair:
            num_held_out += 1
        chosen = questions[:num_held_out] if split == "eval" else questions[num_held_out:]
        return [
            Prompt(
                id=f"arithmetic/{split}/{question.expression.replace(' ', '')}",
                question=f"What is {question.expression}? Answer with only the number.",
                answer=str(question.answer),
            )
            for question in sorted(chosen, key=lambda question: _digest(question.expression))
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the number that the completion states as its answer, or else ends with, is right; 0 for an unfinished
        calculation.
        """
        number = final_number(completion)
        return float(number is not None and number.value == int(prompt.answer))

    def _questions(self, operation: Operation) -> list[Question]:
        """All questions of an operation, without duplicates."""
        match operation:
            case "add":
                return [
                    Question(f"{a} + {b}", a + b, f"{min(a, b)} + {max(a, b)}") for a, b in self._operands(operation)
                ]
            case "sub":
                ordered = dict.fromkeys((max(a, b), min(a, b)) for a, b in self._operands(operation))
                return [Question(f"{a} - {b}", a - b, f"{a} - {b}") for a, b in ordered]
            case "mul":
                return [
                    Question(f"{a} * {b}", a * b, f"{min(a, b)} * {max(a, b)}") for a, b in self._operands(operation)
                ]

    def _operands(self, operation: str) -> list[tuple[int, int]]:
        """Pairs of numbers of `digits` digits: all, or MAX_PAIRS drawn without repetition."""
        least = 10 ** (self.digits - 1)
        count = 9 * least  # how many numbers have this many digits
        indices = dict.fromkeys(range(count**2)) if count**2 <= MAX_PAIRS else {}
        generator = random.Random(f"{operation}/{self.digits}")
        while len(indices) < min(count**2, MAX_PAIRS):
            indices[generator.randrange(count**2)] = None
        return [(least + index // count, least + index % count) for index in indices]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
