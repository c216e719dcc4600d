"""Processes that hold conversations, or threads of the trainer that do.

A process that ends loses its conversations, and so does one that does not respond: a conversation may hold the
interpreter's lock, stop the process, or block the event loop that others share. If a single conversation had a call in
progress, that one is to blame. If several had, each of them goes on in a process that carries out one call at a time,
so that the next loss has one culprit. All others have lost nothing but their process.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from podium.config.schema import TaskConfig
from podium.tasks.conversations.conversing import Answered, Asked, Close, Host
from podium.tasks.workers import Answer, Lost, Received, UnsendableError, Worker, not_started

MOST_ENDS = 3
"""Processes in a row that may end with neither a call in progress nor a conversation that ended well. Conversations of
further such processes count as failed."""


class Event(NamedTuple):
    """What happened in a process, for the trainer's thread."""

    holder: "Holder"
    answered: Answered | None
    """None: it responds."""
    ended: bool = False
    """Whether the process has ended, and with it the conversation."""


Events = queue.SimpleQueue[Event]


class Threads:
    """Conversations in the trainer's process. A call that hangs there cannot be ended."""

    def __init__(self, tasks: Sequence[TaskConfig], events: Events) -> None:
        """Prepare the conversations of these tasks."""
        self.numbers: set[int] = set()
        """The conversations that it holds."""
        self._host = Host(tasks)
        self._events = events

    def ask(self, asked: Asked) -> bool:
        """Begin a request; returns whether it began at once."""

        def answer() -> None:
            self._events.put(Event(self, self._host.answer(asked)))

        threading.Thread(target=answer, name="conversation", daemon=True).start()
        return True

    def drop(self, number: int) -> int | None:
        """End a conversation. Returns None: no request waits for another to end."""
        self.ask(Close(number, graded=False))

    def next(self, ended: int) -> int | None:
        """Return None: no request waits for another to end."""

    def close(self) -> None:
        """End the event loop."""
        self._host.loop.end()


class Process:
    """A process that holds conversations."""

    def __init__(
        self,
        tasks: Sequence[TaskConfig],
        variables: Mapping[str, str],
        events: Events,
        ended: Callable[["Process", str], None],
        *,
        serial: bool,
    ) -> None:
        """Start it; `ended` is called on any thread, with why it has ended. `serial`: it gets one request at a time.

        Raises OSError if this machine has too little memory, or too many processes, for another one.
        """
        self.numbers: set[int] = set()
        """The conversations that it holds."""
        self._turns: deque[Asked] | None = deque() if serial else None
        """The request in progress and those queued behind it; None if requests run at the same time."""
        self._events, self._ended = events, ended
        self.worker = Worker("podium.tasks.conversations.conversing", list(tasks), variables, self._take)

    def ask(self, asked: Asked) -> bool:
        """Send a request or queue it; returns whether it was sent. Never blocks."""
        if self._turns is not None:
            self._turns.append(asked)
            if len(self._turns) > 1:
                return False
        self._post(asked)
        return True

    def drop(self, number: int) -> int | None:
        """End a conversation at once, whatever is in progress. Returns what `next` does."""
        self._post(Close(number, graded=False))
        return self.next(number)

    def next(self, ended: int) -> int | None:
        """Send the next queued request, after one has ended or was dropped.

        Returns its conversation; None if the queue is empty.
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
            why = f"its prompt cannot be sent to another process ({error}); give its rows plain values"
            self._events.put(Event(self, Answered(asked.number, "failed", why)))

    def _take(self, received: Received) -> None:
        if isinstance(received, Lost):
            self._ended(self, received.why)
        elif received is None:
            self._events.put(Event(self, None))
        else:
            self._events.put(Event(self, _answered(received)))


def _answered(answer: Answer) -> Answered:
    return Answered(answer.number, "failed", answer.problem) if answer.problem else answer.value


Holder = Process | Threads


class Pool:
    """The processes of a run, or its threads, and their conversations."""

    def __init__(
        self, tasks: Sequence[TaskConfig], workers: int, variables: Callable[[], Mapping[str, str]], events: Events
    ) -> None:
        """Start nothing yet. `workers` processes hold conversations, and if one is lost as many more; 0: threads.

        `variables` returns the environment variables of processes.
        """
        self._tasks, self._most, self._variables, self._events = tasks, workers, variables, events
        self._shared: list[Holder] = []
        self._serial: list[Holder] = []
        self._retired: list[Holder] = []
        self._homes: dict[int, Holder] = {}
        self._lock = threading.Lock()
        self._unexplained = 0
        """Processes in a row that ended without a call in progress."""

    def place(self, number: int, *, apart: bool) -> None:
        """Give a conversation a home; `apart`: among those with one call at a time.

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
        """What holds a conversation; None if nothing does."""
        return self._homes.get(number)

    def forget(self, number: int) -> Holder | None:
        """Remove a conversation from its holder, which is returned; a retired one without conversations is ended."""
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
        """Note that a conversation was graded."""
        self._unexplained = 0

    def close(self) -> None:
        """End all of them."""
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
            return Process(self._tasks, self._variables(), self._events, self._ended, serial=serial)
        except OSError as error:
            raise ValueError(not_started("environments", error)) from error

    def _ended(self, process: Process, why: str) -> None:
        """Report the loss of the conversations of a process that nobody here has ended."""
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
