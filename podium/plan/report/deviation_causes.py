"""The likeliest reason why a step's time or memory differs from the plan, and what to do about it. No jax."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from podium.accelerators import GIB
from podium.plan.report.formatting import number, step_parts
from podium.plan.result import Plan

MEASURED = {
    "sync": "time/train/sync_s",
    "rollout": "time/train/rollout_s",
    "reward": "time/train/reward_model_s",
    "score": "time/train/score_s",
    "update": "time/train/update_s",
}
"""The metric that measures each part of a step."""
STEP, PEAK = "time/train/step_s", "memory/train/peak_bytes_in_use_max_gib"
DRAWN = "rollout/completion_tokens"
FAR = 1.25
"""Ratio of plan and measurement, in either direction, from which a cause is named."""


class TimedPart(NamedTuple):
    """A part of a step that was planned and measured."""

    name: str
    planned: float  # seconds
    took: float  # seconds


def timed_parts(plan: Plan, measured: Mapping[str, float]) -> list[TimedPart]:
    """The parts of a step that both a plan and a step's metrics have."""
    return [
        TimedPart(name, planned.value, took)
        for name, planned in step_parts(plan)
        if name in MEASURED and (took := measured.get(MEASURED[name]))
    ]


def likeliest_cause(plan: Plan, measured: Mapping[str, float]) -> str | None:
    """The largest cause of the difference between a plan and a step's metrics, and what to do about it.

    Returns None if the step's seconds and its memory are both within a ratio of FAR of the plan. Seconds come first.
    """
    took, peak = measured.get(STEP), measured.get(PEAK)
    if plan.step is not None and took and _far(took / plan.step.value):
        return _of_seconds(plan, measured, took - plan.step.value)
    if peak and _far(peak * GIB / plan.worst.bytes):
        return (
            f"what differs is the memory of {plan.worst.name}: `podium plan` without --fast compiles its programs, and"
            " `podium calibrate RUN` learns from this run"
        )
    return None


def _of_seconds(plan: Plan, measured: Mapping[str, float], late: float) -> str:
    """The cause of a difference in time; `late` is by how many seconds the step exceeded the plan, or negative."""
    parts = timed_parts(plan, measured)
    worst = max(parts, key=lambda part: (part.took - part.planned) * math.copysign(1.0, late), default=None)
    elsewhere = late - sum(part.took - part.planned for part in parts)
    if worst is None or abs(elsewhere) > abs(worst.took - worst.planned):
        return (
            f"{number(abs(elsewhere))} s of the difference are in what the plan has no programs for, such as grading,"
            " environments and checkpoints: see the metrics time/train/..."
        )
    said = f"the {worst.name} took {number(worst.took)} s instead of {number(worst.planned)}"
    tokens = measured.get(DRAWN, 0.0) / max(1, plan.workload.completion_tokens)
    if tokens > 0 and _far(tokens) and not _far(worst.took / worst.planned / tokens):
        return (
            f"{said}, as completions have {tokens:.2f} times the planned tokens: plan with --lengths RUN/lengths.jsonl"
        )
    return f"{said}: `podium doctor` measures this machine, and `podium calibrate RUN` learns from this run"


def _far(ratio: float) -> bool:
    return not 1 / FAR <= ratio <= FAR
