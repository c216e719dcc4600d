"""Whole runs under `--keep-alive` while everything around them fails, on several laptops, in a time that is virtual.

Real are the keepers, the launcher, the slices, `podium pod stop`, `down` and `reap`, and the commands that they give;
Google's API is `FakeTpu`, and the machines understand the commands without running anything: a job is the times at
which it started, and what follows. `one_run(seed)` draws who does what when and what fails; `tests.pods.soak_judge`
judges what came of it from what the API and the machines recorded.
"""

import dataclasses
import functools
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podium.pods import commands
from podium.pods.endings import Endings
from podium.pods.gcloud import Finished, Gcloud, GcloudError
from podium.pods.inventory import IDLE_S, NAME, OWNER, RUN, label_text
from podium.pods.options import Rent, RunOptions
from podium.pods.project import Project
from podium.pods.rental import new_order
from podium.pods.run_command import follow
from podium.pods.secrets import Secrets
from podium.pods.session import Session
from podium.pods.slices import Slices
from podium.pods.world import World
from tests.pods.fake_gcloud import FakeGcloud, Heard, made_spec
from tests.pods.fake_tpu import FakeTpu, Fault
from tests.pods.soak_machines import STEP_S, STEPS, WORKERS, Fleet
from tests.pods.timeline import Laptop, Timeline

ZONES = ("us-a", "us-b", "eu-c")
DEAD = ("SUSPENDED", "FAILED", "PREEMPTED")
HOUR_S = 3600.0
HOURS_S = STEPS * STEP_S
"""How long a run takes that nothing happens to."""
SKEWS_S = (-5 * HOUR_S, 0.0, 0.0, 5 * HOUR_S, 20 * HOUR_S)
"""How wrong the clocks of laptops are."""
LIMIT_S = 40 * 24 * HOUR_S
PATIENCE_S = 24 * HOUR_S
RENT = Rent(type="v4-16", zones=list(ZONES), valid_until="10m", lease="4h")

NO_NETWORK = (
    "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: HTTPSConnectionPool(host="
    "'oauth2.googleapis.com', port=443): Max retries exceeded with url: /token (Caused by NameResolutionError(\"<x>: "
    "Failed to resolve 'oauth2.googleapis.com'\"))\nPlease run:\n\n  $ gcloud auth login\n"
)
"""What gcloud 528 says with a user's credentials and no network."""
LOGIN = (
    "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: Reauthentication failed. "
    "cannot prompt during non-interactive execution.\nPlease run:\n\n  $ gcloud auth login\n"
)
DISK = "ERROR: gcloud crashed (OSError): [Errno 28] No space left on device: '/home/ada/.config/gcloud/logs'\n"
CERTIFICATE = (
    "ERROR: gcloud crashed (SSLError): HTTPSConnectionPool(host='tpu.googleapis.com', port=443): Max retries exceeded "
    "with url: /v2 (Caused by SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]')))\n"
)
ODD = (
    "ERROR: (gcloud.x) ABORTED: The operation was aborted.\n",
    "ERROR: (gcloud.x) CANCELLED: The operation was cancelled.\n",
    "ERROR: (gcloud.x) HttpError accessing <https://tpu.googleapis.com/v2>: response: <{'status': '418'}>\n",
)
"""Passing errors: 409, 499, and one that nobody has seen before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deletion:
    """A request to delete a slice, and the truth about that slice at that moment."""

    time: float
    by: str
    full: str
    owner: str | None
    run: str | None
    """The run of its label, without the attempt's number."""
    healthy: str | None
    """The run that was going on there."""
    ready: bool
    dead: bool
    """Whether its machines were taken away, or will never come."""
    lease_left_s: float | None
    """Until the end of its lease, by the true time; None: it has no machines."""


@dataclasses.dataclass
class Command:
    """A command on a laptop, and what came of it."""

    laptop: Laptop
    role: str
    """keeper, stop, down or reap."""
    run: str | None
    project: Project
    said: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    status: object = None
    followed: bool = False
    """Whether it had got a slice."""
    began: float = 0.0
    again: float = 0.0
    """When its user gave it again, after logging in."""
    bad: list[tuple[float, float, str]] = dataclasses.field(default_factory=list)
    """From when to when its gcloud fails, and with what."""
    odd: int = 0
    """Passing errors to come."""
    lids: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    """Before which kind of request its lid will be closed, and for how long."""


