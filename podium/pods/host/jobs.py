"""A host's jobs: one at a time, started only once even if the command is repeated, stopped with all processes.

    HOME/host.lock           locked while a job's supervisor or its main process lives
    HOME/jobs/JOB/           job.json, pid, log, progress.json, record.json, exit
    HOME/latest -> jobs/JOB  and latest.log, latest.pid, latest.exit

`podium.pods.host.supervisor` runs a job; this module starts it, reports its state and stops it. Linux; standard library
only.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Literal

from podium.files import RunFileError, cause_of, disk_advice, write_atomically
from podium.job.job_records import NO_JOB, PROGRESS, RECORD, JsonObject, one_line, read_json
from podium.pods.host.processes import kill, marked, wait_until

State = Literal["none", "starting", "running", "finished", "killed"]
JOB_DIR = "PODRUN_JOB_DIR"
RESERVE = "reserve"
"""A file that is deleted when the job ends, to leave room for recording the end if the job filled the disk."""
RESERVE_BYTES = 1 << 16
START_S = 20.0
GRACE_S = 60.0
"""Seconds without a sign of life after which a stopping job is killed; saving gives signs of life."""
LONGEST_STOP_S = 3600.0
LOCK_S = 5.0
ASKED = "asked-to-stop"
SYSTEMD = Path("/run/systemd/system")
"""Exists if systemd runs the host."""
KEPT_VARIABLES = ("HOME", "PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH", "USER")
"""Environment variables that a systemd unit inherits."""
ROOT = Path(__file__).absolute().parents[3]
"""Folder from which `-m` finds this package, installed or not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job to run. Written to job.json, so it must not contain secrets."""

    job: str
    command: tuple[str, ...]
    worker: int
    workers: int
    coordinator: str | None
    accelerator: str | None
    cwd: str
    env: dict[str, str]
    env_file: str | None
    """File of secrets; may be deleted as soon as the job has started."""
    created: float = dataclasses.field(default_factory=time.time)


class BusyError(Exception):
    """Another job is running on the host."""

    def __init__(self, job: str) -> None:
        super().__init__(f"job {job} is running on this host; stop it first")
        self.job = job


class StartError(Exception):
    """A job did not start."""


class Host:
    """The jobs of this host, in one folder."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()

    def folder(self, job: str) -> Path:
        """The folder of a job's files."""
        return self.home / "jobs" / job

    def latest(self) -> str | None:
        """The job that was started last."""
        link = self.home / "latest"
        return Path(os.readlink(link)).name if link.is_symlink() else None

    def holder(self) -> str | None:
        """The job that currently holds the host's lock; None if the lock is free."""
        with contextlib.suppress(FileNotFoundError), (self.home / "host.lock").open(encoding="utf-8") as lock:
            return None if try_lock(lock, fcntl.LOCK_SH) else lock.read().strip()
        return None

    def state(self, job: str | None) -> State:
        """The state of a job; `killed` means that no process is left and no end was recorded."""
        if job is None or not (self.folder(job) / "job.json").exists():
            return "none"
        running = self.holder() == job  # before the job's files: the exit status is written before the lock is released
        if (self.folder(job) / "exit").exists():
            return "finished"
        if running:
            return "running"
        young = time.time() - (self.folder(job) / "job.json").stat().st_mtime < START_S
        return "starting" if young and not (self.folder(job) / "pid").exists() else "killed"

    def status(self, job: str | None) -> JsonObject:
        """Everything known about a job: a `records.Status`, with the time and the folder of this host."""
        state = self.state(job)
        found: JsonObject = {**NO_JOB, "host": socket.gethostname(), "time": time.time(), "home": str(self.home)}
        if job is None or state == "none":
            return found
        folder = self.folder(job)
        spec = read_json(folder / "job.json") or {}
        found |= {name: spec.get(name) for name in ("worker", "workers", "created")}
        found |= {"job": job, "state": state, "record": read_json(folder / RECORD)}
        found["progress"] = read_json(folder / PROGRESS)
        with contextlib.suppress(FileNotFoundError):
            found["pid"] = int((folder / "pid").read_text())
            found["log_bytes"] = (folder / "log").stat().st_size
        if state == "finished":
            found |= {"exit": int((folder / "exit").read_text()), "ended": (folder / "exit").stat().st_mtime}
        return found

    def start(self, spec: JobSpec) -> Literal["started", "running", "finished", "killed"]:
        """Start a job, or return its state if the job was started before.

        Raises:
            BusyError: another job is running on the host.
            StartError: the supervisor did not start, or the command cannot be run.
        """
        try:
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self.home / "start.lock").open("a")
        except OSError as error:
            raise self._unwritten(spec.job, error) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self.state(spec.job)
            if state != "none":
                return "running" if state in ("running", "starting") else state
            # A job that has written its exit still holds the lock for a moment.
            wait_until(lambda: (holder := self.holder()) is None or self.state(holder) != "finished", LOCK_S)
            if (holder := self.holder()) is not None:
                raise BusyError(holder)
            # Processes of jobs may remain whose supervisor and main process were both killed.
            kill([each for folder in (self.home / "jobs").glob("*") for each in self.processes(folder.name)])
            folder = self.folder(spec.job)
            try:
                folder.mkdir(parents=True, mode=0o700, exist_ok=True)  # may be left by a failed start
                write_atomically(folder / RESERVE, bytes(RESERVE_BYTES))
                write_atomically(folder / "job.json", json.dumps(dataclasses.asdict(spec)))
                self._link(spec.job)
            except (OSError, RunFileError) as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise self._unwritten(spec.job, error) from error
            self._launch(spec)
            return "started"

    def stop(self, job: str, grace_s: float, wait_s: float = LONGEST_STOP_S) -> list[int]:
        """Ask a job to save and end, and wait until it has; returns the processes that are still saving.

        Processes that give no sign of life for `grace_s` seconds get SIGKILL.
        """
        folder = self.folder(job)
        supervisor = self.status(job)["pid"]
        processes = self.processes(job)
        if processes and not (folder / ASKED).exists():
            (folder / ASKED).touch()
        for process in [supervisor] if supervisor in processes else processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        wait_until(lambda: not self.processes(job) or stuck(folder, grace_s), wait_s)
        if not stuck(folder, grace_s):
            return self.processes(job)
        kill([process for process in self.processes(job) if process != supervisor])
        wait_until(lambda: not self.processes(job), LOCK_S)  # the supervisor records the job's end first
        return kill(self.processes(job))

    def processes(self, job: str) -> list[int]:
        """The living processes of a job, including its supervisor."""
        return marked(JOB_DIR, str(self.folder(job)))

    def _unwritten(self, job: str, error: Exception) -> StartError:
        """The error for a job whose files cannot be written."""
        advice = disk_advice(error, self.home, RESERVE_BYTES, elsewhere="such as old jobs and code")
        return StartError(f"job {job} cannot be written: {cause_of(error.__cause__ or error)}; {advice}")

    def _link(self, job: str) -> None:
        links = {"latest": f"jobs/{job}"} | {f"latest.{name}": f"jobs/{job}/{name}" for name in ("log", "pid", "exit")}
        for name, target in links.items():
            unnamed = self.home / f".{name}.tmp"
            unnamed.unlink(missing_ok=True)
            unnamed.symlink_to(target)
            os.replace(unnamed, self.home / name)

    def _launch(self, spec: JobSpec) -> None:
        """Start the supervisor, and wait until it has started the job's process."""
        folder = self.folder(spec.job)
        command = [sys.executable, "-m", "podium.pods.host.agent", "--home", str(self.home), "supervise", spec.job]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*unit_command(spec.job), *command],
                cwd=ROOT,
                env={**os.environ, JOB_DIR: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started = folder / "pid"
        wait_until(lambda: started.exists() or process.poll() not in (None, 0), START_S)
        if not started.exists():
            process.kill()
            write_atomically(folder / "exit", "1\n")
            raise StartError(f"job {spec.job} did not start: {one_line(last_line(_end(folder / 'log')))}")


def stuck(folder: Path, grace_s: float) -> bool:
    """Whether a job that was asked to stop has since given no sign of life for `grace_s` seconds."""
    with contextlib.suppress(OSError):
        asked = (folder / ASKED).stat().st_mtime
        heard = max(asked, (read_json(folder / PROGRESS) or {}).get("beat") or 0.0)
        return time.time() > min(heard + grace_s, asked + LONGEST_STOP_S)
    return False


def try_lock(file: IO[str], kind: int) -> bool:
    """Take a lock, fcntl.LOCK_EX or LOCK_SH, if the file is not locked; returns whether it was taken."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unit_command(job: str) -> list[str]:
    """The prefix that runs a command in a transient systemd unit; empty if this user cannot have one."""
    if os.geteuid() != 0 or not SYSTEMD.is_dir() or shutil.which("systemd-run") is None:
        return []
    options = ("KillMode=mixed", f"TimeoutStopSec={int(LONGEST_STOP_S)}", f"WorkingDirectory={ROOT}")
    return [
        *("systemd-run", f"--unit=podrun-{job}", "--collect", "--quiet"),
        *(f"--property={option}" for option in options),
        f"--setenv={JOB_DIR}",
        *(f"--setenv={name}" for name in KEPT_VARIABLES if name in os.environ),
        "--",
    ]


def last_line(text: str) -> str:
    """The last line of a text that is not blank."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "(nothing)")


def _end(path: Path, size: int = 2000) -> str:
    """The last bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
