"""Runs one job on this host: stores its output, forwards stop signals, records its end, and leaves no processes
running.

The supervisor leads a session without a terminal or an ssh connection, in which the job's command runs. A process of
the job that loses its parent becomes the supervisor's child; if the supervisor itself is killed, the job's processes
are found by `PODRUN_JOB_DIR` in their environment. Linux; standard library only.
"""

import codecs
import contextlib
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from podium.files import BUCKETS, room, write_atomically
from podium.job.job_records import PROGRESS, Progress, read_json, write_record
from podium.job.redact import Redactor, filtered
from podium.pods.host.jobs import (
    ASKED,
    GRACE_S,
    JOB_DIR,
    LOCK_S,
    RESERVE,
    Host,
    JobSpec,
    StartError,
    last_line,
    stuck,
    try_lock,
)
from podium.pods.host.processes import adopt_orphans, descendants, kill, wait_until
from podium.pods.secrets import read_env_file

CHUNK = 1 << 16  # bytes of output that are read at once
KEPT_PIECES = 8  # pieces of output to keep for the message of a failed job
FULL_BYTES = 1 << 20  # a disk with less free space counts as full
COPY_S = 30.0
"""Seconds between copies of the log to the run's folder."""
BUCKET_S = 60.0
"""Seconds that the last copy into a bucket may take."""
POLL_S = 5.0


def supervise(host: Host, job: str) -> int:
    """Run the job's command to its end; returns the exit status of the supervisor's own process."""
    folder = host.folder(job)
    spec = JobSpec(**(read_json(folder / "job.json") or {}))
    with _hold(host.home / "host.lock", job) as lock:
        adopt_orphans()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold secrets, and fill the disk
        secrets = read_env_file(Path(spec.env_file) if spec.env_file else None)
        redactor = Redactor.from_environment({**os.environ, **spec.env}, secrets.values())
        with (folder / "log").open("ab", buffering=0) as log:
            write_atomically(folder / "pid.new", f"{os.getpid()}\n")  # first, as the command may fill the disk
            process = subprocess.Popen(
                spec.command,
                cwd=spec.cwd,
                env={**os.environ, **spec.env, **_job_variables(spec, folder), **secrets},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=[lock.fileno()],
            )
            stopping = _forward_stop(process, folder)
            (folder / "pid.new").rename(folder / "pid")
            tail: deque[str] = deque(maxlen=KEPT_PIECES)
            pump = threading.Thread(target=_pump, args=(process.stdout, log, redactor, tail), daemon=True)
            pump.start()
            copies = LogCopies(folder, spec)
            while (status := process.poll()) is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(COPY_S)
                copies.update()
            while left := descendants(os.getpid()):
                kill(left)
            pump.join(LOCK_S)
        status = 128 - status if status < 0 else status
        (folder / RESERVE).unlink(missing_ok=True)
        _record_end(folder, spec, status, "".join(tail), after_stop=bool(stopping))
        write_atomically(folder / "exit", f"{status}\n")
    copies.update(last=True)  # outside the lock, so that another job may use the host meanwhile
    return 0


