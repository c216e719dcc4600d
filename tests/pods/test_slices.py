"""Renting and giving back against a fake API that breaks every step: never two, never somebody else's, none left."""

import dataclasses
import random
import re
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from podium.pods.gcloud import Finished, GcloudError, Order
from podium.pods.inventory import (
    IDLE_S,
    LABEL_LENGTH,
    LOST,
    NAME,
    OWNER,
    RUN,
    STATE,
    Slice,
    label_text,
    owner_label,
    read_slices,
    zones_label,
)
from podium.pods.options import Rent
from podium.pods.rental import new_order
from podium.pods.slices import DeletedError, PendingError, SliceError
from tests.pods import fake_gcloud
from tests.pods.fake_gcloud import Closed, Cloud
from tests.pods.fake_tpu import Fault

ZONES = ("us-a", "us-b", "eu-c")
ORDER = Order(
    name="run",
    accelerator="v6e-16",
    runtime="image",
    spot=True,
    queued=True,
    valid_until_s=3600,
    labels={OWNER: "ada", IDLE_S: "7200"},
)
KEPT = dataclasses.replace(ORDER, labels={**ORDER.labels, RUN: "mine-1"}, run="mine-1")
"""For a run that is kept alive."""
DIRECT = dataclasses.replace(ORDER, queued=False)


class World(Cloud):
    """A fake project, and Ada's view of it."""

    def __init__(self, **options):
        super().__init__(zones=ZONES, **options)
        self.slices = self.owned_by("ada")

    def ours(self) -> set[str]:
        """Zones in which the fake holds something of Ada's that is not being deleted."""
        zones = set()
        for full, node in self.fake.nodes.items():
            if node.get("labels", {}).get(OWNER) == "ada" and node["state"] != "DELETING":
                zones.add(full.split("/")[3])
        for full, queued in self.fake.queued.items():
            labels = queued["tpu"]["nodeSpec"][0]["node"].get("labels", {})
            if labels.get(OWNER) == "ada" and queued["state"]["state"] != "DELETING":
                zones.add(full.split("/")[3])
        return zones


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize("order", [ORDER, DIRECT])
def test_a_slice_comes_up_once_and_goes_down(world, order):
    got = world.slices.up(order, ZONES)
    assert (got.state, got.zone, got.accelerator, got.spot, len(got.addresses)) == ("ready", "us-a", "v6e-16", True, 4)
    again = world.slices.up(order, ZONES)
    assert (again.zone, world.ours()) == ("us-a", {"us-a"})
    assert [each.zone for each in world.slices.down("run")] == ["us-a"]
    assert world.fake.everything() == []
    assert world.slices.down("run") == []


def test_zones_are_asked_in_order_and_each_reason_is_told(world):
    world.fake.capacity = {"us-a": 0, "us-b": 0}
    got = world.slices.up(dataclasses.replace(ORDER, valid_until_s=300), ZONES)
    assert got.zone == "eu-c"
    assert world.ours() == {"eu-c"}
    refused = [line.partition(":")[0] for line in world.said if "not fulfilled" in line]
    assert refused == ["us-a", "us-b"]


def test_with_no_zone_left_nothing_stands_and_all_reasons_are_told(world):
    world.fake.capacity = {"us-b": 0}
    world.fake.faults = [Fault("POST us-a", "quota"), Fault("POST eu-c", "403")]
    with pytest.raises(SliceError) as refused:
        world.slices.up(DIRECT, ZONES)
    told = str(refused.value)
    assert "Limit: 0 in zone us-a" in told
    assert "iam-admin/quotas" in told
    assert 'no more capacity in the zone "us-b"' in told
    assert "denied on 'eu-c'" in told
    assert world.fake.everything() == []


def test_what_a_lost_reply_created_is_taken_on(world):
    world.fake.faults = [Fault("POST us-a queuedResources", "lost_reply")]
    assert world.slices.up(ORDER, ZONES).zone == "us-a"
    assert world.ours() == {"us-a"}


def test_a_zone_that_may_have_made_it_is_not_left_for_another(world):
    world.fake.faults = [Fault("POST us-a", "drop", times=1000)]
    with pytest.raises(SliceError, match=r"it is unknown whether us-a created run-.*podium pod down run"):
        world.slices.up(ORDER, ZONES)
    assert not any("us-b" in command for request in world.gcloud.commands for command in request if "create" in request)


