"""Processes that answer requests: graders, environments, and whatever else runs code that may hang or end its process.

A kind of worker is a module with a function `main`, which is all that runs in its processes:

    def main(connection: int, lifeline: int) -> None:
        parent = Parent(connection, lifeline)
        words = read_words(parent.setup())
        parent.serve(lambda word: words[word], limit_s=lambda word: 2.0)

The trainer's side holds the processes. Those of a `WorkerPool` are all alike, and answer one request at a time:

    pool = WorkerPool("words", "mypackage.words", setup=path, variables=child_environment([]), workers=2)
    (answer,) = pool.answers(["apple"])
    pool.close()

The setup, requests and values are pickled. An `Answer` has the value that a request returned, or the traceback of what
it raised. A request that exceeds its limit of seconds, or ends its process, has a `Lost` instead: its process is
killed, another one is started, and no other request is lost.

A `Worker` is a single process whose owner keeps the deadlines: conversations live in one process each, and several of
them are answered at once (`podium.tasks.conversations`).
"""

import contextlib
import functools
import math
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

from podium.plain import message_of, traceback_of
from podium.tasks.worker_process import WorkerProcess, join_parent

START_LIMIT_S = 300.0
"""Seconds in which a process must import what it needs, and be ready for requests."""
BEGIN_LIMIT_S = 5.0
"""Seconds in which an idle process of a pool must take a request, and begin with it."""
MOST_LOST = 3
"""Processes of a pool in a row that may end between two requests."""
READ_S = 1.0
"""Seconds in which what a killed process has sent must be read: that may run a user's code, as it makes objects."""
STARTED = 0
"""The question that a process answers without being asked, once it has its setup."""


class _Begun(NamedTuple):
    """Says that a request is being carried out."""

    number: int
    limit_s: float = math.inf
    """Seconds that it may take."""


class Progress(NamedTuple):
    """A request that is being carried out."""

    since: float
    """When it began, by `time.monotonic`."""
    limit_s: float


class Answer(NamedTuple):
    """The answer to a request."""

    number: int
    """The request's: in a pool, its place among those that were given together."""
    value: Any = None
    problem: str = ""
    """The traceback of what it raised; empty if it raised nothing."""


class Lost(NamedTuple):
    """In place of an answer: its process has ended, or was ended because the request took too long."""

    why: str


Received = Answer | Lost | None
"""What comes of a worker: the answer to a request, its own end, and None if it has responded to `Worker.ping`."""


class UnsendableError(ValueError):
    """A request that cannot be pickled; the message says why."""


class Parent:
    """The trainer, as a worker process sees it."""

    def __init__(self, connection: int, lifeline: int) -> None:
        """Connect to it; this process ends with it, and leaves signals to it."""
        self._channel = join_parent(connection, lifeline)
        self._sending = threading.Lock()

    def setup(self) -> Any:
        """What the trainer has sent first."""
        return pickle.loads(self._channel.receive())

    def serve(self, answer: Callable[[Any], object], *, limit_s: Callable[[Any], float]) -> None:
        """Answer requests one by one until the trainer has ended, and then end this process with all it has started.

        Args:
            answer: returns the value of a request.
            limit_s: the seconds that a request may take.
        """
        for numbers, data in self._asked(lambda call: call()):
            try:
                requests = pickle.loads(data)
            except BaseException as error:  # a class that is not importable here
                for number in numbers:
                    self._send(_Begun(number))
                    self._send(Answer(number, problem=traceback_of(error)))
                continue
            for number, request in zip(numbers, requests, strict=True):
                self._send(_Begun(number, limit_s(request)))
                self._answer(number, functools.partial(answer, request))

    def serve_at_once(self, answer: Callable[[Any], object], *, respond: Callable[[Callable[[], None]], None]) -> None:
        """Answer each request on its own thread until the trainer has ended, and then end this process as `serve` does.

        Args:
            answer: returns the value of a request.
            respond: calls a function that tells the trainer that this process responds, where requests may block.
        """

        def answered(data: bytes) -> object:
            (request,) = pickle.loads(data)
            return answer(request)

        for numbers, data in self._asked(respond):
            for number in numbers:
                self._send(_Begun(number))
                call = functools.partial(answered, data)
                threading.Thread(target=self._answer, args=(number, call), name="request", daemon=True).start()

    def _asked(self, respond: Callable[[Callable[[], None]], None]) -> Iterator[tuple[Sequence[int], bytes]]:
        """The numbers of requests, and the requests, pickled; once the trainer has ended, this process does."""
        with contextlib.suppress(EOFError):
            self._send(None)
            while True:
                asked = pickle.loads(self._channel.receive())
                if asked is None:
                    respond(lambda: self._send(None))
                else:
                    yield asked
        os.killpg(0, signal.SIGKILL)  # whatever threads still do, and processes that requests have started

    def _answer(self, number: int, call: Callable[[], object]) -> None:
        try:
            data = pickle.dumps(Answer(number, call()))
        except BaseException as error:  # SystemExit too, and what a user's objects raise as they are pickled
            data = pickle.dumps(Answer(number, problem=traceback_of(error)))
        self._send_pickled(data)

    def _send(self, message: object) -> None:
        self._send_pickled(pickle.dumps(message))

    def _send_pickled(self, data: bytes) -> None:
        with self._sending, contextlib.suppress(EOFError):  # the trainer has ended, which `_asked` notices
            self._channel.send(data)


