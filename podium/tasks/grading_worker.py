"""The grading process: started by `podium.tasks.grading`, which calls `main` in it.

Its setup is the configs of the tasks and `grading.timeout_s`. It creates the tasks, and then grades one item at a time.
"""

import signal
from typing import Literal, NamedTuple

from podium.plain import number_of, traceback_of
from podium.tasks.registry import make_task
from podium.tasks.task import OutOfTime, Prompt, Task
from podium.tasks.worker_process import leave_to_parent
from podium.tasks.workers import Parent

MEMORY_BYTES = 2 << 30
"""Memory that one grade may allocate in addition to what the process uses once its tasks are created."""


class Item(NamedTuple):
    """An answer to grade, as sent to the process."""

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
        correct = _paid(task.grade(item.prompt, item.completion))
    except OutOfTime as late:
        return Outcome("stopped", correct=late.correct, message=str(late))
    except MemoryError:
        return Outcome("stopped", message=f"it took more than {MEMORY_BYTES >> 30} GiB of memory")
    except BaseException as error:  # SystemExit and CancelledError are bugs as well
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not leave_to_parent:
            raise  # Ctrl-C, if grading runs in the trainer's process
        return Outcome("bug", message=traceback_of(error))
    if isinstance(correct, float):
        return Outcome("graded", correct=correct)
    return Outcome("bug", message=f"grade() returned {correct}; it must return a number from 0 to 1")


def _paid(value: object) -> float | str:
    """A valid grade as a float, or the text of an invalid one."""
    number = number_of(value)
    return number if number is not None and 0 <= number <= 1 else f"{value!r:.80}"


def main(connection: int, lifeline: int) -> None:
    """Grade until the parent ends this process, or the parent itself ends."""
    parent = Parent(connection, lifeline)
    configs, timeout_s = parent.setup()
    tasks = [make_task(config) for config in configs]
    _limit_memory()
    parent.serve(
        lambda item: grade_item(tasks[item.task], item),
        limit_s=lambda item: max(timeout_s, getattr(tasks[item.task], "grading_limit_s", 0.0)),
    )


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
