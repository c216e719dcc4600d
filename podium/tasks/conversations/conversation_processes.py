"""Processes, or threads of the trainer, that hold conversations.

A process that ends loses its conversations, and so does one that does not respond: a conversation may hold the
interpreter's lock, stop the process, or block the event loop that others share. If a single conversation had a call in
progress, it is to blame. If several had, each of them continues in a process that carries out one call at a time, so
that the next loss has one culprit. The other conversations lose only their process.
"""

import contextlib
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from podium.config.schema import TaskConfig
from podium.plain import message_of
from podium.tasks.conversations.conversing import PING, Answered, Asked, Begun, Host, Sent
from podium.tasks.worker_process import WorkerProcess

ENDED = "the environment's process ended"
READ_S = 1.0
"""Seconds in which the remaining output of a killed process must be read; unpickling it may run a user's code."""
MOST_ENDS = 3
"""Maximum number of consecutive processes that end without a call in progress and without having completed a
conversation. Conversations of further such processes count as failed."""


class Event(NamedTuple):
    """Something that happened in a process, for the trainer's thread."""

    worker: "Worker"
    answered: Answered | None
    """An answer; None: the process responds."""
    ended: bool = False
    """Whether the process has ended, which also ends the conversation."""


Events = queue.SimpleQueue[Event]
Ended = Callable[["Process", int | None], None]
"""Called with a process that has ended or was killed, and its exit code; on any thread."""


class Threads:
    """Conversations in the trainer's process. A call that hangs there cannot be killed."""

    def __init__(self, tasks: Sequence[TaskConfig], events: Events) -> None:
        """Prepare the conversations of these tasks."""
        self.numbers: set[int] = set()
        """The conversations that it holds."""
        self._host = Host(tasks, lambda answered: events.put(Event(self, answered)))

    def ask(self, asked: Asked) -> bool:
        """Begin a request; returns whether it began at once."""
        self._host.take(asked)
        return True

    def next(self, ended: int) -> int | None:
        """Return None: no request waits for another to end."""

    def close(self) -> None:
        """End the event loop."""
        self._host.close()