def _job_variables(spec: JobSpec, folder: Path) -> dict[str, str]:
    """Environment variables that describe the job to its processes."""
    variables = {
        "PODRUN_JOB": spec.job,
        JOB_DIR: folder,
        "PODRUN_WORKER": spec.worker,
        "PODRUN_WORKERS": spec.workers,
        "PODRUN_COORDINATOR": spec.coordinator,
        "JAX_COORDINATOR_PORT": spec.coordinator and spec.coordinator.rpartition(":")[2],
        "PODRUN_ACCELERATOR": spec.accelerator,
        "PYTHONUNBUFFERED": 1,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


@contextlib.contextmanager
def _hold(path: Path, job: str) -> Iterator[IO[str]]:
    """Hold the host's lock, which contains the job's name, inside the block and as long as the command runs."""
    with path.open("a+", encoding="utf-8") as lock:
        if not wait_until(lambda: try_lock(lock, fcntl.LOCK_EX), LOCK_S):  # `Host.holder` briefly takes the lock
            raise StartError(f"{path} is locked; another job has the host")
        lock.truncate(0)
        lock.write(job)
        lock.flush()
        yield lock


def _forward_stop(process: "subprocess.Popen[bytes]", folder: Path) -> list[int]:
    """Forward SIGTERM to the job, and kill all processes if they then give no sign of life. The returned list is empty
    until a SIGTERM arrives.
    """
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        if not asked:
            asked.append(number)
            with contextlib.suppress(OSError):
                (folder / ASKED).touch()
            process.send_signal(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, GRACE_S, POLL_S)

    def end(number: int, frame: object) -> None:
        if stuck(folder, GRACE_S):
            kill(descendants(os.getpid()), patience_s=0.0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, end)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    return asked


def _pump(source: IO[bytes], log: BinaryIO, redactor: Redactor, tail: "deque[str]") -> None:
    """Copy the job's output to its log as it comes, without secrets and terminal sequences.

    `tail` receives the end of the output, even if the disk is full.
    """
    for text in filtered(_decoded(source), redactor):
        tail.append(text)
        with contextlib.suppress(OSError):  # a full disk does not end the job
            log.write(text.encode("utf-8"))


def _decoded(source: IO[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    while data := os.read(source.fileno(), CHUNK):
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


class LogCopies:
    """Copies the new part of a job's log to the run's folder or bucket, which outlives this machine."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._name = f"{spec.job}-worker{spec.worker}"
        self._copied = 0  # bytes
        self._tried = 0  # bytes copied once the current copy has finished
        self._copying: subprocess.Popen[bytes] | None = None

    def update(self, *, last: bool = False) -> None:
        """Copy the new part of the log, once the job has recorded its run's folder; errors are ignored."""
        run = (read_json(self._folder / PROGRESS) or {}).get("run_dir")
        with contextlib.suppress(OSError):
            if run and run.startswith(BUCKETS):
                self._into_bucket(f"{run}/logs/{self._name}", last=last)
            elif run and Path(run).is_dir():
                (Path(run) / "logs").mkdir(exist_ok=True)
                with (
                    (self._folder / "log").open("rb") as log,
                    (Path(run) / "logs" / f"{self._name}.log").open("ab") as copy,
                ):
                    log.seek(self._copied)
                    shutil.copyfileobj(log, copy)
                    self._copied = log.tell()

    def _into_bucket(self, target: str, *, last: bool) -> None:
        """Copy in a separate process, with the job's Python; `last`: wait for the copy."""
        if self._copying is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._copying.wait(BUCKET_S if last else 0.0)
            if self._copying.poll() is None:
                return
            self._copied = self._tried if self._copying.returncode == 0 else self._copied
            self._copying = None
        if (size := (self._folder / "log").stat().st_size) > self._copied:
            self._tried = size
            quiet = subprocess.DEVNULL
            self._copying = subprocess.Popen(
                [
                    self._spec.command[0],
                    "-m",
                    "podium.pods.host.copy_log",
                    self._folder / "log",
                    target,
                    str(self._copied),
                ],
                cwd=self._spec.cwd,
                env={**os.environ, **self._spec.env},
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
            )
            if last:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._copying.wait(BUCKET_S)


def _record_end(folder: Path, spec: JobSpec, status: int, said: str, *, after_stop: bool) -> None:
    """Record why the job ended, unless the job recorded it itself."""
    if status == 0:
        kind, message = "done", "done"
    elif status > 128:
        name = signal.Signals(status - 128).name if status - 128 in set(signal.Signals) else "unknown"
        why = ": it did not end when asked to stop" if after_stop else ": kill -9, or the host was out of memory"
        kind, message = "signal", f"signal {status - 128} ({name})" + (why if status == 137 else "")
    else:
        kind, message = "exit", f"exit status {status}; the log ends with: {last_line(said)}"
    free, files = room(folder)
    if status and (free < FULL_BYTES or files == 0):
        what = "has no free file (inode)" if files == 0 else "is full"
        message += f"; the disk of {folder} {what}: delete something there (podium pod ssh), then start again"
    progress = cast("Progress", read_json(folder / PROGRESS) or {})
    write_record(folder, kind, message, status, worker=spec.worker, progress=progress)
