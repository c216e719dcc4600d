"""Processes that tests start, as /proc shows them."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def below(pid: int) -> list[int]:
    """The processes below a process, at any depth; a thread that ends meanwhile has none."""
    own: list[int] = []
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # the process has ended
        return own
    for file in files:
        with contextlib.suppress(OSError):
            own += map(int, file.read_text().split())
    return [*own, *(each for child in own for each in below(child))]


def state(pid: int) -> str:
    """The letter of a process's state, such as T for stopped; Z if it has ended and was not waited for, or is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Return as soon as the condition holds; fails if it does not within a time far beyond what anything takes."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.001)


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    return state(pid) != "Z"
