"""Naive form of a mixture of tasks: which task and level each prompt of a run is drawn from, and which prompt.

For each prompt, tasks are asked in order. A task takes the prompt if its share of all prompts that it was asked about,
plus a fraction drawn from the seed, has reached another whole number. A level is drawn by the means of its last groups.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from podium.certify.naive_draws import hash_of, prompt_index
from podium.config.data import RetireConfig


class Draw(NamedTuple):
    """A drawn prompt."""

    task: int
    """Index among the levels of all tasks; a task without a curriculum has one level."""
    place: int
    """Index among the prompts of that level."""


@dataclasses.dataclass
class NaiveMixture:
    """Draws prompts one at a time; learns from the rewards of earlier groups which task and level come next."""

    seed: int
    weights: Sequence[float]
    levels: Sequence[Sequence[int]]
    """Number of prompts of each level of each task; a task with one level has no curriculum."""
    window: int
    spread: float
    by_progress: bool = False
    """Whether tasks are drawn by their progress: then each has one level."""
    retire: RetireConfig | None = None
    """When prompts are not drawn again; None: all of them are drawn again."""

    def __post_init__(self) -> None:
        """Start before the first draw."""
        self.means: list[list[float]] = [[] for own in self.levels for _ in own]
        """Shares of right answers of the last groups of each level, newest last."""
        self.retired: set[Draw] = set()
        self._weights = [Fraction(1)] if self.by_progress else [Fraction(each) for each in self.weights]
        self._drawn = [0] * len(self._weights)
        self._seen = [0] * len(self._weights)

    def draw(self) -> Draw:
        """The next prompt."""
        task = next(each for each in range(len(self._weights)) if self._takes(each))
        draw, self._drawn[task] = self._drawn[task], self._drawn[task] + 1
        sizes = [own[0] for own in self.levels] if self.by_progress else list(self.levels[task])
        first = 0 if self.by_progress else sum(map(len, self.levels[:task]))
        level = 0
        if len(sizes) > 1:
            evenly = hash_of(self.seed, "level", task, draw) / 2**64
            ends = list(itertools.accumulate(self._chances(self.means[first : first + len(sizes)])))
            level = min(sum(end <= evenly for end in ends), len(sizes) - 1)
        return Draw(first + level, prompt_index(self.seed, draw, sizes[level], first + level))

    def learn(self, draw: Draw, mean: float) -> None:
        """Record the share of right answers to a prompt."""
        self.means[draw.task] = [*self.means[draw.task], mean][-self.window :]
        sizes = [count for own in self.levels for count in own]
        left = sizes[draw.task] - sum(each.task == draw.task for each in self.retired)
        if self.retire is not None and mean >= self.retire.pass_rate and left > self.retire.keep:
            self.retired.add(draw)

    def _takes(self, task: int) -> bool:
        """Whether this task takes a prompt that the tasks before it left."""
        share = self._weights[task] / sum(self._weights[task:])
        begin = Fraction(hash_of(self.seed, "phase", task) % 2**32, 2**32)
        self._seen[task] += 1
        before, after = (int((self._seen[task] - each) * share + begin) for each in (1, 0))
        return after > before

    def _chances(self, means: Sequence[Sequence[float]]) -> list[float]:
        if self.by_progress:
            whole = [each / sum(self.weights) for each in self.weights]
            moved = [_progress(each) for each in means]
            fastest = max((each for each in moved if each is not None), default=1.0)
            wanted = [w * (fastest if each is None else each) for w, each in zip(self.weights, moved, strict=True)]
        else:
            whole = [1 / len(means)] * len(means)
            solved = [sum(each) / len(each) if each else 0.5 for each in means]
            wanted = [each * (1 - each) for each in solved]
        total = sum(wanted)
        return [
            self.spread * even + (1 - self.spread) * (own / total if total > 0 else even)
            for even, own in zip(whole, wanted, strict=True)
        ]


def _progress(means: Sequence[float]) -> float | None:
    """How far the mean of the newer half is from that of the older; None if fewer than four groups are known."""
    half = len(means) // 2
    if half < 2:
        return None
    return abs(sum(means[-half:]) / half - sum(means[:half]) / half)
