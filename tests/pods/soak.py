"""Whole runs under `--keep-alive` while everything around them fails, in a time that passes only when somebody waits.

Real are the keeper, the launcher, the slices and the commands that they give; Google's API is `FakeTpu`, and the
machines understand the commands without running anything: a job is the times at which it started, and what follows.
`one_run(seed)` draws the faults and says what came of the run.
"""

import base64
import contextlib
import dataclasses
import functools
import gzip
import io
import json
import random
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podium.pods import commands
from podium.pods.gcloud import Finished, Gcloud, GcloudError
from podium.pods.inventory import STOP
from podium.pods.launch import RunSpec
from podium.pods.options import Rent, RunOptions
from podium.pods.project import Project
from podium.pods.push import Package
from podium.pods.rental import rent_slice
from podium.pods.run import follow
from podium.pods.secrets import Secrets
from podium.pods.session import Session
from podium.pods.slices import SliceError, Slices
from tests.pods.fake_gcloud import FakeGcloud
from tests.pods.fake_tpu import FakeTpu, Fault

WORKERS, STEPS, SAVE_EVERY = 2, 40, 5
STEP_S, BEGIN_S, SETUP_S, ARRIVAL_S, HEARTBEAT_S = 30.0, 20.0, 90.0, 60.0, 30.0
ZONES = ("us-a", "us-b", "eu-c")
NO_NETWORK = (
    "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: HTTPSConnectionPool(host="
    "'oauth2.googleapis.com', port=443): Max retries exceeded with url: /token (Caused by NameResolutionError(\"<x>: "
    "Failed to resolve 'oauth2.googleapis.com'\"))\nPlease run:\n\n  $ gcloud auth login\n"
)
"""What gcloud 528 says with a user's credentials and no network."""


class Clock:
    """Time that passes when the keeper waits, and what is to happen at which time. A closed lid is not monotonic."""

    def __init__(self) -> None:
        self.now, self.asleep = 1_000_000_000.0, 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - self.asleep

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds
        if threading.current_thread() is threading.main_thread():
            while self.due and min(self.due, key=lambda each: each[0])[0] <= self.now:
                first = min(self.due, key=lambda each: each[0])
                self.due.remove(first)
                first[1]()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.due.append((self.now + seconds, what))

    def close_lid(self, seconds: float) -> None:
        self.asleep += seconds
        self.now += seconds


@dataclasses.dataclass
class Job:
    """An attempt, or its setup, on all machines: what happened to it, from which its state at any time follows."""

    first_step: int
    started: dict[int, float] = dataclasses.field(default_factory=dict)
    fails: tuple[float, int, int] | None = None
    """When, on which worker, with which status."""
    stopped: float | None = None
    save_s: float = 0.0


