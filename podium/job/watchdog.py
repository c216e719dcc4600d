"""Ends a process that has stopped making progress, after printing the stack of every thread.

A process that hangs still answers jax's heartbeats, so jax never notices and all others wait for it forever. The
training loop announces each phase and pings the watchdog in long ones; each phase has an allowance, the seconds for
which it may be silent. Standard library only.
"""

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping

from podium.files import RunFileError
from podium.job.job_records import HANG, ProgressReport

HANG_S, COMPILE_S = 600.0, 3600.0
TIMES_MEDIAN = 5.0
WAITING, TIMES_WAITING = "waiting for the other hosts", 3.0
REMEMBERED = 20  # durations to keep per phase
BACKUP_S = 60.0
"""Seconds after the allowance at which faulthandler's thread ends the process, in case the watchdog's thread cannot get
the interpreter lock."""


class Watchdog:
    """Tracks the loop's last sign of life; inside `watching()`, a thread ends the process if it is too old.

    A phase may be silent for `hang_s`, or for five times the median of its earlier durations if that is longer; its
    first occurrence compiles and may take `compile_s`. `clock` returns seconds; `end` ends the process.
    """

    def __init__(
        self,
        report: ProgressReport,
        *,
        hang_s: float = HANG_S,
        compile_s: float = COMPILE_S,
        poll_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._report = report
        self._hang_s = hang_s
        self._compile_s = compile_s
        self._poll_s = poll_s
        self._clock = clock
        self._end = end
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._phase = "start"
        self._begun = self._heard = clock()
        self._stopping = threading.Event()
        self.rescue: Callable[[], str | None] = lambda: None
        """Called before a silent process is ended, to save what can be saved; returns a line for the log. If it takes
        longer than `BACKUP_S`, the process is ended meanwhile."""

    @classmethod
    def from_environment(cls, report: ProgressReport, environ: Mapping[str, str]) -> "Watchdog":
        """A watchdog with `hang_s` and `compile_s` from PODRUN_HANG_S and PODRUN_COMPILE_S, if they are set."""
        hang_s, compile_s = environ.get("PODRUN_HANG_S", HANG_S), environ.get("PODRUN_COMPILE_S", COMPILE_S)
        return cls(report, hang_s=float(hang_s), compile_s=float(compile_s))

    def phase(self, name: str) -> None:
        """End the current phase and begin another."""
        now = self._clock()
        self._durations[self._phase].append(now - self._begun)
        self._phase = name
        self._begun = self._heard = now
        self._report.phase(name)

    def beat(self) -> None:
        """Report a sign of life."""
        self._heard = self._clock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Extend the allowance within the block, which waits for other processes: the stuck process then ends first."""
        phase = self._phase
        self.phase(WAITING)
        try:
            yield
        finally:
            self.phase(phase)

    def allowance(self) -> float:
        """Seconds for which the current phase may be silent."""
        before = self._durations[self._phase]
        if not before:
            return self._compile_s
        patience = TIMES_WAITING if self._phase == WAITING else 1.0
        return patience * max(self._hang_s, TIMES_MEDIAN * statistics.median(before))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Check the loop from another thread until the end of the block."""
        self._stopping.clear()
        self._heard = self._clock()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            self._write_progress()

    def check(self) -> float:
        """Write the progress; end the process if it was silent for too long. Returns the seconds left until then."""
        silent = self._clock() - self._heard
        allowance = self.allowance()
        self._write_progress()
        if silent > allowance:
            message = f"no sign of life in {self._phase} for {silent:.0f} s"
            self._report.end("hang", message, HANG)
            sys.stderr.write(f"watchdog: {message}; all stacks follow\n")
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            if (line := self.rescue()) is not None:
                sys.stderr.write(f"watchdog: {line}\n")
            sys.stderr.flush()
            self._end(HANG)
        return allowance - silent

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_s) and (left := self.check()) >= 0.0:
            faulthandler.dump_traceback_later(left + BACKUP_S, exit=True, file=sys.__stderr__ or 2)

    def _write_progress(self) -> None:
        with contextlib.suppress(RunFileError):  # a full disk: the run itself decides whether that ends it
            self._report.write_progress(time.time() - (self._clock() - self._heard))
