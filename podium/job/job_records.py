"""The record of each process of a job: how far it got and why it ended; and which process failed first.

When one process of a job ends, jax aborts the others without a message: all exit with status 134, including the one
that failed first. So each process records why it ends while it still can (`ProgressReport`), its supervisor records
what only a parent can observe, and `first_failure` finds the cause from all records. Standard library only.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from podium.files import write_atomically
from podium.job.redact import own_redactor, without_controls

Kind = Literal["exception", "lost", "hang", "guard", "missing", "signal", "stopped", "done", "exit"]
RECORD = "record.json"
PROGRESS = "progress.json"
GUARD = 78
"""Exit status: workers are duplicated or mismatched, and would be again in another attempt."""
MISSING = 75
"""Exit status: a worker is missing, or ended before the start; another attempt may succeed."""
HANG = 124
"""Exit status: the process was stuck."""
STOPPED = 143
"""Exit status: the job was stopped, has saved, and can be continued."""
ABORTED = 134
"""Exit status: another worker was lost, as shown by jax's abort of this process or by an error."""
PEER_LOST = re.compile(
    r"(?-i:UNAVAILABLE): "
    r"|(?-i:[A-Z][A-Z_]{4,}): .*(Gloo|by peer|heartbeat|coordination (service|agent)|unhealthy|barrier|preempt)",
    re.IGNORECASE | re.DOTALL,
)
"""The beginning of an error that jax raises because another process has ended."""
SHOWN = 300  # characters of a message
JsonObject = dict[str, Any]
"""A JSON object from a file or a process, not validated yet."""


class Progress(TypedDict, total=False):
    """How far a process is: contents of progress.json."""

    time: float  # Unix seconds, like all times here
    beat: float  # last sign of life
    phase: str
    phase_since: float
    position: int  # phases begun: equal in all workers at one point of the program
    step: int | None
    steps: int | None
    run_dir: str | None
    metrics: Mapping[str, float]
    notice: str


class Record(TypedDict, total=False):
    """Why a process ended: contents of record.json."""

    kind: Kind
    message: str  # one line
    exit: int
    worker: int
    time: float
    host: str
    pid: int
    step: int | None  # None: training had not begun
    phase: str | None
    position: int | None


Status = Mapping[str, Any]
"""A worker's status of a job, from its agent: JSON with the keys of `NO_JOB`, its `Record` and its `Progress`."""
NO_JOB: Status = {
    **dict.fromkeys(("host", "job", "worker", "workers", "exit", "pid", "created", "ended", "record", "progress")),
    "state": "none",
    "log_bytes": 0,
}


class ProgressReport:
    """Writes this process's progress to its job's folder; without a folder, writes nothing.

    The training loop and the watchdog use it from two threads.
    """

    def __init__(self, folder: Path | None, *, worker: int = 0) -> None:
        self.folder = folder
        self.worker = worker
        self._lock = threading.Lock()
        self._progress: Progress = {
            "step": None,
            "steps": None,
            "run_dir": None,
            "phase": "start",
            "phase_since": time.time(),
            "position": 0,
            "metrics": {},
        }

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self.update(phase=name, phase_since=time.time(), position=self._progress.get("position", 0) + 1)

    def update(self, **values: Unpack[Progress]) -> None:
        """Replace some values of the progress, such as `step` and `metrics`."""
        with self._lock:
            self._progress.update(values)

    def announce(self, text: str) -> None:
        """Show a message in the job's log and in progress.json."""
        print(text, file=sys.stderr, flush=True)
        self.update(notice=text)

    def write_progress(self, beat: float) -> None:
        """Replace progress.json; `beat` is the last sign of life in Unix seconds. Raises RunFileError on failure."""
        if self.folder is None:
            return
        with self._lock:
            progress: Progress = {"time": time.time(), "beat": beat, **self._progress}
        write_atomically(self.folder / PROGRESS, json.dumps(progress))

    def end(self, kind: Kind, message: str, status: int) -> None:
        """Write why this process ends."""
        if self.folder is None:
            return
        with self._lock:
            progress = self._progress.copy()
        with contextlib.suppress(OSError):  # a full disk: the supervisor has reserved room to record the end
            write_record(self.folder, kind, message, status, worker=self.worker, progress=progress)

    def failed(self, error: BaseException) -> int:
        """Record the exception that ends this process; returns the exit status to end with."""
        status = exit_status(error)
        if status in (GUARD, MISSING):
            self.end(getattr(error, "kind", "guard"), str(error), status)
        elif getattr(error, "kind", None) == "lost" or PEER_LOST.match(str(error)):
            status = ABORTED  # so that a cluster can tell it from this process's own failure
            self.end("lost", f"{type(error).__name__}: {error}", status)
        else:
            self.end("exception", f"{type(error).__name__}: {error}", status)
        return status