class Machines:
    """The machines of whatever node is ready, and the folder that outlives them. A `fake_gcloud.Hosts`."""

    def __init__(self, clock: Clock, fake: FakeTpu, rng: random.Random) -> None:
        self.clock, self.fake, self.rng = clock, fake, rng
        self.saved = 0
        """Steps that the last checkpoint holds."""
        self.trained_at: list[tuple[float, int]] = []
        self.node: str | None = None
        self.jobs: dict[str, Job] = {}
        self.agents: set[int] = set()
        self.dead: set[int] = set()
        """Machines that crashed, or never answered."""
        self.refused_until = 0.0
        self.lost_replies = 0
        self.setup_failures = 0
        self.job_failures = 0
        self.late_s: list[float] = []
        """How much later than others a worker begins, for each start to come."""
        self.broken: list[str] = []
        """What is wrong with each slice to come: chips, or ssh."""
        self.chips = True
        self.wrong: list[str] = []

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
        if self.lost_replies and self.rng.random() < 0.3:
            self.lost_replies -= 1
            return 1, "", "Connection to 10.0.0.1 closed by remote host.\n"
        packed = base64.b64encode(gzip.compress(text.encode())).decode()
        return status, f"{mark[1]} {worker} {status} {packed}\n", ""

    def unreachable(self, worker: int) -> bool:
        self.look()
        return worker in self.dead or self.clock.now < self.refused_until

    def look(self) -> None:
        """New machines where there is another node than before."""
        ready = [node["id"] for node in self.fake.nodes.values() if node["state"] == "READY"]
        if ready and ready[0] != self.node:
            self.settle()
            self.node, self.jobs, self.agents, self.dead = ready[0], {}, set(), set()
            what = self.broken.pop(0) if self.broken else ""
            self.chips = what != "chips"
            self.dead = {"ssh": set(range(WORKERS)), "one": {1}}.get(what, set())

    def answer(self, worker: int, command: str) -> tuple[int, str]:
        if "sha256sum" in command:
            self.agents.add(worker)
            problems = [] if self.chips or worker else ["this host has 3 chips and should have 4"]
            return int(bool(problems)), json.dumps({"time": self.clock.now, "problems": problems})
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
            job.stopped = self.clock.now if job.stopped is None else job.stopped
        if found[1] == "logs":
            return 0, ""
        status = self.state(name, worker)
        return 0, json.dumps(status | ({"left": [1] if status["state"] == "running" else []}))

    def start(self, worker: int, name: str) -> tuple[int, str]:
        if name not in self.jobs:
            self.settle()
            job = self.jobs[name] = Job(self.saved, save_s=self.rng.choice([5.0, 45.0, 600.0]))
            at = self.clock.now + self.rng.uniform(1.0, STEPS * STEP_S)
            if name.startswith("setup-") and self.setup_failures:
                self.setup_failures -= 1
                job.fails = (self.clock.now + self.rng.uniform(5.0, SETUP_S), self.rng.randrange(WORKERS), 1)
            elif not name.startswith("setup-") and self.job_failures:
                self.job_failures -= 1
                job.fails = (at, self.rng.randrange(WORKERS), 1)
        busy = [each for each in self.jobs if each != name and self.state(each, worker)["state"] == "running"]
        if busy:
            return 75, json.dumps({"state": "busy"})
        late_s = self.late_s.pop() if worker == WORKERS - 1 and self.late_s and "setup" not in name else 0.0
        self.jobs[name].started.setdefault(worker, self.clock.now + late_s)
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
            ends = [(first + ARRIVAL_S, 78, "missing")]
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
        now = self.clock.now
        status: dict[str, Any] = {"host": f"h{worker}", "job": None, "state": "none", "exit": None, "log_bytes": 0}
        if name is None or name not in self.jobs or worker not in self.jobs[name].started:
            return {**status, "record": None, "progress": None}
        at, code, kind = self.end(name)
        status |= {"job": name, "record": None, "progress": {"step": self.steps(name, now), "position": 0}}
        failing = self.jobs[name].fails
        if kind == "exception" and failing and worker != failing[1] and not name.startswith("setup-"):
            at, code, kind = at + HEARTBEAT_S, 134, "lost"
        if now < at:
            return {**status, "state": "running"}
        record = {"kind": kind, "message": kind, "exit": code, "time": at, "step": 0, "phase": None, "position": 0}
        return {**status, "state": "finished", "exit": code, "record": record}

    def settle(self) -> None:
        """Keep what the jobs have saved so far."""
        for name in self.jobs:
            done, end = self.steps(name, self.clock.now), self.end(name)
            whole = end[2] in ("done", "stopped") and end[0] <= self.clock.now
            self.saved = max(self.saved, done if whole else done - done % SAVE_EVERY)
            if done > self.jobs[name].first_step:
                self.trained_at.append((min(end[0], self.clock.now), done))

    # what happens to them

    def healthy(self) -> bool:
        """Whether a run goes on on machines that are ready."""
        if not any(node["id"] == self.node and node["state"] == "READY" for node in self.fake.nodes.values()):
            return False
        names = [name for name in self.jobs if not name.startswith("setup-")]
        alive = [name for name in names if self.end(name)[0] > self.clock.now and self.end(name)[2] != "missing"]
        return bool(alive) and not self.dead

    def lose_all(self) -> None:
        self.settle()
        self.jobs, self.agents = {}, set()

    def crash(self, worker: int) -> None:
        """One machine stops; its node is still listed as ready, and the others lose their job.

        Not all of them: machines that are ready and all silent are kept for ever, by design.
        """
        if self.dead:
            return
        self.dead.add(worker)
        for name in self.jobs:
            if self.end(name)[0] > self.clock.now:
                self.jobs[name].fails = (self.clock.now, worker, 1)


