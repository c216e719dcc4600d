"""Several laptops of one owner, and a reaper, on slices of one name: each acts on its own slice alone."""

import base64
import contextlib
import gzip
import itertools
import json
import re
from pathlib import Path

import pytest

from podium.job.job_records import NO_JOB, STOPPED
from podium.pods import commands
from podium.pods.endings import Endings
from podium.pods.gcloud import Finished, GcloudError
from podium.pods.inventory import LOST, STARTED, STATE, STOP, label_text
from podium.pods.options import Rent, RunOptions
from podium.pods.project import Project
from podium.pods.rental import new_order
from podium.pods.run_command import follow
from podium.pods.secrets import Secrets
from podium.pods.session import Session
from podium.pods.slices import DeletedError, Slices, TakenError
from podium.pods.world import World
from tests.pods.clock import Clock
from tests.pods.fake_gcloud import Cloud, Heard, made_spec

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
        text = "{}" if "agent stop" in command else f"{self.clock.time():.0f}" if "date +%s" in command else ""
        packed = base64.b64encode(gzip.compress(text.encode())).decode()
        return 0, f"{mark[1]} {worker} {0 if text else 3} {packed}\n", ""

    def copy(self, worker: int, files: object, folder: str) -> int:
        raise AssertionError


class Busy(Idle):
    """Machines on which a job runs."""

    def run(self, worker: int, command: str, timeout_s: float) -> tuple[int, str, str]:
        if "agent status" not in command:
            return super().run(worker, command, timeout_s)
        mark = re.search(r'echo "(\w+) \$worker', command)
        assert mark
        status = json.dumps({**NO_JOB, "job": "run-1", "state": "running", "created": self.clock.time()})
        return 0, f"{mark[1]} {worker} 0 {base64.b64encode(gzip.compress(status.encode())).decode()}\n", ""


class Laptops(Cloud):
    """A project, and laptops of Ada's."""

    def __init__(self, file: Path) -> None:
        super().__init__(zones=ZONES)
        self.gcloud.hosts = Idle(self.clock)
        self.file = file

    def project(self, runner=None, skew_s: float = 0.0) -> Project:
        """A laptop."""
        slices = self.owned_by("ada", runner)
        slices.clock = Skewed(self.clock, skew_s)
        world = World(runner=runner or self.gcloud, clock=slices.clock)
        project = Told(world=world, slices=slices, zone=None, secrets=Secrets({}))
        project.__dict__["said"] = said = []
        project.__dict__["hear"] = said.append
        slices.say = project.say
        return project

    def opened(
        self, name: str = "run", project: Project | None = None, *, own: bool = True, fresh: bool = True
    ) -> Session:
        """`podium pod run --keep-alive --slice demo` on a laptop, if `fresh` with `--type v4-16`, before it rents."""
        project, spec = project or self.project(), made_spec(name, self.file)
        run = label_text(spec.prefix)
        order = new_order("demo", RENT, project.slices, ZONES, run, bucket="b" if own else None)
        endings = Endings(project.slices, "b" if own else None, run)
        return Session(project, spec, order, ZONES, endings, fresh=fresh)

    def session(self, name: str = "run", project: Project | None = None, *, own: bool = True) -> Session:
        """The same, with its slice."""
        session = self.opened(name, project, own=own)
        session.rent()
        return session

    def started(self, session: Session) -> None:
        """A job was started on its slice."""
        assert session.slice is not None
        session._project.slices.label(session.slice, {STATE: STARTED})

    def nodes(self) -> list[str]:
        return [node["id"] for node in self.fake.nodes.values()]


class Told(Heard):
    """A project that keeps what it says and answers."""

    def answer(self, text: str, *, end: str = "\n") -> None:
        self.say(text)


@pytest.fixture
def laptops(tmp_path: Path) -> Laptops:
    (tmp_path / "code.bundle").write_text("code")
    return Laptops(tmp_path / "code.bundle")


