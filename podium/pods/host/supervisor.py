"""Runs one job on this host: keeps its output, passes a stop on to it, records its end, leaves no process behind.

The supervisor leads a session that no terminal and no ssh connection belongs to; the job's command runs below it. A
process of the job that loses its parent becomes the supervisor's child; should the supervisor itself be killed, the
job's processes are found by `PODRUN_JOB_DIR` in their environment. Linux; standard library only.
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
from typing import Any, BinaryIO

from podium.files import BUCKETS, write_atomically
from podium.job.records import PROGRESS, read_json, write_record
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
KEPT_PIECES = 8  # of output, for the message of a job that fails
FULL_BYTES = 1 << 20  # a disk with less room than this is full
COPY_S = 30.0
"""Seconds between copies of the log into the run's folder."""
BUCKET_S = 60.0
"""For the last copy into a bucket."""
POLL_S = 5.0


def supervise(host: Host, job: str) -> int:
    """Run the job's command to its end; the whole life of a process of its own."""
    folder = host.folder(job)
    spec = JobSpec(**(read_json(folder / "job.json") or {}))
    with _hold(host.home / "host.lock", job) as lock:
        adopt_orphans()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold secrets, and fill the disk
        secrets = read_env_file(Path(spec.env_file) if spec.env_file else None)
        redactor = Redactor.from_environment({**os.environ, **spec.env}, secrets.values())
        with (folder / "log").open("ab", buffering=0) as log:
            write_atomically(folder / "pid.new", f"{os.getpid()}\n")  # the command may fill the disk at once
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
    copies.update(last=True)  # another job may have the host meanwhile
    return 0


def _job_variables(spec: JobSpec, folder: Path) -> dict[str, str]:
    """The environment variables that describe the job to its processes."""
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
def _hold(path: Path, job: str) -> Iterator[Any]:
    """The host's lock with the job's name in it, for the block and for as long as the command lives."""
    with path.open("a+", encoding="utf-8") as lock:
        if not wait_until(lambda: try_lock(lock, fcntl.LOCK_EX), LOCK_S):  # somebody may check whether it is free
            raise StartError(f"{path} is locked; another job has the host")
        lock.truncate(0)
        lock.write(job)
        lock.flush()
        yield lock


def _forward_stop(process: "subprocess.Popen[bytes]", folder: Path) -> list[int]:
    """Pass SIGTERM on to the command, and kill all when it gives no sign of life; the list says whether that began."""
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


def _pump(source: Any, log: BinaryIO, redactor: Redactor, tail: "deque[str]") -> None:
    """Copy the job's output to its log as it comes, without the values of secrets and what could drive a terminal.

    `tail` gets the last of it, also where the disk is full and takes no more.
    """
    for text in filtered(_decoded(source), redactor):
        tail.append(text)
        with contextlib.suppress(OSError):  # a full disk must not end the job
            log.write(text.encode("utf-8"))


def _decoded(source: Any) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    while data := source.read1(CHUNK):
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


class LogCopies:
    """Copies what a job's log has grown by into the run's folder or bucket, which outlives this machine."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self._folder, self._spec, self._name = folder, spec, f"{spec.job}-worker{spec.worker}"
        self._copied = self._tried = 0  # bytes, and how many there will be when what copies them has ended
        self._copying: subprocess.Popen[bytes] | None = None

    def update(self, *, last: bool = False) -> None:
        """Copy what is new, once the job has said where its run is; a folder that cannot be written is left alone."""
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
        """Have another process do it, by the job's Python; whoever is `last` waits for it."""
        if self._copying is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._copying.wait(BUCKET_S if last else 0.0)
            if self._copying.poll() is None:
                return
            self._copied = self._tried if self._copying.returncode == 0 else self._copied
            self._copying = None
        if (size := (self._folder / "log").stat().st_size) > self._copied:
            self._tried = size
            python, quiet = self._spec.command[0], subprocess.DEVNULL
            self._copying = subprocess.Popen(
                [python, "-m", "podium.pods.host.copy_log", self._folder / "log", target, str(self._copied)],
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
    """Record why the job ended, unless it has done so itself."""
    if status == 0:
        kind, message = "done", "done"
    elif status > 128:
        name = signal.Signals(status - 128).name if status - 128 in set(signal.Signals) else "unknown"
        why = ": it did not end when asked to stop" if after_stop else ": kill -9, or the host was out of memory"
        kind, message = "signal", f"signal {status - 128} ({name})" + (why if status == 137 else "")
    else:
        kind, message = "exit", f"exit status {status}; the log ends with: {last_line(said)}"
    if status and shutil.disk_usage(folder).free < FULL_BYTES:
        message += f"; the disk of {folder} is full: delete something there (podium pod ssh), then start again"
    write_record(folder, kind, message, status, worker=spec.worker, progress=read_json(folder / PROGRESS) or {})
