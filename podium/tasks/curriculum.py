"""Curricula: which level of a task a prompt is drawn from, by how well its levels went lately.

A level's chance grows with m (1 - m), where m is the mean share of right answers in its last groups: a level that is
always or never solved teaches nothing. A share of the prompts is drawn evenly, so that no level is forgotten. Seed,
number of the draw and the last groups' means, which are saved with the run, decide the level.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Mapping, Sequence

from podium.config.schema import CurriculumConfig, TaskConfig
from podium.tasks.registry import task_labels

UNKNOWN = 0.5
"""The mean of a level that no group has been drawn from."""


def leveled(tasks: Sequence[TaskConfig]) -> list[list[TaskConfig]]:
    """Each task's levels as tasks of their own; a task without curriculum is its only level."""
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


class Curriculum:
    """The chances of a task's levels."""

    def __init__(self, config: CurriculumConfig, labels: Sequence[str]) -> None:
        """`labels` are the levels' names, easiest first."""
        self._spread = config.spread
        self._last: dict[str, deque[float]] = {label: deque(maxlen=config.window) for label in labels}

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
        means = [sum(last) / len(last) if last else UNKNOWN for last in self._last.values()]
        weights = [mean * (1 - mean) for mean in means]
        total, even = sum(weights), 1 / len(means)
        return [
            self._spread * even + (1 - self._spread) * (weight / total if total > 0 else even) for weight in weights
        ]

    def level(self, uniform: float) -> int:
        """The level of a number that is drawn evenly from 0 up to 1."""
        bounds = list(itertools.accumulate(self.chances()))
        return min(bisect.bisect_right(bounds, uniform), len(bounds) - 1)
