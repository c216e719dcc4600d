"""The questions of the demo as they were split when the golden of training was recorded, so that it stays as it is."""

import hashlib
from collections.abc import Sequence

from podium.tasks.games.arithmetic import Arithmetic
from podium.tasks.task import Prompt, TaskSource

NUM_HELD_OUT = 20


class FormerSplit(Arithmetic):
    """One-digit sums of which a quarter is held out by the hash of the expression, whatever becomes of `b + a`."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The 61 questions of `train` or the 20 of `eval`."""
        prompts = [*super().prompts("train"), *super().prompts("eval")]
        expressions = {prompt.question.removeprefix("What is ").partition("?")[0]: prompt for prompt in prompts}
        ordered = sorted(expressions, key=lambda expression: hashlib.sha256(expression.encode()).digest())
        chosen = ordered[:NUM_HELD_OUT] if split == "eval" else ordered[NUM_HELD_OUT:]
        return [
            Prompt(
                id=f"arithmetic/{split}/{expression.replace(' ', '')}",
                question=expressions[expression].question,
                answer=expressions[expression].answer,
            )
            for expression in chosen
        ]


def arithmetic(source: TaskSource) -> FormerSplit:
    """The task by a name whose label in records is `arithmetic`."""
    return FormerSplit(source)
