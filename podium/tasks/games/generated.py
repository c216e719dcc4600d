"""Shared by generated tasks and games: distinct questions, those held out, and the rewards of games."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from podium.tasks.task import Prompt

Made = TypeVar("Made", bound=Hashable)

DRAWS = 20
"""Draws for each question that is wanted, before it is taken that there are no more."""


class PaidByEnvironment:
    """A task whose conversations give the reward, so that its own grade is never used."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return 0; the environment's own reward counts instead."""
        return 0.0


def distinct(draw: Callable[[], Made], count: int) -> list[Made]:
    """Up to `count` different results of `draw`, in order; fewer where many draws find no more."""
    found: dict[Made, None] = {}
    tries = 0
    while len(found) < count and tries < DRAWS * count:
        tries += 1
        found[draw()] = None
    return list(found)


def held_out(task: str, made: Sequence[Made], split: str, eval_size: int) -> Sequence[Made]:
    """The first `eval_size` for evaluation, or the others for training.

    Raises ValueError if none is left to train on.
    """
    if len(made) <= eval_size:
        raise ValueError(f"{task}: with these options there are only {len(made)} different ones; lower eval_size")
    return made[:eval_size] if split == "eval" else made[eval_size:]


def earned(number: int, most: int) -> float:
    """The reward of a game that is won with answer `number` of at most `most`: 1 for the first, 0.5 for the last."""
    return 1.0 - 0.5 * (number - 1) / max(1, most - 1)
