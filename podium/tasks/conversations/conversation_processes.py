"""Processes, or threads of the trainer, in which conversations run.

A process that ends loses its conversations, and so does one that does not respond: a conversation may hold the
interpreter's lock, stop the process, or block the event loop that others share. If a single conversation had a call in
progress, it is to blame. If several had, each of them continues in a process that carries out one call at a time, so
that the next loss has one culprit. The other conversations lose only their process.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from podium.config.schema import TaskConfig
from podium.tasks.conversations.conversing import Answered, Asked, Close, Host
from podium.tasks.workers import Answer, Lost, Progress, Received, UnsendableError, Worker, not_started

MOST_ENDS = 3
"""Maximum number of consecutive processes that end without a call in progress and without having completed a
conversation. Conversations of further such processes count as failed."""


class Event(NamedTuple):
    """Something that happened in a process, for the trainer's thread."""

    holder: "Holder"
    answered: Answered | None
    """An answer; None if the event only shows that the process responds."""
    ended: bool = False
    """Whether the process has ended, which also ends the conversation."""


Events = queue.SimpleQueue[Event]


class Threads:
    """Conversations in the trainer's process. A call that hangs there cannot be killed."""

    def __init__(self, tasks: Sequence[TaskConfig], events: Events) -> None:
        """Prepare the conversations of `tasks`."""
        self.numbers: set[int] = set()
        """Numbers of the conversations in this process."""
        self._host = Host(tasks)
        self._events = events

    def ask(self, asked: Asked) -> bool:
        """Begin a request; returns whether it began at once."""

        def answer() -> None:
            self._events.put(Event(self, self._host.answer(asked)))

        threading.Thread(target=answer, name="conversation", daemon=True).start()
        return True

    def drop(self, number: int) -> int | None:
        """End a conversation without a reward. Returns None, because no requests are queued here."""
        self.ask(Close(number, graded=False))

    def next(self, ended: int) -> int | None:
        """Return None, because no requests are queued here."""

    def close(self) -> None:
        """End the event loop."""
        self._host.loop.end()


class Process:
    """A process that holds conversations."""

    def __init__(
        self,
        tasks: Sequence[TaskConfig],
        events: Events,
        ended: Callable[["Process", str], None],
        *,
        serial: bool,
        hidden: Sequence[str],
    ) -> None:
        """Start the process.

        `ended` is called, on any thread, with the reason when the process ends. With `serial` the process handles one
        request at a time. It does not get the `hidden` environment variables.

        Raises OSError if this machine has too little memory, or too many processes, for another one.
        """
        self.numbers: set[int] = set()
        """Numbers of the conversations in this process."""
        self._turns: deque[Asked] | None = deque() if serial else None
        """The request in progress and those queued after it; None if requests run concurrently."""
        self._events, self._ended = events, ended
        self.worker = Worker("podium.tasks.conversations.conversing", list(tasks), self._take, hidden=hidden)

    def ask(self, asked: Asked) -> bool:
        """Send a request or queue it; returns whether it was sent. Never blocks."""
        if self._turns is not None:
            self._turns.append(asked)
            if len(self._turns) > 1:
                return False
        self._post(asked)
        return True

    def drop(self, number: int) -> int | None:
        """End a conversation without a reward. Sends the next queued request, and returns the same as `next`."""
        self._post(Close(number, graded=False))
        return self.next(number)

    def next(self, ended: int) -> int | None:
        """Send the next queued request, after a request has ended or was dropped.

        Returns the request's conversation; None if the queue is empty.
        """
        if not self._turns:
            return None
        waited = self._turns[0].number == ended
        self._turns = deque(asked for asked in self._turns if asked.number != ended)
        if not waited or not self._turns:
            return None
        self._post(self._turns[0])
        return self._turns[0].number

    def close(self) -> None:
        """Kill the process and its children."""
        self.worker.stop()

    def _post(self, asked: Asked) -> None:
        try:
            self.worker.ask([asked.number], [asked])
        except UnsendableError as error:
            why = f"the conversation's prompt cannot be sent to another process ({error}); use plain values in its row"
            self._events.put(Event(self, Answered(asked.number, "failed", why)))

    def _take(self, received: Received) -> None:
        if isinstance(received, Progress):
            return
        if isinstance(received, Lost):
            self._ended(self, received.why)
        elif isinstance(received, Answer) and received.problem:
            self._events.put(Event(self, Answered(received.number, "failed", received.problem)))
        else:
            self._events.put(Event(self, received and received.value))


