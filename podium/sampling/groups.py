"""Prompts with their graded completions: what a step trains on, and an evaluation counts. No jax."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from podium.algorithms.advantages import equal_reward_groups
from podium.observe.stats import EnvironmentStats
from podium.rollout.request import RolloutStats
from podium.rollout.transcript import Transcript
from podium.sampling.feed import Feed
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Reward


class Greedy(NamedTuple):
    """The greedy completion of a prompt, which others are compared with."""

    transcript: Transcript
    reward: Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt with its graded episodes."""

    prompt: TaskPrompt
    transcripts: list[Transcript]
    rewards: list[Reward]
    """One reward per transcript."""
    version: int = 0
    """Weight version at the start of the step; a token's age is this minus the token's version."""
    firsts: tuple[str | None, ...] = ()
    """What the environment of each transcript added to the prompt; empty: there are no environments."""
    greedy: Greedy | None = None
    """None: no recipe compares with it, or it is the last of the transcripts until the group is graded."""

    @functools.cached_property
    def tokens(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return tuple(self.transcripts[0].prompt.tolist())

    @property
    def totals(self) -> np.ndarray:
        """The total rewards, [G] float32."""
        return np.array([reward.total for reward in self.rewards], np.float32)

    @property
    def correct(self) -> float | None:
        """The share of right answers, among the episodes that did not fail; None: all failed."""
        found = [reward.parts["correct"] for reward in self.rewards if not reward.failed]
        return min(1.0, max(0.0, sum(found) / len(found))) if found else None

    @property
    def apart(self) -> "Group":
        """The group with its last transcript as its greedy completion."""
        greedy = Greedy(self.transcripts[-1], self.rewards[-1])
        return dataclasses.replace(
            self, transcripts=self.transcripts[:-1], rewards=self.rewards[:-1], firsts=self.firsts[:-1], greedy=greedy
        )

    def judged(self, part: str | None) -> np.ndarray:
        """What decides whether its rewards are equal, [G] float32: totals (None), or a part of the reward.

        NaN: the episode does not count, because it failed or has no such part.
        """
        return np.array([reward.part(part) for reward in self.rewards], np.float32)

    def equal_rewards(self, part: str | None) -> bool:
        """Whether all its episodes got the same reward, or part of it, so that its recipe leaves it out."""
        return bool(equal_reward_groups(self.judged(part)[None])[0])


class StepGroups(NamedTuple):
    """The groups of a step, and statistics of how they were made."""

    groups: list[Group]
    stats: RolloutStats
    environments: EnvironmentStats | None = None
    """None: no task has conversations, or nothing is drawn."""
    demonstrations: Sequence[Group] = ()
    """The demonstrations that are mixed into the step, each a group of one completion."""


class Source(Protocol):
    """Where the groups of a run's steps come from: drawn by `Sampler`, or taken from the data by `Demonstrations`."""

    @property
    def draws(self) -> bool:
        """Whether it draws them with the current weights."""
        ...

    def next(self, prompts: int) -> StepGroups:
        """The groups of the next step, of the next prompts of the run."""
        ...


class GroupScorer(Protocol):
    """Adds a part to the rewards of complete groups, on all hosts together."""

    def check(self, feed: Feed, prompts: Sequence[TaskPrompt]) -> None:
        """Raise ValueError if answers to these prompts cannot be scored."""
        ...

    def scored(self, groups: Sequence[Group], feed: Feed) -> tuple[list[Group], int]:
        """The groups with their scores, and the number of answers that have none because they are too long."""
        ...

    def standardised(self, groups: Sequence[Group]) -> list[Group]:
        """All scored groups of a step, with scores as they count in totals."""
        ...
