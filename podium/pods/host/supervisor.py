"""Runs one job on this host: keeps its output, passes a stop on to it, records its end, leaves no process behind.

The supervisor leads a session that no terminal and no ssh connection belongs to; the job's command runs below it. A
process of the job that loses its parent becomes the supervisor's child; should the supervisor itself be killed, the
job's processes are found by `PODRUN_JOB_DIR` in their environment. Linux; standard library only.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from podium.files import write_atomically
from podium.job.records import PROGRESS, read_json, write_record
from podium.pods.host.jobs import GRACE_S, JOB_DIR, LOCK_S, Host, JobSpec, StartError, last_line, try_lock
from podium.pods.host.processes import adopt_orphans, descendants, kill, wait_until
from podium.pods.secrets import Secrets, read_env_file


def supervise(host: Host, job: str) -> int:
    """Run the job's command to its end; the whole life of a process of its own."""
    folder = host.folder(job)
    spec = JobSpec(**(read_json(folder / "job.json") or {}))
    with _hold(host.home / "host.lock", job) as lock:
        adopt_orphans()
        secrets = Secrets(read_env_file(Path(spec.env_file) if spec.env_file else None))
        with (folder / "log").open("ab", buffering=0) as log:
            process = subprocess.Popen(
                spec.command,
                cwd=spec.cwd,
                env={**os.environ, **spec.env, **_job_variables(spec, folder), **secrets.values},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=[lock.fileno()],
            )
            stopping = _forward_stop(process)
            write_atomically(folder / "pid", f"{os.getpid()}\n")
            pump = threading.Thread(target=_pump, args=(process.stdout, log, secrets), daemon=True)
            pump.start()
            status = process.wait()
            while left := descendants(os.getpid()):
                kill(left)
            pump.join(LOCK_S)
        status = 128 - status if status < 0 else status
        _record_end(folder, spec, status, after_stop=bool(stopping))
        write_atomically(folder / "exit", f"{status}\n")
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


def _forward_stop(process: "subprocess.Popen[bytes]") -> list[int]:
    """Pass SIGTERM on to the command and kill everything after the grace; the list is filled once that has begun."""
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        if not asked:
            asked.append(number)
            process.send_signal(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def end(number: int, frame: object) -> None:
        kill(descendants(os.getpid()), patience_s=0.0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, end)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    return asked


def _pump(source: Any, log: BinaryIO, secrets: Secrets) -> None:
    """Copy the job's output to its log line by line, without the values of secrets."""
    for line in source:
        text = secrets.redact(line.decode("utf-8", "surrogateescape"))
        with contextlib.suppress(OSError):  # a full disk must not end the job
            log.write(text.encode("utf-8", "surrogateescape"))


def _record_end(folder: Path, spec: JobSpec, status: int, *, after_stop: bool) -> None:
    """Record why the job ended, unless it has done so itself."""
    if status == 0:
        kind, message = "done", "done"
    elif status > 128:
        name = signal.Signals(status - 128).name if status - 128 in set(signal.Signals) else "unknown"
        why = ": it did not end when asked to stop" if after_stop else ": kill -9, or the host was out of memory"
        kind, message = "signal", f"signal {status - 128} ({name})" + (why if status == 137 else "")
    else:
        kind, message = "exit", f"exit status {status}; the log ends with: {last_line(folder / 'log')}"
    write_record(folder, kind, message, status, worker=spec.worker, progress=read_json(folder / PROGRESS) or {})
