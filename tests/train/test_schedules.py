"""The same 64 conversations on any schedule: replies at once, late, in reverse, evictions, carry-over."""

from typing import Any

import numpy as np
import pytest
from held_steps import CARRIED, Steps, assert_same_draws
from scripted import LATEST
from tiny_runs import merged

from podium.rollout.transcript import Transcript
from podium.sampling.groups import Group

AT_ONCE: dict[str, Any] = {"environment": "Counting", "prompts_per_step": 16, "rollout": {"refill_steps": 2}}
LATE: dict[str, Any] = AT_ONCE | {"environment": "Late"}
CARRY: dict[str, Any] = {"prompts_per_step": 8, "rollout": CARRIED}
"""In three steps, in each of which conversations are left in the middle."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "late": LATE,
    "reversed": AT_ONCE | {"environment": "Reversed", "environments": {"workers": 1}},
    "several processes": LATE | {"environments": {"workers": 2}},
    "small cache": LATE | {"rollout": {"cache_tokens": 64, "refill_steps": 2}},
    "carry-over": LATE | CARRY,
}
EXACTLY = {"rollout": {"reproducible": True}}


def held(talk, changes: dict[str, Any]) -> Steps:
    return Steps(talk(**changes), 3 if "in_flight" in changes.get("rollout", {}) else 1)


def same_episodes(expected: Steps, found: Steps) -> list[tuple[Group, Group]]:
    """Pairs of all 64 episodes' groups."""
    named = found.by_prompt()
    pairs = [(group, named[key]) for key, group in expected.by_prompt().items()]
    assert sum(len(group.transcripts) for group, _ in pairs) == 64
    return pairs


def same_bits(one: Transcript, other: Transcript) -> bool:
    names = ("tokens", "sampled_logprobs", "full_logprobs")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def check_schedules(talk, schedules: dict[str, dict[str, Any]], latest_s: float) -> None:
    first = held(talk, AT_ONCE)
    (stats,) = first.stats
    assert stats.scheduled.rebuilt_tokens == 0 and 1 <= stats.scheduled.parked <= 64
    assert max(each.num_turns for each in first.transcripts) == 3
    distinct = sum(len(g.tokens) + sum(len(t.tokens) - len(g.tokens) for t in g.transcripts) for g in first.groups[0])
    assert stats.scheduled.prefill_tokens < distinct
    for name, changes in schedules.items():
        other = held(talk, changes)
        for one, two in same_episodes(first, other):
            assert_same_draws(two, one)
        if changes["environment"] != "Counting":
            assert max(second for each in other.held for second in each.reply_s) > latest_s / 2, name
        rebuilt = sum(each.scheduled.rebuilt_tokens for each in other.stats)
        assert (rebuilt > 0) == (name in ("small cache", "carry-over")), name
        if name == "carry-over":
            assert len({version for each in other.transcripts for version in each.versions.tolist()}) == 3


def check_bits(talk, schedules: dict[str, dict[str, Any]]) -> None:
    """Without carry-over all are equal to the last bit; with it, all that begin and end in the same steps are."""
    first = held(talk, merged(AT_ONCE, EXACTLY))
    for name, changes in schedules.items():
        room = {"rollout": {"cache_tokens": 128}} if name == "small cache" else {}
        other = held(talk, merged(merged(changes, EXACTLY), room))
        assert sum(each.scheduled.preempted + each.scheduled.evicted for each in other.stats) == 0
        if name == "carry-over":
            again = held(talk, merged(AT_ONCE | CARRY, EXACTLY))
            pairs = [(again.by_prompt()[key], group) for key, group in other.by_prompt().items()]
            assert len(pairs) == 24
            for one, two in zip(again.transcripts, other.transcripts, strict=True):
                assert np.array_equal(one.versions, two.versions)
            for one, two in same_episodes(first, other):
                assert_same_draws(two, one)
        else:
            pairs = same_episodes(first, other)
        for one, two in pairs:
            assert all(map(same_bits, one.transcripts, two.transcripts)), name


def test_the_schedule_changes_no_token(talk, monkeypatch):
    monkeypatch.setenv(LATEST, "0.05")
    check_schedules(talk, {name: SCHEDULES[name] for name in ("reversed", "small cache", "carry-over")}, 0.05)


@pytest.mark.long
def test_the_schedule_changes_no_bit_where_asked_for(talk, monkeypatch):
    monkeypatch.setenv(LATEST, "0.05")
    check_bits(talk, {name: SCHEDULES[name] for name in ("several processes", "carry-over")})


@pytest.mark.long
def test_the_schedule_changes_nothing_with_replies_after_up_to_two_seconds_and_eight_processes(talk, monkeypatch):
    monkeypatch.setenv(LATEST, "2")
    schedules = SCHEDULES | {"several processes": LATE | {"environments": {"workers": 8}}}
    schedules["one process"] = LATE | {"environments": {"workers": 1}}
    check_schedules(talk, schedules, 2.0)
    check_bits(talk, schedules)
