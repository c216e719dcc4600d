"""Ends a process that has stopped making progress, after writing where every thread stands.

A process that hangs goes on answering jax's heartbeats, so jax never notices, and all others wait for it for ever. The
loop says when a phase begins and, in long ones, that it still moves; each phase has an allowance between two such signs
of life. Standard library only.
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

from podium.job.records import HANG, Report

HANG_S, COMPILE_S = 600.0, 3600.0
TIMES_MEDIAN = 5.0
WAITING, TIMES_WAITING = "waiting for the other hosts", 3.0
REMEMBERED = 20  # durations of a phase
STUCK_TOO_S = 60.0
"""How much later a thread that needs no interpreter ends the process, where this one is not let run."""


class Watchdog:
    """Knows when the loop was last heard of; between `with` and its end, a thread looks at that.

    A phase may be silent for `hang_s`, or five times the median that it took before if that is longer; the first of its
    kind compiles and may take `compile_s`.
    """

    def __init__(
        self,
        report: Report,
        *,
        hang_s: float = HANG_S,
        compile_s: float = COMPILE_S,
        poll_s: float = 1.0,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._report, self._hang_s, self._compile_s, self._poll_s, self._end = report, hang_s, compile_s, poll_s, end
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._phase = "start"
        self._begun = self._heard = time.monotonic()
        self._stopping = threading.Event()

    @classmethod
    def from_environment(cls, report: Report, environ: Mapping[str, str]) -> "Watchdog":
        """With the least allowances of PODRUN_HANG_S and PODRUN_COMPILE_S, where they are set."""
        hang_s, compile_s = (
            float(environ.get(name, default))
            for name, default in (("PODRUN_HANG_S", HANG_S), ("PODRUN_COMPILE_S", COMPILE_S))
        )
        return cls(report, hang_s=hang_s, compile_s=compile_s, poll_s=min(1.0, hang_s / 4))

    def phase(self, name: str) -> None:
        """A phase begins, and the one before has ended."""
        now = time.monotonic()
        self._durations[self._phase].append(now - self._begun)
        self._phase, self._begun, self._heard = name, now, now
        self._report.phase(name)

    def beat(self) -> None:
        """The phase goes on."""
        self._heard = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for other processes: whichever of them is stuck is to be the first that ends."""
        phase = self._phase
        self.phase(WAITING)
        try:
            yield
        finally:
            self.phase(phase)

    def allowance(self) -> float:
        """Seconds that the present phase may be silent."""
        before = self._durations[self._phase]
        if not before:
            return self._compile_s
        patience = TIMES_WAITING if self._phase == WAITING else 1.0
        return patience * max(self._hang_s, TIMES_MEDIAN * statistics.median(before))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Looks at the loop from another thread until the end of the block."""
        self._stopping.clear()
        self._heard = time.monotonic()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            self._write_progress()

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_s):
            silent, allowance = time.monotonic() - self._heard, self.allowance()
            self._write_progress()
            if silent > allowance:
                self._report.end("hang", f"no sign of life in {self._phase} for {silent:.0f} s", HANG)
                sys.stderr.write(f"watchdog: no sign of life in {self._phase} for {silent:.0f} s; all stacks follow\n")
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                self._end(HANG)
                return
            faulthandler.dump_traceback_later(allowance - silent + STUCK_TOO_S, exit=True, file=sys.__stderr__ or 2)

    def _write_progress(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run decides for itself whether that ends it
            self._report.write_progress(time.time() - (time.monotonic() - self._heard))