class Soak:
    """A project, machines, and what happens to them, drawn from a seed."""

    def __init__(self, seed: int, file: Path) -> None:
        self.rng, self.clock = random.Random(seed), Clock()
        self.fake = FakeTpu(clock=self.clock.time, zones=ZONES, provision_s=60.0, operation_s=5.0)
        self.machines = Machines(self.clock, self.fake, self.rng)
        self.offline_until = 0.0
        self.gcloud = FakeGcloud(self.fake, self.clock, self.machines)
        self.gcloud.parallel = False
        self.said: list[str] = []
        self.events: list[str] = []
        self.stop_asked = False
        """Whether the stop is known to the API; the command may fail yet, where a machine does not answer."""
        self.stop_accepted: float | None = None
        self.trained_by_then = 0
        self.preempt_at_copy = 0
        package = Package(key="code-1", files=(file,), inside="", extras=("tpu",), environment="e", python=None)
        self.spec = RunSpec(
            name="run", config="a: 1\n", package=package, accelerator="v4-16", secrets=Secrets({}), environment={}
        )
        delete = self.fake._route
        self.fake._route = functools.partial(self.watched, delete)  # pyright: ignore[reportAttributeAccessIssue]

    def project(self, runner: Callable[[Sequence[str], float], Finished]) -> Project:
        gcloud = Gcloud(runner)
        slices = Slices(gcloud, owner="ada", clock=self.clock, say=self.said.append, parallel=1)
        return _Quiet(slices=slices, clock=self.clock, zone=None, secrets=Secrets({}), said=self.said)

    def watched(self, route: Callable[..., Any], method: str, *arguments: Any, **more: Any) -> Any:
        """The API, with an eye on what is deleted."""
        if method == "PATCH" and STOP in (arguments[-1] or {}).get("labels", {}):
            self.stop_asked = True
        if method == "DELETE" and self.machines.healthy():
            self.machines.wrong.append(f"{arguments[:4]} deleted at {self.clock.now:.0f} while its run was healthy")
        return route(method, *arguments, **more)

    def laptop(self, argv: Sequence[str], timeout_s: float) -> Finished:
        """gcloud on the keeper's laptop."""
        self.clock.sleep(2.0)
        if self.clock.now < self.offline_until:
            self.clock.sleep(8.0)
            return Finished(argv=tuple(argv), returncode=1, stdout="", stderr=NO_NETWORK)
        if "scp" in argv and self.preempt_at_copy:
            self.preempt_at_copy -= 1
            self.preempt()
        return self.gcloud(argv, timeout_s)

    def preempt(self) -> None:
        self.machines.lose_all()
        self.fake.preempt("demo")

    def stop(self) -> None:
        """`podium pod stop` on another laptop; again in a minute if it fails."""
        other = self.project(lambda argv, timeout_s: (self.clock.sleep(1.0), self.gcloud(argv, timeout_s))[1])
        given, commands.open_project = commands.open_project, lambda *common: other
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                commands.stop(name="demo", project=None, dry_run=False)
            self.stop_accepted = self.clock.now
            self.machines.settle()
            self.trained_by_then = self.machines.saved
        except (ValueError, GcloudError) as error:
            self.said.append(f"stop: {error}")
            self.clock.after(60.0, self.stop)
        finally:
            commands.open_project = given

    def plan(self) -> None:
        """Draw what will happen."""
        m, rng = self.machines, self.rng
        hours = STEPS * STEP_S
        draws: dict[str, Callable[[], None]] = {
            "laptop offline": lambda: setattr(self, "offline_until", self.clock.now + rng.choice([60, 900, 7200])),
            "ssh refused": lambda: setattr(m, "refused_until", self.clock.now + rng.choice([60, 900, 7200])),
            "lid closed": lambda: self.clock.close_lid(rng.choice([120, 3600, 36000])),
            "preempted": self.preempt,
            "a machine crashes": lambda: m.crash(rng.randrange(WORKERS)),
            "lost replies": lambda: setattr(m, "lost_replies", rng.randint(1, 6)),
            "API faults": lambda: self.fake.faults.extend(
                Fault(
                    rng.choice(["GET", "POST", "DELETE", "PATCH"]), rng.choice(["lost_reply", "503", "drop", "429"]), 2
                )
                for _ in range(3)
            ),
            "no capacity": lambda: self.fake.capacity.update({zone: rng.choice([0, 0, 2]) for zone in ZONES}),
        }
        for name in rng.choices(list(draws), k=rng.randint(1, 5)):
            at = rng.uniform(0.0, hours)
            self.events.append(f"{name} at {at:.0f}")
            self.clock.after(at, draws[name])
        self.clock.after(1.5 * hours, lambda: self.fake.capacity.clear())
        for name, what in {
            "preempted in push": lambda: setattr(self, "preempt_at_copy", 1),
            "setup failing": lambda: setattr(m, "setup_failures", rng.randint(1, 2)),
            "job failing": lambda: setattr(m, "job_failures", rng.randint(1, 3)),
            "slow guard": lambda: m.late_s.extend(rng.choice([8.0, 50.0, 90.0]) for _ in range(2)),
            "broken machines": lambda: m.broken.extend(rng.choices(["chips", "ssh", "one", ""], k=2)),
        }.items():
            if rng.random() < 0.3:
                self.events.append(name)
                what()
        if rng.random() < 0.35:
            at = rng.uniform(0.0, 1.5 * hours)
            self.events.append(f"stop at {at:.0f}")
            self.clock.after(at, self.stop)


