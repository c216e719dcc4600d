"""Converts the typed statistics of a step or an evaluation to metrics by name.

The table of all metrics is `podium.observe.metric_table`.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from podium.observe.metric_table import METRICS, Metric, Value
from podium.observe.stats import EvaluationStats, StepStats

REWARD = "train-reward/total/mean"
ACCURACY = "eval/accuracy"
UPDATES = "optimizer/updates"
MARGIN = "rewards/margins"
PAIRS, HELD_OUT_PAIRS = "rewards/accuracies", "eval-rewards/accuracies"
"""Metrics for the share of pairs whose chosen completion has the larger reward: in a step, and held out."""
GAP_METRIC = "policy/logprob_gap/mean"
TRUNCATED = "rollout/truncated_fraction"
TIMEOUTS = "grading/timeouts"
STEP_REPORT = (REWARD, "train-other/loss", ACCURACY, "time/train/step_s")
"""Metrics of the last step to show in a worker's status."""
COMPARED_WITH_SAMPLER = ("policy/logprob_gap", "policy/kl_sampled", "rollout/entropy", "policy/clip")
"""Prefixes of metrics that are undefined if completions were not sampled (SFT)."""
STATISTICS: Mapping[str, Callable[[np.ndarray], np.floating]] = {
    "mean": np.mean,
    "std": np.std,
    "min": np.min,
    "max": np.max,
}
"""The statistic of an array for each last part of a name; `std` divides by n."""


def all_metrics() -> Iterator[Metric]:
    """All metrics of the table, in order."""
    return itertools.chain.from_iterable(METRICS.values())


def step_metrics(stats: StepStats) -> dict[str, float]:
    """The metrics of a step, by name."""
    return named((metric, metric.step and metric.step(stats)) for metric in all_metrics())


def evaluation_metrics(stats: EvaluationStats) -> dict[str, float]:
    """The metrics of an evaluation, by name: those of its tasks, then the overall ones."""
    found: dict[str, float] = {}
    for task, scores in stats.tasks.items():
        values = named((metric, metric.task and metric.task(scores)) for metric in all_metrics())
        found |= {name.replace("<task>", task): value for name, value in values.items()}
    return found | named((metric, metric.evaluation and metric.evaluation(stats)) for metric in all_metrics())


def named(values: Iterable[tuple[Metric, Value]]) -> dict[str, float]:
    """Values by complete metric name; values of None are left out."""
    found: dict[str, float] = {}
    for metric, value in values:
        if value is None:
            continue
        if isinstance(value, Mapping):
            found |= {metric.name.replace("<part>", part): each for part, each in value.items()}
        elif isinstance(value, tuple):
            found |= dict(zip(metric.names, value, strict=True))
        elif metric.parts:
            array = np.asarray(value, np.float64)
            if array.size:  # if all conversations of a step failed, some arrays are empty
                found |= {f"{metric.name}/{part}": float(STATISTICS[part](array)) for part in metric.parts}
        else:
            assert isinstance(value, float | int), metric.name
            found[metric.name] = value
    return found


def find_metric(name: str) -> Metric | None:
    """The table entry of a complete name such as `eval/gsm8k/accuracy`; None if the name is unknown."""
    for metric in all_metrics():
        if any(re.fullmatch(re.sub(r"<\w+>", "[^/]+", listed), name) for listed in metric.names):
            return metric
    return None
