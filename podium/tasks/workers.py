"""Processes that answer requests: graders, environments, and other code that may hang or end its process.

A kind of worker is a module with a function `main`, which its processes run:

    def main(connection: int, lifeline: int) -> None:
        parent = Parent(connection, lifeline)
        words = read_words(parent.setup())
        parent.serve(lambda word: words[word], limit_s=lambda word: 2.0)

The trainer starts them. The processes of a `WorkerPool` are all alike, and each answers one request at a time:

    pool = WorkerPool("words", "mypackage.words", setup=path, workers=2)
    (answer,) = pool.answers(["apple"])
    pool.close()

The setup, requests and values are pickled. The result of a request is an `Answer` with the value that `main` returned
for it, or with the traceback of the exception that it raised. If the request exceeds its time limit or ends its
process, the result is a `Lost`: the process is killed and replaced, and all other requests are answered.

The module may be the one that makes the pool (`__name__`) if importing it is quick. An idle process has up to 5 s to
begin with a request.

A `Worker` is a single process that may answer several requests at the same time, and whose owner enforces the time
limits. Conversations use it, because each of them lives in one process (`podium.tasks.conversations`).
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

from podium.plain import message_of, traceback_of
from podium.tasks.worker_process import WorkerProcess, join_parent

START_LIMIT_S = 300.0
"""Seconds within which a process must import what it needs, and be ready for requests."""
BEGIN_LIMIT_S = 5.0
"""Seconds within which an idle process of a pool must begin with a request that is sent to it."""
MOST_LOST = 3
"""Number of consecutive processes of a pool that end between two requests, after which the pool gives up."""
READ_S = 1.0
"""Seconds within which the last messages of a killed process must be read: unpickling them may run a user's code."""
STARTED = 0
"""The ping that a process answers on its own once it is ready for requests."""


class _Begun(NamedTuple):
    """Message that a request has begun."""

    number: int
    limit_s: float = math.inf
    """Time limit of the call in seconds."""


class Progress(NamedTuple):
    """A request in progress."""

    since: float
    """When it began, by `time.monotonic`."""
    limit_s: float


class Answer(NamedTuple):
    """The result of a request that a process has answered."""

    number: int
    """The request's number; in a pool, its index among the requests of one call."""
    value: Any = None
    problem: str = ""
    """The traceback of the exception that the request raised; empty if it raised none."""


class Lost(NamedTuple):
    """The result of a request whose process has ended, or was killed because the request took too long."""

    why: str


Received = Progress | Answer | Lost | None
"""What a worker passes on: the beginning of a request, its answer, the worker's own end, or None when the process is
ready for requests and when it responds to a ping."""


class UnsendableError(ValueError):
    """A request cannot be pickled; the message says why."""


class Parent:
    """The trainer, as a worker process sees it."""

    def __init__(self, connection: int, lifeline: int) -> None:
        """Connect to the trainer. This process then ends when the trainer does, and ignores SIGINT and SIGTERM."""
        self._channel = join_parent(connection, lifeline)
        self._pid = os.getpid()
        self._sending = threading.Lock()

    def setup(self) -> Any:
        """The object that the trainer passed as `setup`."""
        return pickle.loads(self._channel.receive())

    def serve(self, answer: Callable[[Any], object], *, limit_s: Callable[[Any], float]) -> None:
        """Answer requests one by one until the trainer ends; then kill this process and all processes it has started.

        Args:
            answer: returns the value of a request.
            limit_s: returns the time limit of a request in seconds.
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

    def serve_concurrently(
        self, answer: Callable[[Any], object], *, respond: Callable[[Callable[[], None]], None]
    ) -> None:
        """Answer each request on its own thread until the trainer ends; then kill this process as `serve` does.

        Args:
            answer: returns the value of a request.
            respond: calls the function it is given, which answers a ping, on the thread whose blocking means that this
                process does not respond.
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
        """Yield the numbers of requests with the pickled requests; kill this process once the trainer has ended."""
        with contextlib.suppress(EOFError):
            self._send(None)
            while True:
                asked = pickle.loads(self._channel.receive())
                if asked is None:
                    respond(lambda: self._send(None))
                else:
                    yield asked
        os.killpg(0, signal.SIGKILL)  # exits even if threads are busy, and ends processes that requests have started

    def _answer(self, number: int, call: Callable[[], object]) -> None:
        try:
            data = pickle.dumps(Answer(number, call()))
        except BaseException as error:  # SystemExit too, and what a user's objects raise as they are pickled
            data = pickle.dumps(Answer(number, problem=traceback_of(error)))
        self._send_pickled(data)

    def _send(self, message: object) -> None:
        self._send_pickled(pickle.dumps(message))

    def _send_pickled(self, data: bytes) -> None:
        if os.getpid() != self._pid:  # a user's code has forked, and its child continues here: only the parent answers
            os._exit(0)
        with self._sending, contextlib.suppress(EOFError):  # the trainer has ended, which `_asked` notices
            self._channel.send(data)


