"""The task `calculator`: sums and products of large numbers, which a small model needs the tool `calculator` for."""

import hashlib
import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from podium.tasks.games.calculator import calculator
from podium.tasks.games.generated import distinct
from podium.tasks.math_answers.final_answer import final_number
from podium.tasks.task import Count, Prompt, TaskSource

Digits = Annotated[int, Field(ge=1, le=12)]


class CalculatorTask:
    """Products and sums of numbers of several digits: `What is 4821 * 377?`, with a calculator to call.

    Questions are generated: `size` to train on and `eval_size` others. An answer is right if its last number is.
    """

    system_prompt: str | None = None
    tools = (calculator,)

    def __init__(self, source: TaskSource, *, digits: Digits = 4, size: Count = 2000, eval_size: Count = 100) -> None:
        source.refuse("calculator")
        self.digits = digits
        self.size = size
        self.eval_size = eval_size

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All questions of a split; the splits are disjoint."""
        questions = list(self._questions())
        chosen = questions[: self.eval_size] if split == "eval" else questions[self.eval_size :]
        return [
            Prompt(
                id=f"calculator/{split}/{hashlib.sha256(expression.encode()).hexdigest()[:8]}",
                question=f"What is {expression}?",
                answer=calculator(expression),
            )
            for expression in chosen
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the last number of the answer is the result."""
        number = final_number(completion)
        return float(number is not None and number.value == int(prompt.answer))

    def _questions(self) -> Sequence[str]:
        """Distinct expressions of two numbers."""
        generator = random.Random(f"calculator/{self.digits}")
        least, most = 10 ** (self.digits - 1), 10**self.digits - 1

        def draw() -> str:
            a, b = generator.randint(least, most), generator.randint(least, most)
            return f"{a} {generator.choice('*+-')} {b}"

        return distinct(draw, self.size + self.eval_size)
