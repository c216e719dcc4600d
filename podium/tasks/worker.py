"""The grading process: started by `podium.tasks.grading`, which calls `main` in it.

It reads task configs and then lists of items from its connection, and answers each item as soon as it is graded. It has
no time limit of its own: the parent kills it if necessary.
"""

import contextlib
import math
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from podium.tasks.registry import make_task
from podium.tasks.task import OutOfTime, Prompt, Task

MEMORY_BYTES = 2 << 30
"""Memory that one grade may allocate beyond what the process has once its tasks are made."""
ORPHAN_S = 60.0
"""A worker that is still busy with one item this long after its time limit has lost its parent, and exits."""


class Item(NamedTuple):
    """One answer to grade."""

    task: int
    prompt: Prompt
    completion: str


class Outcome(NamedTuple):
    """How grading ended: graded; stopped (time or memory), because of the model's text; or with a bug in the grader."""

    kind: Literal["graded", "stopped", "bug"]
    correct: float = 0.0
    message: str = ""


def grade_item(task: Task, item: Item) -> Outcome:
    """Grade one completion. Never raises: a bug is returned as its traceback."""
    try:
        correct = task.grade(item.prompt, item.completion)
    except OutOfTime as late:
        return Outcome("stopped", correct=late.correct, message=str(late))
    except MemoryError:
        return Outcome("stopped", message=f"it took more than {MEMORY_BYTES >> 30} GiB of memory")
    except BaseException as error:  # SystemExit and CancelledError are bugs as well
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            raise  # Ctrl-C, where grading has no process of its own
        return Outcome("bug", message=traceback.format_exc())
    if not isinstance(correct, int | float) or not math.isfinite(correct) or not 0 <= correct <= 1:
        return Outcome("bug", message=f"grade() returned {correct!r}; it must return a number from 0 to 1")
    return Outcome("graded", correct=float(correct))


def grading_limit_s(task: Task, timeout_s: float) -> float:
    """Seconds in which a task must have graded an answer: `timeout_s`, or more if the task limits itself to that."""
    return max(timeout_s, getattr(task, "grading_limit_s", 0.0))


def main(file_descriptor: int) -> None:
    """Grade until the parent closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent finishes its step, and then closes the connection
    connection = Connection(file_descriptor)
    configs, timeout_s = connection.recv()
    tasks = [make_task(config) for config in configs]
    _limit_memory()
    limits_s = [grading_limit_s(task, timeout_s) for task in tasks]
    connection.send(limits_s)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            for item in connection.recv():
                signal.setitimer(signal.ITIMER_REAL, limits_s[item.task] + ORPHAN_S)
                outcome = grade_item(tasks[item.task], item)
                signal.setitimer(signal.ITIMER_REAL, 0)
                connection.send(outcome)


def _limit_memory() -> None:
    """Make allocations of more than MEMORY_BYTES beyond the current size raise MemoryError, where supported (Linux)."""
    import resource

    try:
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = in_use + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