def test_a_request_that_is_done_after_its_zone_refused_is_undone(world):
    world.fake.faults = [Fault("POST us-a", "late"), Fault("POST us-a", "quota")]
    assert world.slices.up(ORDER, ZONES).zone == "us-b"
    assert world.ours() == {"us-b"}


def test_a_request_that_is_done_after_the_laptop_was_closed_is_undone(world, monkeypatch):
    monkeypatch.setattr(fake_gcloud, "ATTEMPTS", 1)
    world.fake.faults = [Fault("POST us-a", "late")]
    close_when(world, lambda: any(method == "POST" for method, *_ in world.fake.requests))
    with pytest.raises(Closed):
        world.slices.up(ORDER, ZONES)
    world.gcloud.before = lambda argv: None
    assert world.fake.nodes == world.fake.queued == {}
    world.slices.down("run")
    assert world.fake.everything() == []


def close_when(world: World, due: Callable[[], bool]) -> None:
    """Close the laptop before the first command for which it is due."""

    def close(argv):
        if due():
            raise Closed

    world.gcloud.before = close


def test_a_strangers_node_in_the_same_zone_outlives_our_request(world):
    world.fake.capacity = {"us-a": 0}
    close_when(world, lambda: len(world.gcloud.commands) > 12)
    with pytest.raises(Closed):
        world.slices.up(ORDER, ["us-a"])
    world.gcloud.before = lambda argv: None
    node = world.fake.stranger("us-a", "run")
    assert len(world.slices.down("run")) == 1
    assert world.fake.everything() == [node]


def test_too_many_requests_are_made_again(world):
    world.fake.faults = [Fault("POST us-a", "429", times=3)]
    assert world.slices.up(ORDER, ZONES).zone == "us-a"


@pytest.mark.parametrize("owner", [None, "bob"])
def test_what_somebody_else_calls_the_same_hinders_nobody_and_is_not_touched(world, owner):
    labels = {OWNER: owner, NAME: "run"} if owner else {}
    theirs = sorted(world.fake.stranger(zone, "run", labels) for zone in ZONES)
    assert world.slices.up(ORDER, ZONES).zone == "us-a"
    assert world.ours() == {"us-a"}
    assert len(world.slices.down("run")) == 1
    assert world.fake.everything() == theirs


@pytest.mark.parametrize("order", [ORDER, DIRECT])
def test_a_zone_that_cannot_be_reached_is_no_zone_without_slices(world, order):
    world.slices.up(order, ZONES)
    world.fake.unreachable = {"us-a"}
    with pytest.raises(GcloudError, match="us-a cannot be reached"):
        world.slices.down("run")
    world.fake.unreachable = set()
    assert len(world.slices.down("run")) == 1
    assert world.fake.everything() == []


def test_a_preempted_slice_is_deleted_and_rented_again(world):
    world.slices.up(ORDER, ZONES)
    world.fake.preempt("run")
    assert [(each.state, each.detail) for each in world.slices.titled("run")] == [("dead", "SUSPENDED")]
    assert world.slices.up(ORDER, ZONES).state == "ready"
    assert world.ours() == {"us-a"}


def test_deleting_while_machines_are_being_made(world):
    close_when(world, lambda: any(each["state"] == "CREATING" for each in world.fake.nodes.values()))
    with pytest.raises(Closed):
        world.slices.up(ORDER, ZONES)
    world.gcloud.before = lambda argv: None
    assert [each.state for each in world.slices.down("run")] == ["creating"]
    assert world.fake.everything() == []


def test_one_that_somebody_deletes_while_it_is_made_is_not_asked_for_elsewhere(world):
    world.fake.capacity = {"us-a": 0}

    def vanish(argv):
        if any(each["state"]["state"] == "WAITING_FOR_RESOURCES" for each in world.fake.queued.values()):
            world.fake.vanish("run")

    world.gcloud.before = vanish
    with pytest.raises(DeletedError, match=r"run-\w+ in us-a was deleted while it was being created"):
        world.slices.up(ORDER, ["us-a", "us-b"])
    assert world.fake.everything() == []


