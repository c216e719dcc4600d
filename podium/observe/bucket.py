"""Runs in a bucket: `runs_dir: gs://BUCKET/FOLDER`, or s3://.

Objects are replaced whole, and the records of a run grow by a line at a time: they are written to a folder of this
machine and copied to the bucket, regularly and always before a checkpoint is saved, so that whoever continues the run
from there finds them as far as the checkpoint goes. Checkpoints are no part of this: orbax writes them to the bucket.

    ~/.cache/podium/runs/BUCKET/FOLDER/NAME     the records, as every run has them
    gs://BUCKET/FOLDER/NAME/                    the same files, and checkpoints/
    gs://BUCKET/FOLDER/NAME/run.lease           whose run it is, and when that process was last alive

A bucket has no locks. The process that trains renews its lease; one that finds another's lease waits until it has not
been renewed for `LEASE_S`, and takes it. Needs the extra `gcs` or `s3`.
"""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from podium.files import RunFileError

LEASE = "run.lease"
LEASE_S, RENEW_S = 60.0, 15.0
POLL_S = 1.0
NOT_COPIED = ("run.lock", LEASE, "checkpoints")


class Mirror:
    """A run's records on this machine, and their copy in the bucket; this process has the lease until `close`."""

    def __init__(self, folder: Path, bucket: Path) -> None:
        """Take the lease, and make the folder what the bucket has.

        Raises:
            RunFileError: the bucket cannot be used, or another process trains this run.
        """
        self.folder, self.bucket = folder, bucket
        self._copied: dict[str, tuple[int, int]] = {}  # name -> size and time of what the bucket has
        self._owner = f"process {os.getpid()} on host {socket.gethostname()}"
        self._lost: str | None = None
        self._pushing = threading.Lock()
        with self._told():
            self._take_lease()
            self._fetch()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """Copy to the bucket what has changed. Raises RunFileError where that fails, or the lease is another's."""
        if self._lost:
            raise RunFileError(f"{self.bucket} is now written by {self._lost}: this process was silent for too long")
        with self._pushing, self._told():
            for path in sorted(self.folder.rglob("*")):
                name = path.relative_to(self.folder).as_posix()
                if not path.is_file() or name.partition("/")[0] in NOT_COPIED or path.suffix == ".tmp":
                    continue
                state = path.stat().st_size, path.stat().st_mtime_ns
                if self._copied.get(name) != state:
                    (self.bucket / name).write_bytes(path.read_bytes())
                    self._copied[name] = state

    def close(self) -> None:
        """Copy what is left and give the lease up; a second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        try:
            self.push()
        finally:
            if not self._lost:
                with contextlib.suppress(Exception):  # it ends by itself
                    (self.bucket / LEASE).unlink()

    def _fetch(self) -> None:
        """The bucket's records replace those of an earlier run of this machine."""
        theirs = copy_records(self.bucket, self.folder)
        for path in self.folder.iterdir():
            if path.is_file() and path.name not in theirs.union(NOT_COPIED):
                path.unlink()

    def _take_lease(self) -> None:
        found, since = self._lease(), time.monotonic()
        while found is not None and not self._ended(found):
            time.sleep(POLL_S)
            if (again := self._lease()) != found:
                if again is not None:
                    raise RunFileError(
                        f"{self.bucket} is in use by {again['owner']}; wait for it, stop it, or set another name"
                    )
                break
            if time.monotonic() - since > LEASE_S:
                break
        self._write_lease()
        time.sleep(POLL_S)  # of two that found it free, the last to write has it
        if (now := self._lease()) is None or now["owner"] != self._owner:
            raise RunFileError(f"{self.bucket} is in use by {now and now['owner']}; set another name")

    def _ended(self, lease: dict[str, Any]) -> bool:
        """Whether its owner is known to be gone: a process of this host, or one that has been silent for an hour."""
        process, host = lease["owner"].split(" on host ")
        here = host == socket.gethostname()
        gone = here and not Path("/proc", process.removeprefix("process ")).exists()
        return gone or time.time() - lease["time"] > 60 * LEASE_S

    def _lease(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.bucket / LEASE).read_text())
        except FileNotFoundError:
            return None

    def _write_lease(self) -> None:
        (self.bucket / LEASE).write_text(json.dumps({"owner": self._owner, "time": time.time()}))

    def _renew(self) -> None:
        while not self._closed.wait(RENEW_S):
            with contextlib.suppress(Exception):  # the network: the next push tells, if it lasts
                found = self._lease()
                if found is not None and found["owner"] != self._owner:
                    self._lost = found["owner"]
                    return
                self._write_lease()
                self.push()

    @contextlib.contextmanager
    def _told(self) -> Any:
        """What the packages that reach the bucket raise is of many types; it is told as what it is."""
        extra = "s3" if str(self.bucket).startswith("s3://") else "gcs"
        try:
            yield
        except RunFileError:
            raise
        except ImportError as error:
            raise RunFileError(f"{self.bucket}: {error}; pip install 'podium-rl[{extra}]', or set runs_dir") from error
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            login = "aws configure, or AWS_ACCESS_KEY_ID" if extra == "s3" else "gcloud auth application-default login"
            raise RunFileError(
                f"{self.bucket} cannot be used ({type(error).__name__}: {reason}); check the bucket's name and your"
                f" access to it ({login}), or set runs_dir"
            ) from error


def copy_records(bucket: Path, folder: Path) -> set[str]:
    """Copy the records of a run in a bucket to a folder of this machine; the names of all that the bucket has of it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {item.name for item in bucket.iterdir()} if bucket.exists() else set()
    for name in names.difference(NOT_COPIED):
        if (bucket / name).is_file():
            (folder / name).write_bytes((bucket / name).read_bytes())
    return names


def records_folder(home: Path) -> Path:
    """Where this machine keeps the records of a run in a bucket."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "podium" / "runs" / str(home).removeprefix("gs://").replace("s3://", "s3/")