Holder = Process | Threads


class Pool:
    """A run's processes or threads, and their conversations."""

    def __init__(self, tasks: Sequence[TaskConfig], workers: int, events: Events, *, hidden: Sequence[str]) -> None:
        """Create the pool without starting a process. Conversations run in `workers` processes, and up to as many more
        after a loss; 0: in threads. Processes do not get the `hidden` environment variables.
        """
        self._tasks, self._most = tasks, workers
        self._events = events
        self._hidden = hidden
        self._shared: list[Holder] = []
        self._serial: list[Holder] = []
        self._retired: list[Holder] = []
        self._homes: dict[int, Holder] = {}
        self._lock = threading.Lock()
        self._unexplained = 0
        """Number of consecutive processes that ended without a call in progress."""

    def place(self, number: int, *, apart: bool) -> None:
        """Assign a conversation to a process or threads; `apart`: to a process with one call at a time.

        Raises ValueError if no process can be started.
        """
        with self._lock:
            holders = self._serial if apart and self._most else self._shared
            while len(holders) < max(1, self._most):
                holders.append(self._started(serial=apart))
            holder = min(holders, key=lambda each: len(each.numbers))
            holder.numbers.add(number)
            self._homes[number] = holder

    def home(self, number: int) -> Holder | None:
        """The process or threads of a conversation; None if it has none."""
        return self._homes.get(number)

    def forget(self, number: int) -> Holder | None:
        """Remove a conversation from its holder, and return the holder; a retired holder without conversations is
        ended.
        """
        with self._lock:
            holder = self._homes.pop(number, None)
            if holder is None:
                return None
            holder.numbers.discard(number)
            ends = holder in self._retired and not holder.numbers
            if ends:
                self._retired.remove(holder)
        if ends:
            holder.close()
        return holder

    def retire(self, holder: Holder) -> None:
        """Give a holder no more conversations, and end it after its last one."""
        with self._lock:
            for holders in (self._shared, self._serial):
                if holder in holders:
                    holders.remove(holder)
                    self._retired.append(holder)

    def ended_well(self) -> None:
        """Record that a conversation was graded."""
        self._unexplained = 0

    def close(self) -> None:
        """End all processes and threads."""
        with self._lock:
            holders = (*self._shared, *self._serial, *self._retired)
            for each in (self._shared, self._serial, self._retired, self._homes):
                each.clear()
        for holder in holders:
            holder.close()

    def _started(self, *, serial: bool) -> Holder:
        if not self._most:
            return Threads(self._tasks, self._events)
        try:
            return Process(self._tasks, self._events, self._ended, serial=serial, hidden=self._hidden)
        except OSError as error:
            raise ValueError(not_started("environments", error)) from error

    def _ended(self, process: Process, why: str) -> None:
        """Report the conversations of a process as lost, unless the pool itself has ended the process."""
        with self._lock:
            held = [holders for holders in (self._shared, self._serial, self._retired) if process in holders]
            if not held:
                return
            held[0].remove(process)
            numbers = sorted(process.numbers)
            begun = process.worker.begun.keys() & process.numbers
            self._unexplained = 0 if begun else self._unexplained + 1
            hopeless = self._unexplained > MOST_ENDS
        for number in numbers:
            blamed = hopeless or begun == {number}
            answered = Answered(number, "failed" if blamed else "lost", why, apart=number in begun)
            self._events.put(Event(process, answered, ended=True))
