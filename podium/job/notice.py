"""Google's notice that this machine is about to go, from its metadata server; the run then saves and stops.

A spot machine that is preempted, or a host that is to be maintained, is announced some seconds before at `instance/
preempted` and `instance/maintenance-event`, if at all: saving every few minutes is what a run can rely on. The notice
becomes a SIGTERM to this process, which the training loop agrees on with all others. Standard library only.
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
"""Keys of the metadata server, and the values that mean that the machine is about to go."""
ASK_S = 60.0
"""How long one request waits for a change."""
RETRY_S = 5.0


class Notice:
    """What Google has announced of this machine: `text`, empty until then."""

    def __init__(
        self,
        server: str = METADATA,
        *,
        announce: Callable[[str], None] = lambda text: None,
        act: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        """`announce` is told of it, and then `act` called, both on another thread, once."""
        self.text = ""
        self._server, self._announce, self._act = server, announce, act
        self._lock, self._stopping = threading.Lock(), threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Ask the metadata server from other threads until the end of the block; without one, nothing happens."""
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
            except OSError:  # on no machine of Google's, or its server is busy
                if not heard:
                    return
                self._stopping.wait(RETRY_S)
                continue
            heard, wait = True, f"?wait_for_change=true&timeout_sec={ASK_S:.0f}"
            if value in NOTICES[key]:
                return self._give(f"this machine is about to go ({key}: {value})")

    def _give(self, text: str) -> None:
        with self._lock:
            if self.text or self._stopping.is_set():
                return
            self.text = text
        self._announce(f"notice: {text}; saving")
        self._act()