def exit_status(error: BaseException) -> int:
    """The exit status of a process that this exception ends; an exception may have its own `exit_status`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(error, "exit_status", 1)


def write_record(folder: Path, kind: Kind, message: str, status: int, *, worker: int, progress: Progress) -> None:
    """Write record.json unless it exists: why a process is ending. Later events are not the cause.

    Secrets of this process are removed from the message.
    """
    record: Record = {
        "kind": kind,
        "message": one_line(own_redactor().redact(without_controls(message))),
        "exit": status,
        "worker": worker,
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": progress.get("step"),
        "phase": progress.get("phase"),
        "position": progress.get("position"),
    }
    unnamed = folder / f"{RECORD}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        unnamed.write_text(json.dumps(record), encoding="utf-8")
        os.link(unnamed, folder / RECORD)  # unlike renaming, this fails if the name is taken
    except OSError:  # it exists; or the disk is full, which must not hide the error being recorded
        pass
    finally:
        unnamed.unlink(missing_ok=True)


def read_json(path: Path) -> JsonObject | None:
    """The JSON object in a file; None if the file does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def one_line(text: str) -> str:
    """Shorten text to one printable line of at most `SHOWN` characters; cuts the middle, as the end names the cause."""
    line = " ".join(without_controls(text).split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN // 2 - 3]} ... {line[-SHOWN // 2 + 2 :]}"


JobOutcome = Literal["none", "running", "done", "stopped", "guard", "failed"]


def outcome(statuses: Sequence[Status | None]) -> JobOutcome:
    """The state of a job, from the status of each worker (None if it did not answer).

    `running` means that no worker has failed yet; `stopped`, that the job has saved and can be continued.
    """
    if ends := _ends(statuses):
        return "guard" if ends[0].blame == _GUARD else "failed"
    states = [status["state"] if status else "none" for status in statuses]
    if all(state == "none" for state in states):
        return "none"
    if any(state in ("running", "starting", "none") for state in states):
        return "running"
    exits = {status["exit"] for status in statuses if status}
    return "done" if exits == {0} else "stopped"


def first_failure(statuses: Sequence[Status | None]) -> str | None:
    """One line that says which worker failed first and why; None if none has failed."""
    ends = _ends(statuses)
    if not ends:
        return None
    first = ends[0]
    if first.blame == _GUARD:
        return first.text
    if not any(statuses):
        return "no worker answers"
    behind = _most_behind(statuses) if first.hang else None
    text = first.text if behind is None or behind[0] == first.worker else f"{first.text}; {behind[1]}"
    others = sorted(end.worker for end in ends[1:])
    return text + (f"; {listed(others)} ended after it" if others else "")


def _ends(statuses: Sequence[Status | None]) -> list["_End"]:
    """The failures of workers, the cause first."""
    ends = [end for worker, status in enumerate(statuses) if (end := _end_of(worker, status)) is not None]
    if all(end.blame == _UNREACHABLE for end in ends) and len(ends) < len(statuses):
        return []  # the network from here may be at fault: the other workers continue
    return sorted(ends, key=lambda end: (end.blame, *end.order))


_CAUSE, _GUARD, _UNREACHABLE, _KILLED, _CONSEQUENCE = range(5)
"""Kinds of failures, the likeliest cause first: jax aborts all other workers, so their ends mean nothing."""


@dataclasses.dataclass(frozen=True)
class _End:
    worker: int
    blame: int
    order: tuple[float, float]
    text: str
    hang: bool = False


def _end_of(worker: int, status: Status | None) -> _End | None:
    """The failure of a worker's process; None if it has not failed."""
    if status is None:
        return _End(worker, _UNREACHABLE, (0.0, worker), f"worker {worker} does not answer")
    name = f"worker {worker} ({status['host']})"
    record = status.get("record")
    if status["state"] == "killed":
        text = f"{name} was killed with all its processes, or its host was restarted"
        return _End(worker, _KILLED, (status.get("created") or 0.0, worker), text)
    if record is None or record["kind"] in ("done", "stopped") or record["exit"] in (0, STOPPED):
        return None
    kind, hang = record["kind"], record["kind"] == "hang"
    guard = kind in ("guard", "missing")
    blame = _CONSEQUENCE if kind == "lost" or record["exit"] == ABORTED else _GUARD if guard else _CAUSE
    position = record["position"] if hang and record["position"] is not None else 0
    order = (position, worker if guard else record["time"])  # the guard gives all workers the same message
    return _End(worker, blame, order, f"{name} {_sentence(record)}", hang)


def _sentence(record: JsonObject) -> str:
    where = "" if record["phase"] is None else f" in {record['phase']}"
    where += "" if record["step"] is None else f" after step {record['step']}"
    verb = {
        "guard": "did not begin",
        "missing": "did not begin",
        "lost": f"lost another worker{where}",
        "hang": f"was stuck{where}",
        "signal": f"was ended{where}",
        "exit": f"ended{where}",
    }.get(record["kind"], f"failed first{where}")
    return f"{verb}: {record['message']}"


def _most_behind(statuses: Sequence[Status | None]) -> tuple[int, str] | None:
    """The worker that the others wait for: the one that has begun the fewest phases; None if all are equal."""
    known = [
        (status["progress"]["position"], worker, status["progress"])
        for worker, status in enumerate(statuses)
        if status and status.get("progress")
    ]
    positions = {position for position, _, _ in known}
    if len(positions) < 2:
        return None
    _, worker, progress = min(known, key=lambda each: each[:2])
    silent = max(0.0, progress["time"] - progress["beat"])
    return worker, f"worker {worker} is behind: in {progress['phase']} without a sign of life for {silent:.0f} s"


def listed(workers: Sequence[int]) -> str:
    """Workers as text: `worker 2`, `workers 2, 3`."""
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