def said(project: Project) -> str:
    return "\n".join(project.__dict__.get("said", []))


@pytest.mark.parametrize("theirs", ["run", "other"])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("act", ["give back", "rent"])
def test_a_laptop_that_wakes_deletes_nothing_that_another_laptop_rented(laptops, act, lost, theirs):
    """Its lid is closed before each request in turn; another laptop has rented a slice meanwhile."""
    slept = 0
    for request in itertools.count():
        session = laptops.session()
        machines: list[str] = []
        sent = itertools.count()

        def instant(method: str, request=request, sent=sent, machines=machines) -> None:
            if next(sent) == request:
                other = laptops.project()
                other.slices.down("demo")
                laptops.session(theirs, other)
                machines.extend(laptops.nodes())

        if lost:
            laptops.fake.preempt("demo")
        laptops.gcloud.instant = instant
        with contextlib.suppress(GcloudError, TakenError, DeletedError):  # what it labels is gone, or the title taken
            session.rent() if act == "rent" else session.give_back(0, told=False)
        laptops.gcloud.instant = lambda method: None
        if not machines:  # the command had ended before
            break
        slept += 1
        if act == "give back":
            session.give_back(0, told=True)
        assert laptops.nodes() == machines, request
        assert len(machines) == 1
        laptops.project().slices.down("demo")
    assert slept >= 4


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_down_deletes_what_it_has_found_and_nothing_that_was_rented_later(laptops, monkeypatch, method):
    laptops.session()
    project, machines = laptops.project(), []
    monkeypatch.setattr(commands, "open_project", lambda *_: project)

    def instant(sent: str) -> None:
        if sent == method:
            laptops.gcloud.instant = lambda sent: None
            other = laptops.project()
            other.slices.down("demo")
            laptops.session("other", other)
            machines.extend(laptops.nodes())

    laptops.gcloud.instant = instant
    commands.down(name="demo", project=None, dry_run=False)
    assert laptops.nodes() == machines != []


@pytest.mark.parametrize("act", ["reap", "replace", "replace, as a reaper was about to"])
@pytest.mark.parametrize("method", ["GET", "PATCH"])
def test_a_job_that_was_started_after_the_look_keeps_its_slice(laptops, monkeypatch, act, method):
    """The laptop sleeps after it has seen a slice that is idle, or machines that do not answer."""
    session = laptops.session()
    laptops.started(session)
    if "reaper" in act:
        laptops.project().slices.label(session.slice, {STATE: LOST})
    laptops.clock.sleep(5 * 3600)
    machines = laptops.nodes()
    label = Slices.label

    def labelled(slices, tpu_slice, labels) -> None:
        laptops.gcloud.instant = instant
        label(slices, tpu_slice, labels)

    def instant(sent: str) -> None:
        if sent == method:
            laptops.gcloud.hosts = Busy(laptops.clock)

    monkeypatch.setattr(Slices, "label", labelled)
    if act == "reap":
        assert "nothing was deleted" in reap(laptops, monkeypatch)
    else:
        session.replace()
        session.rent()
    assert laptops.nodes() == machines
    assert session.observe().slice.mark == STARTED


def test_a_stop_that_was_heard_is_remembered_when_the_slice_is_gone(laptops):
    """A slice that the user made tells it by its label alone."""
    maker = laptops.opened(own=False)
    maker.rent()
    laptops.started(maker)
    keeper = laptops.opened()
    keeper.rent()
    assert keeper.observe().over is None
    laptops.project().slices.label(keeper.slice, {STATE: f"{STOP}word"})
    assert keeper.observe().over == STOPPED
    laptops.fake.vanish("demo")
    assert keeper.observe().over == STOPPED
    with pytest.raises(DeletedError, match="the run is over"):
        keeper.rent()
    assert laptops.nodes() == []


