"""Warnings during training. Each is printed once, when its metric enters a range in which runs usually fail."""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from podium.config.schema import RolloutConfig
from podium.observe.metrics import GAP_METRIC, REWARD, TIMEOUTS, TRUNCATED
from podium.observe.stats import StepStats

AT_BOUND, WAITED = 5, 0.05
"""Warn after this many consecutive steps at the staleness bound, if waiting took more than this share of the steps'
time."""
WINDOW, DISTANCE = 10, 0.1
"""Number of steps whose lengths are compared, and the largest acceptable distance between the distributions."""
RISE, SMOOTHED = 0.1, 5
"""Largest acceptable rise of the truncated share over WINDOW steps, and the number of steps averaged at each end."""
GAP = 0.02
"""Largest acceptable gap, in nats, between trainer and sampler on tokens drawn with the current weights."""
CURRENT_GAP = "async/logprob_gap_by_age/0"
"""The gap on tokens drawn with the current weights, in a run with carry-over."""
GAP_FLOAT32, GAP_ROUNDED = 0.01, 0.05
"""Mean gaps, in nats, above which trainer and sampler must have different weights. With the same weights it is about
1e-6 if both compute in float32, up to 0.02 with a narrower format."""
SOLVED = 0.9
"""Mean reward above which equal rewards, short answers and low entropy are signs of success, not of failure."""
MOSTLY_CUT = 0.25
"""Share of completions cut by max_new_tokens above which truncation is reported as the cause."""


class RewardAlarm:
    """Warns once if a step taught nothing: all groups had equal rewards below the maximum."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._said = False

    def after_step(self, stats: StepStats, metrics: Mapping[str, float]) -> list[str]:
        """Return the lines to print after a step."""
        reward = metrics.get(REWARD)
        if reward is None or self._said or stats.batched.equal_groups < stats.batched.groups or reward >= SOLVED:
            return []
        self._said = True
        cut = metrics[TRUNCATED]
        advice = "choose easier questions, a reward with more levels, or a larger group_size"
        if late := metrics[TIMEOUTS]:
            advice = f"the rewards of {late:g} completions took too long and count as 0: make them faster, or {advice}"
        elif cut > MOSTLY_CUT:
            advice = f"{cut:.0%} hit rollout.max_new_tokens ({self._config.max_new_tokens}): raise it, or {advice}"
        return [f"all groups earned the same (mean reward {reward:.2f}), so nothing was learned; {advice}"]


def gap_limit(update_dtype: str, rollout_dtype: str, weights: str = "dtype") -> float:
    """The largest mean gap between trainer and sampler, in nats, that these number formats can explain.

    With rounded rollout `weights`, the largest acceptable gap.
    """
    if weights != "dtype":
        return GAP
    return GAP_FLOAT32 if update_dtype == rollout_dtype == "float32" else GAP_ROUNDED


def milder_weights(weights: str) -> str:
    """In words, the values of `rollout.weights` that change the policy less than `weights`."""
    return "int8, which leaves activations as they are, or to dtype" if weights == "w8a8" else "dtype"


class GapAlarm:
    """Warns once if trainer and sampler differ by more than rounding explains, so that their weights cannot be the
    same.
    """

    def __init__(self, config: RolloutConfig, *, update_dtype: str, rollout_dtype: str) -> None:
        """The number formats must be resolved. Silent with carry-over, where weights differ legitimately and
        `CarryAlarms` checks instead.
        """
        self._carries = config.in_flight > 1
        self._formats = f"update {update_dtype}, rollout {rollout_dtype}"
        self._weights = config.weights
        self._limit = gap_limit(update_dtype, rollout_dtype, config.weights)
        self._said = False

    def after_step(self, stats: StepStats, metrics: Mapping[str, float]) -> list[str]:
        """Return the lines to print after a step."""
        gap = metrics.get(GAP_METRIC, 0.0)
        if self._said or self._carries or gap <= self._limit:
            return []
        self._said = True
        if self._weights != "dtype":
            rule = f"rollout.weights {self._weights} changes the policy that samples"
            milder = milder_weights(self._weights)
            return [f"{GAP_METRIC} is {gap:.3g} nat, above {self._limit:g}: {rule}; set it to {milder}"]
        return [
            f"{GAP_METRIC} is {gap:.3g} nat, and the number formats ({self._formats}) explain at most "
            f"{self._limit:g}: completions are sampled with other weights than are trained, and training may go "
            "wrong; on several hosts check that all have the same model; otherwise set rollout.dtype and train.dtype "
            "to float32, and report a bug if the gap stays"
        ]


class SamplerGapError(ValueError):
    """Sampler and trainer are farther apart than `rollout.max_logprob_gap` allows."""


def check_gap(config: RolloutConfig, step: int, metrics: Mapping[str, float]) -> None:
    """Check a step's gap between trainer and sampler. Raises SamplerGapError above `rollout.max_logprob_gap`."""
    name = CURRENT_GAP if config.in_flight > 1 else GAP_METRIC
    gap, limit = metrics.get(name, 0.0), config.max_logprob_gap
    if limit is None or gap <= limit:
        return
    way_out = "set train.dtype and rollout.dtype to float32"
    if config.weights != "dtype":
        way_out = f"set rollout.weights to {milder_weights(config.weights)}"
    raise SamplerGapError(
        f"{name} of step {step} is {gap:.3g} nat, above rollout.max_logprob_gap {limit:g}: the policy that samples is "
        f"too far from the trained one; {way_out}, or raise the limit; the run continues from its last checkpoint"
    )


