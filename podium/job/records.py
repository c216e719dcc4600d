"""What each process of a job leaves behind: how far it is, and why it ended; and who failed first of all of them.

When one process of a job ends, jax ends the others, by abort and without a word: all have exit status 134, also the
guilty one. So each writes why it ends while it still can (`Report`), its supervisor writes what only a parent sees, and
the cause is read from all records together (`first_failure`). Standard library only.
"""

import dataclasses
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Kind = Literal["exception", "lost", "hang", "guard", "signal", "stopped", "done", "exit"]
RECORD = "record.json"
PROGRESS = "progress.json"
GUARD, HANG, STOPPED, ABORTED = 78, 124, 143, 134
"""Exit statuses: workers missing or not alike, stuck, stopped and resumable, ended by jax because another was lost."""
PEER_LOST = re.compile(
    r"(?-i:UNAVAILABLE): "
    r"|(?-i:[A-Z][A-Z_]{4,}): .*(Gloo|by peer|heartbeat|coordination (service|agent)|unhealthy|barrier|preempt)",
    re.IGNORECASE | re.DOTALL,
)
"""What an error of jax begins with that is the consequence of another process's end."""
SHOWN = 300  # characters of a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Why a process ended."""

    kind: Kind
    message: str
    """One line."""
    exit: int
    worker: int
    host: str
    pid: int
    time: float
    """Unix seconds of its own clock."""
    step: int | None = None
    """Steps done; unset: it had not begun."""
    phase: str | None = None
    position: int | None = None
    """Phases begun: the same for all workers at the same point of the program."""


class Report:
    """What a process says of itself in the folder of its job; says nothing where there is none.

    Used from two threads: the loop's and the watchdog's.
    """

    def __init__(self, folder: Path | None, *, worker: int = 0) -> None:
        self.folder = folder
        self.worker = worker
        self._lock = threading.Lock()
        self._progress: dict[str, Any] = {
            "phase": "start",
            "phase_since": time.time(),
            "step": None,
            "steps": None,
            "position": 0,
            "run_dir": None,
            "metrics": {},
        }

    def phase(self, name: str) -> None:
        """Say what is being done from now on."""
        position = self._progress["position"] + 1
        self.update(phase=name, phase_since=time.time(), position=position)

    def update(self, **values: Any) -> None:
        """Say more: `step`, `steps`, `run_dir`, `metrics`."""
        with self._lock:
            self._progress |= values

    def write_progress(self, beat: float) -> None:
        """Replace progress.json; `beat` is when the loop was last heard of."""
        if self.folder is None:
            return
        with self._lock:
            progress = {"time": time.time(), "beat": beat, **self._progress}
        write_json(self.folder / PROGRESS, progress)

    def end(self, kind: Kind, message: str, status: int) -> None:
        """Write why this process ends. The first record stays: what follows an end is not its cause."""
        if self.folder is None:
            return
        with self._lock:
            known = {name: self._progress[name] for name in ("step", "phase", "position")}
        record = Record(
            kind=kind,
            message=one_line(message),
            exit=status,
            worker=self.worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            time=time.time(),
            **known,
        )
        write_record(self.folder, record)

    def failed(self, error: BaseException) -> int:
        """Write that an exception ends this process; the exit status that it ends with."""
        status = exit_status(error)
        kind = _kind_of(error)
        self.end(kind, str(error) if kind == "guard" else f"{type(error).__name__}: {error}", status)
        return status

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.failed(error)