class Soak:
    """A project, machines, laptops, and what happens to them, drawn from a seed."""

    def __init__(self, seed: int, file: Path) -> None:
        self.timeline = Timeline()
        self.rng = random.Random(seed)
        self.words = random.Random(-seed - 1)
        self.fake = FakeTpu(clock=self.timeline.time, zones=ZONES, provision_s=60.0, operation_s=5.0)
        self.fleet = Fleet(self.timeline.time, self.rng)
        self.events: list[str] = []
        self.commands: list[Command] = []
        self.deletions: list[Deletion] = []
        self.stops: dict[str, float] = {}
        """Run -> when its stop was recorded; the command may fail yet, where a machine does not answer."""
        self.stopped_at: dict[str, tuple[float, int]] = {}
        """Run -> when the command that stops it succeeded, and what was saved then."""
        self.twice: list[str] = []
        self.preempt_at_copy = 0
        self.specs = {name: made_spec(name, file) for name in ("run", "other")}
        route = self.fake._route
        self.fake._route = functools.partial(self._watched, route)  # pyright: ignore[reportAttributeAccessIssue]
        self.timeline.after(30.0, self._tick)

    # what happens

    def command(self, name: str, role: str, run: str | None, skew_s: float = 0.0) -> Command:
        """A laptop with a command that has not begun."""
        laptop = Laptop(self.timeline, name, skew_s)
        gcloud = _Gcloud(self, laptop)
        slices = Slices(
            Gcloud(gcloud),
            owner="ada",
            clock=laptop,
            parallel=1,
            follows=role == "keeper",
            say=lambda line: project.say(line),
            random_word=self.word,
        )
        world = World(runner=gcloud, clock=laptop, random_word=self.word)
        project = Heard(world=world, slices=slices, zone=None, secrets=Secrets({}))
        command = Command(laptop=laptop, role=role, run=run, project=project, began=self.timeline.now)
        project.__dict__["hear"] = lambda line: command.said.append((self.timeline.now, line))
        gcloud.command = command
        self.commands.append(command)
        return command

    def word(self, purpose: str) -> str:
        """The next random word of the story's seed: new each time, and the same in every replay of the story."""
        return f"{self.words.getrandbits(64):016x}"

    def keep(self, command: Command) -> None:
        """`podium pod run --keep-alive`; when its login has expired, its user logs in and gives it again."""
        while True:
            try:
                return self._keep(command)
            except GcloudError as error:
                if error.kind != "login":
                    raise
                command.said.append((self.timeline.now, str(error)))
            logged_in = max(until for _, until, text in command.bad if text == LOGIN)
            command.laptop.sleep(max(60.0, logged_in - self.timeline.now))
            command.again = self.timeline.now
            command.project.slices.began = command.laptop.time()

    def _keep(self, command: Command) -> None:
        """`podium pod run --keep-alive --type v4-16 --slice demo`."""
        spec = self.specs[str(command.run)]
        project = command.project
        run = label_text(spec.prefix)
        order = new_order("demo", RENT, project.slices, ZONES, run, bucket="bucket")
        endings = Endings(project.slices, "bucket", run)
        session = Session(project, spec, order, ZONES, endings, fresh=True)
        command.followed = True
        command.status = follow(project, session, RunOptions(keep_alive=True))

    def stop(self, command: Command) -> None:
        """`podium pod stop`; again in a minute if it fails."""
        commands.stop(name="demo", project=None, dry_run=False)
        for run in [run for run in self.stops if run not in self.stopped_at]:
            self.fleet.settle()
            self.stopped_at[run] = (self.timeline.now, self.fleet.saved[run])
        command.status = 0

    def down(self, command: Command) -> None:
        """`podium pod down`."""
        commands.down(name="demo", project=None, dry_run=False)
        command.status = 0

    def reap(self, command: Command) -> None:
        """`podium pod reap`, as cron runs it."""
        commands.reap(everyone=False, project=None, dry_run=False)
        command.status = 0

    def begin(self, command: Command, what: Callable[[Command], None], again_s: float | None = None) -> None:
        """Run a command on its laptop; after a failure again in `again_s`, for a day."""

        def work() -> None:
            while True:
                try:
                    what(command)
                except SystemExit as error:
                    command.status = error.code
                except (ValueError, OSError) as error:
                    command.status = f"{type(error).__name__}: {error}"
                    command.said.append((self.timeline.now, str(error)))
                    if again_s is not None and self.timeline.now < 1e9 + PATIENCE_S:
                        command.laptop.sleep(again_s)
                        continue
                return

        command.began = self.timeline.now
        command.laptop.begin(work)

    def preempt(self) -> None:
        """Google takes our machines."""
        for node in self.ours():
            if node["state"] == "READY":
                self.fleet.of(node).lose()
                node["state"] = "PREEMPTED"
                if parent := self.fake.queued.get(node.get("queuedResource", "")):
                    parent["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE", "suspendedData": {}}

    def _preempt_with_lids(self) -> None:
        """The moment at which most is decided by names: a slice is lost, and each laptop may close in a command."""
        for command in self.commands:
            if command.role == "keeper" and self.rng.random() < 0.7:
                method = self.rng.choice(["POST", "POST", "DELETE", "DELETE", "PATCH", "GET", "PUT"])
                command.lids.append((method, self.rng.choice([120, 1800, 7200, 36000])))
        self.preempt()

    def ours(self) -> list[dict[str, Any]]:
        """Our nodes."""
        return [node for node in self.fake.nodes.values() if node.get("labels", {}).get(OWNER) == "ada"]

    def stranger(self) -> None:
        """Somebody else takes the name in a zone, if it is free there."""
        zone = self.rng.choice(ZONES)
        held = {full.split("/")[3] for full in (*self.fake.nodes, *self.fake.queued) if full.endswith("/demo")}
        if zone not in held:
            labels = self.rng.choice([{}, {OWNER: "bob", NAME: "demo", RUN: "theirs-0a1b2c"}])
            self.fake.stranger(zone, "demo", labels)

    # what is recorded

    def _tick(self) -> None:
        with self.fake.lock:
            self.fake.tick()
        going = [run for node in self.ours() if node["state"] == "READY" and (run := self.fleet.of(node).healthy())]
        for run in {run for run in going if going.count(run) > 1}:
            self.twice.append(f"{run} was going on twice at {self.timeline.now - 1e9:.0f}")
        self.timeline.after(30.0, self._tick)

    def _watched(self, route: Callable[..., Any], method: str, *arguments: Any, **more: Any) -> Any:
        """The API, with an eye on what is deleted and labelled."""
        parent, _, kind, name = arguments[:4]
        full = f"{parent}/{kind}/{name}"
        if method == "DELETE" and full in (*self.fake.nodes, *self.fake.queued):
            self.deletions.append(self._deletion(full))
            nodes = [each for key, each in self.fake.nodes.items() if full in (key, each.get("queuedResource"))]
            reply = route(method, *arguments, **more)
            for node in nodes:
                self.fleet.of(node).lose()
            return reply
        return route(method, *arguments, **more)

    def _deletion(self, full: str) -> Deletion:
        nodes = [each for key, each in self.fake.nodes.items() if full in (key, each.get("queuedResource"))]
        node = nodes[0] if nodes else None
        queued = self.fake.queued.get(full)
        asked = queued["tpu"]["nodeSpec"][0]["node"].get("labels", {}) if queued else {}
        labels: Mapping[str, str] = {**asked, **(node or {}).get("labels", {})}
        left_s = None
        if node is not None and IDLE_S in labels:
            left_s = _seconds(node["createTime"]) + float(labels[IDLE_S]) - self.timeline.now
        ready = node is not None and node["state"] == "READY"
        laptop = self.timeline.running
        return Deletion(
            time=self.timeline.now,
            by=laptop.name if laptop else "?",
            full=full,
            owner=labels.get(OWNER),
            run=labels.get(RUN),
            healthy=self.fleet.of(node).healthy() if node is not None and ready else None,
            ready=ready,
            dead=(queued["state"]["state"] if queued else str((node or {}).get("state"))) in DEAD,
            lease_left_s=left_s,
        )

    # the plan

    def plan(self) -> None:
        """Draw who does what and what will happen."""
        rng = self.rng

        def keeps(name: str, run: str, at: float) -> None:
            skew_s = rng.choice(SKEWS_S)
            command = functools.partial(self.command, name, "keeper", run, skew_s)
            self.later(f"{name} keeps {run}", at, lambda: self.begin(command(), self.keep))

        keeps("first", "run", 0.0)
        if rng.random() < 0.45:
            keeps("second", "run", rng.uniform(0.0, 1.5 * HOURS_S))
        if rng.random() < 0.35:
            keeps("third", "other", rng.uniform(0.0, 3.0 * HOURS_S))
        if rng.random() < 0.35:
            skew_s = rng.choice(SKEWS_S)
            every_s = rng.choice([600.0, 1800.0])
            self.events.append(f"reaper {skew_s / HOUR_S:+.0f} h every {every_s:.0f}")
            self.timeline.after(rng.uniform(0.0, every_s), lambda: self._cron(every_s, skew_s))
        if rng.random() < 0.3:
            self.later("stop", rng.uniform(0.0, 1.5 * HOURS_S), lambda: self._once("stop", self.stop, 60.0))
        if rng.random() < 0.1:
            self.later("down", rng.uniform(0.0, 1.5 * HOURS_S), lambda: self._once("down", self.down, 60.0))
        if rng.random() < 0.5:
            at = rng.uniform(0.0, 1.5 * HOURS_S)
            self.later("preempted, with lids", at, self._preempt_with_lids)
        for _ in range(rng.randint(1, 6)):
            name, what = rng.choice(list(self._faults().items()))
            self.later(name, rng.uniform(0.0, 1.3 * HOURS_S), what)
        self.timeline.after(2.0 * HOURS_S, self.fake.capacity.clear)
        for name, what in {
            "preempted in push": lambda: setattr(self, "preempt_at_copy", 1),
            "setup failing": lambda: setattr(self.fleet, "setup_failures", rng.randint(1, 2)),
            "job failing": lambda: setattr(self.fleet, "job_failures", rng.randint(1, 3)),
            "slow guard": lambda: self.fleet.late_s.extend(rng.choice([8.0, 50.0, 90.0]) for _ in range(2)),
            "broken machines": lambda: self.fleet.broken.extend(rng.choices(["chips", "ssh", "one", ""], k=2)),
            "no capacity at first": lambda: self.fake.capacity.update(dict.fromkeys(ZONES, 0)),
        }.items():
            if rng.random() < 0.25:
                self.events.append(name)
                what()

    def later(self, name: str, seconds: float, what: Callable[[], None]) -> None:
        """Have something happen, and keep that it was planned."""
        self.events.append(f"{name} at {seconds:.0f}")
        self.timeline.after(seconds, what)

    def _faults(self) -> dict[str, Callable[[], None]]:
        fleet, rng = self.fleet, self.rng

        def to_a_keeper(what: Callable[[Command], None]) -> Callable[[], None]:
            def do() -> None:
                if keepers := [each for each in self.commands if each.role == "keeper" and each.laptop.ended is None]:
                    what(rng.choice(keepers))

            return do

        def failing(text: str, lengths_s: Sequence[float]) -> Callable[[], None]:
            return to_a_keeper(lambda command: command.bad.append((now_of(), now_of() + rng.choice(lengths_s), text)))

        def now_of() -> float:
            return self.timeline.now

        def machines(what: Callable[[Any], None]) -> Callable[[], None]:
            def do() -> None:
                for node in self.ours():
                    if node["state"] == "READY":
                        what(fleet.of(node))

            return do

        return {
            "offline": failing(NO_NETWORK, [60, 300, 900, 7200, 36000]),
            "credentials expired": failing(LOGIN, [600, 1500, 7200]),
            "disk full": failing(DISK, [600]),
            "certificates": failing(CERTIFICATE, [600]),
            "odd errors": to_a_keeper(lambda command: setattr(command, "odd", command.odd + rng.randint(1, 6))),
            "lid closed": to_a_keeper(lambda command: command.laptop.close_lid(rng.choice([120, 1800, 3600, 36000]))),
            "lid closed in a command": to_a_keeper(
                lambda command: command.lids.append(
                    (rng.choice(["POST", "DELETE", "PATCH", "GET", "PUT"]), rng.choice([120, 1800, 3600, 36000]))
                )
            ),
            "ssh refused": lambda: setattr(fleet, "refused_until", self.timeline.now + rng.choice([60, 900, 7200])),
            "preempted": self.preempt,
            "preempted again": self.preempt,
            "a machine crashes": machines(lambda each: each.crash({rng.randrange(WORKERS)})),
            "all machines crash": machines(lambda each: each.crash(set(range(WORKERS)))),
            "lost replies": lambda: setattr(fleet, "lost_replies", rng.randint(1, 6)),
            "a stranger": self.stranger,
            "API faults": lambda: self.fake.faults.extend(
                Fault(
                    rng.choice(["GET", "POST", "DELETE", "PATCH"]), rng.choice(["lost_reply", "503", "drop", "429"]), 2
                )
                for _ in range(3)
            ),
            "no capacity": lambda: self.fake.capacity.update({zone: rng.choice([0, 0, 2]) for zone in ZONES}),
        }

    def _once(self, role: str, what: Callable[[Command], None], again_s: float) -> None:
        self.begin(self.command(role, role, None), what, again_s if self.fake.nodes else None)

    def _cron(self, every_s: float, skew_s: float) -> None:
        if not self.over():
            self.begin(self.command("cron", "reap", None, skew_s), self.reap)
            self.timeline.after(every_s, lambda: self._cron(every_s, skew_s))

    def over(self) -> bool:
        """Whether all that was to come has come, and all commands have ended."""
        late = self.timeline.now > 1e9 + LIMIT_S
        planned = self.timeline.now > 1e9 + 3.0 * HOURS_S
        return late or (planned and all(each.laptop.ended is not None for each in self.commands))


