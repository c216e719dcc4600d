"""Several laptops of one owner, and a reaper, on slices of one name: each acts on its own slice alone."""

import base64
import dataclasses
import gzip
import re
from pathlib import Path

import pytest

from podium.pods import commands
from podium.pods.gcloud import Finished
from podium.pods.inventory import END, LEASE, LEASE_S, RUN, STOP, label_text
from podium.pods.launch import RunSpec
from podium.pods.options import Rent, RunOptions
from podium.pods.project import Project
from podium.pods.push import Package
from podium.pods.remote import RemoteError
from podium.pods.rental import rent_slice
from podium.pods.run_command import follow
from podium.pods.secrets import Secrets
from podium.pods.session import Session
from podium.pods.slices import Slices, TakenError
from podium.pods.world import World
from tests.pods.clock import Clock
from tests.pods.fake_gcloud import Cloud

ZONES = ("us-a", "us-b", "eu-c")
RENT = Rent(type="v4-16", zones=list(ZONES), valid_until="10m", lease="4h")


class Skewed(Clock):
    """A clock that is wrong by some seconds."""

    def __init__(self, right: Clock, skew_s: float) -> None:
        super().__init__()
        self.right, self.skew_s = right, skew_s

    def time(self) -> float:
        return self.right.time() + self.skew_s

    def monotonic(self) -> float:
        return self.right.monotonic()

    def sleep(self, seconds: float, /) -> None:
        self.right.sleep(seconds)


class Idle:
    """Machines that have not run anything yet."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def run(self, worker: int, command: str, timeout_s: float) -> tuple[int, str, str]:
        """The marked line that every worker prints."""
        mark = re.search(r'echo "(\w+) \$worker', command)
        assert mark
        text = f"{self.clock.time():.0f}" if "date +%s" in command else ""
        packed = base64.b64encode(gzip.compress(text.encode())).decode()
        return 0, f"{mark[1]} {worker} {0 if text else 3} {packed}\n", ""

    def copy(self, worker: int, files: object, folder: str) -> int:
        raise AssertionError


class Laptops(Cloud):
    """A project, and laptops of Ada's."""

    def __init__(self, file: Path) -> None:
        super().__init__(zones=ZONES)
        self.gcloud.hosts = Idle(self.clock)
        self.package = Package(key="code-1", files=(file,), inside="", extras=("tpu",), environment="e", python=None)

    def project(self, runner=None, skew_s: float = 0.0) -> Project:
        """A laptop."""
        slices = self.owned_by("ada", runner)
        slices.clock = Skewed(self.clock, skew_s)
        world = World(runner=runner or self.gcloud, clock=slices.clock)
        return _Heard(world=world, slices=slices, zone=None, secrets=Secrets({}))

    def spec(self, name: str) -> RunSpec:
        """A run."""
        return RunSpec(
            name=name,
            config=f"name: {name}\n",
            package=self.package,
            accelerator="v4-16",
            secrets=Secrets({}),
            environment={},
        )

    def session(self, name: str = "run", project: Project | None = None) -> Session:
        """`podium pod run --type v4-16 --slice demo` on a laptop, up to the moment at which it has its slice."""
        project, spec = project or self.project(), self.spec(name)
        return Session(
            project, rent_slice(project.slices, "demo", RENT, default_zone=None, run=spec.prefix), RENT, spec
        )

    def started(self, session: Session, name: str = "run", attempt: int = 1) -> None:
        """A job was started on its slice."""
        session._project.slices.label(session.slice, {RUN: label_text(f"{self.spec(name).prefix}{attempt}")})

    def nodes(self) -> list[str]:
        return [node["id"] for node in self.fake.nodes.values()]


class _Heard(Project):
    """A project that keeps what it says."""

    def say(self, line: str) -> None:
        self.__dict__.setdefault("said", []).append(line)

    def answer(self, text: str, *, end: str = "\n") -> None:
        self.say(text)


@pytest.fixture
def laptops(tmp_path: Path) -> Laptops:
    (tmp_path / "code.bundle").write_text("code")
    return Laptops(tmp_path / "code.bundle")