class _Quiet(Project):
    """A project that keeps what it says."""

    def __init__(self, *, said: list[str], **parts: Any) -> None:
        super().__init__(**parts)
        object.__setattr__(self, "said", said)

    def say(self, line: str) -> None:
        self.said.append(line)  # pyright: ignore[reportAttributeAccessIssue]

    def answer(self, text: str, *, end: str = "\n") -> None:
        pass


@functools.cache
def _a_file() -> Path:
    path = Path(tempfile.mkdtemp(prefix="soak-")) / "code.bundle"
    path.write_text("code")
    return path


def one_run(seed: int) -> dict[str, Any]:
    """What came of a run: `problems` is empty where it was neither lost, nor went on after a stop, nor still costs."""
    soak = Soak(seed, _a_file())
    rent = Rent(type="v4-16", zones=list(ZONES), valid_until="10m")
    project = soak.project(soak.laptop)
    tpu_slice = rent_slice(project.slices, "demo", rent, default_zone=None)
    soak.plan()
    session = Session(project, tpu_slice, rent, soak.spec)
    began = soak.clock.now
    try:
        status: Any = follow(project, session, RunOptions(keep_alive=True))
    except (GcloudError, SliceError) as error:
        status = f"{type(error).__name__}: {error}"
    machines = soak.machines
    machines.settle()
    problems = list(machines.wrong)
    if soak.stop_accepted is not None and machines.saved > soak.trained_by_then:
        problems.append(f"trained on after it was stopped: {soak.trained_by_then} -> {machines.saved}")
    if soak.stop_asked:
        if status not in ((0, 143) if machines.saved == STEPS else (143,)):
            problems.append(f"stopped, and ended with {status} after {machines.saved} of {STEPS} steps")
    elif status != 0 or machines.saved != STEPS:
        problems.append(f"lost: ended with {status} after {machines.saved} of {STEPS} steps")
    if left := soak.fake.everything():
        problems.append(f"left: {left}")
    return {
        "seed": seed,
        "events": soak.events,
        "status": status,
        "hours": round((soak.clock.now - began) / 3600, 1),
        "stopped": soak.stop_asked,
        "problems": problems,
        "said": soak.said,
    }
