"""The machines of `tests.pods.soak`: jobs that are the times at which they started."""

import base64
import collections
import dataclasses
import gzip
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.job.job_records import NO_JOB

WORKERS, STEPS, SAVE_EVERY = 2, 40, 5
STEP_S, BEGIN_S, SETUP_S, ARRIVAL_S, HEARTBEAT_S = 30.0, 20.0, 90.0, 60.0, 30.0


@dataclasses.dataclass
class Job:
    """An attempt, or its setup, on all machines: what happened to it, from which its state at any time follows."""

    first_step: int
    started: dict[int, float] = dataclasses.field(default_factory=dict)
    fails: tuple[float, int, int] | None = None
    """When, on which worker, with which status."""
    stopped: float | None = None
    save_s: float = 0.0


class Fleet:
    """All machines there ever were, by their node, and the folder that outlives them."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self.machines: dict[str, Machines] = {}
        """By the node's id."""
        self.saved: collections.Counter[str] = collections.Counter()
        """Steps that the last checkpoint of each run holds."""
        self.refused_until = 0.0
        self.lost_replies = 0
        self.setup_failures = 0
        self.job_failures = 0
        self.late_s: list[float] = []
        """How much later than others a worker begins, for each start to come."""
        self.broken: list[str] = []
        """What is wrong with each slice to come: chips, ssh, or one machine."""

    def of(self, node: Mapping[str, Any]) -> "Machines":
        """The machines of a node."""
        if node["id"] not in self.machines:
            self.settle()
            self.machines[node["id"]] = Machines(self, self.broken.pop(0) if self.broken else "")
        return self.machines[node["id"]]

    def settle(self) -> None:
        """Keep what all jobs have saved so far."""
        for each in self.machines.values():
            each.settle()


