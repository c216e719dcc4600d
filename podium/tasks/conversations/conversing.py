"""Runs conversations, in a process that `podium.tasks.conversations.environments` starts, or in threads of the trainer.

Each request is answered on its own thread, and async code runs on one event loop, so that slow replies overlap. The
trainer enforces time limits, not this module.
"""

import contextlib
import dataclasses
import resource
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from podium.config.schema import TaskConfig
from podium.plain import copied, traceback_of
from podium.tasks.conversation import Asking, Reply, Turn, finite, plain_first, plain_reply
from podium.tasks.conversations.environment_copy import Copied
from podium.tasks.conversations.environment_forms import Conversing, Running, conversing
from podium.tasks.event_loop import LoopThread
from podium.tasks.task import Prompt
from podium.tasks.workers import Parent


class Open(NamedTuple):
    """Request to begin a conversation."""

    number: int
    task: int
    prompt: Prompt
    seed: int


class Say(NamedTuple):
    """Request to reply to an answer of the model."""

    number: int
    turn: Turn


class Close(NamedTuple):
    """Request to end a conversation; `graded`: whether to return its final reward."""

    number: int
    graded: bool
    keep: bool = False
    """Whether to return the environment too."""


Asked = Open | Say | Close


class Answered(NamedTuple):
    """The answer to a request of a conversation."""

    number: int
    kind: Literal["opened", "replied", "graded", "failed", "lost"]
    """What happened; lost: the process ended or does not respond, and this conversation is not known to be the
    cause."""
    value: str | Asking | Reply | float | None = None
    """Depending on the request and outcome: the text to append to the prompt or a program's first request, the reply,
    the final reward, a traceback, or why the conversation was lost."""
    seconds: float = 0.0
    environment: object = None
    """The environment after the conversation's end, if requested: the object itself, or a copy if it is in another
    process."""
    apart: bool = False
    """Whether the conversation must continue, or restart, in a process that carries out one call at a time, because it
    may have caused the end of a process."""


class Host:
    """The conversations of one process."""

    def __init__(self, configs: Sequence[TaskConfig]) -> None:
        """Prepare the conversations of the tasks with these configs."""
        _allow_open_files()
        self._tasks: list[Conversing | None] = [conversing(config) for config in configs]
        self._open: dict[int, Running] = {}
        self.loop = LoopThread("environments")
        """Runs all async code."""

    def answer(self, asked: Asked) -> Answered:
        """Answer a request. Never raises; requests of several conversations may be answered at the same time."""
        start = time.perf_counter()
        try:
            answered = self._answered(asked)
        except BaseException as error:  # a user's environment may raise anything, even while it closes
            answered = Answered(asked.number, "failed", traceback_of(error))
            with contextlib.suppress(BaseException):
                self._answered(Close(asked.number, graded=False))
        return answered._replace(seconds=time.perf_counter() - start)

    def _answered(self, asked: Asked) -> Answered:
        match asked:
            case Open():
                held = self._tasks[asked.task]
                assert held is not None, "the task has conversations"
                prompt = dataclasses.replace(
                    asked.prompt, metadata=copied(dict(asked.prompt.metadata))
                )  # as from another process
                running = held.open(prompt, asked.seed, self.loop.resolve)
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


def _allow_open_files() -> None:
    """Let this process open as many files as the system allows; hundreds of open environments may need thousands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse the limit that they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(connection: int, lifeline: int) -> None:
    """Run conversations until the trainer ends this process, or the trainer itself ends."""
    parent = Parent(connection, lifeline)
    host = Host(parent.setup())

    def answer(asked: Asked) -> Answered:
        answered = host.answer(asked)
        kept = answered.environment
        return answered if kept is None else answered._replace(environment=Copied(kept))

    parent.serve_concurrently(answer, respond=host.loop.call)
