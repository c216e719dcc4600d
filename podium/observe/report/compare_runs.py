"""Compares several runs: their settings, groups of seeds, and whether a difference in score is significant."""

import itertools
import math
import random
from collections.abc import Sequence

from podium.config.show import flat
from podium.observe.report.read import RunRecords

OF_A_SEED = ("name", "seed", "runs_dir")
"""Settings that may differ between repetitions of one experiment."""
SCORES = ("eval/accuracy", "train-reward/total/mean")
"""Metrics to rank runs by: the first one that all runs have is used."""
BOOTSTRAPS = 2_000
LAST_SHARE = 0.1
"""If there are no evaluations, a run's score is its mean reward over this last share of the steps."""


def differences(runs: Sequence[RunRecords]) -> dict[str, list[object]]:
    """Settings in which the runs differ (other than names), with their values in the order of the runs."""
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(itertools.chain.from_iterable(configs))
    table = {key: [config.get(key) for config in configs] for key in keys if key not in ("name", "runs_dir")}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def same_but_for_seed(runs: Sequence[RunRecords]) -> list[list[int]]:
    """Indices of the runs, grouped: runs whose settings differ only in name and seed share a group."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        known = {key: value for key, value in sorted(flat(run.config).items()) if key not in OF_A_SEED}
        groups.setdefault(repr(known) if known else f"run {index}", []).append(index)
    return list(groups.values())


def ranking_metric(runs: Sequence[RunRecords]) -> str | None:
    """The metric to rank runs by; None if no metric exists in all runs."""
    return next((name for name in SCORES if all(name in run.metrics for run in runs)), None)


def score(run: RunRecords, metric: str) -> float:
    """A run's score: the last evaluation's accuracy, or the mean reward of the last tenth of its steps."""
    values = run.metrics[metric].values
    last = 1 if metric.startswith("eval/") else max(1, math.ceil(LAST_SHARE * len(values)))
    return sum(values[-last:]) / last


def seed_interval(scores: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of the mean over seeds (Efron, 1979); None for a single seed."""
    if len(scores) < 2:
        return None
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(scores, k=len(scores))) / len(scores) for _ in range(BOOTSTRAPS))
    return means[int(0.025 * BOOTSTRAPS)], means[int(0.975 * BOOTSTRAPS) - 1]


def verdict(better: Sequence[float], worse: Sequence[float]) -> str:
    """Say whether the first group's mean exceeds the second's, according to a bootstrap of the difference."""
    if len(better) < 2 or len(worse) < 2:
        return "unknown: run at least two seeds of each"
    draw = random.Random(0)
    gaps = [
        sum(draw.choices(better, k=len(better))) / len(better) - sum(draw.choices(worse, k=len(worse))) / len(worse)
        for _ in range(BOOTSTRAPS)
    ]
    share = sum(gap > 0 for gap in gaps) / BOOTSTRAPS
    seeds = f"{len(better)} and {len(worse)} seeds"
    if share >= 0.975:
        word = "real" if min(len(better), len(worse)) >= 3 else "likely real"
        return f"{word}: larger in {share:.1%} of {BOOTSTRAPS:,} resamples of {seeds}"
    return f"not shown: larger in only {share:.0%} of {BOOTSTRAPS:,} resamples of {seeds}; run more seeds"


def comparison(runs: Sequence[RunRecords]) -> dict[str, object] | None:
    """A comparison of the runs in the page's JSON form; None for a single run."""
    if len(runs) < 2:
        return None
    metric, groups = ranking_metric(runs), same_but_for_seed(runs)
    ranking: list[dict[str, object]] = []
    answer: dict[str, object] = {
        "differences": differences(runs),
        "groups": groups,
        "metric": metric,
        "ranking": ranking,
    }
    if metric is None:
        return answer
    scored = [([score(runs[index], metric) for index in group], group) for group in groups]
    scored.sort(key=lambda item: -sum(item[0]) / len(item[0]))
    for place, (values, group) in enumerate(scored):
        following = scored[place + 1][0] if place + 1 < len(scored) else None
        ranking.append(
            {
                "runs": group,
                "score": sum(values) / len(values),
                "interval": seed_interval(values),
                "against_next": verdict(values, following) if following else None,
            }
        )
    return answer
