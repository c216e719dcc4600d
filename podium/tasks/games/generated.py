"""Shared by generated tasks and games: distinct questions, held-out questions, and the rewards of games."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from podium.tasks.task import Prompt

Made = TypeVar("Made", bound=Hashable)

DRAWS = 20
"""Draws for each requested question before assuming that no more distinct ones exist."""


class PaidByEnvironment:
    """A task whose conversations return the reward, so that the task's own grade is never used."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return 0; the environment's own reward counts instead."""
        return 0.0


def distinct(draw: Callable[[], Made], count: int) -> list[Made]:
    """Up to `count` distinct results of `draw`, in order; fewer if many draws find no new one."""
    found: dict[Made, None] = {}
    tries = 0
    while len(found) < count and tries < DRAWS * count:
        tries += 1
        found[draw()] = None
    return list(found)


def held_out(task: str, made: Sequence[Made], split: str, eval_size: int) -> Sequence[Made]:
    """The first `eval_size` items for evaluation, or the rest for training. Raises ValueError if nothing is left to
    train on.
    """
    if len(made) <= eval_size:
        raise ValueError(f"{task}: with these options there are only {len(made)} different questions; lower eval_size")
    return made[:eval_size] if split == "eval" else made[eval_size:]


def earned(number: int, most: int) -> float:
    """The reward of a game that is won with answer `number` of at most `most`: linear from 1 for the first to 0.5 for
    the last.
    """
    return 1.0 - 0.5 * (number - 1) / max(1, most - 1)