def test_machines_that_stay_in_creation_are_given_up_and_asked_for_elsewhere():
    world = World(provision_s=10.0)
    world.fake.stuck_zones = {"us-a"}
    began = world.clock.now
    assert world.slices.up(dataclasses.replace(ORDER, valid_until_s=4 * 3600), ["us-a", "us-b"]).zone == "us-b"
    assert world.clock.now - began < 2400
    assert any("its machines have been PROVISIONING, node CREATING for 30 minutes" in line for line in world.said)


def test_a_closed_lid_is_no_time_in_which_a_zone_gave_nothing(world, monkeypatch):
    """The wall clock jumps by six hours while the request waits; the machines come a moment later."""
    jump = iter([0.0] * 4 + [6 * 3600.0] * 10_000)
    monkeypatch.setattr(world.clock, "time", lambda: world.clock.now + next(jump), raising=False)
    assert world.slices.up(ORDER, ["us-a", "us-b"]).zone == "us-a"


LOGIN = "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: invalid_grant\n gcloud auth login\n"


def offline_from(world: World, states: tuple[str, ...], stderr: str, seconds: float) -> None:
    """From the moment on at which a request is in one of these states, gcloud fails for some time."""
    began: list[float] = []
    inner = world.gcloud

    def run(argv, timeout_s):
        if not began and any(each["state"]["state"] in states for each in world.fake.queued.values()):
            began.append(world.clock.now)
        if began and world.clock.now < began[0] + seconds:
            world.clock.sleep(10.0)
            return Finished(argv=tuple(argv), returncode=1, stdout="", stderr=stderr)
        return inner(argv, timeout_s)

    world.slices = world.owned_by("ada", run, follows=True)


@pytest.mark.parametrize(
    ("stderr", "seconds"),
    [
        ("ERROR: gcloud crashed (ConnectionError): unable to find the server\n", 6 * 3600.0),
        ("ERROR: (gcloud.x) ABORTED: the operation was aborted\n", 1500.0),
        ("ERROR: (gcloud.x) CANCELLED: the client closed\n", 1500.0),
        ("ERROR: (gcloud.x) DATA_LOSS: nobody knows what\n", 1500.0),
    ],
    ids=["offline", "aborted", "cancelled", "unknown"],
)
def test_a_request_in_the_queue_is_waited_for_through_errors(world, stderr, seconds):
    offline_from(world, ("ACCEPTED", "WAITING_FOR_RESOURCES"), stderr, seconds)
    got = world.slices.up(ORDER, ["us-a"])
    assert got.state == "ready"
    assert len(world.fake.everything()) == 2


@pytest.mark.parametrize(
    "stderr",
    [
        LOGIN,
        "ERROR: gcloud crashed (OSError): [Errno 28] No space left on device\n",
        "ERROR: gcloud crashed (SSLError): Max retries exceeded: [SSL: CERTIFICATE_VERIFY_FAILED] unable to connect\n",
    ],
    ids=["login", "disk", "certificate"],
)
def test_who_gives_up_waiting_says_what_may_be_rented_and_what_deletes_it(world, stderr):
    offline_from(world, ("ACCEPTED",), stderr, 7200.0)
    with pytest.raises(PendingError, match="run may be requested or rented in us-a: podium pod down run withdraws it"):
        world.slices.up(ORDER, ["us-a"])


def asleep_in(world: World, method: str, meanwhile: Callable[[], object]) -> None:
    """The lid is closed inside a command, before its first request of this kind; then other things happen."""

    def instant(sent: str) -> None:
        if sent == method:
            world.gcloud.instant = lambda method: None
            meanwhile()

    world.gcloud.instant = instant


def test_an_update_of_labels_that_was_asleep_takes_no_label_back(world):
    """gcloud reads all labels and writes them all; what another laptop wrote in between must not depend on it."""
    got = world.slices.up(KEPT, ["us-a"])
    other = world.owned_by("ada")
    asleep_in(world, "PATCH", lambda: other.label(got, {STATE: "stop-b"}))
    world.slices.label(got, {STATE: "stop-a"})
    (now,) = world.slices.titled("run")
    assert (now.mark, {key: now.labels[key] for key in KEPT.labels}) == ("stop-a", KEPT.labels)


def test_two_that_were_asked_for_at_once_become_one(world):
    """A laptop was asleep between its look and its request; the other one's came first, and stays."""
    other = world.owned_by("ada")
    first: list[Slice] = []
    asleep_in(world, "POST", lambda: first.append(other.up(KEPT, ["us-b"])))
    assert world.slices.up(KEPT, ["us-a", "us-b"]).name == first[0].name
    assert world.ours() == {"us-b"}