class Worker:
    """A process that answers requests. One thread sends to it and another reads from it, so that no caller blocks."""

    def __init__(
        self, module: str, setup: object, take: Callable[[Received], None], *, hidden: Iterable[str] = ()
    ) -> None:
        """Start `main` of a module, without the `hidden` environment variables.

        `take` is called on another thread with each thing that is received, the last of which is a `Lost`. Raises
        OSError if this machine has too little memory, or too many processes, for another one.
        """
        self.began = time.monotonic()
        """When the process was started, by `time.monotonic`."""
        self.begun: dict[int, Progress] = {}
        """The requests in progress, by their numbers."""
        self._take = take
        self._pings, self._responses = 0, -1
        self._why = ""
        self._stopped = False
        self._ended = threading.Lock()
        """Acquired when the end is passed on, which happens once."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outbox.put(pickle.dumps(setup))
        self._process = WorkerProcess(module, hidden=hidden)
        threading.Thread(target=self._send, name=f"to {module}", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name=f"from {module}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running and `stop` was not called."""
        return not self._stopped and self._process.exit_code is None

    def ask(self, numbers: Sequence[int], requests: Sequence[object]) -> None:
        """Send requests under numbers that the caller chooses; never blocks.

        Raises UnsendableError if one of them cannot be pickled.
        """
        try:
            data = pickle.dumps(requests)
        except Exception as error:  # a row of a user's task may hold objects that cannot be pickled
            raise UnsendableError(message_of(error)) from error
        self._outbox.put(pickle.dumps((numbers, data)))

    def ping(self) -> int:
        """Ping the process; returns the number of this ping, for `responded`."""
        self._pings += 1
        self._outbox.put(pickle.dumps(None))
        return self._pings

    def responded(self, ping: int) -> bool:
        """Whether the process has answered this ping; STARTED: whether it is ready for requests."""
        return self._responses >= ping

    def kill(self, why: str) -> None:
        """Kill the process because it does not respond; `why` is passed on with its end."""
        self._why = why
        self.stop()
        self._reader.join(READ_S)
        if self._reader.is_alive():
            self._why = f"{why}, or unpickling an object that it sent does not end"
            self._end()

    def stop(self) -> None:
        """Kill the process and what it has started, and wait for its end; can be called repeatedly, from any thread."""
        self._stopped = True
        self._process.stop()

    def _send(self) -> None:
        with contextlib.suppress(EOFError):
            while (data := self._outbox.get()) is not None:
                self._process.channel.send(data)  # without a time limit: the owner kills a process that is too slow

    def _read(self) -> None:
        try:
            while True:
                self._receive(pickle.loads(self._process.receive()))
        except EOFError:
            pass
        except Exception as error:  # for example, a class that is not importable here
            self._why = f"the message from its process cannot be read ({message_of(error)})"
        self._end()

    def _receive(self, sent: "_Begun | Answer | None") -> None:
        if isinstance(sent, _Begun):
            self.begun[sent.number] = Progress(time.monotonic(), sent.limit_s)
            self._take(self.begun[sent.number])
            return
        if isinstance(sent, Answer):
            self.begun.pop(sent.number, None)
        else:
            self._responses += 1
        self._take(sent)

    def _end(self) -> None:
        """Free the resources of a process that has ended, and report its end once."""
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

    def __init__(self, name: str, module: str, *, setup: object, workers: int, hidden: Iterable[str] = ()) -> None:
        """Start processes with `main` of a module.

        Args:
            name: name of the pool in messages, which assume that the setting `NAME.workers` is its size.
            module: import path of the module.
            setup: object that `Parent.setup` returns in each process.
            workers: number of processes.
            hidden: environment variables that the processes do not get, in addition to the keys that none gets.

        Raises:
            ValueError: this machine has too little memory, or too many processes, to start them.
        """
        self._name = name
        self._start = functools.partial(Worker, module, setup, hidden=tuple(hidden))
        self._closed = False
        self._not_started: ValueError | None = None
        """Why a process could not be replaced; if set, no further request is answered."""
        self._members: set[_Member] = set()
        self._idle: queue.SimpleQueue[_Member] = queue.SimpleQueue()
        try:
            for _ in range(workers):
                self._idle.put(self._started())
        except ValueError:
            self.close()
            raise

    def answers(self, requests: Sequence[object]) -> list[Answer | Lost]:
        """Wait for the results of requests, in order; several threads may call this at the same time.

        One process answers them one after the other; if it is lost, another one continues.

        Raises:
            UnsendableError: a request cannot be pickled.
            ValueError: no process can be started, or several consecutive ones ended before they began with a request.
            RuntimeError: a process ended before it was ready for requests.
            CancelledError: the pool was closed in the meantime.
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
                        f"{lost} {self._name} processes in a row ended or stopped before they began with a request;"
                        " check the code that runs when they start"
                    )
            except BaseException:
                member.worker.stop()  # this worker's remaining answers would not be read
                if self._closed:  # `close` ended the process, perhaps before it was ready
                    break
                raise
            finally:
                self._idle.put(self._living(member))
        if self._closed:
            raise CancelledError(f"{self._name}: closed before all requests were answered")
        return found

    def close(self) -> None:
        """Kill the processes at once; calls of `answers` in progress raise CancelledError."""
        self._closed = True
        for member in list(self._members):
            member.worker.stop()

    def _answered(self, member: _Member, requests: Sequence[object], first: int) -> list[Answer | Lost]:
        """The results of requests from index `first` up to the one at which the process is lost."""
        numbers = range(first, len(requests))
        member.worker.ask(numbers, requests[first:])
        found: list[Answer | Lost] = []
        for number in numbers:
            answer = self._wait(member, number)
            if answer is not None:
                found.append(answer)
            if not isinstance(answer, Answer):
                break
        return found

    def _wait(self, member: _Member, number: int) -> Answer | Lost | None:
        """Wait for the result of a request; None if the process is lost before it begins with the request."""
        worker, inbox = member
        ready = time.monotonic()
        while True:
            begun, started = worker.begun.get(number), worker.responded(STARTED)
            if begun is not None:
                until = begun.since + begun.limit_s
            else:
                until = ready + BEGIN_LIMIT_S if started else worker.began + START_LIMIT_S
            try:
                received = inbox.get(timeout=min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
            except queue.Empty:
                if begun != worker.begun.get(number):
                    continue
                why = "" if begun is None else f"it took longer than {begun.limit_s:g} s"
            else:
                if isinstance(received, Answer):
                    return received
                if not isinstance(received, Lost):
                    ready = ready if received else time.monotonic()
                    continue
                why, begun = received.why, worker.begun.get(number)
            worker.stop()
            if not started:
                raise RuntimeError(
                    f"a {self._name} process did not start: it ended (see above), or took {START_LIMIT_S:g} s"
                )
            return None if begun is None else Lost(why)

    def _living(self, member: _Member) -> _Member:
        """The member, or its replacement if its process has ended; the old member if no process can be started, so that
        no thread waits.
        """
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
            member = _Member(self._start(take=inbox.put), inbox)
        except OSError as error:
            raise ValueError(not_started(self._name, error)) from error
        self._members.add(member)
        if self._closed:  # perhaps before this one could be seen
            member.worker.stop()
        return member


def not_started(name: str, error: OSError) -> str:
    """Error message for a process that could not be started; `name` is the group of settings with `workers`."""
    return (
        f"a process for {name} could not be started ({error.strerror}); free memory or processes on this machine, or"
        f" lower {name}.workers, then continue the run"
    )
