"""What is done about what is seen of a run that is kept alive: a table."""

import dataclasses

import pytest

from podium.pods.inventory import LOST as LOST_MARK
from podium.pods.inventory import STATE
from podium.pods.recover import Counts, Policy, decide
from podium.pods.session import Observation
from tests.pods.looks import (
    DONE,
    FAILED,
    GUARD,
    KILLED,
    LOST,
    MISSING,
    NONE,
    POLICY,
    SLICE,
    STOPPED,
    WRONG,
    seen,
    status,
)

TABLE: dict[str, tuple[Observation, str, int]] = {
    "running": (seen(status(), status()), "wait", 0),
    "one silent while running": (seen(status(), None), "wait", 0),
    "nothing started": (seen(NONE, NONE), "start", 0),
    "done": (seen(DONE, DONE), "end", 0),
    "stopped as asked": (seen(STOPPED, STOPPED, over=143), "end", 143),
    "killed while it saved, as it had been asked to stop": (seen(KILLED, LOST, over=143), "end", 143),
    "asked to stop, and restarted meanwhile": (seen(status(), status(), over=143), "stop", 0),
    "asked to stop, and not heard": (seen(None, None, over=143), "wait", 0),
    "asked to stop, and preempted then": (
        Observation(slice=dataclasses.replace(SLICE, state="dead", detail="PREEMPTED"), job=None, over=143),
        "end",
        143,
    ),
    "asked to stop when it was done": (seen(DONE, DONE, over=143), "end", 0),
    "stopped, machines may go": (seen(STOPPED, STOPPED), "wait", 0),
    "stopped, machines stayed": (seen(STOPPED, STOPPED, waited_s=100.0), "restart", 0),
    "guard": (seen(GUARD, GUARD), "end", 78),
    "guard on one": (seen(GUARD, LOST), "end", 78),
    "started on one that is silent now": (seen(None, NONE, waited_s=301.0), "start", 0),
    "started on some, which have ended": (seen(DONE, NONE, waited_s=30.0), "restart", 0),
    "a worker came too late": (seen(MISSING, MISSING), "restart", 0),
    "one silent while running, for long": (seen(status(), None, waited_s=9999.0), "wait", 0),
    "wrong settings": (seen(WRONG, LOST), "end", 2),
    "failed": (seen(LOST, FAILED), "restart", 0),
    "failed and one silent": (seen(LOST, None), "wait", 0),
    "failed and one silent for long": (seen(LOST, None, waited_s=301.0), "replace", 0),
    "all silent": (seen(None, None), "wait", 0),
    "all silent for long": (seen(None, None, waited_s=9999.0), "wait", 0),
    "preempted": (seen(status(), status(), state="dead", detail="PREEMPTED"), "replace", 0),
    "done before it was preempted": (seen(state="dead", detail="PREEMPTED"), "replace", 0),
    "not listed": (Observation(slice=None, job=None), "wait", 0),
    "deleted by somebody": (Observation(slice=None, job=None, waited_s=100.0), "end", 1),
    "deleted by somebody, and known not to be over": (
        Observation(slice=None, job=None, waited_s=100.0, wanted=True),
        "rent",
        0,
    ),
    "being replaced": (Observation(slice=None, job=None, renting=True), "rent", 0),
    "being replaced when it was stopped": (Observation(slice=None, job=None, renting=True, over=143), "end", 143),
    "ended by another command": (seen(FAILED, LOST, over=1), "end", 1),
    "stopped before this command, and saving": (
        dataclasses.replace(seen(status(), status()), stopped_before=True),
        "stop",
        0,
    ),
    "stopped before this command": (dataclasses.replace(seen(STOPPED, STOPPED), stopped_before=True), "replace", 0),
    "given up by another command": (seen(status(), status(), labels={STATE: LOST_MARK}), "replace", 0),
    "in repair for ever": (
        Observation(slice=dataclasses.replace(SLICE, state="creating", detail="REPAIRING"), job=None, waited_s=1801.0),
        "replace",
        0,
    ),
    "being repaired": (
        Observation(slice=dataclasses.replace(SLICE, state="creating", detail="REPAIRING"), job=None),
        "wait",
        0,
    ),
    "being deleted": (
        Observation(slice=dataclasses.replace(SLICE, state="deleting", detail="DELETING"), job=None),
        "wait",
        0,
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_done_about_what_is_seen(case):
    look, act, code = TABLE[case]
    decision = decide(look, Counts(), POLICY)
    assert (decision.act, decision.status) == (act, code)
    assert decision.why


def test_restarts_and_replacements_are_bounded():
    failed = decide(seen(LOST, FAILED), Counts(restarts=3), POLICY)
    assert (failed.act, failed.status) == ("end", 1)
    assert "restarted 3 times without a new step" in failed.why
    lost = decide(seen(state="dead", detail="PREEMPTED"), Counts(replacements=20), POLICY)
    assert (lost.act, lost.status) == ("end", 1)


def test_without_keep_alive_nothing_is_replaced_and_it_is_said_what_would():
    once = Policy(restarts=0, replacements=0)
    decision = decide(seen(state="dead", detail="PREEMPTED"), Counts(), once)
    assert (decision.act, decision.status) == ("end", 1)
    assert "the slice is lost (PREEMPTED); podium pod run --keep-alive" in decision.why
    assert decide(seen(LOST, FAILED), Counts(), once).act == "end"
    assert decide(seen(STOPPED, STOPPED, waited_s=100.0), Counts(), once).status == 143


def test_machines_that_are_ready_and_silent_are_kept_for_a_lease_told_every_hour_and_then_replaced():
    keep = Policy()
    words = [decide(seen(None, None, waited_s=hours * 3600.0), Counts(), keep) for hours in (0.5, 1, 7.5, 23.9, 24)]
    assert [each.act for each in words] == ["wait"] * 4 + ["replace"]
    assert "is ssh blocked here?" in words[0].why
    assert (
        "no worker has answered for 7 h, although the machines are ready and cost money; after 24 h the" in words[2].why
    )
    assert "podium pod down demo" in words[2].why
    assert words[4].why == "no worker has answered for 24 h, the length of its lease"
    labels = {"podium-lease-s": "7200"}
    assert decide(seen(None, None, waited_s=7200.0, labels=labels), Counts(), keep).act == "replace"
    kept = decide(seen(None, None, waited_s=1e6), Counts(), POLICY)
    assert (kept.act, "nothing deletes them" in kept.why) == ("wait", True)
    stopped = decide(seen(None, None, over=143, waited_s=86400.0), Counts(), keep)
    assert (stopped.act, stopped.status) == ("end", 143)