class CarryAlarms:
    """Warnings about runs with carry-over."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._said: set[str] = set()
        self._bound: collections.deque[tuple[bool, float]] = collections.deque(maxlen=AT_BOUND)
        self._lengths: collections.deque[tuple[Sequence[int], Sequence[int]]] = collections.deque(maxlen=WINDOW)
        self._cut: collections.deque[float] = collections.deque(maxlen=WINDOW + SMOOTHED)

    def after_step(self, stats: StepStats, metrics: Mapping[str, float]) -> list[str]:
        """Return the lines to print after a step, each kind at most once per run."""
        if stats.carried is None:
            return []
        at_bound = metrics["async/staleness/max"] >= self._config.max_staleness
        self._bound.append((at_bound, stats.rolled.waited_s / stats.seconds.step_s))
        self._lengths.append((stats.completions.completion_tokens.tolist(), stats.rolled.drawn_lengths))
        self._cut.append(metrics[TRUNCATED])
        found = [each for each in self._found(metrics) if each[0] not in self._said]
        self._said |= {kind for kind, _ in found}
        return [f"carry-over: {line}" for _, line in found]

    def _found(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield (kind, line) for every problem at this step."""
        rollout = self._config
        waited = sum(share for _, share in self._bound) / len(self._bound)
        if len(self._bound) == AT_BOUND and all(at for at, _ in self._bound) and waited > WAITED:
            yield (
                "bound",
                f"for {AT_BOUND} steps groups were as old as rollout.max_staleness {rollout.max_staleness} allows, and"
                f" waiting for them took {waited:.0%} of the time; raise it, or lower rollout.in_flight"
                f" {rollout.in_flight:g}",
            )
        if (distance := self._distance()) is not None:
            yield (
                "lengths",
                f"over {WINDOW} steps, the lengths of trained completions differ by {distance:.2f} "
                "(Kolmogorov-Smirnov) from those of sampled completions: lengths change faster than they are trained "
                f"on; lower rollout.in_flight {rollout.in_flight:g}",
            )
        if len(self._cut) == WINDOW + SMOOTHED:
            values = list(self._cut)
            before, now = (sum(part) / SMOOTHED for part in (values[:SMOOTHED], values[-SMOOTHED:]))
            if now - before > RISE:
                yield (
                    "cut",
                    f"the share of completions cut by rollout.max_new_tokens rose from {before:.0%} to {now:.0%} in"
                    f" {WINDOW} steps, as in runs whose stale answers grow until they fail; lower the learning rate or"
                    f" rollout.in_flight {rollout.in_flight:g}, or set algorithm.loss to cispo",
                )
        gap = metrics.get(CURRENT_GAP, 0.0)
        if gap > GAP:
            yield (
                "gap",
                f"sampler and trainer differ by {gap:.3f} nat on tokens of the same weights, so the cause is "
                "rounding, not staleness; set rollout.dtype and train.dtype to the same format, or float32",
            )

        if changed := int(metrics.get("env/changed", 0)):
            yield (
                "changed",
                f"the environments of {changed} conversations answered differently when they were opened again, so "
                "these conversations were restarted. An environment must depend only on its prompt, its seed and the "
                "answers",
            )

    def _distance(self) -> float | None:
        """Distance between the lengths of the last WINDOW steps; None unless the distance is too large and significant
        at 1 %.
        """
        if len(self._lengths) < WINDOW:
            return None
        trained, drawn = ([length for part in side for length in part] for side in zip(*self._lengths, strict=True))
        distance = length_distance(trained, drawn)
        if distance is None:
            return None
        chance = 1.63 * math.sqrt(
            1 / len(trained) + 1 / len(drawn)
        )  # critical value at the 1 % level for two samples of one distribution
        return distance if distance > max(DISTANCE, chance) else None


def length_distance(one: Sequence[int], other: Sequence[int]) -> float | None:
    """The two-sample Kolmogorov-Smirnov statistic: largest gap between the two cumulative distributions, 0 to 1.

    None if either sample is empty.
    """
    if not one or not other:
        return None
    lengths = np.unique([*one, *other])
    at_most = [np.searchsorted(np.sort(each), lengths, side="right") / len(each) for each in (one, other)]
    return float(np.max(np.abs(at_most[0] - at_most[1])))
