"""Reads a run's history from its files: rewards and accuracies by step, and an answer before and after training."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from podium.observe.metrics import ACCURACY, HELD_OUT_PAIRS, PAIRS, REWARD, UPDATES
from podium.observe.records import MetricsRecord, read_metrics, read_samples, step_of
from podium.observe.run_dir import METRICS, SAMPLES

Point = tuple[int, float]
"""A step and its value."""


class Answers(NamedTuple):
    """The model's answers to one held-out question, at the first and the last evaluation."""

    question: str
    expected: str
    before: str
    after: str


class History(NamedTuple):
    """Rewards, accuracies, steps and time of a run."""

    rewards: list[Point]
    """`train-reward/total/mean` of each step."""
    accuracies: list[Point]
    """`eval/accuracy` of each evaluation; step 0 is the initial model."""
    pairs: list[Point]
    """`rewards/accuracies` of each step of a run that learns from pairs, whose answers earn nothing."""
    held_out_pairs: list[Point]
    """`eval-rewards/accuracies` of each evaluation of such a run."""
    steps: int
    """Number of finished steps."""
    steps_without_update: int
    """Number of steps with nothing to train on."""
    wall_s: float
    cpu_s: float


def read_history(folder: Path) -> History:
    """Read the history of a run from its metrics.jsonl."""
    lines = read_metrics(folder / METRICS)
    last = lines[-1] if lines else {}
    return History(
        rewards=_points(lines, REWARD),
        accuracies=_points(lines, ACCURACY),
        pairs=_points(lines, PAIRS),
        held_out_pairs=_points(lines, HELD_OUT_PAIRS),
        steps=step_of(last),
        steps_without_update=sum(line.get(UPDATES) == 0 for line in lines),
        wall_s=last.get("time/wall_s", 0.0),
        cpu_s=last.get("time/cpu_s", 0.0),
    )


def read_answers(folder: Path) -> Answers | None:
    """A question from both the first and the last evaluation, preferably one whose answer became correct.

    None if samples.jsonl does not have two evaluations with a common question.
    """
    records = [record for record in read_samples(folder / SAMPLES) if record["split"] == "eval"]
    steps = [record["step"] for record in records]
    if not records or min(steps) == max(steps):
        return None
    first, last = (
        {(record["task"], record["prompt"]): record for record in records if record["step"] == step}
        for step in (min(steps), max(steps))
    )
    common = [key for key in first if key in last]
    if not common:
        return None
    before, after = ({key: asked[key]["completions"][0] for key in common} for asked in (first, last))
    key = max(common, key=lambda key: after[key]["reward"] - before[key]["reward"])
    return Answers(first[key]["question"], first[key]["answer"], before[key]["text"], after[key]["text"])


def _points(lines: Iterable[MetricsRecord], name: str) -> list[Point]:
    points = ((step_of(line), line[name]) for line in lines if name in line)
    return [(step, value) for step, value in points if math.isfinite(value)]
