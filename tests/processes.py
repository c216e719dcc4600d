"""Processes that tests start, as /proc shows them."""

import contextlib
import os
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


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