def said(project: Project) -> str:
    return "\n".join(project.__dict__.get("said", []))


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("theirs", ["other", None])
def test_a_laptop_that_wakes_deletes_nothing_that_another_laptop_uses(laptops, preempted, theirs):
    """While it slept its run ended or its slice was lost, and another laptop rented one of the same name."""
    session = laptops.session()
    if preempted:
        laptops.fake.preempt("demo")
    other = laptops.project()
    other.slices.down("demo")
    spec = laptops.spec("other")
    rent_slice(other.slices, "demo", RENT, default_zone=None, run=spec.prefix if theirs else None)
    machines = laptops.nodes()
    session.replace() if preempted else session.give_back(0)
    assert session.observe().taken
    assert not session.give_back(0)
    assert laptops.nodes() == machines
    assert "podium pod down demo" in said(session._project)


def test_a_run_that_another_run_kept_from_starting_deletes_nothing(laptops):
    """The machines were busy from the beginning: their label is another run's, and stays so."""
    first = laptops.session()
    laptops.started(first)
    second = laptops.session("other")
    assert not second.give_back(1)
    assert len(laptops.nodes()) == 1
    with pytest.raises(TakenError, match="demo is kept: run-"):
        second.replace()
    assert len(laptops.nodes()) == 1


def test_what_was_rented_for_another_run_is_not_used_before_that_has_begun(laptops):
    laptops.session()
    second = laptops.session("other")
    assert "it was rented for run-" in second.observe().taken
    assert not second.give_back(1)
    assert len(laptops.nodes()) == 1


def test_a_slice_on_which_its_run_begins_again_meanwhile_is_not_claimed(laptops):
    first = laptops.session()
    laptops.started(first)
    second = laptops.session("other")
    assert second.observe().taken == ""  # an attempt that has ended
    laptops.started(first, attempt=2)
    with pytest.raises(RemoteError, match=r"demo is busy with job run-\w+-2, which has just been started"):
        second.start()
    assert not first.observe().taken


def test_what_another_laptop_rents_while_a_slice_is_replaced_is_kept_or_used(laptops):
    for theirs, adopted in (("run", True), ("other", False)):
        session = laptops.session()
        laptops.fake.preempt("demo")
        down = laptops.project()

        def meanwhile(argv, theirs=theirs, down=down):
            if "create" in argv:
                laptops.gcloud.before = lambda argv: None
                laptops.session(theirs, down)

        laptops.gcloud.before = meanwhile
        if adopted:
            session.replace()
        else:
            with pytest.raises(TakenError, match="was rented meanwhile for other-"):
                session.replace()
        assert len(laptops.nodes()) == 1
        down.slices.down("demo")


def test_a_slice_that_another_laptop_replaced_in_another_zone_is_followed(laptops):
    session = laptops.session()
    other = laptops.session()
    laptops.fake.preempt("demo")
    laptops.fake.capacity = {"us-a": 0}
    other.replace()
    assert other.slice.zone == "us-b"
    found = session.observe()
    assert found.slice is not None
    assert (found.slice.zone, found.taken) == ("us-b", "")


def test_a_laptop_tells_others_that_the_run_has_ended_before_it_deletes_the_slice(laptops):
    first, second = laptops.session(), laptops.session()
    laptops.started(first)
    seen = []
    began = laptops.clock.now

    def look(argv):
        if laptops.clock.now > began + 10.0 and not seen and "list" in argv:
            laptops.gcloud.before = lambda argv: None
            seen.append(second.observe())

    laptops.gcloud.before = look
    assert first.give_back(143)
    assert seen[0].ended == 143
    assert laptops.nodes() == []
    assert not second.give_back(143)


def test_the_end_of_another_run_and_a_stop_of_another_run_are_not_this_ones(laptops):
    session = laptops.session()
    laptops.started(session)
    slices = session._project.slices
    slices.label(session.slice, {END: "other-0a1b2c-1700000000-1"})
    assert session.observe().ended is None
    second = laptops.session("other")
    slices.label(session.slice, {STOP: "1700000000"})
    assert not second.observe().asked_to_stop
    assert session.observe().asked_to_stop


def test_a_stop_before_a_laptop_hears_that_its_slice_was_granted_is_heard(laptops):
    def stop_once_granted(argv):
        for node in laptops.fake.nodes.values():
            if node["state"] == "READY":
                node["labels"][STOP] = "1700000000"

    laptops.gcloud.before = stop_once_granted
    session = laptops.session()
    assert session.observe().asked_to_stop
    assert not laptops.session().observe().asked_to_stop  # the same command again overrides the stop


