"""Finds processes of this host by their parents or their environment, and ends them. Linux; standard library only."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POLL_S = 0.02
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own parent."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked(variable: str, value: str) -> list[int]:
    """The processes with this variable in their environment, except the current process and its ancestors."""
    mark = f"{variable}={value}".encode()
    own = {os.getpid(), *_ancestors(os.getpid())}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's process
            if mark in (entry / "environ").read_bytes().split(b"\0") and _lives(int(entry.name)):
                found.append(int(entry.name))
    return found


def descendants(parent: int) -> list[int]:
    """All living descendants of a process."""
    below: list[int] = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                below += [child] * _lives(child) + descendants(child)
    return below


def kill(processes: Sequence[int], *, patience_s: float = 5.0) -> list[int]:
    """Send SIGKILL to each process; returns the ones that still live after `patience_s`."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    wait_until(lambda: not any(map(_lives, processes)), patience_s)
    return [process for process in processes if _lives(process)]


def wait_until(condition: Callable[[], bool], patience_s: float) -> bool:
    """Wait for a condition; returns whether it became true within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _lives(process: int) -> bool:
    return _state_and_parent(process)[0] != "Z"


def _ancestors(process: int) -> list[int]:
    parent = _state_and_parent(process)[1]
    return [parent, *_ancestors(parent)] if parent > 0 else []


def _state_and_parent(process: int) -> tuple[str, int]:
    """A process's state (Z for a zombie, or if the process does not exist) and its parent's id."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "Z", 0
    return state, int(parent)
