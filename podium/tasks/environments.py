"""Runs the conversations of a run's tasks in processes beside the trainer, or in threads of it.

Requests return at once; `next` returns their answers one by one, and may wait. A process that ends takes
its conversations with it, and is replaced. One that has a call beyond the time limit gets no further conversations, and
is ended as soon as its others are.
"""

import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe

from podium.config.judge import JudgeConfig
from podium.config.schema import EnvironmentsConfig, TaskConfig
from podium.tasks.child_environment import child_environment
from podium.tasks.conversation import Turn
from podium.tasks.conversing import Answered, Asked, Close, Host, Open, Say
from podium.tasks.environment_forms import led_by_program
from podium.tasks.rewards import asks_for_environment
from podium.tasks.task import Prompt

ENDED = "the process of its environment ended"


class Environments:
    """The conversations of a run."""

    def __init__(
        self, tasks: Sequence[TaskConfig], config: EnvironmentsConfig, *, judges: Sequence[JudgeConfig] = ()
    ) -> None:
        """Start nothing yet. `tasks` are in the order of `TaskPrompt.task`; processes get no keys, as of `judges`."""
        self._tasks = list(tasks)
        self._judges = tuple(judges)
        self._config = config
        self._events: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self._workers: list[_Process | _Threads] = []
        self._retired: list[_Process | _Threads] = []
        self._homes: dict[int, _Process | _Threads] = {}
        """Where each conversation is held."""
        self._kept: set[int] = set()
        """Conversations whose environment a reward function asks for."""
        self._deadlines: dict[int, float] = {}
        """When each open request is late, soonest first: all have the same limit."""
        self._lock = threading.Lock()
        self.keeps = functools.cache(lambda task: asks_for_environment(self._tasks[task]))
        """Whether the environments of a task (by number) are returned with their grades, for reward functions."""
        self.led = functools.cache(lambda task: led_by_program(self._tasks[task]))
        """Whether programs lead the conversations of a task (by number)."""

    def open(self, number: int, task: int, prompt: Prompt, seed: int) -> None:
        """Begin a conversation under a number of its own."""
        with self._lock:
            while len(self._workers) < max(1, self._config.workers):
                self._workers.append(self._started())
            worker = min(self._workers, key=lambda each: len(each.numbers))
            self._homes[number] = worker
            worker.numbers.add(number)
            if self.keeps(task):
                self._kept.add(number)
        self._ask(worker, Open(number, task, prompt, seed))

    def holds(self, number: int) -> bool:
        """Whether a conversation was opened here and has not ended."""
        return number in self._homes

    def say(self, number: int, turn: Turn) -> None:
        """Pass an answer of the model to its conversation."""
        self._ask(self._homes[number], Say(number, turn))

    def grade(self, number: int) -> None:
        """End a conversation and ask for its final reward, and for its environment if a reward function wants it."""
        self._ask(self._homes[number], Close(number, graded=True, keep=number in self._kept))

    def drop(self, number: int) -> None:
        """End a conversation; `next` returns nothing more of it."""
        worker = self._forget(number)
        if worker is not None:
            worker.ask(Close(number, graded=False))

    def next(self, wait_s: float) -> Answered | None:
        """Return the next answer to a request, waiting up to `wait_s` seconds; None if none came."""
        while True:
            until = next(iter(self._deadlines.values()), None)
            patience = wait_s if until is None else min(wait_s, max(0.0, until - time.monotonic()))
            try:
                answered = self._events.get(timeout=patience) if patience > 0 else self._events.get_nowait()
            except queue.Empty:
                return self._late()
            if answered.number in self._deadlines:  # else it was dropped, or is late
                del self._deadlines[answered.number]
                if answered.kind in ("graded", "failed"):
                    self._forget(answered.number)
                return answered

    def close(self) -> None:
        """End all processes."""
        for worker in (*self._workers, *self._retired):
            worker.stop()
        self._workers.clear()
        self._retired.clear()
        self._homes.clear()
        self._kept.clear()
        self._deadlines.clear()

    def _ask(self, worker: "_Process | _Threads", asked: Asked) -> None:
        self._deadlines[asked.number] = time.monotonic() + self._config.timeout_s
        if worker.dead:
            self._events.put(Answered(asked.number, "failed", ENDED))
        else:
            worker.ask(asked)

    def _late(self) -> Answered | None:
        """The failure of a request that is beyond the time limit."""
        number, until = next(iter(self._deadlines.items()), (0, None))
        if until is None or until > time.monotonic():
            return None
        del self._deadlines[number]
        worker = self._homes[number]
        with self._lock:
            if worker in self._workers:
                self._workers.remove(worker)
                self._retired.append(worker)
        self._forget(number)
        limit = f"it took longer than environments.timeout_s, {self._config.timeout_s:g} s"
        return Answered(number, "failed", limit, self._config.timeout_s)

    def _forget(self, number: int) -> "_Process | _Threads | None":
        """Forget a conversation; a retired process without others is ended."""
        self._deadlines.pop(number, None)
        with self._lock:
            worker = self._homes.pop(number, None)
            self._kept.discard(number)
            if worker is not None:
                worker.numbers.discard(number)
        if worker in self._retired and not worker.numbers:
            self._retired.remove(worker)
            worker.stop()
        return worker

    def _started(self) -> "_Process | _Threads":
        if not self._config.workers:
            return _Threads(self._tasks, self._events)
        return _Process(self._tasks, child_environment(self._judges), self._events, self._ended)

    def _ended(self, worker: "_Process", code: int | None) -> None:
        """Called on another thread when a process has ended: its open requests have failed."""
        with self._lock:
            lost = sorted(worker.numbers)
            worker.dead = True
            if worker in self._workers:
                self._workers.remove(worker)
        for number in lost:
            self._events.put(Answered(number, "failed", f"{ENDED} with code {code}"))


Ended = Callable[["_Process", int | None], None]
"""Called with a process that has ended, and its exit code."""


class _Threads:
    """Conversations in the trainer's process."""

    def __init__(self, tasks: list[TaskConfig], events: "queue.SimpleQueue[Answered]") -> None:
        self.numbers: set[int] = set()
        self.dead = False
        self._host = Host(tasks, events.put)

    def ask(self, asked: Asked) -> None:
        self._host.take(asked)

    def stop(self) -> None:
        self._host.close()


class _Process:
    """A process that holds conversations, and a thread that reads what it sends."""

    def __init__(
        self,
        tasks: list[TaskConfig],
        variables: Mapping[str, str],
        events: "queue.SimpleQueue[Answered]",
        ended: "Ended",
    ) -> None:
        self.numbers: set[int] = set()
        self.dead = False
        self._stopped = False
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from podium.tasks.conversing import main; main({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        theirs.close()
        self._connection.send(tasks)
        threading.Thread(target=self._read, args=(events, ended), name="environments", daemon=True).start()

    def ask(self, asked: Asked) -> None:
        """Send a request; if the process has ended, its reader reports that."""
        with contextlib.suppress(OSError):
            self._connection.send(asked)

    def stop(self) -> None:
        """End the process and its children."""
        self._stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self, events: "queue.SimpleQueue[Answered]", ended: "Ended") -> None:
        try:
            while True:
                events.put(self._connection.recv())
        except (EOFError, OSError):
            pass
        if not self._stopped:
            ended(self, self._process.wait())
        self._connection.close()