def test_what_was_rented_for_another_run_is_neither_used_nor_deleted(laptops):
    laptops.session()
    second = laptops.opened("other")
    with pytest.raises(TakenError, match="was rented for the run run-"):
        second.rent()
    assert not second.give_back(1, told=False)
    assert len(laptops.nodes()) == 1
    with pytest.raises(TakenError, match="was rented for the run run-"):
        laptops.opened("other", fresh=False)


def test_of_two_runs_that_ask_at_once_the_second_gives_its_slice_back(laptops):
    """Both looked for another run's slice before either asked for one, so both ask."""
    first, second = laptops.opened(), laptops.opened("other")

    def instant(method: str) -> None:
        if method == "POST":
            laptops.gcloud.instant = lambda method: None
            first.rent()

    laptops.gcloud.instant = instant
    with pytest.raises(TakenError, match="was rented for the run run-"):
        second.rent()
    assert [node["name"].rpartition("/")[2] for node in laptops.fake.nodes.values()] == [first.slice.name]


def test_a_title_that_another_run_took_while_a_setup_lasted_is_not_taken_back(laptops, monkeypatch):
    session, machines = laptops.session(), []

    def prepared(remote, spec) -> tuple[str, bool]:
        other = laptops.project()
        other.slices.down("demo")
        laptops.session("other", other)
        machines.extend(laptops.nodes())
        return "run-1", True

    monkeypatch.setattr("podium.pods.session.prepare", prepared)
    with contextlib.suppress(GcloudError):  # what it labels is gone
        session.start()
    with pytest.raises(TakenError):
        session.rent()
    assert not session.give_back(1, told=False)
    assert laptops.nodes() == machines


def test_a_slice_that_another_laptop_replaced_in_another_zone_is_followed(laptops):
    session = laptops.session()
    other = laptops.session()
    laptops.fake.preempt("demo")
    laptops.fake.capacity = {"us-a": 0}
    other.observe()
    other.replace()
    other.rent()
    found = session.observe()
    assert found.slice is not None
    assert (found.slice.zone, found.slice.name) == ("us-b", other.slice and other.slice.name)


def test_a_laptop_tells_others_that_the_run_has_ended_before_it_deletes_the_slice(laptops):
    first, second = laptops.session(), laptops.session()
    laptops.started(first)
    assert first.give_back(3, told=False)
    seen = second.observe()
    assert (seen.slice, seen.over, laptops.nodes()) == (None, 3, [])
    assert not second.give_back(3, told=True)
    assert laptops.opened().observe().over is None, "a later command is a new one"


def stop(laptops: Laptops, monkeypatch: pytest.MonkeyPatch) -> str:
    """`podium pod stop demo` on another laptop; what it says."""
    project = laptops.project()
    monkeypatch.setattr(commands, "open_project", lambda *_: project)
    commands.stop(name="demo", project=None, dry_run=False)
    return said(project)


def test_a_stop_reaches_a_laptop_that_was_asleep_in_its_request(laptops, monkeypatch):
    """It saw the slice lost; while its lid was closed, the run went on elsewhere, was stopped, and was given back."""
    asleep, awake = laptops.session(), laptops.session()
    laptops.fake.preempt("demo")
    asleep.observe()
    asleep.replace()

    def instant(sent: str) -> None:
        if sent == "POST":
            laptops.gcloud.instant = lambda sent: None
            awake.observe()
            awake.rent()
            stop(laptops, monkeypatch)
            assert awake.observe().over == 143
            awake.give_back(143, told=True)

    laptops.gcloud.instant = instant
    with pytest.raises(DeletedError, match="the run is over"):
        asleep.rent()
    assert asleep.observe().over == 143
    assert laptops.fake.everything() == []


def test_a_stop_before_a_laptop_hears_that_its_slice_was_granted_is_heard(laptops, monkeypatch):
    """Without a bucket, too: the label of the slice tells it."""

    def stop_once_granted(argv):
        if any(node["state"] == "READY" for node in laptops.fake.nodes.values()):
            laptops.gcloud.before = lambda argv: None
            stop(laptops, monkeypatch)

    session = laptops.opened(own=False)
    laptops.gcloud.before = stop_once_granted
    session.rent()
    assert session.observe().over == 143
    again = laptops.session(own=False)
    assert again.observe().over is None  # the same command again overrides the stop


