"""Holds conversations: in a process that `podium.tasks.environments` starts, or in threads of the trainer.

Each request is answered on a thread of its own, async code on one event loop, so that slow replies overlap. It has no
time limit: the trainer's side has.
"""

import asyncio
import contextlib
import inspect
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from podium.config.schema import TaskConfig
from podium.tasks.conversation import Asking, Reply, Turn, finite, plain_first, plain_reply
from podium.tasks.environment_copy import Copied
from podium.tasks.environment_forms import Conversing, Running, conversing
from podium.tasks.event_loop import start_loop
from podium.tasks.task import Prompt


class Open(NamedTuple):
    """Begin a conversation."""

    number: int
    task: int
    prompt: Prompt
    seed: int


class Say(NamedTuple):
    """An answer of the model, to reply to."""

    number: int
    turn: Turn


class Close(NamedTuple):
    """End a conversation; `graded`: with its final reward."""

    number: int
    graded: bool
    keep: bool = False
    """Whether to return the environment too."""


Asked = Open | Say | Close


class Answered(NamedTuple):
    """The answer to a request."""

    number: int
    kind: Literal["opened", "replied", "graded", "failed"]
    value: str | Asking | Reply | float | None = None
    """The text to append to the prompt or what a program asks first, the reply, the final reward, or a traceback."""
    seconds: float = 0.0
    environment: object = None
    """The environment after its end, if it was asked for: itself, or from another process a copy."""


class Host:
    """The conversations of one process."""

    def __init__(self, configs: Sequence[TaskConfig], answer: Callable[[Answered], None]) -> None:
        """`answer` is called on other threads, with the answer to each request."""
        _allow_open_files()
        self._tasks: list[Conversing | None] = [conversing(config) for config in configs]
        self._answer = answer
        self._open: dict[int, Running] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def take(self, asked: Asked) -> None:
        """Answer a request on a thread of its own."""
        threading.Thread(target=self._handle, args=(asked,), name="conversation", daemon=True).start()

    def close(self) -> None:
        """End the event loop; threads that hang are left."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _handle(self, asked: Asked) -> None:
        start = time.perf_counter()
        try:
            answered = self._answered(asked)
        except BaseException:  # a user's environment may raise anything, also as it is closed
            answered = Answered(asked.number, "failed", traceback.format_exc())
            with contextlib.suppress(BaseException):
                self._answered(Close(asked.number, graded=False))
        if isinstance(asked, Close) and not asked.graded:
            return
        with contextlib.suppress(OSError):  # the trainer has ended
            self._answer(answered._replace(seconds=time.perf_counter() - start))

    def _answered(self, asked: Asked) -> Answered:
        match asked:
            case Open():
                held = self._tasks[asked.task]
                assert held is not None, "the task has conversations"
                running = held.open(asked.prompt, asked.seed, self._resolve)
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
        """Wait on this thread for an awaitable, which runs on the process's event loop."""
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> object:
            return await value

        return asyncio.run_coroutine_threadsafe(awaited(), self._started()).result()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = start_loop("environments")
        return self._loop


def _allow_open_files() -> None:
    """Let this process open as many files as the system allows; hundreds of open environments may need thousands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system may refuse its own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(file_descriptor: int) -> None:
    """Hold conversations until the trainer closes the connection, or ends; then end with all that tools started."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the trainer finishes its step, and then closes the connection
    connection = Connection(file_descriptor)
    sending = threading.Lock()

    def answer(answered: Answered) -> None:
        with sending:
            kept = answered.environment
            connection.send(answered if kept is None else answered._replace(environment=Copied(kept)))

    with contextlib.suppress(EOFError, OSError):
        host = Host(connection.recv(), answer)
        while True:
            host.take(connection.recv())
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # whatever threads still do, and processes that tools have started
    os._exit(0)
