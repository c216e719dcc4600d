"""Whole runs under `--keep-alive` while everything around them fails, in a time that passes only when somebody waits.

Real are the keeper, the launcher, the slices and the commands that they give; Google's API is `FakeTpu`, and the
machines understand the commands without running anything: a job is the times at which it started, and what follows.
`one_run(seed)` draws the faults and says what came of the run.
"""

import contextlib
import functools
import io
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podium.pods import commands
from podium.pods.gcloud import Finished, GcloudError
from podium.pods.inventory import STOP
from podium.pods.launch import RunSpec
from podium.pods.options import Rent, RunOptions
from podium.pods.project import Project
from podium.pods.push import Package
from podium.pods.rental import rent_slice
from podium.pods.run import follow
from podium.pods.secrets import Secrets
from podium.pods.session import Session
from podium.pods.slices import SliceError
from podium.pods.world import World
from tests.pods.fake_gcloud import Cloud
from tests.pods.fake_tpu import Fault
from tests.pods.soak_machines import STEP_S, STEPS, WORKERS, Machines

ZONES = ("us-a", "us-b", "eu-c")


NO_NETWORK = (
    "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: HTTPSConnectionPool(host="
    "'oauth2.googleapis.com', port=443): Max retries exceeded with url: /token (Caused by NameResolutionError(\"<x>: "
    "Failed to resolve 'oauth2.googleapis.com'\"))\nPlease run:\n\n  $ gcloud auth login\n"
)
"""What gcloud 528 says with a user's credentials and no network."""


class Soak(Cloud):
    """A project, machines, and what happens to them, drawn from a seed."""

    def __init__(self, seed: int, file: Path) -> None:
        super().__init__(zones=ZONES, provision_s=60.0, operation_s=5.0)
        self.rng = random.Random(seed)
        self.machines = self.gcloud.hosts = Machines(self.clock, self.fake, self.rng)
        self.offline_until = 0.0
        self.gcloud.parallel = False
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
        slices = self.owned_by("ada", runner)
        world = World(runner=runner, clock=self.clock)
        return _Quiet(world=world, slices=slices, zone=None, secrets=Secrets({}), said=self.said)

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
            "a machine crashes": lambda: m.crash({rng.randrange(WORKERS)}),
            "all machines crash": lambda: m.crash(set(range(WORKERS))),
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
    rent = Rent(type="v4-16", zones=list(ZONES), valid_until="10m", lease="4h")  # longer than any silence that ends
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
