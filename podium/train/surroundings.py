"""How a run is recorded, shown, watched and stopped."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from podium.files import absolute
from podium.hosts.distributed import AgreedStop, from_leader
from podium.hosts.signals import StopSignal
from podium.job.job_context import JobContext
from podium.observe.live_view import Progress, run_console
from podium.observe.run_dir import Fork, RunDir, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """How a run is recorded, shown, watched and stopped."""

    run_dir: RunDir
    progress: Progress
    stop: AgreedStop
    job: JobContext

    def phase(self, name: str) -> None:
        """Announce the current phase to the user and the watchdog."""
        self.progress.phase(name)
        self.job.watchdog.phase(name)

    def say(self, line: str) -> None:
        """Print a line to the user."""
        self.progress.message(line)


@contextlib.contextmanager
def open_run_dir(home: Path, settings: Settings, fork: Fork | None) -> Iterator[RunDir]:
    """Open the run's folder: for writing on process 0, read-only on the others."""
    opened: list[RunDir] = []

    def open_it() -> tuple[bool, Fork | None, Settings]:
        opened.append(RunDir.open(home, settings, fork=fork))
        return opened[0].continued, opened[0].fork, opened[0].settings

    continued, kept, completed = from_leader(open_it)
    with opened[0] if opened else RunDir.follow(home, completed, continued=continued, fork=kept) as run_dir:
        yield run_dir


@contextlib.contextmanager
def open_surroundings(run_dir: RunDir, steps: int, job: JobContext, *, plain: bool) -> Iterator[Surroundings]:
    """Open the display of a run of `steps` steps, and its watchdog and stop signals; `plain`: lines instead of the live
    view.
    """
    console = run_console(plain=plain or job.watched)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(run_dir.path.name, steps, console))
        stop = AgreedStop(stack.enter_context(StopSignal(progress.notice)))
        if job.watched:
            stack.enter_context(job.watchdog.watching())
        job.report.update(steps=steps, run_dir=str(absolute(run_dir.home)))
        yield Surroundings(run_dir=run_dir, progress=progress, stop=stop, job=job)
