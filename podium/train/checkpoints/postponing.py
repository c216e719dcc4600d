"""Puts off the saves of a run in a bucket that does not answer, so that training goes on through a short outage."""

import contextlib
import tempfile
import threading
import uuid
from concurrent.futures import Future, wait
from pathlib import Path

from podium.files import in_bucket
from podium.hosts.distributed import from_leader

ANSWER_S = 10.0
"""Seconds in which a bucket must take an object for a save to begin."""


class Postponing:
    """Whether a regular save is put off, and whether one was."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the checkpoints; saves into folders that are not in a bucket are never put off."""
        self._folder = folder
        self._attempt: Future[None] | None = None  # to write an object
        self.postponed = False
        """Whether a save was due while the bucket did not answer, and is still to come."""

    def puts_off(self, *, regular: bool, needed: bool) -> bool:
        """Whether a save is put off until a later step; every host must call this with the same arguments.

        A save that was put off is tried again after each step. The next `regular` one waits for the bucket, as does
        one that is `needed` now.
        """
        waits = needed or (regular and self.postponed)
        self.postponed = not waits and in_bucket(self._folder) and not from_leader(self._answers)
        return self.postponed

    def _answers(self) -> bool:
        """Whether the bucket takes an object at once; if it refuses, the save itself tells why."""
        begun = self._attempt is None
        if self._attempt is None:
            self._attempt = Future()
            threading.Thread(target=_write, args=(self._folder, self._attempt), daemon=True).start()
        if wait([self._attempt], ANSWER_S if begun else 0.0).not_done:
            return False
        self._attempt = None
        return True


def _write(folder: Path, done: "Future[None]") -> None:
    with contextlib.suppress(Exception):  # the save itself meets it too
        try_to_write(folder)
    done.set_result(None)


def try_to_write(folder: Path) -> None:
    """Create the folder, and write and delete a file in it; the name is unique, as other hosts do the same."""
    if in_bucket(folder):
        probe = folder / f".written-{uuid.uuid4().hex}"
        probe.write_text("")
        probe.unlink()
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