class Worker:
    """A process that answers requests. One thread sends to it, and one reads what it sends, so that nothing blocks."""

    def __init__(
        self, module: str, setup: object, variables: Mapping[str, str], take: Callable[[Received], None]
    ) -> None:
        """Start `main` of a module, with these environment variables.

        `take` is called with all that is received, on a thread of this worker, and last with a `Lost`. Raises OSError
        if this machine has too little memory, or too many processes, for another one.
        """
        self.began = time.monotonic()
        """When it was started."""
        self.begun: dict[int, Progress] = {}
        """The requests in progress, by their numbers."""
        self._take = take
        self._questions, self._responses = 0, -1
        self._why = ""
        self._stopped = False
        self._ended = threading.Lock()
        """Held as soon as the end is passed on."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outbox.put(pickle.dumps(setup))
        self._process = WorkerProcess(module, variables)
        threading.Thread(target=self._send, name=f"to {module}", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name=f"from {module}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs, and nobody has stopped it."""
        return not self._stopped and self._process.exit_code is None

    def ask(self, numbers: Sequence[int], requests: Sequence[object]) -> None:
        """Send requests under numbers that the caller chooses; never blocks.

        Raises UnsendableError if one of them cannot be pickled.
        """
        try:
            data = pickle.dumps(requests)
        except Exception as error:  # a row of a user's task may hold anything
            raise UnsendableError(message_of(error)) from error
        self._outbox.put(pickle.dumps((numbers, data)))

    def ping(self) -> int:
        """Ask the process to respond; returns the number of this question, for `responded`."""
        self._questions += 1
        self._outbox.put(pickle.dumps(None))
        return self._questions

    def responded(self, question: int) -> bool:
        """Whether the process has answered this question; STARTED: whether it has its setup."""
        return self._responses >= question

    def kill(self, why: str) -> None:
        """End the process because it does not respond."""
        self._why = why
        self.stop()
        self._reader.join(READ_S)
        if self._reader.is_alive():
            self._why = f"{why}, or an object that it sent cannot be made here: its class blocks as it is unpickled"
            self._end()

    def stop(self) -> None:
        """End the process and what it has started; any number of times, from any thread. Waits for its end."""
        self._stopped = True
        self._process.stop()

    def _send(self) -> None:
        with contextlib.suppress(EOFError):
            while (data := self._outbox.get()) is not None:
                self._process.channel.send(data)  # as long as it takes: who asks keeps deadlines, and then it is killed

    def _read(self) -> None:
        try:
            while True:
                self._receive(pickle.loads(self._process.receive()))
        except EOFError:
            pass
        except Exception as error:  # a class that is not importable here, say
            self._why = f"what its process sent cannot be read ({message_of(error)})"
        self._end()

    def _receive(self, sent: "_Begun | Answer | None") -> None:
        if isinstance(sent, _Begun):
            self.begun[sent.number] = Progress(time.monotonic(), sent.limit_s)
            return
        if isinstance(sent, Answer):
            self.begun.pop(sent.number, None)
        else:
            self._responses += 1
        self._take(sent)

    def _end(self) -> None:
        """Free what is left of a process that has ended, and say so once."""
        self._process.close()
        self._outbox.put(None)
        if self._ended.acquire(blocking=False):
            self._take(Lost(self._why or f"its process ended with code {self._process.exit_code}"))


class _Member(NamedTuple):
    """A process of a pool."""

    worker: Worker
    inbox: "queue.SimpleQueue[Received]"


