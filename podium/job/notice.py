"""Google's notice that this machine will be taken away, from its metadata server; the run then saves and stops.

Preemption of a spot machine and maintenance of a host are announced some seconds before, at `instance/preempted` and
`instance/maintenance-event`, if at all: a run can rely only on saving every few minutes. The notice becomes a SIGTERM
to this process; the training loop agrees with all other processes on the step after which they stop. Standard library
only.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

from podium.job.cluster import METADATA, read_metadata

NOTICES: Mapping[str, tuple[str, ...]] = {
    "preempted": ("TRUE",),
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
}
"""Keys of the metadata server, and the values that announce that the machine will be taken away."""
ASK_S = 60.0
"""Seconds for which one request waits for a change."""
RETRY_S = 5.0


class Notice:
    """Google's announcement about this machine; `text` is empty until one arrives."""

    def __init__(
        self,
        server: str = METADATA,
        *,
        announce: Callable[[str], None] = lambda text: None,
        act: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        """Call `announce` with a notice, then `act`, once, on another thread."""
        self.text = ""
        self._server = server
        self._announce = announce
        self._act = act
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Poll the metadata server on other threads until the end of the block; without a server, do nothing."""
        for key in NOTICES:
            threading.Thread(target=self._watch, args=(key,), name=f"notice {key}", daemon=True).start()
        try:
            yield
        finally:
            self._stopping.set()

    def _watch(self, key: str) -> None:
        heard = False
        wait = ""
        while not self._stopping.is_set():
            try:
                value = read_metadata(self._server, f"{key}{wait}", ASK_S + RETRY_S)
            except OSError:  # not a Google machine, or its metadata server is busy
                if not heard:
                    return
                self._stopping.wait(RETRY_S)
                continue
            heard, wait = True, f"?wait_for_change=true&timeout_sec={ASK_S:.0f}"
            if value in NOTICES[key]:
                return self._give(f"this machine is about to be taken away ({key}: {value})")

    def _give(self, text: str) -> None:
        with self._lock:
            if self.text or self._stopping.is_set():
                return
            self.text = text
        self._announce(f"notice: {text}; saving")
        self._act()