class Process:
    """A process that holds conversations; one thread sends to it, and one reads what it sends."""

    def __init__(
        self, tasks: Sequence[TaskConfig], variables: Mapping[str, str], events: Events, ended: Ended, *, serial: bool
    ) -> None:
        """Start it. `serial`: it carries out one request at a time.

        Raises OSError if this machine has too little memory, or too many processes, for another one.
        """
        self.numbers: set[int] = set()
        """The conversations that it holds."""
        self.begun: set[int] = set()
        """Conversations with a request in progress, as the reading thread knows them."""
        self.why = ""
        """Why the process was killed."""
        self._turns: deque[Asked] | None = deque() if serial else None
        """The request in progress and those queued behind it; None if requests run at the same time."""
        self.began = time.monotonic()
        self._questions, self._responses = 0, -1
        self._ended = [ended]
        """Holds the callback to call once when the process ends; empty once it was called or is no longer needed."""
        self._events = events
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process = WorkerProcess("podium.tasks.conversations.conversing", variables)
        self._outbox.put(pickle.dumps(list(tasks)))
        threading.Thread(target=self._send, name="to environments", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name="from environments", daemon=True)
        self._reader.start()

    def ask(self, asked: Asked) -> bool:
        """Send a request or queue it; returns whether it was sent. Never blocks."""
        if self._turns is not None and asked.answers:
            self._turns.append(asked)
            if len(self._turns) > 1:
                return False
        self._post(asked)
        return True

    def next(self, ended: int) -> int | None:
        """Send the next queued request, after a request has ended or was dropped.

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

    def question(self) -> int:
        """Ping the process; returns the number of this ping, for `responded`."""
        self._questions += 1
        self._outbox.put(pickle.dumps(PING))
        return self._questions

    def responded(self, question: int) -> bool:
        """Whether the process has answered this ping; 0: whether it has started."""
        return self._responses >= question

    def kill(self, why: str) -> None:
        """Kill the process because it does not respond; `ended` is called with it."""
        self.why = why
        self._process.stop()
        self._reader.join(READ_S)
        if self._reader.is_alive():
            self.why = f"{why}, or an object that it sent cannot be unpickled here, because its class blocks"
            self._end()

    def close(self) -> None:
        """Kill the process and its children; `ended` is not called."""
        self._ended.clear()
        self._outbox.put(None)
        self._process.stop()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def _post(self, asked: Asked) -> None:
        try:
            data = pickle.dumps(asked)
        except Exception as error:  # a row of a user's task may hold objects that cannot be pickled
            why = f"its prompt cannot be sent to another process ({message_of(error)}); give its rows plain values"
            self._events.put(Event(self, Answered(asked.number, "failed", why)))
        else:
            self._outbox.put(pickle.dumps((asked.number, asked.answers, data)))

    def _send(self) -> None:
        with contextlib.suppress(EOFError):
            while (data := self._outbox.get()) is not None:
                self._process.channel.send(
                    data
                )  # blocks without a time limit: requests have deadlines, after which the process is killed

    def _read(self) -> None:
        try:
            while True:
                self._take(pickle.loads(self._process.receive()))
        except EOFError:
            pass
        except Exception as error:  # for example, a class that is not importable here
            self.why = f"the message from the environment's process cannot be read ({message_of(error)})"
        self._end()

    def _end(self) -> None:
        """Free the resources of a process that has ended, and report its end once."""
        self._process.close()
        self._outbox.put(None)
        try:
            ended = self._ended.pop()
        except IndexError:
            return
        ended(self, self._process.exit_code)

    def _take(self, sent: Sent) -> None:
        if isinstance(sent, Begun):
            self.begun.add(sent.number)
        elif sent is None:
            self._responses += 1
            self._events.put(Event(self, None))
        else:
            self.begun.discard(sent.number)
            self._events.put(Event(self, sent))


Worker = Process | Threads


class Pool:
    """A run's processes or threads, and their conversations."""

    def __init__(
        self, tasks: Sequence[TaskConfig], workers: int, variables: Callable[[], Mapping[str, str]], events: Events
    ) -> None:
        """Create the pool without starting a process. `workers` processes hold conversations, and up to as many more
        after a loss; 0: threads. `variables` returns the environment variables of processes.
        """
        self._tasks, self._most, self._variables, self._events = tasks, workers, variables, events
        self._shared: list[Worker] = []
        self._serial: list[Worker] = []
        self._retired: list[Worker] = []
        self._homes: dict[int, Worker] = {}
        self._lock = threading.Lock()
        self._unexplained = 0
        """Number of consecutive processes that ended without a call in progress."""

    def place(self, number: int, *, apart: bool) -> Worker:
        """Assign a conversation to a worker; `apart`: to one that carries out one call at a time.

        Raises ValueError if no process can be started.
        """
        with self._lock:
            workers = self._serial if apart and self._most else self._shared
            while len(workers) < max(1, self._most):
                workers.append(self._started(serial=apart))
            worker = min(workers, key=lambda each: len(each.numbers))
            worker.numbers.add(number)
            self._homes[number] = worker
        return worker

    def home(self, number: int) -> Worker | None:
        """The worker that holds a conversation; None if absent."""
        return self._homes.get(number)

    def forget(self, number: int) -> Worker | None:
        """Remove a conversation from its worker and return that worker; a retired worker without conversations is
        ended.
        """
        with self._lock:
            worker = self._homes.pop(number, None)
            if worker is None:
                return None
            worker.numbers.discard(number)
            ends = worker in self._retired and not worker.numbers
            if ends:
                self._retired.remove(worker)
        if ends:
            worker.close()
        return worker

    def retire(self, worker: Worker) -> None:
        """Assign no more conversations to a worker, and end it after its last one."""
        with self._lock:
            for workers in (self._shared, self._serial):
                if worker in workers:
                    workers.remove(worker)
                    self._retired.append(worker)

    def ended_well(self) -> None:
        """Record that a conversation was graded."""
        self._unexplained = 0

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            workers = (*self._shared, *self._serial, *self._retired)
            for each in (self._shared, self._serial, self._retired, self._homes):
                each.clear()
        for worker in workers:
            worker.close()

    def _started(self, *, serial: bool) -> Worker:
        if not self._most:
            return Threads(self._tasks, self._events)
        try:
            return Process(self._tasks, self._variables(), self._events, self._ended, serial=serial)
        except OSError as error:
            raise ValueError(
                f"a process for environments could not be started ({error.strerror}); free memory or processes on this"
                " machine, or lower environments.workers, then continue the run"
            ) from error

    def _ended(self, process: Process, code: int | None) -> None:
        """Report the loss of a process's conversations."""
        with self._lock:
            for workers in (self._shared, self._serial, self._retired):
                if process in workers:
                    workers.remove(process)
            numbers = sorted(process.numbers)
            begun = process.begun & process.numbers
            self._unexplained = 0 if begun else self._unexplained + 1
            hopeless = self._unexplained > MOST_ENDS
        why = process.why or f"{ENDED} with code {code}"
        for number in numbers:
            blamed = hopeless or begun == {number}
            answered = Answered(number, "failed" if blamed else "lost", why, apart=number in begun)
            self._events.put(Event(process, answered, ended=True))
