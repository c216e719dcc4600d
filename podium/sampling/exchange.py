"""Exchanges between the hosts of a run while they answer prompts, and how they stop together."""

import contextlib
import dataclasses
import functools
import signal
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from podium.hosts.distributed import AgreedStop, HostFailedError, Interrupted
from podium.job.watchdog import Watchdog
from podium.observe.stats import EnvironmentStats
from podium.rollout.request import GradingCounts, JudgeCounts, RolloutStats
from podium.sampling.conversations.carry import Answer
from podium.tasks.conversations.conversing import Answered

Value = TypeVar("Value")


class HostPart(NamedTuple):
    """The results that a host sends to the others."""

    answers: list[Answer]
    stats: RolloutStats
    episodes: EnvironmentStats = EnvironmentStats()


class Ending(contextlib.AbstractContextManager["Ending"]):
    """A block in which a host makes its part of a rollout; records for the other hosts whether it ended with a result,
    a stop or an error.
    """

    def __init__(self, *, together: bool) -> None:
        """`together`: whether all hosts decode together. Then an error of one host cannot be exchanged, and is raised
        at once.
        """
        self._together = together
        self.part: HostPart | None = None
        """The result; None if the run must stop now, or if there was an error."""
        self.failed: Exception | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Interrupted):
            return True
        if self._together or not isinstance(error, Exception) or isinstance(error, HostFailedError):
            return False
        self.failed = error
        return True


class Exchange:
    """Exchanges with the other hosts of a run. All hosts must call `agree` and `gather` equally often, in the same
    order.
    """

    def __init__(self, stop: AgreedStop, watchdog: Watchdog, *, together: bool) -> None:
        """`together`: whether all hosts decode all prompts together; otherwise each decodes its share. `watchdog` is
        pinged at every exchange.
        """
        self.stop, self.watchdog, self.together = stop, watchdog, together

    def poll(self) -> None:
        """Raise Interrupted if the run must stop now."""
        self.watchdog.beat()
        self.stop.poll()

    def agree(self, value: Value) -> list[Value]:
        """Exchange a value; returns each host's value, in order. Raises Interrupted on all hosts if one must stop."""
        with contextlib.suppress(Interrupted):
            self.stop.poll()  # signals received by other processes
        with self.watchdog.waiting():
            hosts, asked = self.stop.exchange(value)
        if signal.SIGTERM in asked:
            raise Interrupted
        return hosts

    def answered(self, answered: list[Answered]) -> list[Answered]:
        """Exchange environments' answers; returns those of all hosts. Raises Interrupted on all hosts if one
        must stop.
        """
        return [each for found in self.agree(answered) for each in found]

    def gather(self, ending: Ending) -> HostPart:
        """Join the parts of all hosts, in the order of their prompts. If one host has no part, all raise Interrupted.

        If one host has failed, it raises its error, and the others raise HostFailedError.
        """
        with self.watchdog.waiting():
            gathered, asked = self.stop.exchange(ending.part, ending.failed)
        self.stop.agree(asked)
        parts = [part for part in gathered if part is not None]
        if len(parts) < len(gathered):
            raise Interrupted
        return HostPart(
            answers=[answer for part in parts for answer in part.answers],
            stats=self._stats([part.stats for part in parts]),
            episodes=functools.reduce(
                EnvironmentStats.then, [part.episodes for part in (parts[:1] if self.together else parts)]
            ),
        )

    def _stats(self, hosts: Sequence[RolloutStats]) -> RolloutStats:
        """Join the statistics of all hosts."""
        if not self.together:
            return functools.reduce(RolloutStats.beside, hosts)
        grading = GradingCounts(
            reward_s=max(stats.grading.reward_s for stats in hosts),
            judged=sum((stats.grading.judged for stats in hosts), JudgeCounts()),
        )
        return dataclasses.replace(hosts[0], grading=grading)  # all hosts have counted the same, except for grading
