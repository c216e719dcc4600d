"""Holds conversations: in a process that `podium.tasks.conversations.environments` starts, or in threads of the
trainer.

Each request is answered on its own thread, async code on one event loop, so that slow replies overlap. It has no
time limit: the trainer's side has.
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
    """Begin a conversation."""

    number: int
    task: int
    prompt: Prompt
    seed: int

    @property
    def answers(self) -> bool:
        """Whether it is answered."""
        return True


class Say(NamedTuple):
    """An answer of the model, to reply to."""

    number: int
    turn: Turn

    @property
    def answers(self) -> bool:
        """Whether it is answered."""
        return True


class Close(NamedTuple):
    """End a conversation; `graded`: with its final reward."""

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
"""Asks a process to respond, sent in place of a request; its response is the same, and so is what it sends first."""


class Begun(NamedTuple):
    """Says that a request of a conversation is being carried out."""

    number: int


class Answered(NamedTuple):
    """The answer to a request."""

    number: int
    kind: Literal["opened", "replied", "graded", "failed", "lost"]
    """lost: its process ended, or does not respond, and it is not known to be the reason."""
    value: str | Asking | Reply | float | None = None
    """The text to append to the prompt or what a program asks first, the reply, the final reward, a traceback, or why
    it was lost."""
    seconds: float = 0.0
    environment: object = None
    """The environment after its end, if it was asked for: itself, or from another process a copy."""
    apart: bool = False
    """Whether it is to go on, or begin again, in a process with one call at a time, because it may end others."""


Sent = Answered | Begun | None
"""What a process sends."""


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
        """Call a function where all async code runs, if any does: what blocks the event loop then blocks this too."""
        if self._loop is None:
            respond()
        else:
            self._loop.call_soon_threadsafe(respond)

    def close(self) -> None:
        """End the event loop; threads that hang are left."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.end)

    def _handle(self, asked: Asked) -> None:
        start = time.perf_counter()
        try:
            answered = self._answered(asked)
        except BaseException as error:  # a user's environment may raise anything, also as it is closed
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
                )  # as in a process
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
        """Wait on this thread for an awaitable, which runs on the process's event loop."""
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
    with contextlib.suppress(ValueError, OSError):  # a system may refuse its own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(connection: int, lifeline: int) -> None:
    """Hold conversations until the trainer ends this process, or ends itself."""
    channel = join_parent(connection, lifeline)
    sending = threading.Lock()

    def send(data: bytes) -> None:
        with sending:
            channel.send(data)

    def answer(answered: Answered) -> None:
        kept = answered.environment
        try:
            data = pickle.dumps(answered if kept is None else answered._replace(environment=Copied(kept)))
        except BaseException as error:  # the environment's own code takes part
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
            except BaseException as error:  # classes in a row of the data that are not importable here
                answer(Answered(number, "failed", traceback_of(error)))
            else:
                host.take(request)
    os.killpg(0, signal.SIGKILL)  # whatever threads still do, and processes that tools have started
