"""Compiles programs on background threads before they are first called, so that a run's first steps wait only for the
slowest compilation.

Tracing needs Python's lock, so the caller does it; XLA's compiler does not. A call whose arguments match those that a
program was lowered for finds the compiled program in jax's own caches.
"""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Self

import jax

from podium.compiler import Lowerable


class Call(NamedTuple):
    """A program and the arguments of a call, which may be abstract."""

    program: Lowerable
    arguments: tuple[object, ...]

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the program for these arguments."""
        return self.program.lower(*self.arguments)


def threads_for(platform: str) -> int:
    """How many programs to compile at a time: one for each core of this process, at about half a GiB each; 0 on CPU,
    where the programs need the cores.
    """
    return 0 if platform == "cpu" else len(os.sched_getaffinity(0))


class CompileAhead:
    """Programs that are being compiled, by name. Not thread-safe."""

    def __init__(self, threads: int) -> None:
        """Compile up to `threads` programs at the same time; with 0, each program is compiled by its first call."""
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile") if threads else None
        self._begun: dict[str, Future[jax.stages.Compiled]] = {}

    def begin(self, calls: Iterable[tuple[str, Call]]) -> None:
        """Lower these calls now, in order, and compile them on other threads."""
        if self._pool is None:
            return
        for name, call in calls:
            self._begun[name] = self._pool.submit(call.lower().compile)

    def wait(self, *names: str) -> None:
        """Wait until the compilations of these programs have ended; programs that were not begun are ignored. If a
        compilation failed, the program's first call compiles again and raises the error.
        """
        wait([self._begun.pop(name) for name in names if name in self._begun])

    def close(self) -> None:
        """Cancel compilations that have not begun. Running ones continue, and the process ends only after them."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._begun.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
