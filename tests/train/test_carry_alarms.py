"""What a run with carry-over says once, and when it says nothing."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from test_recorder import BATCHED, UPDATED
from tiny_runs import make_group

from podium.config.schema import RolloutConfig
from podium.observe.alarms import AT_BOUND, WINDOW, CarryAlarms, GapAlarm, SamplerGapError, check_gap
from podium.observe.metrics import GAP_METRIC
from podium.observe.stats import CarryStats, StepSeconds, StepStats
from podium.rollout.request import RolloutStats
from podium.train.recorder import completion_stats

STALENESS, CUT, GAP = "async/staleness/max", "rollout/truncated_fraction", "async/logprob_gap_by_age/0"
CARRIED = CarryStats(staleness=np.zeros(2), token_ages=np.zeros(2), crossed=0.0, rewards={}, length_distance=0.0)
HEALTHY: dict[str, Any] = {STALENESS: 1.0, CUT: 0.1, GAP: 0.001}


def step(
    *, waited_s: float = 0.0, trained: int = 10, drawn: int = 10, carried: CarryStats | None = CARRIED
) -> StepStats:
    """A step of a second, whose 400 completions are all of a length."""
    stats = StepStats(
        completions=completion_stats([make_group([0.0, 1.0])]),
        rolled=RolloutStats(waited_s=waited_s, drawn_lengths=(drawn,) * 400),
        batched=BATCHED,
        updated=UPDATED,
        seconds=StepSeconds(step_s=1.0, cpu_s=1.0, sync_s=0.0, checkpoint_s=None),
        carried=carried,
    )
    lengths = dataclasses.replace(stats.completions, completion_tokens=np.full(400, trained))
    return dataclasses.replace(stats, completions=lengths)


def said(steps: list[tuple[StepStats, dict[str, Any]]]) -> list[tuple[int, str]]:
    """The lines of a run, each with its step, counted from 1."""
    alarms = CarryAlarms(RolloutConfig(in_flight=1.5, max_staleness=2))
    return [
        (number, line)
        for number, (stats, metrics) in enumerate(steps, start=1)
        for line in alarms.after_step(stats, HEALTHY | metrics)
    ]


def test_a_healthy_run_hears_nothing():
    assert said([(step(), {})] * 40) == []


def test_waiting_at_the_bound_is_said_once():
    ((when, line),) = said([(step(waited_s=0.2), {STALENESS: 2.0})] * 20)
    assert when == AT_BOUND
    assert line == (
        "carry-over: for 5 steps groups were as old as rollout.max_staleness 2 allows, and waiting for them took 20% of"
        " the time; raise it, or lower rollout.in_flight 1.5"
    )


@pytest.mark.parametrize(("waited_s", "staleness"), [(0.01, [2.0]), (0.2, [2.0, 2.0, 2.0, 2.0, 1.0])])
def test_the_bound_is_no_fault_where_nobody_waits_or_it_is_not_always_reached(waited_s, staleness):
    steps = [(step(waited_s=waited_s), {STALENESS: each}) for each in staleness * 10]
    assert said(steps) == []


def test_lengths_that_are_not_those_that_were_drawn_are_said_after_a_window():
    ((when, line),) = said([(step(trained=9 if number % 5 == 0 else 10), {}) for number in range(20)])
    assert when == WINDOW
    assert "over 10 steps, the lengths of trained completions differ by 0.20" in line
    assert said([(step(trained=9 if number % 20 == 0 else 10), {}) for number in range(40)]) == []


def test_cut_completions_that_grow_are_said():
    steps = [(step(), {CUT: 0.1 + 0.02 * max(0, number - 10)}) for number in range(40)]
    ((when, line),) = said(steps)
    assert 15 < when < 25
    assert "rose from 10% to 22% in 10 steps" in line
    assert said([(step(), {CUT: 0.1 + 0.1 * (number % 2)}) for number in range(40)]) == []


def test_a_gap_without_age_is_said():
    ((when, line),) = said([(step(), {GAP: 0.019}), (step(), {GAP: 0.03}), (step(), {GAP: 0.04})])
    assert (when, "differ by 0.030 nat" in line) == (2, True)


def test_environments_that_answer_otherwise_are_said_once():
    ((when, line),) = said([(step(), {}), (step(), {"env/changed": 3.0}), (step(), {"env/changed": 1.0})])
    assert (when, "the environments of 3 conversations answered differently" in line) == (2, True)


def test_a_run_that_carries_nothing_hears_nothing():
    assert said([(step(carried=None, waited_s=1.0), {STALENESS: 2.0, GAP: 1.0})] * 20) == []


@pytest.mark.parametrize(
    "formats, gap, said",
    [
        (("float32", "float32"), 3e-6, False),
        (("float32", "float32"), 0.1, True),
        (("float32", "bfloat16"), 0.02, False),
        (("bfloat16", "bfloat16"), 0.1, True),
    ],
)
def test_a_gap_beyond_what_formats_explain_is_said_once(formats, gap, said):
    alarm = GapAlarm(RolloutConfig(), update_dtype=formats[0], rollout_dtype=formats[1])
    lines = [line for _ in range(3) for line in alarm.after_step(step(carried=None), {GAP_METRIC: gap})]
    assert len(lines) == said
    assert all(f"{gap:.3g} nat" in line and "all have the same model" in line for line in lines)


@pytest.mark.parametrize(("weights", "way_out"), [("int8", "set it to dtype"), ("w8a8", "set it to int8, which")])
def test_a_gap_of_rounded_weights_is_said_from_a_lower_bound(weights, way_out):
    alarm = GapAlarm(RolloutConfig(weights=weights), update_dtype="float32", rollout_dtype="bfloat16")
    lines = [line for gap in (0.019, 0.021, 0.03) for line in alarm.after_step(step(carried=None), {GAP_METRIC: gap})]
    (line,) = lines
    assert f"is 0.021 nat, above 0.02: rollout.weights {weights} changes the policy that samples; {way_out}" in line


@pytest.mark.parametrize(
    ("settings", "metric", "way_out"),
    [
        ({"weights": "w8a8"}, GAP_METRIC, "set rollout.weights to int8, which"),
        ({"weights": "int8"}, GAP_METRIC, "set rollout.weights to dtype, or raise the limit"),
        ({}, GAP_METRIC, "set train.dtype and rollout.dtype to float32"),
        ({"in_flight": 1.5}, "async/logprob_gap_by_age/0", "set train.dtype and rollout.dtype to float32"),
    ],
)
def test_a_gap_above_the_limit_stops_a_run(settings, metric, way_out):
    limited = RolloutConfig(**settings, max_logprob_gap=0.05)
    check_gap(limited, 3, {metric: 0.05})
    check_gap(limited, 3, {})
    check_gap(RolloutConfig(**settings), 3, {metric: 1.0})
    with pytest.raises(SamplerGapError, match=f"{metric} of step 3 is 0.051 nat, .*max_logprob_gap 0.05:") as error:
        check_gap(limited, 3, {metric: 0.051})
    assert way_out in str(error.value)


def test_drift_of_what_is_carried_over_is_not_limited():
    check_gap(RolloutConfig(in_flight=1.5, max_logprob_gap=0.05), 3, {GAP_METRIC: 1.0})
