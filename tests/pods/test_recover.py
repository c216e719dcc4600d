"""Keeping a run alive: the loop around the decisions, and machines that are taken away at random."""

import dataclasses
import hashlib
import itertools
import random
import threading
import time

import pytest

from podium.pods.gcloud import GcloudError, Order
from podium.pods.launch import JobStatus, SetupError
from podium.pods.recover import RUNNING, Counts, Keeper, Policy, decide
from podium.pods.remote import RemoteError, UnusableError
from podium.pods.session import Observation
from podium.pods.slices import DeletedError, RefusedError, SliceError
from tests.pods.clock import Clock
from tests.pods.looks import DONE, FAILED, LOST, MISSING, NONE, POLICY, SLICE, WRONG, seen, status
from tests.pods.pod_world import ZONES

RENTED = "demo is still rented; podium pod down demo deletes it"


class Story:
    """A world that is looked at in a row of looks, and keeps what was done to it."""

    def __init__(self, *looks: Observation | Exception, fails: dict[str, Exception] | None = None) -> None:
        self.looks, self.done, self.said = list(looks), [], []
        self.fails = fails or {}
        self.clock = Clock()
        self.slice, self.title, self.may_run, self.lasting = SLICE, "demo", True, False

    def observe(self) -> Observation:
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def replace(self) -> None:
        self._do("replace")

    def rent(self) -> None:
        self._do("rent")

    def give_back(self, status: int, *, told: bool) -> bool:
        self._do("give back")
        return True

    def show(self, job: JobStatus) -> None:
        pass

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in self.fails:
            raise self.fails.pop(what)

    def outcome(self, policy: Policy = POLICY) -> int:
        return Keeper(self, policy, clock=self.clock, say=self.said.append).keep()


