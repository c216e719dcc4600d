"""Postpones a run's saves while its bucket does not respond, so that training continues through a short outage."""

import contextlib
import tempfile
import threading
import uuid
from concurrent.futures import Future, wait
from pathlib import Path

from podium.files import in_bucket
from podium.hosts.distributed import from_leader

ANSWER_S = 10.0
"""Seconds within which a bucket must accept an object for a save to begin."""


class Postponing:
    """Decides whether to postpone a save, and records whether one was postponed."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the folder of the checkpoints; saves to folders outside buckets are never postponed."""
        self._folder = folder
        self._attempt: Future[None] | None = None  # an attempt to write an object
        self.postponed = False
        """Whether a save that was due is still pending, because the bucket did not respond."""

    def puts_off(self, *, regular: bool, needed: bool) -> bool:
        """Whether to postpone a save until a later step; every host must call this with the same arguments.

        A postponed save is retried after each step. The next `regular` save waits for the bucket, as does a save that
        is `needed` now.
        """
        waits = needed or (regular and self.postponed)
        self.postponed = not waits and in_bucket(self._folder) and not from_leader(self._answers)
        return self.postponed

    def _answers(self) -> bool:
        """Whether the bucket accepts an object quickly; if it refuses, the save itself reports why."""
        begun = self._attempt is None
        if self._attempt is None:
            self._attempt = Future()
            threading.Thread(target=_write, args=(self._folder, self._attempt), daemon=True).start()
        if wait([self._attempt], ANSWER_S if begun else 0.0).not_done:
            return False
        self._attempt = None
        return True


def _write(folder: Path, done: "Future[None]") -> None:
    with contextlib.suppress(Exception):  # the save itself reports the error
        try_to_write(folder)
    done.set_result(None)


def try_to_write(folder: Path) -> None:
    """Create the folder, and write and delete a file in it; the file's name is unique, because other hosts do
    the same.
    """
    if in_bucket(folder):
        probe = folder / f".written-{uuid.uuid4().hex}"
        probe.write_text("")
        probe.unlink()
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
