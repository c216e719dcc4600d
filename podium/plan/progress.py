"""How the compilation of a plan goes on, told while it does."""

from collections.abc import Callable

from podium.plan.compile import CompileProgress, OnProgress
from podium.plan.formatting import verdict_line
from podium.plan.result import Plan


def follow(
    machine: str, say: Callable[[str], None], update: Callable[[str], None], estimated: Callable[[], Plan] | None
) -> OnProgress:
    """Shows how compilation goes on, and what the closed form says meanwhile, if that is asked for.

    `say` gets lines that stay, `update` what runs now.
    """
    running, said = dict[str, float](), estimated is None

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