@pytest.mark.parametrize("skew_s", [-9000.0, 0.0, 9000.0])
@pytest.mark.parametrize(("stopped_s", "status"), [(-600.0, None), (600.0, STOPPED)])
def test_a_command_that_looks_late_obeys_the_stops_that_were_given_after_it(laptops, stopped_s, status, skew_s):
    """Its laptop was offline for an hour, and its clock is wrong."""
    stopping = Endings(laptops.project().slices, "b", "run-1")
    laptops.clock.sleep(600.0)
    if stopped_s < 0:
        stopping.add(STOPPED, "word")
    laptops.clock.sleep(600.0)
    late = laptops.project(skew_s=skew_s).slices
    late.began = late.clock.time()
    laptops.clock.sleep(600.0)
    if stopped_s > 0:
        stopping.add(STOPPED, "word")
    laptops.clock.sleep(3600.0)
    keeping = Endings(late, "b", "run-1")
    keeping.begin()
    assert keeping.status() == status


def test_a_stop_withdraws_a_request_in_the_queue(laptops, monkeypatch):
    laptops.fake.capacity = dict.fromkeys(ZONES, 0)
    heard = []

    def instant(sent: str) -> None:
        if not heard and any("WAITING" in each["state"]["state"] for each in laptops.fake.queued.values()):
            heard.append(None)
            heard.append(stop(laptops, monkeypatch))

    session = laptops.opened()
    laptops.gcloud.instant = instant
    with pytest.raises(DeletedError):
        session.rent()
    assert "so nothing ran; the request is withdrawn" in heard[1]
    assert session.observe().over == 143
    assert laptops.fake.everything() == []


def test_a_bucket_that_this_account_may_not_use_is_named_and_done_without(laptops):
    laptops.fake.storage_fails = (
        "ERROR: (gcloud.storage.objects.list) [ada] does not have permission to access b instance [b]"
    )
    session = laptops.session()
    assert not session.observe().wanted
    assert said(session._project).count("stops cannot be recorded in the run's bucket") == 1


def reap(laptops: Laptops, monkeypatch: pytest.MonkeyPatch, skew_s: float = 0.0) -> str:
    """`podium pod reap` on a laptop whose clock is wrong; what it says."""
    project = laptops.project(skew_s=skew_s)
    monkeypatch.setattr(commands, "open_project", lambda *_: project)
    commands.reap(everyone=False, project=None, dry_run=False)
    return said(project)


def test_a_request_in_the_queue_is_not_reaped(laptops, monkeypatch):
    laptops.fake.capacity = dict.fromkeys(ZONES, 0)
    heard: list[str] = []

    def cron(argv):
        if laptops.clock.now > 1e9 + 60 and not heard:
            heard.append("")
            heard[0] = reap(laptops, monkeypatch, skew_s=48 * 3600.0)
            laptops.fake.capacity = {}

    laptops.gcloud.before = cron
    laptops.session()
    assert heard == ["nothing was deleted"]


@pytest.mark.parametrize("hours", [5.0, 20.0])
def test_a_reaper_whose_clock_is_ahead_deletes_nothing_early(laptops, monkeypatch, hours):
    laptops.session()
    assert "nothing was deleted" in reap(laptops, monkeypatch, skew_s=hours * 3600)
    laptops.fake.preempt("demo")
    assert "nothing was deleted" in reap(laptops, monkeypatch, skew_s=hours * 3600)
    assert len(laptops.nodes()) == 1
    laptops.clock.sleep(4 * 3600 + 86400)
    assert "deleted demo" in reap(laptops, monkeypatch)
    assert laptops.fake.everything() == []


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