def test_a_slice_that_is_being_given_up_is_not_used_again(world):
    got = world.slices.up(KEPT, ["us-a"])
    world.slices.label(got, {STATE: LOST})
    again = world.slices.up(KEPT, ["us-a"])
    assert (again.name != got.name, again.mark) == (True, "")


def test_a_request_is_withdrawn_only_while_it_has_no_machines(world):
    """The lid is closed in the command that withdraws it, and it is granted meanwhile."""
    world.fake.capacity = {"us-a": 0}
    close_when(world, lambda: any("WAITING" in each["state"]["state"] for each in world.fake.queued.values()))
    with pytest.raises(Closed):
        world.slices.up(KEPT, ["us-a"])
    world.gcloud.before = lambda argv: None
    (waiting,) = world.slices.titled("run")

    def granted() -> None:
        world.fake.capacity = {}
        for _ in range(2):
            world.clock.sleep(600.0)
            world.fake.tick()

    asleep_in(world, "DELETE", granted)
    assert not world.slices.withdraw(waiting)
    assert [each.state for each in world.slices.titled("run")] == ["ready"]


def test_a_run_that_is_over_asks_for_nothing_and_takes_its_request_back(world):
    with pytest.raises(DeletedError, match="the run is over"):
        world.slices.up(KEPT, ZONES, over=lambda: True)
    assert not world.fake.requests or not any(method == "POST" for method, *_ in world.fake.requests)
    asked = iter([False, True])  # while the request was made
    with pytest.raises(DeletedError, match="the run is over"):
        world.slices.up(KEPT, ZONES, over=lambda: next(asked))
    assert world.fake.everything() == []


def test_another_type_under_the_same_name_is_refused(world):
    world.slices.up(ORDER, ZONES)
    with pytest.raises(SliceError, match="exists in us-a as v6e-16, spot; ask for that"):
        world.slices.up(dataclasses.replace(ORDER, accelerator="v6e-8"), ZONES)
    with pytest.raises(SliceError, match="podium pod down run"):
        world.slices.up(dataclasses.replace(ORDER, spot=False), ZONES)


@pytest.mark.parametrize("kind", ["403", "503"])
def test_a_zone_whose_queue_cannot_be_read_is_named(world, kind):
    world.slices.up(ORDER, ["us-a"])
    world.fake.faults = [Fault("GET us-b queuedResources", kind, times=1000)]
    if kind == "403":
        assert [each.zone for each in world.slices.survey()] == ["us-a"]
        assert any("us-b: its queue cannot be read" in line for line in world.said)
    else:
        with pytest.raises(GcloudError, match="currently unavailable"):
            world.slices.survey()


def test_a_node_is_found_without_reading_queues(world):
    world.slices.up(ORDER, ["us-b"])
    world.gcloud.commands.clear()
    assert (world.slices.locate("run").zone, world.slices.locate(None).title) == ("us-b", "run")
    assert len(world.gcloud.commands) == 2
    with pytest.raises(SliceError, match="no slice of yours is named other"):
        world.slices.locate("other")
    world.slices.up(dataclasses.replace(ORDER, name="second"), ["us-a"])
    with pytest.raises(SliceError, match="several slices: run, second; name one"):
        world.slices.locate(None)


def test_owners_that_look_alike_are_told_apart():
    assert owner_label("a.b@x.org") != owner_label("a-b@x.org")
    assert re.fullmatch(r"a-b-x-org-[0-9a-f]{8}", owner_label("a.b@x.org"))
    assert len(owner_label(f"{'a' * 80}@x.org")) <= LABEL_LENGTH


def test_labels_fit_their_rules():
    assert label_text("Ada.Lovelace@Example.org") == "ada-lovelace-example-org"
    assert zones_label(ZONES) == "us-a_us-b_eu-c"
    assert len(zones_label([f"europe-west{index}-a" for index in range(9)])) <= LABEL_LENGTH
    assert read_slices([], []) == []


@pytest.mark.parametrize("name", ["", "Run", "1run", "run_1", "run-", "a" * 41])
def test_names_that_the_api_refuses_are_refused_here(name):
    with pytest.raises(SliceError, match="lower-case letters"):
        new_order(name, Rent(type="v6e-8"), World().slices, ZONES)