class WorkerPool:
    """Processes that are all alike, each of which answers one request at a time."""

    def __init__(self, name: str, module: str, *, setup: object, variables: Mapping[str, str], workers: int) -> None:
        """Start processes with `main` of a module.

        Args:
            name: of what they do, for messages; the setting `NAME.workers` says how many there are.
            module: its import path.
            setup: for `Parent.setup`.
            variables: the processes' environment variables, such as `podium.tasks.child_environment` returns.
            workers: how many processes.

        Raises:
            ValueError: this machine has too little memory, or too many processes, for them.
        """
        self._name = name
        self._start = functools.partial(Worker, module, setup, variables)
        self._closed = False
        self._not_started: ValueError | None = None
        """Why a process could not be restarted; if set, nothing is answered any more."""
        self._members: set[_Member] = set()
        self._idle: queue.SimpleQueue[_Member] = queue.SimpleQueue()
        try:
            for _ in range(workers):
                self._idle.put(self._started())
        except ValueError:
            self.close()
            raise

    def answers(self, requests: Sequence[object]) -> list[Answer | Lost]:
        """What comes of each request, in order; waits for it, on any number of threads at a time.

        The requests are answered one after the other, by one process and, if that is lost, by those that replace it.

        Raises:
            UnsendableError: one of them cannot be pickled.
            ValueError: no process can be started, or several in a row ended without having begun with a request.
            RuntimeError: a process ended before it had its setup.
            CancelledError: the pool was closed meanwhile.
        """
        found: list[Answer | Lost] = []
        lost = 0
        while len(found) < len(requests) and not self._closed:
            member = self._idle.get()
            try:
                if self._not_started is not None:
                    raise self._not_started
                more = self._answered(member, requests, len(found))
                found += more
                lost = 0 if more else lost + 1
                if lost == MOST_LOST:
                    raise ValueError(
                        f"{lost} {self._name} processes in a row ended or stopped before they began with a request:"
                        " code that runs as they start ends them"
                    )
            except BaseException:
                member.worker.stop()  # its remaining answers would not be read
                if self._closed:  # `close` ended the process, perhaps before it had its setup
                    break
                raise
            finally:
                self._idle.put(self._living(member))
        if self._closed:
            raise CancelledError(f"{self._name}: closed before all requests were answered")
        return found

    def close(self) -> None:
        """End the processes at once; those who wait for answers have a CancelledError."""
        self._closed = True
        for member in list(self._members):
            member.worker.stop()

    def _answered(self, member: _Member, requests: Sequence[object], first: int) -> list[Answer | Lost]:
        """What comes of requests, from the first one to the one that its process does not answer."""
        numbers = range(first, len(requests))
        member.worker.ask(numbers, requests[first:])
        found: list[Answer | Lost] = []
        for number in numbers:
            answer = self._wait(member, number)
            found += [] if answer is None else [answer]
            if not isinstance(answer, Answer):
                break
        return found

    def _wait(self, member: _Member, number: int) -> Answer | Lost | None:
        """What comes of a request; None if the process ends or hangs before it begins with it."""
        worker, inbox = member
        ready = time.monotonic()
        while True:
            begun, started = worker.begun.get(number), worker.responded(STARTED)
            if begun is not None:
                until = begun.since + begun.limit_s
            else:
                until = ready + BEGIN_LIMIT_S if started else worker.began + START_LIMIT_S
            try:
                received = inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                if begun != worker.begun.get(number):
                    continue
                why = "" if begun is None else f"it took longer than {begun.limit_s:g} s"
            else:
                if isinstance(received, Answer):
                    return received
                if received is None:
                    ready = time.monotonic()
                    continue
                why, begun = received.why, worker.begun.get(number)
            worker.stop()
            if not started:
                raise RuntimeError(
                    f"a {self._name} process did not start: it ended (see above), or took {START_LIMIT_S:g} s"
                )
            return None if begun is None else Lost(why)

    def _living(self, member: _Member) -> _Member:
        """The process, or its replacement if it has ended; if none can be started, the old one, so no thread waits."""
        if member.worker.alive or self._closed or self._not_started is not None:
            return member
        self._members.discard(member)
        try:
            return self._started()
        except ValueError as error:
            self._not_started = error
            return member

    def _started(self) -> _Member:
        inbox: queue.SimpleQueue[Received] = queue.SimpleQueue()
        try:
            member = _Member(self._start(inbox.put), inbox)
        except OSError as error:
            raise ValueError(not_started(self._name, error)) from error
        self._members.add(member)
        return member


def not_started(name: str, error: OSError) -> str:
    """The message of a process that could not be started; `name` is the group of settings with `workers`."""
    return (
        f"a process for {name} could not be started ({error.strerror}); free memory or processes on this machine, or"
        f" lower {name}.workers, then continue the run"
    )
