"""The prompts in flight between the steps of a run, and which of them form the next step."""

import math
import time
from collections.abc import Sequence

import jax

from podium.rollout.transcript import transcript_of
from podium.run.run_spec import RolloutSpec
from podium.sampling.conversations.carry import Pending, Position, chosen
from podium.sampling.demonstrations import mixed_in
from podium.sampling.exchange import Exchange
from podium.sampling.feed import Feed
from podium.sampling.groups import Group

STEPS_APART = 4
"""Engine steps between exchanges in which the hosts check whether a step has enough complete prompts."""


class PartialRollouts:
    """The prompts in flight between the steps of a run."""

    def __init__(self, feed: Feed, spec: RolloutSpec) -> None:
        """Start at the run's beginning."""
        self.feed = feed
        self.demonstrations = None if spec.demonstrations is None else mixed_in(spec.demonstrations, spec, feed)
        """The demonstrations to mix in; None if the run has none."""
        self.max_staleness = spec.settings.max_staleness
        self.version = 0
        """Number of steps that trained the current weights."""
        self.pending = tuple[Pending, ...]()
        self.failures: tuple[str, ...] = ("it was in an earlier part of the run",)
        """Failures of the last step that had any, because an episode in flight may have failed in an earlier step."""

    @property
    def position(self) -> Position:
        """The run's position in its prompts: saved with the run, and set when it resumes."""
        tasks = self.feed.tasks
        return Position(
            cursor=tasks.cursor,
            pending=self.pending,
            curriculum=tasks.means,
            retired=tasks.retired,
            demonstrations=0 if self.demonstrations is None else self.demonstrations.feed.tasks.cursor,
        )

    @position.setter
    def position(self, position: Position) -> None:
        tasks, self.pending = self.feed.tasks, position.pending
        tasks.cursor, tasks.means, tasks.retired = position.cursor, position.curriculum, position.retired
        if self.demonstrations is not None:
            self.demonstrations.feed.tasks.cursor = position.demonstrations


class Choice:
    """Decides, during decoding, which of the pending prompts form a step."""

    def __init__(
        self, rollouts: PartialRollouts, pending: Sequence[Pending], count: int, per_step: int, exchange: Exchange
    ) -> None:
        """Decide which `count` of the pending prompts to take; later steps take `per_step` each."""
        self._rollouts, self._exchange = rollouts, exchange
        self._first = [each.first_version for each in pending]
        self._count, self._per_step = count, per_step
        self._engine_steps = 0
        self._since = math.inf
        self.leaves = len(pending) > count
        """Whether prompts are left for the next step."""
        self.asks = exchange.together or self.leaves
        """Whether hosts exchange which prompts are complete; otherwise each waits for all its prompts, at its
        own pace."""

    @property
    def waited_s(self) -> float:
        """Seconds since enough prompts were complete."""
        return max(0.0, time.perf_counter() - self._since)

    def split(self, pending: Sequence[Pending]) -> tuple[list[Group], list[Pending]]:
        """The groups of the step, and the remaining prompts with the tokens sampled so far; requires `enough`."""
        taken = self.of([bool(each.rewards) for each in pending])
        assert taken is not None, "enough prompts were complete"
        groups = [_group(pending[index], self._rollouts.version) for index in taken]
        return groups, [each for index, each in enumerate(pending) if index not in set(taken)]

    def of(self, complete: Sequence[bool]) -> list[int] | None:
        """Indices of the prompts (over all hosts) to take; None if decoding must continue."""
        return chosen(
            self._first,
            complete,
            self._count,
            per_step=self._per_step,
            version=self._rollouts.version,
            max_staleness=self._rollouts.max_staleness,
        )

    def enough(self, own: Sequence[bool]) -> bool:
        """Whether the complete prompts of all hosts suffice; all hosts must call this equally often.

        Raises Interrupted on all hosts if one must stop.
        """
        self._engine_steps += 1
        if jax.process_count() > 1 and self._engine_steps % STEPS_APART:
            return False
        hosts = self._exchange.agree(list(own))
        complete = list(own) if self._exchange.together else [each for flags in hosts for each in flags]
        if sum(complete) >= self._count:
            self._since = min(self._since, time.perf_counter())
        return self.of(complete) is not None


def _group(pending: Pending, version: int) -> Group:
    """The group of a prompt whose completions have ended and are graded; `version` as in `Group`."""
    return Group(
        prompt=pending.prompt.prompt,
        transcripts=[episode.transcript for episode in pending.episodes]
        or [transcript_of(pending.prompt.tokens, completion) for completion in pending.completions],
        rewards=list(pending.rewards),
        version=version,
        firsts=tuple(episode.first for episode in pending.episodes),
    )
