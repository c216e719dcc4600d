"""Shows the progress of a plan's compilations."""

from collections.abc import Callable

from podium.plan.compiled.compile import CompileProgress, OnProgress
from podium.plan.report.formatting import verdict_line
from podium.plan.result import Plan


def follow(
    machine: str, say: Callable[[str], None], update: Callable[[str], None], estimated: Callable[[], Plan] | None
) -> OnProgress:
    """Make a callback that shows compilations as they proceed.

    Args:
        machine: name of the accelerator.
        say: prints a permanent line.
        update: replaces the status line.
        estimated: makes the closed-form plan to print while the first program compiles; None: print no estimate.
    """
    running: dict[str, float] = {}
    said = estimated is None

    def tell(progress: CompileProgress) -> None:
        nonlocal said
        counts = f"{progress.done} of {progress.total}"
        if progress.state == "compiling":
            if estimated and not said:
                said = True
                say(f"estimate while compiling: {verdict_line(estimated())}")
            running[progress.phase] = progress.seconds
        elif progress.state == "compiled":
            running.pop(progress.phase, None)
            said = True
            if estimated:
                say(f"compiled {progress.phase} for {machine} in {progress.seconds:.0f} s ({counts})")
        phases = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in running.items())
        update(f"compiling for {machine}: {phases} ({counts} done)")

    return tell
