"""What can be seen of a slice and its workers, for tests of what is done about it."""

import dataclasses
from typing import Any

from podium.pods.inventory import Slice
from podium.pods.launch import JobStatus
from podium.pods.recover import Policy
from podium.pods.session import Observation

POLICY = Policy(down=False)


SLICE = Slice(
    name="demo",
    zone="us-a",
    state="ready",
    detail="READY",
    accelerator="v6e-16",
    runtime="image",
    spot=True,
    queued=True,
    from_queue=True,
    node=True,
    addresses=("a", "b"),
    labels={},
    created=None,
    requested=None,
)


def status(
    state: str = "running", code: int | None = None, *, kind: str | None = None, step: int = 0
) -> dict[str, Any]:
    record = None
    if kind:
        record = {"kind": kind, "message": kind, "exit": code, "time": 1.0, "step": step, "phase": None, "position": 0}
    progress = {"step": step, "position": 0}
    return {
        "host": "h",
        "job": "j-1",
        "state": state,
        "exit": code,
        "record": record,
        "progress": progress,
        "log_bytes": 0,
    }


def seen(
    *statuses: dict[str, Any] | None, over: int | None = None, waited_s: float = 0.0, **of_slice: Any
) -> Observation:
    tpu_slice = dataclasses.replace(SLICE, **of_slice)
    return Observation(slice=tpu_slice, job=JobStatus(workers=statuses), over=over, waited_s=waited_s)


DONE = status("finished", 0, kind="done")
STOPPED = status("finished", 143, kind="stopped")
FAILED = status("finished", 1, kind="exception")
LOST = status("finished", 134, kind="lost")
GUARD = status("finished", 78, kind="guard")
MISSING = status("finished", 75, kind="missing")
KILLED = status("finished", 137, kind="signal")
WRONG = status("finished", 2, kind="exit")
NONE = {**status("none"), "job": None, "progress": None}
