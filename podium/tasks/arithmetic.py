"""Generated sums, differences and products of whole numbers: the task of the demo and of the tests."""

import hashlib
import random
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from podium.tasks.final_answer import final_number
from podium.tasks.task import Prompt, TaskSource

Operation = Literal["add", "sub", "mul"]

MAX_PAIRS = 10_000
"""The most pairs of numbers per operation; of more, this many are drawn, always the same."""


class Arithmetic:
    """Questions like `What is 3 + 4?`: operands have `digits` digits and do not begin with 0; no result is negative.

    A quarter of the questions is held out for evaluation, always the same.
    """

    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        digits: Annotated[int, Field(ge=1, le=12)] = 1,
        operations: Annotated[Sequence[Operation], Field(min_length=1)] = ("add",),
    ) -> None:
        if source.path or source.eval_path:
            raise ValueError("arithmetic: path and eval_path: the questions are generated, not read; unset them")
        self.digits = digits
        self.operations = operations

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All questions of `train` (three quarters) or `eval` (a quarter)."""
        questions = [
            question for operation in dict.fromkeys(self.operations) for question in self._questions(operation)
        ]
        questions.sort(key=lambda question: hashlib.sha256(question[0].encode()).digest())
        num_held_out = max(1, len(questions) // 4)
        chosen = questions[:num_held_out] if split == "eval" else questions[num_held_out:]
        return [
            Prompt(
                id=f"arithmetic/{split}/{expression.replace(' ', '')}",
                question=f"What is {expression}? Answer with only the number.",
                answer=str(answer),
            )
            for expression, answer in chosen
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the number that the completion states, or else ends in, is the answer; 0 for an open calculation."""
        number = final_number(completion)
        return float(number is not None and number.value == int(prompt.answer))

    def _questions(self, operation: Operation) -> list[tuple[str, int]]:
        """Expressions and their values, each expression once."""
        match operation:
            case "add":
                return [(f"{a} + {b}", a + b) for a, b in self._pairs("add")]
            case "sub":
                ordered = dict.fromkeys((max(a, b), min(a, b)) for a, b in self._pairs("sub"))
                return [(f"{a} - {b}", a - b) for a, b in ordered]
            case "mul":
                return [(f"{a} * {b}", a * b) for a, b in self._pairs("mul")]

    def _pairs(self, operation: str) -> list[tuple[int, int]]:
        """Pairs of numbers of `digits` digits: all, or MAX_PAIRS drawn without repetition."""
        least = 10 ** (self.digits - 1)
        count = 9 * least  # how many numbers have this many digits
        indices = dict.fromkeys(range(count**2)) if count**2 <= MAX_PAIRS else {}
        generator = random.Random(f"{operation}/{self.digits}")
        while len(indices) < min(count**2, MAX_PAIRS):
            indices[generator.randrange(count**2)] = None
        return [(least + index // count, least + index % count) for index in indices]
