"""Holds conversations: in a process that `podium.tasks.conversations.environments` starts, or in threads of the
trainer.

Each request is answered on its own thread, async code on one event loop, so that slow replies overlap. It has no
time limit: the trainer's side has.
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


class Host:
    """The conversations of one process."""

    def __init__(self, configs: Sequence[TaskConfig]) -> None:
        """Hold none yet. `configs` are those of the run's tasks."""
        _allow_open_files()
        self._tasks: list[Conversing | None] = [conversing(config) for config in configs]
        self._open: dict[int, Running] = {}
        self.loop = LoopThread("environments")
        """Runs all async code."""

    def answer(self, asked: Asked) -> Answered:
        """Answer a request. Never raises, whatever an environment does; those of several conversations may overlap."""
        start = time.perf_counter()
        try:
            answered = self._answered(asked)
        except BaseException as error:  # a user's environment may raise anything, also as it is closed
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
                )  # as in a process
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
    with contextlib.suppress(ValueError, OSError):  # a system may refuse its own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(connection: int, lifeline: int) -> None:
    """Hold conversations until the trainer ends this process, or ends itself."""
    parent = Parent(connection, lifeline)
    host = Host(parent.setup())

    def answer(asked: Asked) -> Answered:
        answered = host.answer(asked)
        kept = answered.environment
        return answered if kept is None else answered._replace(environment=Copied(kept))

    parent.serve_at_once(answer, respond=host.loop.call)
