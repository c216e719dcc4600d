"""Holds conversations: in a process that `podium.tasks.conversations.environments` starts, or in threads of the
trainer.

Each request is answered on its own thread, and async code runs on one event loop, so that slow replies overlap. Time
limits are enforced by the trainer's side, not here.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from podium.config.schema import TaskConfig
from podium.plain import copied, traceback_of
from podium.tasks.conversation import Asking, Reply, Turn, finite, plain_first, plain_reply
from podium.tasks.conversations.environment_copy import Copied
from podium.tasks.conversations.environment_forms import Conversing, Running, conversing
from podium.tasks.event_loop import UsersLoop, start_loop
from podium.tasks.task import Prompt
from podium.tasks.worker_process import join_parent


class Open(NamedTuple):
    """Request to begin a conversation."""

    number: int
    task: int
    prompt: Prompt
    seed: int

    @property
    def answers(self) -> bool:
        """Whether it is answered."""
        return True


class Say(NamedTuple):
    """Request to reply to an answer of the model."""

    number: int
    turn: Turn

    @property
    def answers(self) -> bool:
        """Whether it is answered."""
        return True


class Close(NamedTuple):
    """Request to end a conversation; `graded`: and to return its final reward."""

    number: int
    graded: bool
    keep: bool = False
    """Whether to return the environment too."""

    @property
    def answers(self) -> bool:
        """Whether it is answered."""
        return self.graded


Asked = Open | Say | Close
PING = None
"""Ping, sent instead of a request; the process answers with the same value, which is also its first message."""


class Begun(NamedTuple):
    """Says that a request of a conversation is being carried out."""

    number: int


class Answered(NamedTuple):
    """The answer to a request of a conversation."""

    number: int
    kind: Literal["opened", "replied", "graded", "failed", "lost"]
    """lost: its process ended or does not respond, and this conversation is not known to be the cause."""
    value: str | Asking | Reply | float | None = None
    """Depending on the request and outcome: the text to append to the prompt or a program's first request, the reply,
    the final reward, a traceback, or why the conversation was lost."""
    seconds: float = 0.0
    environment: object = None
    """The environment after the conversation's end, if requested: the object itself, or a copy if it is in another
    process."""
    apart: bool = False
    """Whether the conversation must continue, or restart, in a process that carries out one call at a time, because it
    may be what ends processes."""


Sent = Answered | Begun | None
"""Messages that a process sends."""


class Host:
    """The conversations of one process."""

    def __init__(self, configs: Sequence[TaskConfig], answer: Callable[[Answered], None]) -> None:
        """`answer` is called on other threads, with the answer to each request."""
        _allow_open_files()
        self._tasks: list[Conversing | None] = [conversing(config) for config in configs]
        self._answer = answer
        self._open: dict[int, Running] = {}
        self._loop: UsersLoop | None = None
        self._starting = threading.Lock()

    def take(self, asked: Asked) -> None:
        """Answer a request on its own thread."""
        threading.Thread(target=self._handle, args=(asked,), name="conversation", daemon=True).start()

    def respond(self, respond: Callable[[], None]) -> None:
        """Call a function on the event loop, if there is one, so that code that blocks the loop also delays this
        call.
        """
        if self._loop is None:
            respond()
        else:
            self._loop.call_soon_threadsafe(respond)

    def close(self) -> None:
        """End the event loop; hanging threads are abandoned."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.end)

    def _handle(self, asked: Asked) -> None:
        start = time.perf_counter()
        try:
            answered = self._answered(asked)
        except BaseException as error:  # a user's environment may raise anything, even while it is closed
            answered = Answered(asked.number, "failed", traceback_of(error))
            with contextlib.suppress(BaseException):
                self._answered(Close(asked.number, graded=False))
        if isinstance(asked, Close) and not asked.graded:
            return
        with contextlib.suppress(EOFError):  # the trainer has ended
            self._answer(answered._replace(seconds=time.perf_counter() - start))

    def _answered(self, asked: Asked) -> Answered:
        match asked:
            case Open():
                held = self._tasks[asked.task]
                assert held is not None, "the task has conversations"
                prompt = dataclasses.replace(
                    asked.prompt, metadata=copied(dict(asked.prompt.metadata))
                )  # pickled, as between processes
                running = held.open(prompt, asked.seed, self._resolve)
                self._open[asked.number] = running
                return Answered(asked.number, "opened", plain_first(running.begin()))
            case Say():
                return Answered(asked.number, "replied", plain_reply(self._open[asked.number].reply(asked.turn)))
            case Close():
                running = self._open.pop(asked.number, None)
                if running is None:
                    return Answered(asked.number, "graded")
                try:
                    final = running.grade() if asked.graded else None
                    final = None if final is None else finite(final, "the final reward")
                    kept = running.environment if asked.keep else None
                    return Answered(asked.number, "graded", final, environment=kept)
                finally:
                    running.close()

    def _resolve(self, value: object) -> object:
        """Run an awaitable on the process's event loop and wait for it on this thread."""
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> object:
            return await value

        return asyncio.run_coroutine_threadsafe(awaited(), self._started()).result()

    def _started(self) -> UsersLoop:
        with self._starting:
            if self._loop is None:
                self._loop = start_loop("environments")
        return self._loop


def _allow_open_files() -> None:
    """Let this process open as many files as the system allows; hundreds of open environments may need thousands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse the limit that they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(connection: int, lifeline: int) -> None:
    """Hold conversations until the trainer ends this process, or the trainer itself ends."""
    channel = join_parent(connection, lifeline)
    sending = threading.Lock()

    def send(data: bytes) -> None:
        with sending:
            channel.send(data)

    def answer(answered: Answered) -> None:
        kept = answered.environment
        try:
            data = pickle.dumps(answered if kept is None else answered._replace(environment=Copied(kept)))
        except BaseException as error:  # the environment's own code may raise here
            data = pickle.dumps(Answered(answered.number, "failed", traceback_of(error)))
        send(data)

    with contextlib.suppress(EOFError):
        host = Host(pickle.loads(channel.receive()), answer)
        send(pickle.dumps(PING))
        while True:
            asked = pickle.loads(channel.receive())
            if asked is PING:
                host.respond(lambda: send(pickle.dumps(PING)))
                continue
            number, answers, data = asked
            if answers:
                send(pickle.dumps(Begun(number)))
            try:
                request = pickle.loads(data)
            except BaseException as error:  # a data row may hold classes that are not importable here
                answer(Answered(number, "failed", traceback_of(error)))
            else:
                host.take(request)
    os.killpg(0, signal.SIGKILL)  # exits even if threads are busy, and ends processes that tools have started
