"""Runs the conversations of a run's tasks in separate processes, or in threads of the trainer.

Requests return at once; `next` returns their answers one by one, and may wait. If a request is not answered within the
time limit, its process is asked to respond. If the process responds, only that request hangs and counts as failed; the
process gets no further conversations, and ends after its current ones. If the process does not respond, it is killed.
`conversation_processes` decides which conversation is the cause; the others are lost, and must be opened again.
"""

import functools
import queue
import time
from collections.abc import Sequence
from typing import NamedTuple

from podium.config.judge import JudgeConfig
from podium.config.schema import EnvironmentsConfig, TaskConfig
from podium.tasks.conversation import Turn
from podium.tasks.conversations.conversation_processes import Event, Events, Holder, Pool, Process
from podium.tasks.conversations.conversing import Answered, Asked, Close, Open, Say
from podium.tasks.conversations.environment_forms import led_by_program
from podium.tasks.rewards import asks_for_environment
from podium.tasks.task import Prompt
from podium.tasks.workers import START_LIMIT_S, STARTED, Worker

RESPONSE_SHARE, RESPONSE_S = 0.1, 1.0
"""A process must respond within this share of the time limit, or within this number of seconds if that is longer."""


class _Awaited(NamedTuple):
    """A ping that a process must answer before its request continues; otherwise the request fails."""

    worker: Worker
    ping: int
    until: float
    """When the process must have responded."""
    why: str
    """Error message if it has not responded."""