class Machines:
    """The machines of one node. A `fake_gcloud.Hosts`."""

    def __init__(self, fleet: Fleet, broken: str) -> None:
        self.fleet = fleet
        self.jobs: dict[str, Job] = {}
        self.agents: set[int] = set()
        self.chips = broken != "chips"
        self.dead: set[int] = {"ssh": set(range(WORKERS)), "one": {1}}.get(broken, set())
        """Machines that crashed, or never answered."""

    @property
    def now(self) -> float:
        return self.fleet.clock()

    # what the laptop's commands do

    def copy(self, worker: int, files: Sequence[str], folder: str) -> int:
        return 255 if self.unreachable(worker) else 0

    def run(self, worker: int, command: str, timeout_s: float) -> tuple[int, str, str]:
        if self.unreachable(worker):
            return 255, "", "ssh: connect to host 10.0.0.1 port 22: Connection refused\n"
        mark = re.search(r'echo "(\w+) \$worker', command)
        inner = re.search(r"text=\$\( \{ (.*); \} 2>&1 \); status=", command, re.DOTALL)
        assert mark and inner
        status, text = self.answer(worker, inner[1])
        if self.fleet.lost_replies and self.fleet.rng.random() < 0.3:
            self.fleet.lost_replies -= 1
            return 1, "", "Connection to 10.0.0.1 closed by remote host.\n"
        packed = base64.b64encode(gzip.compress(text.encode())).decode()
        return status, f"{mark[1]} {worker} {status} {packed}\n", ""

    def unreachable(self, worker: int) -> bool:
        return worker in self.dead or self.now < self.fleet.refused_until

    def answer(self, worker: int, command: str) -> tuple[int, str]:
        if command == "date +%s":
            return 0, f"{self.now:.0f}"
        if "sha256sum" in command:
            self.agents.add(worker)
            problems = [] if self.chips or worker else ["this host has 3 chips and should have 4"]
            return int(bool(problems)), json.dumps({"time": self.now, "problems": problems})
        found = re.search(r"podrun/agent (status|start|stop|logs) ?([\w.-]*)", command)
        if not found:
            return 0, ""
        if worker not in self.agents:
            return (3, "") if found[1] == "status" else (0, "{}")
        name = found[2] if found[2] and not found[2].startswith("--") else self.latest(worker)
        if found[1] == "start":
            return self.start(worker, str(name))
        if found[1] == "stop" and name in self.jobs and self.state(str(name), worker)["state"] == "running":
            job = self.jobs[str(name)]
            job.stopped = self.now if job.stopped is None else job.stopped
        if found[1] == "logs":
            return 0, ""
        status = self.state(name, worker)
        return 0, json.dumps(status | ({"left": [1] if status["state"] == "running" else []}))

    def start(self, worker: int, name: str) -> tuple[int, str]:
        if any(each != name and self.state(each, worker)["state"] == "running" for each in self.jobs):
            return 75, json.dumps({"state": "busy"})
        fleet, rng = self.fleet, self.fleet.rng
        if name not in self.jobs:
            fleet.settle()
            job = self.jobs[name] = Job(fleet.saved[run_of(name)], save_s=rng.choice([5.0, 45.0, 600.0]))
            at = self.now + rng.uniform(1.0, STEPS * STEP_S)
            if name.startswith("setup-") and fleet.setup_failures:
                fleet.setup_failures -= 1
                job.fails = (self.now + rng.uniform(5.0, SETUP_S), rng.randrange(WORKERS), 1)
            elif not name.startswith("setup-") and fleet.job_failures:
                fleet.job_failures -= 1
                job.fails = (at, rng.randrange(WORKERS), 1)
        late_s = fleet.late_s.pop() if worker == WORKERS - 1 and fleet.late_s and "setup" not in name else 0.0
        self.jobs[name].started.setdefault(worker, self.now + late_s)
        return 0, json.dumps({"state": "running"})

    # what follows from what happened

    def latest(self, worker: int) -> str | None:
        return next((name for name in reversed(self.jobs) if worker in self.jobs[name].started), None)

    def end(self, name: str) -> tuple[float, int, str]:
        """When a job ends if nothing more happens, with which status, and why."""
        job = self.jobs[name]
        first = min(job.started.values())
        if name.startswith("setup-"):
            ends = [(first + SETUP_S, 0, "done")]
        elif len(job.started) < WORKERS or max(job.started.values()) - first > ARRIVAL_S:
            ends = [(first + ARRIVAL_S, 75, "missing")]
        else:
            ends = [(max(job.started.values()) + BEGIN_S + (STEPS - job.first_step) * STEP_S, 0, "done")]
        if job.fails is not None:
            ends.append((job.fails[0], job.fails[2], "exception"))
        if job.stopped is not None and job.stopped < min(ends)[0]:
            ends = ends[1:] if len(ends) > 1 else []  # it trains no more
            ends.append((job.stopped + (5.0 if name.startswith("setup-") else job.save_s), 143, "stopped"))
        return min(ends)

    def steps(self, name: str, now: float) -> int:
        """Steps that are done by then."""
        job = self.jobs[name]
        if name.startswith("setup-") or len(job.started) < WORKERS:
            return job.first_step
        until = min(now, self.end(name)[0], job.stopped or now)
        past = until - max(job.started.values()) - BEGIN_S
        return min(STEPS, job.first_step + max(0, int(past / STEP_S)))

    def state(self, name: str | None, worker: int) -> dict[str, Any]:
        now = self.now
        status: dict[str, Any] = {**NO_JOB, "host": f"h{worker}"}
        if name is None or name not in self.jobs or worker not in self.jobs[name].started:
            return status
        at, code, kind = self.end(name)
        status |= {
            "job": name,
            "created": self.jobs[name].started[worker],
            "progress": {"step": self.steps(name, now), "position": 0},
        }
        failing = self.jobs[name].fails
        if kind == "exception" and failing and worker != failing[1] and not name.startswith("setup-"):
            at, code, kind = at + HEARTBEAT_S, 134, "lost"
        if now < at:
            return {**status, "state": "running"}
        record = {"kind": kind, "message": kind, "exit": code, "time": at, "step": 0, "phase": None, "position": 0}
        return {**status, "state": "finished", "exit": code, "ended": at, "record": record}

    def settle(self) -> None:
        """Keep what the jobs have saved so far."""
        for name in self.jobs:
            done, end = self.steps(name, self.now), self.end(name)
            whole = end[2] in ("done", "stopped") and end[0] <= self.now
            run = run_of(name)
            self.fleet.saved[run] = max(self.fleet.saved[run], done if whole else done - done % SAVE_EVERY)

    # what happens to them

    def healthy(self) -> str | None:
        """The run that goes on here; None: none does."""
        names = [name for name in self.jobs if not name.startswith("setup-")]
        alive = [name for name in names if self.end(name)[0] > self.now and self.end(name)[2] != "missing"]
        return run_of(alive[0]) if alive and not self.dead else None

    def lose(self) -> None:
        """The machines are taken away."""
        self.settle()
        self.jobs, self.agents, self.dead = {}, set(), set(range(WORKERS))

    def crash(self, workers: set[int]) -> None:
        """Machines stop; their node is still listed as ready, and the others lose their job."""
        if self.dead:
            return
        self.dead |= workers
        for name in self.jobs:
            if self.end(name)[0] > self.now:
                self.jobs[name].fails = (self.now, min(workers), 1)


def run_of(job: str) -> str:
    """The run that a job is an attempt of, or sets up."""
    return job.removeprefix("setup-").rpartition("-")[0]
