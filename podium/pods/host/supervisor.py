"""One job per host: started once whatever the transport repeats, watched, its output kept, ended with all it started.

    HOME/host.lock           locked by the kernel for as long as a job's supervisor or its main process lives
    HOME/jobs/JOB/           job.json, pid, log, progress.json, record.json, exit
    HOME/latest -> jobs/JOB  and latest.log, latest.pid, latest.exit

A job is its supervisor, the leader of a session that no terminal and no ssh connection belongs to, and below it the
command. A process that leaves its parents is the supervisor's child, so that nothing of a job is lost from sight;
should the supervisor itself be killed, what is left is known by the job's folder in its environment. Where the host has
systemd, the supervisor runs in a transient unit of its own. Linux; standard library only.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from podium.job.records import PROGRESS, RECORD, Record, one_line, read_json, write_json, write_record
from podium.pods.host.processes import POLL_S, adopt_orphans, descendants, kill, marked

State = Literal["none", "starting", "running", "finished", "killed"]
JOB_DIR = "PODRUN_JOB_DIR"
START_S = 20.0
GRACE_S = 60.0
LOCK_S = 5.0
SYSTEMD = Path("/run/systemd/system")
"""Is there where systemd runs the host."""
KEPT_VARIABLES = ("HOME", "PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH", "USER")
"""What a unit of systemd gets of the environment that starts it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What to run; written to job.json, so that no secret may be in it."""

    job: str
    command: tuple[str, ...]
    worker: int
    workers: int
    coordinator: str | None
    accelerator: str | None
    cwd: str
    env: dict[str, str]
    env_file: str | None
    """File with the secrets, read once; may be deleted as soon as the job has started."""
    grace_s: float = GRACE_S
    """Between SIGTERM and SIGKILL."""
    host: str = dataclasses.field(default_factory=socket.gethostname)
    created: float = dataclasses.field(default_factory=time.time)


class BusyError(Exception):
    """Another job has the host."""

    def __init__(self, job: str) -> None:
        super().__init__(f"job {job} runs on this host; stop it first")
        self.job = job


class StartError(Exception):
    """A job did not start."""


class Host:
    """The jobs of this host, below one folder."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()

    def folder(self, job: str) -> Path:
        """Folder of a job."""
        return self.home / "jobs" / job

    def latest(self) -> str | None:
        """The job that was started last."""
        link = self.home / "latest"
        return Path(os.readlink(link)).name if link.is_symlink() else None

    def holder(self) -> str | None:
        """The job that has the host now."""
        with contextlib.suppress(FileNotFoundError), (self.home / "host.lock").open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip()
        return None

    def state(self, job: str | None) -> State:
        """What has become of a job. `killed`: nothing of it is left and it could not say how it ended."""
        if job is None or not (self.folder(job) / "job.json").exists():
            return "none"
        running = self.holder() == job
        if (self.folder(job) / "exit").exists():
            return "finished"
        if running:
            return "running"
        young = time.time() - (self.folder(job) / "job.json").stat().st_mtime < START_S
        return "starting" if young and not (self.folder(job) / "pid").exists() else "killed"

    def status(self, job: str | None) -> dict[str, Any]:
        """All that is known of a job, for scripts."""
        state = self.state(job)
        found: dict[str, Any] = {"host": socket.gethostname(), "time": time.time(), "home": str(self.home)}
        found |= dict.fromkeys(("worker", "workers", "exit", "pid", "created", "ended", "record", "progress"))
        found |= {"job": job if state != "none" else None, "state": state, "log_bytes": 0}
        if job is None or state == "none":
            return found
        folder = self.folder(job)
        spec = read_json(folder / "job.json") or {}
        found |= {name: spec.get(name) for name in ("worker", "workers", "created", "host")}
        found |= {"record": read_json(folder / RECORD), "progress": read_json(folder / PROGRESS)}
        with contextlib.suppress(FileNotFoundError):
            found["pid"] = int((folder / "pid").read_text())
            found["log_bytes"] = (folder / "log").stat().st_size
        if state == "finished":
            found |= {"exit": int((folder / "exit").read_text()), "ended": (folder / "exit").stat().st_mtime}
        return found

    def start(self, spec: Spec) -> Literal["started", "running", "finished", "killed"]:
        """Start a job, or say what has become of it if it was started before.

        Raises:
            BusyError: another job has the host.
            StartError: the supervisor did not come up, or the command cannot be run.
        """
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.home / "start.lock").open("a") as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            state = self.state(spec.job)
            if state != "none":
                return "running" if state in ("running", "starting") else state
            if (holder := self._holder_after_its_end()) is not None:
                raise BusyError(holder)
            kill(self._leftovers())
            folder = self.folder(spec.job)
            folder.mkdir(parents=True, mode=0o700)
            write_json(folder / "job.json", dataclasses.asdict(spec))
            self._link(spec.job)
            self._launch(spec)
            return "started"

    def stop(self, job: str, grace_s: float) -> list[int]:
        """End a job: SIGTERM, after `grace_s` SIGKILL to whatever is left of it; the processes that withstood."""
        supervisor, deadline = self.status(job)["pid"], time.monotonic() + grace_s
        supervised = supervisor in self.processes(job)
        for process in [supervisor] if supervised else self.processes(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        while self.processes(job) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        kill([process for process in self.processes(job) if process != supervisor])
        deadline = time.monotonic() + LOCK_S  # for the supervisor to write how it ended
        while self.processes(job) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return kill(self.processes(job))

    def processes(self, job: str) -> list[int]:
        """What lives of a job, its supervisor included."""
        return marked(JOB_DIR, str(self.folder(job)))

    def _holder_after_its_end(self) -> str | None:
        """The job that has the host; one that has written its exit is given the moment that it takes to go."""
        deadline = time.monotonic() + LOCK_S
        while (holder := self.holder()) is not None and time.monotonic() < deadline:
            if self.state(holder) != "finished":
                return holder
            time.sleep(POLL_S)
        return holder

    def _leftovers(self) -> list[int]:
        """Processes of jobs whose supervisor and main process were both killed."""
        return [process for folder in (self.home / "jobs").glob("*") for process in self.processes(folder.name)]

    def _link(self, job: str) -> None:
        links = {"latest": f"jobs/{job}"} | {f"latest.{name}": f"jobs/{job}/{name}" for name in ("log", "pid", "exit")}
        for name, target in links.items():
            unnamed = self.home / f".{name}.tmp"
            unnamed.unlink(missing_ok=True)
            unnamed.symlink_to(target)
            os.replace(unnamed, self.home / name)

    def _launch(self, spec: Spec) -> None:
        """Start the supervisor, and wait until it has the job's process."""
        folder = self.folder(spec.job)
        command = [sys.executable, "-m", "podium.pods.host.agent", "--home", str(self.home), "supervise", spec.job]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*unit_command(spec.job), *command],
                cwd=Path(__file__).parents[2],  # from where `-m` finds this package, installed or not
                env={**os.environ, JOB_DIR: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not (folder / "pid").exists():
            if process.poll() not in (None, 0) or time.monotonic() > deadline:
                process.kill()
                write_exit(folder, 1)
                raise StartError(f"job {spec.job} did not start: {one_line(_tail(folder / 'log'))}")
            time.sleep(POLL_S)


def supervise(home: Path, job: str) -> int:
    """The supervisor's whole life: run the job's command to its end. Called in a process of its own."""
    host = Host(home)
    folder = host.folder(job)
    spec = Spec(**(read_json(folder / "job.json") or {}))
    with _hold(host.home / "host.lock", job) as lock:
        adopt_orphans()
        secrets = read_env_file(Path(spec.env_file)) if spec.env_file else {}
        environment = {**os.environ, **spec.env, **job_variables(spec, folder), **secrets}
        with (folder / "log").open("ab", buffering=0) as log:
            process = subprocess.Popen(
                spec.command,
                cwd=spec.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=[lock.fileno()],
            )
            stopping = _forward_stop(process, spec.grace_s)
            _write(folder / "pid", f"{os.getpid()}\n")
            assert process.stdout is not None
            hidden = [value.encode() for value in secrets.values() if value]
            pump = threading.Thread(target=_pump, args=(process.stdout, log, hidden), daemon=True)
            pump.start()
            status = process.wait()
            while left := descendants(os.getpid()):
                kill(left)
            pump.join(LOCK_S)
        status = 128 - status if status < 0 else status
        _record_end(folder, spec, status, after_stop=bool(stopping))
        write_exit(folder, status)
    return 0


def job_variables(spec: Spec, folder: Path) -> dict[str, str]:
    """What the processes of a job are told."""
    told = {
        "PODRUN_JOB": spec.job,
        JOB_DIR: str(folder),
        "PODRUN_WORKER": str(spec.worker),
        "PODRUN_WORKERS": str(spec.workers),
        "PYTHONUNBUFFERED": "1",
    }
    if spec.coordinator is not None:
        told |= {
            "PODRUN_COORDINATOR": spec.coordinator,
            "JAX_COORDINATOR_PORT": spec.coordinator.rpartition(":")[2],
        }
    return told | ({"PODRUN_ACCELERATOR": spec.accelerator} if spec.accelerator else {})


def redact(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """`data` without the values of secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        data = data.replace(secret, b"[redacted]")
    return data


def read_env_file(path: Path) -> dict[str, str]:
    """The NAME=VALUE lines of a file. Raises StartError where others than we can read it, or a line is not one."""
    found = path.stat()
    if found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise StartError(f"{path} has mode {found.st_mode & 0o777:o} of user {found.st_uid}; it must be 600 and ours")
    settings: dict[str, str] = {}
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    for number, line in enumerate(lines, start=1):
        name, equals, value = line.partition("=")
        if not equals:
            raise StartError(f"{path}: setting {number} is not NAME=VALUE")
        settings[name] = value
    return settings


def write_exit(folder: Path, status: int) -> None:
    """Write the exit file, by renaming: it is there whole or not at all."""
    _write(folder / "exit", f"{status}\n")


def unit_command(job: str) -> list[str]:
    """What puts a command into a transient unit of systemd; nothing where there is none that we may use."""
    if os.geteuid() != 0 or not SYSTEMD.is_dir() or shutil.which("systemd-run") is None:
        return []
    root = Path(__file__).absolute().parents[2]
    options = ("KillMode=mixed", f"TimeoutStopSec={int(GRACE_S) + 30}", f"WorkingDirectory={root}")
    return [
        "systemd-run",
        f"--unit=podrun-{job}",
        "--collect",
        "--quiet",
        *(f"--property={option}" for option in options),
        f"--setenv={JOB_DIR}",
        *(f"--setenv={name}" for name in KEPT_VARIABLES if name in os.environ),
        "--",
    ]


@contextlib.contextmanager
def _hold(path: Path, job: str) -> Iterator[Any]:
    """The host's lock with the job's name in it, for the length of the block and as long as the command lives."""
    with path.open("a+", encoding="utf-8") as lock:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # somebody looks whether it is free
                if time.monotonic() > deadline:
                    raise StartError(f"{path} is locked; another job has the host") from None
                time.sleep(POLL_S)
        lock.truncate(0)
        lock.write(job)
        lock.flush()
        yield lock


def _forward_stop(process: "subprocess.Popen[bytes]", grace_s: float) -> list[int]:
    """Hands SIGTERM on to the command alone, and after the grace SIGKILL to all; the list fills when that begins."""
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        if not asked:
            asked.append(number)
            process.send_signal(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, grace_s))

    def end(number: int, frame: object) -> None:
        for each in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return asked


def _pump(source: Any, log: BinaryIO, secrets: Sequence[bytes]) -> None:
    """Line by line from the job to its log, without the values of secrets."""
    for line in source:
        with contextlib.suppress(OSError):  # a full disk must not end the job
            log.write(redact(line, secrets))


def _record_end(folder: Path, spec: Spec, status: int, *, after_stop: bool) -> None:
    """Write why the job ended, where it has not done so itself."""
    last = one_line(_tail(folder / "log"))
    if status == 0:
        kind, message = "done", "done"
    elif status > 128:
        name = signal.Signals(status - 128).name if status - 128 in set(signal.Signals) else "an unknown one"
        why = ": it did not end when it was told to stop" if after_stop else ": kill -9, or the host was out of memory"
        kind, message = "signal", f"signal {status - 128} ({name})" + (why if status == 137 else "")
    else:
        kind, message = "exit", f"exit status {status}; the log ends with: {last}"
    progress = read_json(folder / PROGRESS) or {}
    write_record(
        folder,
        Record(
            kind=kind,
            message=message,
            exit=status,
            worker=spec.worker,
            host=spec.host,
            pid=os.getpid(),
            time=time.time(),
            **{name: progress.get(name) for name in ("step", "phase", "position")},
        ),
    )


def _tail(path: Path, size: int = 2000) -> str:
    """The last line of a file that says something."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "(nothing)")


def _write(path: Path, text: str) -> None:
    unnamed = path.with_name(f".{path.name}.tmp")
    unnamed.write_text(text, encoding="utf-8")
    os.replace(unnamed, path)
