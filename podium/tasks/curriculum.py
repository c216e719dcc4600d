"""Curricula: choose the level of a task, or the task of a mixture, from which a prompt is drawn, by recent success.

A level's chance grows with m (1 - m), where m is the mean share of right answers in its most recent groups: a level
that is always or never solved teaches nothing. A task's chance grows with its progress: how far its share of right
answers has moved (arXiv:1707.00183). A share of the prompts is drawn evenly, or by weight, so that nothing is
forgotten. A draw depends on the seed, the number of the draw and the means of recent groups, which are saved with the
run.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from podium.config.data import ProgressConfig
from podium.config.schema import CurriculumConfig, TaskConfig
from podium.tasks.registry import task_labels

UNKNOWN = 0.5
"""The mean assumed for a level from which no group has been drawn."""
LEAST_KNOWN = 4
"""Minimum groups of a task from which its progress is computed."""
Chances = Callable[[Sequence[Sequence[float]]], list[float]]
"""Computes the probability of each level, or task, from the means of its last groups, oldest first."""


def leveled(tasks: Sequence[TaskConfig]) -> list[list[TaskConfig]]:
    """Each task's levels as separate tasks; a task without a curriculum has itself as its only level."""
    found: list[list[TaskConfig]] = []
    for task in tasks:
        levels = [{}] if task.curriculum is None else task.curriculum.levels
        settings = [{"options": {**task.options, **options}, "curriculum": None} for options in levels]
        found.append([task] if task.curriculum is None else [task.model_copy(update=each) for each in settings])
    return found


def level_labels(tasks: Sequence[TaskConfig]) -> list[str]:
    """A name for each level of each task, in order: the task's label, and `LABEL-level1` where it has a curriculum."""
    return [
        label if task.curriculum is None else f"{label}-level{level}"
        for label, task, levels in zip(task_labels(tasks), tasks, leveled(tasks), strict=True)
        for level in range(1, len(levels) + 1)
    ]


def by_success(config: CurriculumConfig, labels: Sequence[str]) -> "Curriculum":
    """The curriculum of a task's levels; `labels` are their names, easiest first."""
    return Curriculum(labels, window=config.window, chances=partial(half_solved, spread=config.spread))


def by_progress(config: ProgressConfig, labels: Sequence[str], weights: Sequence[float]) -> "Curriculum":
    """The curriculum of a mixture's tasks with these weights."""
    chances = partial(learned_fast, weights=weights, spread=config.spread)
    return Curriculum(labels, window=config.window, chances=chances)


def half_solved(last: Sequence[Sequence[float]], *, spread: float) -> list[float]:
    """Probabilities proportional to m (1 - m), where m is the mean of a level's last groups; a share `spread` is
    uniform.
    """
    means = [sum(each) / len(each) if each else UNKNOWN for each in last]
    weights = [mean * (1 - mean) for mean in means]
    total, even = sum(weights), 1 / len(means)
    return [spread * even + (1 - spread) * (weight / total if total > 0 else even) for weight in weights]


def learned_fast(last: Sequence[Sequence[float]], *, weights: Sequence[float], spread: float) -> list[float]:
    """Probabilities proportional to weight x progress; a share `spread` is by weight alone. A task whose progress is
    still unknown counts as the one with the most progress.
    """
    known = [progress(each) for each in last]
    fastest = max((each for each in known if each is not None), default=1.0)
    fast = [weight * (fastest if each is None else each) for weight, each in zip(weights, known, strict=True)]
    total, whole = sum(fast), sum(weights)
    shares = [weight / whole for weight in weights]
    return [
        spread * share + (1 - spread) * (each / total if total > 0 else share)
        for share, each in zip(shares, fast, strict=True)
    ]


def progress(last: Sequence[float]) -> float | None:
    """The absolute difference between the means of the newer and the older half of the last groups; None if there are
    too few groups.
    """
    if len(last) < LEAST_KNOWN:
        return None
    half = len(last) // 2
    older, newer = list(last)[:half], list(last)[-half:]
    return abs(sum(newer) - sum(older)) / half


class Curriculum:
    """The probabilities of a task's levels, or of a mixture's tasks."""

    def __init__(self, labels: Sequence[str], *, window: int, chances: Chances) -> None:
        """`labels` are the levels' names; the last `window` groups of each decide."""
        self._chances = chances
        self._last: dict[str, deque[float]] = {label: deque(maxlen=window) for label in labels}

    @property
    def means(self) -> dict[str, tuple[float, ...]]:
        """The means of the last groups of each level by label, the newest last."""
        return {label: tuple(last) for label, last in self._last.items()}

    @means.setter
    def means(self, means: Mapping[str, Sequence[float]]) -> None:
        for label, last in self._last.items():
            last.clear()
            last.extend(means.get(label, ()))

    def add(self, label: str, mean: float) -> None:
        """Record the share of right answers in a group of a level."""
        self._last[label].append(mean)

    def chances(self) -> list[float]:
        """The probability of each level."""
        return self._chances([tuple(last) for last in self._last.values()])

    def level(self, uniform: float) -> int:
        """The level that a uniform random number in [0, 1) selects."""
        bounds = list(itertools.accumulate(self.chances()))
        return min(bisect.bisect_right(bounds, uniform), len(bounds) - 1)