class Environments:
    """The conversations of a run."""

    def __init__(
        self, tasks: Sequence[TaskConfig], config: EnvironmentsConfig, *, judges: Sequence[JudgeConfig] = ()
    ) -> None:
        """Does not start a process yet. `tasks` are in the order of `TaskPrompt.task`; processes do not get API keys,
        such as those of `judges`.
        """
        self._tasks = list(tasks)
        self._timeout_s = config.timeout_s
        self._events = Events()
        self._pool = Pool(
            self._tasks, config.workers, self._events, hidden=[judge.key_env for judge in judges if judge.key_env]
        )
        self._kept: set[int] = set()
        """Conversations whose environment a reward function needs."""
        self._deadlines: dict[int, float] = {}
        """Deadline of each open request, earliest first; all have the same time limit."""
        self._awaited: dict[int, _Awaited] = {}
        """Requests that exceeded their time limit, or whose process is still starting."""
        self.keeps = functools.cache(lambda task: asks_for_environment(self._tasks[task]))
        """Whether the environments of a task (by number) are returned with their grades, for reward functions."""
        self.led = functools.cache(lambda task: led_by_program(self._tasks[task]))
        """Whether programs lead the conversations of a task (by number)."""

    def open(self, number: int, task: int, prompt: Prompt, seed: int, *, apart: bool = False) -> None:
        """Begin a conversation under its own number.

        `apart`: in a process that handles one request at a time, because the conversation may have ended another
        process. Raises ValueError if no process can be started.
        """
        self._pool.place(number, apart=apart)
        if self.keeps(task):
            self._kept.add(number)
        self._ask(Open(number, task, prompt, seed))

    def holds(self, number: int) -> bool:
        """Whether a conversation was opened here and has not ended."""
        return self._pool.home(number) is not None

    def say(self, number: int, turn: Turn) -> None:
        """Pass an answer of the model to the conversation."""
        self._ask(Say(number, turn))

    def grade(self, number: int) -> None:
        """End a conversation and ask for its final reward, and for its environment if a reward function wants it."""
        self._ask(Close(number, graded=True, keep=number in self._kept))

    def drop(self, number: int) -> None:
        """End a conversation; `next` returns no more answers of it."""
        holder = self._forget(number)
        if holder is not None:
            self._start_clock(holder.drop(number), holder)

    def next(self, wait_s: float) -> Answered | None:
        """Return the next answer to a request, waiting up to `wait_s` seconds; None on timeout. Lost conversations are
        returned too, with or without an open request.
        """
        end = time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            wake = min(
                end,
                next(iter(self._deadlines.values()), end),
                *(each.until for each in self._awaited.values()),
            )
            try:
                event = self._events.get(timeout=wake - now) if wake > now else self._events.get_nowait()
            except queue.Empty:
                answered = self._late()
                if answered is not None or time.monotonic() >= end:
                    return answered
                continue
            answered = self._responded(event) if event.answered is None else self._accepted(event, event.answered)
            if answered is not None:
                return answered

    def close(self) -> None:
        """End all processes."""
        self._pool.close()
        self._kept.clear()
        self._deadlines.clear()
        self._awaited.clear()

    def _ask(self, asked: Asked) -> None:
        holder = self._pool.home(asked.number)
        assert holder is not None, "the conversation was opened, and has not ended"
        if holder.ask(asked):  # if the process has ended, the conversation is about to be lost
            self._start_clock(asked.number, holder)

    def _start_clock(self, number: int | None, holder: Holder) -> None:
        """Start the time limit of a request, if one was sent; the time counts from when its process has started."""
        if number is None:
            return
        if isinstance(holder, Process) and not holder.worker.responded(STARTED):
            why = f"its process has not started within {START_LIMIT_S:g} s"
            self._awaited[number] = _Awaited(holder.worker, STARTED, holder.worker.began + START_LIMIT_S, why)
        else:
            self._deadlines[number] = time.monotonic() + self._timeout_s

    def _accepted(self, event: Event, answered: Answered) -> Answered | None:
        """Return an answer unless its request was dropped or has failed; also returns the loss of a conversation
        without a request.
        """
        self._start_clock(event.holder.next(answered.number), event.holder)
        is_open = answered.number in self._deadlines or answered.number in self._awaited
        if self._pool.home(answered.number) is not event.holder or not (is_open or event.ended):
            return None
        self._deadlines.pop(answered.number, None)
        self._awaited.pop(answered.number, None)
        if answered.kind in ("graded", "failed", "lost"):
            self._forget(answered.number)
        if answered.kind == "graded":
            self._pool.ended_well()
        return answered

    def _late(self) -> Answered | None:
        """Handle a request that exceeded the time limit: it fails once the process has shown that it still responds."""
        now = time.monotonic()
        for number in [number for number, until in self._deadlines.items() if until <= now]:
            del self._deadlines[number]
            holder = self._pool.home(number)
            if isinstance(holder, Process):
                until = now + max(RESPONSE_S, RESPONSE_SHARE * self._timeout_s)
                why = f"{self._limit}, and its process does not respond"
                self._awaited[number] = _Awaited(holder.worker, holder.worker.ping(), until, why)
            elif holder is not None:
                return self._failed(number, holder)
        for number, late in list(self._awaited.items()):
            if late.until <= now and number in self._awaited:
                self._awaited = {key: each for key, each in self._awaited.items() if each.worker is not late.worker}
                late.worker.kill(late.why)
        return None

    def _responded(self, event: Event) -> Answered | None:
        """Start the time limits in a process that has started; return the failure of a late request whose process
        responded.
        """
        now = time.monotonic()
        for number, late in list(self._awaited.items()):
            if self._pool.home(number) is not event.holder or not late.worker.responded(late.ping):
                continue
            del self._awaited[number]
            if late.ping != STARTED:
                return self._failed(number, event.holder)
            self._deadlines[number] = now + self._timeout_s
        return None

    def _failed(self, number: int, holder: Holder) -> Answered:
        self._pool.retire(holder)
        begun = holder.drop(number)
        self._forget(number)
        self._start_clock(begun, holder)
        return Answered(number, "failed", self._limit, self._timeout_s)

    @property
    def _limit(self) -> str:
        return f"it took longer than environments.timeout_s, {self._timeout_s:g} s"

    def _forget(self, number: int) -> Holder | None:
        self._deadlines.pop(number, None)
        self._awaited.pop(number, None)
        self._kept.discard(number)
        return self._pool.forget(number)