def reap(laptops: Laptops, monkeypatch: pytest.MonkeyPatch, skew_s: float = 0.0) -> str:
    """`podium pod reap` on a laptop whose clock is wrong; what it says."""
    project = laptops.project(skew_s=skew_s)
    monkeypatch.setattr(commands, "open_project", lambda *_: project)
    commands.reap(everyone=False, project=None, dry_run=False)
    return said(project)


def test_a_request_in_the_queue_is_not_reaped(laptops, monkeypatch):
    laptops.fake.capacity = {"us-a": 0}
    order = dataclasses.replace(RENT, zones=["us-a"], valid_until="9h")
    heard: list[str] = []

    def cron(argv):
        if laptops.clock.now > 1e9 + 6 * 3600 and not heard:
            heard.append("")
            heard[0] = reap(laptops, monkeypatch)
            laptops.fake.capacity = {}

    laptops.gcloud.before = cron
    project = laptops.project()
    got = rent_slice(project.slices, "demo", order, default_zone=None)
    assert heard == ["no lease has expired"]
    assert got.lease is not None
    assert got.lease - laptops.clock.now > 3.9 * 3600, "a lease counts from the grant"


@pytest.mark.parametrize("hours", [5.0, 20.0])
def test_a_reaper_whose_clock_is_ahead_deletes_nothing_early(laptops, monkeypatch, hours):
    laptops.session()
    heard = reap(laptops, monkeypatch, skew_s=hours * 3600)
    assert "by its machines' clocks it ends in 239 minutes" in heard
    laptops.fake.preempt("demo")
    assert "it is SUSPENDED, and is deleted a day later" in reap(laptops, monkeypatch, skew_s=hours * 3600)
    assert len(laptops.nodes()) == 1
    laptops.clock.sleep(4 * 3600 + 86400)
    assert "deleted demo" in reap(laptops, monkeypatch)
    assert laptops.fake.everything() == []


def test_a_lease_that_is_renewed_while_machines_are_asked_keeps_the_slice(laptops, monkeypatch):
    session = laptops.session()
    laptops.clock.sleep(5 * 3600)

    def renew(argv):
        if any("date +%s" in word for word in argv):
            laptops.gcloud.before = lambda argv: None
            lease = str(int(laptops.clock.now) + 3600)
            session._project.slices.label(session.slice, {LEASE: lease, LEASE_S: "3600"})

    laptops.gcloud.before = renew
    assert "nothing was deleted" in reap(laptops, monkeypatch)
    assert len(laptops.nodes()) == 1


def test_strangers_in_every_zone_end_a_run_that_lost_its_slice(laptops):
    session = laptops.session()
    laptops.fake.preempt("demo")
    for zone in ZONES[1:]:
        laptops.fake.stranger(zone, "demo")
    project = session._project

    def take(argv):
        if "create" in argv:
            laptops.gcloud.before = lambda argv: None
            laptops.fake.stranger(ZONES[0], "demo")

    laptops.gcloud.before = take
    laptops.fake.capacity = {ZONES[0]: 0}
    assert follow(project, session, RunOptions(keep_alive=True)) == 1
    assert "the name demo is taken in every zone; nothing was requested" in said(project)
    assert len(laptops.nodes()) == 3


@pytest.mark.parametrize("text", ["[Errno 28] No space left on device", "[SSL: CERTIFICATE_VERIFY_FAILED]"])
def test_who_gives_up_says_what_is_rented_and_what_deletes_it(laptops, text):
    full = []

    def runner(argv, timeout_s):
        if full:
            return Finished(
                argv=tuple(argv), returncode=1, stdout="", stderr=f"ERROR: gcloud crashed (OSError): {text}\n"
            )
        return laptops.gcloud(argv, timeout_s)

    project = laptops.project(runner)
    session = laptops.session(project=project)
    full.append(True)
    with pytest.raises(ValueError, match="gcloud crashed"):
        follow(project, session, RunOptions(keep_alive=True))
    assert "demo may still be rented and cost money; podium pod down demo deletes it" in said(project)


def test_an_order_without_a_run_has_none(laptops):
    project: Project = laptops.project()
    slices: Slices = project.slices
    assert rent_slice(slices, "demo", RENT, default_zone=None).run is None
