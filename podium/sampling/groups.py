"""Prompts with their graded completions, for training steps and evaluations. No jax."""

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
    """The greedy completion of a prompt, with which the others are compared."""

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
    """The text that each transcript's environment added to the prompt; empty without environments."""
    greedy: Greedy | None = None
    """The greedy completion; None if the recipe has none, or while it is still the last transcript of an ungraded
    group."""

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
        """The share of right answers, among the episodes that did not fail; None if all failed."""
        found = [reward.parts["correct"] for reward in self.rewards if not reward.failed]
        return min(1.0, max(0.0, sum(found) / len(found))) if found else None

    @property
    def apart(self) -> "Group":
        """Take the last transcript out of the group, as its greedy completion."""
        greedy = Greedy(self.transcripts[-1], self.rewards[-1])
        return dataclasses.replace(
            self, transcripts=self.transcripts[:-1], rewards=self.rewards[:-1], firsts=self.firsts[:-1], greedy=greedy
        )

    def judged(self, part: str | None) -> np.ndarray:
        """The values that decide whether the group's rewards are equal, [G] float32: the named part of the reward, or
        totals if None.

        NaN for episodes that do not count, because they failed or lack the part.
        """
        return np.array([reward.part(part) for reward in self.rewards], np.float32)

    def equal_rewards(self, part: str | None) -> bool:
        """Whether all episodes got the same reward, or the same value of this part of it."""
        return bool(equal_reward_groups(self.judged(part)[None])[0])


class StepGroups(NamedTuple):
    """The groups of a step, and statistics about them."""

    groups: list[Group]
    stats: RolloutStats
    environments: EnvironmentStats | None = None
    """Statistics of environments; None if no task has conversations, or nothing was sampled."""
    demonstrations: Sequence[Group] = ()
    """The demonstrations that are mixed into the step, each a group of one completion."""


class Source(Protocol):
    """The source of a run's groups: sampled by `Sampler`, or taken from the data by `Demonstrations`."""

    def next(self, prompts: int) -> StepGroups:
        """The groups of the next step, for the next prompts of the run."""
        ...


class GroupScorer(Protocol):
    """Adds a part to the rewards of complete groups, on all hosts together."""

    def check(self, feed: Feed, prompts: Sequence[TaskPrompt]) -> None:
        """Raise ValueError if answers to these prompts cannot be scored."""
        ...

    def scored(self, groups: Sequence[Group], feed: Feed) -> tuple[list[Group], int]:
        """Add scores to the groups; also returns the number of answers that are too long to score."""
        ...

    def standardised(self, groups: Sequence[Group]) -> list[Group]:
        """Standardise the scores of all groups of a step in their total rewards, if so configured."""
        ...