def exit_status(error: BaseException) -> int:
    """What a process exits with that an exception ends; an exception may carry it as `exit_status`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(error, "exit_status", 1)


def _kind_of(error: BaseException) -> Kind:
    if exit_status(error) == GUARD:
        return "guard"
    return "lost" if PEER_LOST.match(str(error)) else "exception"


def write_record(folder: Path, record: Record) -> None:
    """Write record.json unless there is one."""
    unnamed = folder / f"{RECORD}.{os.getpid()}.{threading.get_ident()}.tmp"
    unnamed.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
    try:
        os.link(unnamed, folder / RECORD)  # unlike a renaming, this fails where the name is taken
    except FileExistsError:
        pass
    finally:
        unnamed.unlink()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file: a reader sees the old content or the new."""
    unnamed = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    unnamed.write_text(json.dumps(value), encoding="utf-8")
    os.replace(unnamed, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None where there is nothing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def one_line(text: str) -> str:
    """A text without line ends, its middle left out where it is long: an error's last words name its cause."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN // 2 - 3]} ... {line[-SHOWN // 2 + 2 :]}"


Status = Mapping[str, Any]
Outcome = Literal["none", "running", "done", "stopped", "guard", "failed"]


def outcome(statuses: Sequence[Status | None]) -> Outcome:
    """What has become of a job, from what `status` says of each of its workers (None: it does not answer).

    `running` is a job of which nobody has failed yet, `stopped` one that was saved and can be continued.
    """
    if (first := _first_end(statuses)) is not None:
        return "guard" if first.blame == _GUARD else "failed"
    states = [status["state"] if status else "none" for status in statuses]
    if all(state == "none" for state in states):
        return "none"
    if any(state in ("running", "starting", "none") for state in states):
        return "running"
    exits = {status["exit"] for status in statuses if status}
    return "done" if exits == {0} else "stopped"


def first_failure(statuses: Sequence[Status | None]) -> str | None:
    """One line: which worker failed first, and of what; None if none has.

    Args:
        statuses: of all workers, in order, as the agent's `status` prints them; None: it does not answer.
    """
    first = _first_end(statuses)
    if first is None or first.blame == _GUARD:
        return first and first.text
    if not any(statuses):
        return "no worker answers"
    behind = _most_behind(statuses) if first.hang else None
    text = first.text if behind is None or behind[0] == first.worker else f"{first.text}; {behind[1]}"
    others = [end.worker for end in _ends(statuses) if end.worker != first.worker]
    return text + (f"; {_workers(others)} ended after it" if others else "")


def _first_end(statuses: Sequence[Status | None]) -> "_End | None":
    """The end that is the cause of the others; None: nobody has failed."""
    ends = _ends(statuses)
    if not ends or (all(end.blame == _UNREACHABLE for end in ends) and len(ends) < len(statuses)):
        return None  # or a network between us and them: the others go on
    return min(ends, key=lambda end: (end.blame, *end.order))


def _ends(statuses: Sequence[Status | None]) -> list["_End"]:
    found = (_end_of(worker, status) for worker, status in enumerate(statuses))
    return [end for end in found if end is not None]


_CAUSE, _GUARD, _UNREACHABLE, _KILLED, _CONSEQUENCE = range(5)
"""Whom to blame before whom: jax takes all the others down, so that their ends say nothing."""


@dataclasses.dataclass(frozen=True)
class _End:
    worker: int
    blame: int
    order: tuple[float, float]
    text: str
    hang: bool = False


def _end_of(worker: int, status: Status | None) -> _End | None:
    """How a worker's job failed; None: it has not."""
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
    blame = _CONSEQUENCE if kind == "lost" or record["exit"] == ABORTED else _GUARD if kind == "guard" else _CAUSE
    position = record["position"] if hang and record["position"] is not None else 0
    order = (position, worker if kind == "guard" else record["time"])  # the guard tells all the same
    return _End(worker, blame, order, f"{name} {_told(record)}", hang)


def _told(record: Mapping[str, Any]) -> str:
    where = "" if record["phase"] is None else f" in {record['phase']}"
    where += "" if record["step"] is None else f" after step {record['step']}"
    verb = {
        "guard": "did not begin",
        "lost": f"lost another worker{where}",
        "hang": f"was stuck{where}",
        "signal": f"was ended{where}",
        "exit": f"ended{where}",
    }.get(record["kind"], f"failed first{where}")
    return f"{verb}: {record['message']}"


def _most_behind(statuses: Sequence[Status | None]) -> tuple[int, str] | None:
    """The worker that had begun the fewest phases, which the others wait for; None where all are equally far."""
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
    return worker, f"worker {worker} is behind, in {progress['phase']} without a sign for {silent:.0f} s"


def _workers(workers: Sequence[int]) -> str:
    listed = ", ".join(map(str, workers))
    return f"worker {listed}" if len(workers) == 1 else f"workers {listed}"
