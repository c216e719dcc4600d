"""Curricula: which level of a task, or which task of a mixture, a prompt is drawn from, by how well they went lately.

A level's chance grows with m (1 - m), where m is the mean share of right answers in its last groups: a level that is
always or never solved teaches nothing. A task's chance grows with its progress: how far its share of right answers has
moved (arXiv:1707.00183). A share of the prompts is drawn evenly, or by weight, so that nothing is forgotten. Seed,
number of the draw and the last groups' means, which are saved with the run, decide.
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
"""The mean of a level that no group has been drawn from."""
LEAST_KNOWN = 4
"""Groups of a task from which its progress is known."""
Chances = Callable[[Sequence[Sequence[float]]], list[float]]
"""The chance of each level, or task, from the means of its last groups, oldest first."""


def leveled(tasks: Sequence[TaskConfig]) -> list[list[TaskConfig]]:
    """Each task's levels as their own tasks; a task without curriculum is its only level."""
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
    """Chances in proportion to m (1 - m), m the mean of each level's last groups; a share `spread` is even."""
    means = [sum(each) / len(each) if each else UNKNOWN for each in last]
    weights = [mean * (1 - mean) for mean in means]
    total, even = sum(weights), 1 / len(means)
    return [spread * even + (1 - spread) * (weight / total if total > 0 else even) for weight in weights]


def learned_fast(last: Sequence[Sequence[float]], *, weights: Sequence[float], spread: float) -> list[float]:
    """Chances in proportion to weight x progress; a share `spread` is by weight alone.

    A task whose progress is not known yet counts as the fastest.
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
    """How far the mean of the newer half of the last groups is from that of the older; None: too few are known."""
    if len(last) < LEAST_KNOWN:
        return None
    half = len(last) // 2
    older, newer = list(last)[:half], list(last)[-half:]
    return abs(sum(newer) - sum(older)) / half


class Curriculum:
    """The chances of a task's levels, or of a mixture's tasks."""

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
        """Take the share of right answers of a level's group."""
        self._last[label].append(mean)

    def chances(self) -> list[float]:
        """The chance of each level."""
        return self._chances([tuple(last) for last in self._last.values()])

    def level(self, uniform: float) -> int:
        """The level of a number that is drawn evenly from 0 up to 1."""
        bounds = list(itertools.accumulate(self.chances()))
        return min(bisect.bisect_right(bounds, uniform), len(bounds) - 1)