FAULTS = ("429", "503", "403", "quota", "drop", "lost_reply", "late", "operation")


def one_story(seed: int) -> None:
    """A few commands while things break, with the laptop closed now and then; then all is well again."""
    rng = random.Random(seed)
    world = World(provision_s=rng.choice([10.0, 60.0, 200.0]), operation_s=rng.choice([1.0, 20.0]))
    stranger = world.fake.stranger(rng.choice(ZONES), rng.choice(["run", "theirs"]))
    order = dataclasses.replace(rng.choice([ORDER, DIRECT]), valid_until_s=rng.choice([120, 600]))
    for _ in range(rng.randint(2, 5)):
        world.fake.capacity = {zone: rng.choice([0, 1, 9]) for zone in ZONES if rng.random() < 0.5}
        world.fake.faults = [
            Fault(f"{rng.choice(['GET', 'POST', 'DELETE', ''])}.*{zone}", rng.choice(FAULTS), rng.choice([1, 2, 9]))
            for zone in ZONES
            if rng.random() < 0.6
        ]
        close_at = len(world.gcloud.commands) + rng.randint(1, 40) if rng.random() < 0.4 else None

        def watch(argv, close_at=close_at):
            assert len(world.ours()) <= 1, world.gcloud.commands[-5:]
            if len(world.gcloud.commands) == close_at:
                raise Closed

        world.gcloud.before = watch
        command = rng.choice(["up", "up", "down", "preempt", "vanish"])
        try:
            if command == "up":
                got = world.slices.up(order, rng.sample(ZONES, 3))
                assert world.ours() == {got.zone}
            elif command == "down":
                world.slices.down("run")
                assert not world.ours()
            elif command == "preempt":
                world.fake.preempt("run")
            elif not stranger.endswith("/run"):
                world.fake.vanish("run")
        except (SliceError, GcloudError, Closed):
            pass
        agrees_with_the_ledger(world)
    world.fake.faults, world.gcloud.before = [], lambda argv: None
    world.slices.down("run")
    assert world.fake.everything() == [stranger]


def agrees_with_the_ledger(world: World) -> None:
    """What `podium pod ls` would show is what the fake holds."""
    faults, before = world.fake.faults, world.gcloud.before
    world.fake.faults, world.gcloud.before = [], lambda argv: None
    shown: list[Slice] = world.slices.survey()
    listed = {(each.zone, each.name) for each in shown}
    held = {(full.split("/")[3], full.rpartition("/")[2]) for full in (*world.fake.nodes, *world.fake.queued)}
    assert listed == held
    world.fake.faults, world.gcloud.before = faults, before


@pytest.mark.parametrize("block", range(10))
def test_random_faults_leave_nothing_behind(block):
    for seed in range(20 * block, 20 * block + 20):
        one_story(seed)


def test_one_project_s_zones_are_listed_while_gcloud_is_slow_for_another(world):
    """Both commands run in threads of one process; the first is answered only after the second."""
    asked, answered = threading.Event(), threading.Event()

    def slow(argv, timeout_s):
        asked.set()
        assert answered.wait(60)
        return world.gcloud(argv, timeout_s)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(lambda: world.owned_by("eve", slow).zones)
        assert asked.wait(60)
        second = threads.submit(lambda: world.slices.zones)
        try:
            assert second.result(30) == sorted(ZONES)
        finally:
            answered.set()
        assert first.result(60) == sorted(ZONES)


def test_lists_of_several_zones_that_fail_at_once_are_waited_for_in_one_line(world):
    together, failed = threading.Barrier(len(ZONES)), set()

    def run(argv, timeout_s):
        if argv[3] == "queued-resources" and argv not in failed:
            failed.add(argv)
            return Finished(argv=argv, returncode=1, stdout="", stderr="ERROR: gcloud crashed (ConnectionError): no\n")
        return world.gcloud(argv, timeout_s)

    slices = world.owned_by("ada", run)
    slices._parallel = len(ZONES)
    slices.clock = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: together.wait(60))
    assert slices.survey(ZONES) == []
    assert world.said == ["waiting for Google, for 30 minutes: gcloud crashed (ConnectionError): no"]