class _Gcloud(FakeGcloud):
    """gcloud on one laptop; it reaches the machines of each node."""

    command: Command

    def __init__(self, soak: Soak, laptop: Laptop) -> None:
        super().__init__(soak.fake, laptop)  # pyright: ignore[reportArgumentType]
        self.soak, self.laptop, self.parallel = soak, laptop, False
        self.instant = self._instant

    def __call__(self, argv: Sequence[str], timeout_s: float) -> Finished:
        soak, command = self.soak, self.command
        self.laptop.sleep(2.0)
        failing = next((text for since, until, text in command.bad if since <= soak.timeline.now < until), None)
        if failing is None and command.odd and soak.rng.random() < 0.5:
            command.odd -= 1
            failing = soak.rng.choice(ODD)
        if failing is not None:
            self.laptop.sleep(8.0)
            return Finished(argv=tuple(argv), returncode=1, stdout="", stderr=failing)
        if "scp" in argv and soak.preempt_at_copy:
            soak.preempt_at_copy -= 1
            soak.preempt()
        return super().__call__(argv, timeout_s)

    def _storage(self, argv: tuple[str, ...]) -> Finished:
        finished = super()._storage(argv)
        if argv[2] == "cp" and self.command.role == "stop":
            run = argv[4].rpartition("/")[2].split(".")[0]
            self.soak.stops.setdefault(run, self.soak.timeline.now)
        return finished

    def _instant(self, method: str) -> None:
        """Between the requests of a command time passes, and the lid may be closed."""
        self.laptop.sleep(1.0)
        for lid in self.command.lids:
            if lid[0] == method:
                self.command.lids.remove(lid)
                self.laptop.close_lid(lid[1])
                self.laptop.sleep(1.0)
                break

    def _on_hosts(
        self, argv: tuple[str, ...], verb: str, words: list[str], flags: dict[str, str], timeout_s: float
    ) -> Finished:
        target = (words[0] if verb == "ssh" else words[-1].partition(":")[0]).rpartition("@")[2]
        node = self.fake.nodes.get(f"projects/p/locations/{flags['zone']}/nodes/{target}")
        self.hosts = self.soak.fleet.of(node) if node is not None else None
        return super()._on_hosts(argv, verb, words, flags, timeout_s)


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


@functools.cache
def _a_file() -> Path:
    path = Path(tempfile.mkdtemp(prefix="soak-")) / "code.bundle"
    path.write_text("code")
    return path


@contextmanager
def commands_of(soak: Soak) -> Iterator[None]:
    """`podium pod stop`, `down` and `reap` open the project of the laptop that runs them."""

    def opened(*_: object) -> Project:
        return next(each.project for each in soak.commands if each.laptop is soak.timeline.running)

    given, commands.open_project = commands.open_project, opened
    try:
        yield
    finally:
        commands.open_project = given


def story(seed: int) -> Soak:
    """A drawn story, told to its end."""
    assert "PODRUN_OWNER" not in os.environ
    soak = Soak(seed, _a_file())
    soak.plan()
    with commands_of(soak):
        soak.timeline.run(soak.over)
    soak.fleet.settle()
    return soak


def label_of(soak: Soak, run: str) -> str:
    """A run as labels name it."""
    return label_text(soak.specs[run].prefix)
