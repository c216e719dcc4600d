"""Stores a run in a bucket: `runs_dir: gs://BUCKET/FOLDER`, or s3://.

An object can only be replaced as a whole, but a run's records grow line by line. So they are written to a local folder
and copied to the bucket, regularly and always before a checkpoint is complete: a process that resumes the run from the
bucket finds records at least up to that checkpoint. Checkpoints are written to the bucket by orbax directly.

    ~/.cache/podium/runs/BUCKET/FOLDER/NAME the run's records
    gs://BUCKET/FOLDER/NAME/                    the same files, and checkpoints/
    gs://BUCKET/FOLDER/NAME/run.lease           which process trains the run, and when it last renewed

If the bucket cannot be reached, requests wait (`podium.buckets`). Buckets have no locks. The training process renews
its lease; a process that finds another's lease waits, and takes it over after `LEASE_S` seconds without renewal. Needs
the extra `gcs` or `s3`.
"""

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from podium.files import RunFileError, cause_of, user_cache
from podium.patience import fault_of, way_out

LEASE = "run.lease"
LEASE_S, RENEW_S = 60.0, 15.0
POLL_S = 1.0
LEASE_READS = 5
NOT_COPIED = ("run.lock", LEASE, "checkpoints")


class Lease(TypedDict):
    """Contents of run.lease."""

    owner: str
    """`process PID on host NAME`."""
    time: float
    """Time of the last renewal, in seconds since 1970."""


class Mirror:
    """Mirrors the local records of a run to its bucket, and holds the run's lease until `close`."""

    def __init__(self, folder: Path, bucket: Path) -> None:
        """Take the lease, and replace the local folder's content with the bucket's.

        Raises:
            RunFileError: the bucket is unusable, or another process trains this run.
        """
        self.folder, self.bucket = folder, bucket
        self._copied: dict[str, tuple[int, int]] = {}  # name -> (size, mtime in ns) when last copied
        self._owner = f"process {os.getpid()} on host {socket.gethostname()}"
        self._lost: str | None = None
        self._pushing = threading.Lock()
        with self._as_run_file_errors():
            self._take_lease()
            self._fetch()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """Copy changed records to the bucket. Raises RunFileError if that fails or another process holds the lease."""
        if self._lost:
            raise RunFileError(
                f"another process has taken over {self.bucket} ({self._lost}): this process did not renew its lease "
                "in time"
            )
        with self._pushing, self._as_run_file_errors():
            for path in sorted(self.folder.rglob("*")):
                name = path.relative_to(self.folder).as_posix()
                if not path.is_file() or name.partition("/")[0] in NOT_COPIED or path.suffix == ".tmp":
                    continue
                state = path.stat().st_size, path.stat().st_mtime_ns
                if self._copied.get(name) != state:
                    (self.bucket / name).write_bytes(path.read_bytes())
                    self._copied[name] = state

    def close(self) -> None:
        """Copy the remaining changes and release the lease; a second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(LEASE_S)  # a request to the bucket may hang; the lease then expires
        try:
            self.push()
        finally:
            if not self._lost:
                with contextlib.suppress(Exception):  # the lease then expires
                    (self.bucket / LEASE).unlink()

    def _fetch(self) -> None:
        """Replace local records, which may be an earlier run's, with those in the bucket."""
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
        time.sleep(POLL_S)  # if two processes found the lease free, the last to write holds it
        if (now := self._lease()) is None or now["owner"] != self._owner:
            raise RunFileError(f"{self.bucket} is in use by {now and now['owner']}; set another name")

    def _ended(self, lease: Lease) -> bool:
        """Whether the owner has certainly ended: its process on this host no longer exists, or it did not renew the
        lease for an hour.
        """
        process, host = lease["owner"].split(" on host ")
        here = host == socket.gethostname()
        gone = here and not Path("/proc", process.removeprefix("process ")).exists()
        return gone or time.time() - lease["time"] > 60 * LEASE_S

    def _lease(self) -> Lease | None:
        """Read the lease in the bucket; None if absent. Retries if its owner replaces it meanwhile, which S3 reports as
        EBUSY.
        """
        for _ in range(LEASE_READS):
            try:
                return json.loads((self.bucket / LEASE).read_text())
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
        raise OSError(errno.EBUSY, f"{LEASE} was replaced during each of {LEASE_READS} reads")

    def _write_lease(self) -> None:
        (self.bucket / LEASE).write_text(json.dumps({"owner": self._owner, "time": time.time()}))

    def _renew(self) -> None:
        while not self._closed.wait(RENEW_S):
            with contextlib.suppress(Exception):  # a network fault; if it lasts, the next push raises
                found = self._lease()
                if found is not None and found["owner"] != self._owner:
                    self._lost = found["owner"]
                    return
                self._write_lease()
                self.push()

    @contextlib.contextmanager
    def _as_run_file_errors(self) -> Iterator[None]:
        """Translate the many exception types of bucket libraries into RunFileError."""
        extra = "s3" if str(self.bucket).startswith("s3://") else "gcs"
        try:
            yield
        except RunFileError:
            raise
        except ImportError as error:
            raise RunFileError(f"{self.bucket}: {error}; pip install 'podium-rl[{extra}]', or set runs_dir") from error
        except Exception as error:
            reason = cause_of(error)
            fault = fault_of(error)
            advice = way_out("denied" if fault == "other" else fault, str(self.bucket)[:2])
            raise RunFileError(
                f"{self.bucket} cannot be used ({type(error).__name__}: {reason}); {advice}, or set runs_dir"
            ) from error


def copy_records(bucket: Path, folder: Path) -> set[str]:
    """Copy a run's records from its bucket to a local folder; returns the names of everything in the bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {item.name for item in bucket.iterdir()} if bucket.exists() else set()
    for name in names.difference(NOT_COPIED):
        if (bucket / name).is_file():
            (folder / name).write_bytes((bucket / name).read_bytes())
    return names


def records_folder(home: Path) -> Path:
    """The local folder for the records of a run in a bucket."""
    return user_cache("runs") / str(home).removeprefix("gs://").replace("s3://", "s3/")