def test_a_preempted_run_goes_on_on_other_machines():
    story = Story(seen(status(), status()), seen(state="dead", detail="PREEMPTED"), seen(NONE, NONE), seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.done == ["replace", "start"]
    assert story.said == ["replace: the slice is lost (PREEMPTED)", "start: no job has been started", "done", RENTED]


def test_a_failed_run_is_stopped_everywhere_and_started_again_after_a_pause():
    story = Story(seen(LOST, FAILED), seen(status(), status()), seen(DONE, DONE))
    began = story.clock.now
    assert story.outcome() == 0
    assert story.done == ["stop", "start"]
    assert story.clock.now - began >= POLICY.pauses_s[0]


def test_failures_without_progress_end_it_and_with_progress_do_not():
    story = Story(*[seen(LOST, FAILED)] * 9)
    assert story.outcome() == 1
    assert story.done.count("start") == 3
    going = [seen(LOST, {**FAILED, "record": FAILED["record"] | {"step": step}}) for step in range(1, 9)]
    story = Story(*going, seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.done.count("start") == 8


def test_a_start_that_fails_is_tried_again_but_not_for_ever():
    story = Story(*[seen(NONE, NONE)] * 3, seen(DONE, DONE), fails={"start": RemoteError("worker 1 did not answer")})
    assert story.outcome() == 0
    assert story.said[:2] == ["start: no job has been started", "worker 1 did not answer"]

    class Never(Story):
        def start(self) -> None:
            self.done.append("start")
            raise RemoteError("no")

    never = Never(*[seen(NONE, NONE)] * 9)
    assert never.outcome() == 1
    assert "started 3 times without a new step" in never.said[-2]
    assert never.done == ["start"] * 3


def test_a_restart_that_reached_nobody_counts_for_nothing():
    """Two failures, and in between an hour without ssh: the third may be restarted too."""
    mute = UnusableError("no worker responds during the setup", answered=False)

    class Mute(Story):
        def start(self) -> None:
            self.done.append("start")
            if 2 <= self.done.count("start") <= 6:
                raise mute

    story = Mute(*[seen(MISSING, MISSING)] * 8, seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.done.count("start") == 8


def test_time_without_google_is_no_time_in_which_setups_failed():
    """A setup fails, then Google is away for hours, then it fails again."""

    class Failing(Story):
        def start(self) -> None:
            self.done.append("start")
            if len(self.done) < 3:
                raise SetupError("the setup failed on worker(s) 0: connection reset")

    away = [GcloudError("unavailable", "gcloud crashed (ConnectionError)")] * 300
    story = Failing(seen(NONE, NONE), *away, *[seen(NONE, NONE)] * 2, seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.done == ["start"] * 3


RENTING = Observation(slice=None, job=None, renting=True)


@pytest.mark.parametrize("first", [True, False])
def test_no_capacity_is_asked_for_again_for_as_long_as_it_takes(first):
    class NoCapacity(Story):
        def rent(self) -> None:
            self.done.append("rent")
            if self.done.count("rent") <= 30:
                raise SliceError("no zone granted v6e-16")

    lost = [] if first else [seen(state="dead", detail="PREEMPTED")]
    story = NoCapacity(*lost, *[RENTING] * 31, seen(NONE, NONE), seen(DONE, DONE))
    began = story.clock.now
    assert story.outcome() == 0
    assert story.done == ["replace"] * len(lost) + ["rent"] * 31 + ["start"]
    assert story.clock.now - began > 4 * 3600  # a stock-out costs nothing


@pytest.mark.parametrize(("kind", "ends"), [("denied", True), ("invalid", True), ("stockout", False), ("quota", False)])
def test_a_refusal_that_will_not_change_ends_the_command(kind, ends):
    order = Order(name="demo", accelerator="v6e-16", runtime="r", spot=True, queued=True, valid_until_s=9, labels={})
    story = Story(
        *[RENTING] * (1 if ends else 2),
        seen(DONE, DONE),
        fails={"rent": RefusedError(order, {"us-a": GcloudError(kind, "no")})},
    )
    assert story.outcome() == int(ends)


def test_machines_that_were_never_usable_are_replaced_and_running_ones_never():
    """A new machine that does not answer, or has not its chips, before anything was started on it."""
    mute = UnusableError("worker 0 cannot be reached by ssh", answered=False)

    class Mute(Story):
        def start(self) -> None:
            self.done.append("start")
            if self.done.count("replace") == 0:
                raise mute

    story = Mute(*[seen(NONE, NONE)] * 7, seen(DONE, DONE))
    story.may_run = False
    assert story.outcome() == 0
    assert story.done == ["start"] * 5 + ["replace", "start"]
    kept = Mute(*[seen(NONE, NONE)] * 40, seen(DONE, DONE))
    kept.may_run = True  # a job was started there once, and may go on
    assert kept.outcome() == 0
    assert set(kept.done) == {"start"}


def test_in_the_end_the_slice_is_deleted_however_often_that_fails():
    offline = GcloudError("unavailable", "no network")

    class Offline(Story):
        def give_back(self, status: int, *, told: bool) -> bool:
            self.done.append("give back")
            if len(self.done) < 9:
                raise offline
            return True

    story = Offline(seen(DONE, DONE))
    assert story.outcome(Policy()) == 0
    assert story.done == ["give back"] * 9
    failed = Story(seen(WRONG, LOST))
    assert failed.outcome(Policy()) == 2
    assert failed.done == ["give back"]


def test_a_lid_that_was_closed_is_one_look():
    """Some workers do not answer and the job failed on others: an hour of sleep is no hour of silence."""

    class Asleep(Story):
        def observe(self) -> Observation:
            self.clock.sleep(3600.0)
            return super().observe()

    story = Asleep(*[seen(LOST, None)] * 4, seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.done == []


def test_the_laptops_network_may_go_away():
    down = GcloudError("unavailable", "gcloud crashed (ConnectionError)")
    story = Story(seen(status(), status()), *[down] * 50, seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.said[0] == (
        "waiting for Google (the run continues without this machine), for as long as it takes: "
        "gcloud crashed (ConnectionError)"
    )
    assert story.said[1:] == ["done", RENTED]


@pytest.mark.parametrize("kind", ["quota", "invalid", "unknown"])
def test_errors_that_pass_within_half_an_hour_end_nothing(kind):
    error = GcloudError(kind, "a text")
    story = Story(*[error] * 55, seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.said[0] == "waiting for Google (the run continues without this machine), for 30 minutes: a text"
    longer = Story(*[error] * 100)
    with pytest.raises(GcloudError, match="a text"):
        longer.outcome()
    assert 1800.0 <= longer.clock.now - Clock().now < 1900.0


@pytest.mark.parametrize("kind", ["missing", "disk", "certificate", "login", "denied", "disabled"])
def test_what_this_machine_or_account_lacks_is_not_waited_for(kind):
    story = Story(GcloudError(kind, "no"))
    with pytest.raises(GcloudError):
        story.outcome()
    assert story.clock.now == Clock().now


def test_a_node_that_ends_during_a_command_is_looked_at_again():
    story = Story(
        seen(NONE, NONE), seen(DONE, DONE), fails={"start": GcloudError("not_found", "NOT_FOUND: nodes/demo")}
    )
    assert story.outcome() == 0
    assert story.done == ["start"]


def test_a_command_ends_with_the_status_that_another_has_recorded():
    assert Story(seen(status(), status()), seen(None, NONE, over=143)).outcome() == 143


def test_a_request_that_another_command_withdrew_ends_the_run_or_is_made_again():
    """With a bucket it is known that the run is not over; without one, it is not."""
    gone = {"rent": DeletedError("it was deleted while it was being created")}
    assert Story(RENTING, fails=dict(gone)).outcome() == 1
    known = dataclasses.replace(RENTING, wanted=True)
    assert Story(known, known, seen(DONE, DONE), fails=dict(gone)).outcome() == 0


def test_a_slice_that_the_user_made_is_not_deleted():
    story, asked = lasting(), lasting()
    assert story.outcome(Policy()) == 0
    assert (story.done, story.said) == ([], ["done", RENTED])
    assert asked.outcome(Policy(down=True)) == 0
    assert asked.done == ["give back"]


def lasting() -> Story:
    story = Story(seen(DONE, DONE))
    story.lasting = True
    return story


def test_silence_is_waited_out_before_machines_are_replaced():
    story = Story(*[seen(LOST, None)] * 32, seen(NONE, NONE), seen(DONE, DONE))
    began = story.clock.now
    assert story.outcome() == 0
    assert "replace" in story.done
    assert story.clock.now - began >= POLICY.silence_s
    assert story.said[0] == "worker 1 does not answer; worker 0 ended after it"
    story = Story(*[seen(LOST, None)] * 20, seen(status(), status()), seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.done == []


def test_running_is_nothing_to_tell():
    story = Story(*[seen(status(), status())] * 5, seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.said == ["done", RENTED]
    assert decide(seen(status(), status()), Counts(), POLICY).why == RUNNING


def test_a_worker_that_falls_silent_is_named_before_the_others_notice():
    story = Story(seen(status(), status()), *[seen(status(), None)] * 3, seen(LOST, None), seen(DONE, DONE))
    assert story.outcome() == 0
    assert story.said == [
        "worker 1 does not answer; no worker has failed yet",
        "worker 1 does not answer; worker 0 ended after it",
        "done",
        RENTED,
    ]


STEPS, SAVE_EVERY, STEP_S = 12, 3, 0.06


@pytest.mark.parametrize("instant", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2))])
def test_machines_taken_at_random_instants_cost_at_most_two_save_intervals(make_world, pod, instant):
    """Real supervisors and jobs on two hosts; the machines, with their disks, are taken and others given."""
    rng = random.Random(instant)
    world = make_world(workers=2)
    world.plan(steps=STEPS, step_s=STEP_S, save_every=SAVE_EVERY, hold=True)
    assert pod("up", "demo", "--type", "v4-16", "--zone", ZONES[0], "--zone", ZONES[1])[0] == 0
    lost_at = []

    def take() -> None:
        after = rng.randint(1, STEPS - 3)
        deadline = time.monotonic() + 120
        while len(world.metrics()) < after and time.monotonic() < deadline:
            time.sleep(0.01)
        world.fake.capacity = {ZONES[0]: 0}  # before the laptop, which looks meanwhile, rents others
        world.fake.preempt("demo")
        for worker in (0, 1):
            world.hosts.lose(worker)
        lost_at.append(world.metrics()[-1]["step"])
        world.hosts.renew()
        world.release()

    thief = threading.Thread(target=take)
    thief.start()
    result, _, err = pod(*world.run_arguments("--keep-alive", "--slice", "demo", "--valid-until", "2m"))
    thief.join()
    assert result == 0, err
    assert "replace: the slice is lost" in err
    steps = [line["step"] for line in world.metrics()]
    again = [step for step, following in itertools.pairwise(steps) if following <= step]
    assert again in ([], lost_at), "one interruption"
    repeated = len(steps) - STEPS
    assert 0 <= repeated <= 2 * SAVE_EVERY
    assert {line["step"]: line["chain"] for line in world.metrics()} == undisturbed()
    assert f"{ZONES[1]}: ACTIVE" in err
    assert world.fake.everything() == []


def undisturbed() -> dict[int, str]:
    """The chain of a run that nothing happened to."""
    chain, found = "", {}
    for step in range(1, STEPS + 1):
        chain = hashlib.sha256(f"{chain}{step}".encode()).hexdigest()
        found[step] = chain
    return found
