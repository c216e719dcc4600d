"""The charts of a report, and the metrics in each."""

from collections.abc import Sequence
from typing import NamedTuple

from podium.observe.metrics import ACCURACY


class Chart(NamedTuple):
    """A chart: metrics as lines over steps."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    """Complete names; `*` matches any text, so one entry may match several metrics."""
    labels: tuple[str, ...] = ()
    """Labels of the lines; unset: the parts in which the names differ."""


CURVES = (
    Chart("Reward", "reward", ("train-reward/total/mean",), ("mean reward",)),
    Chart("Parts of the reward", "before weights", ("train-reward/func/*",)),
    Chart("Held-out accuracy", "fraction", ("eval/accuracy", "eval/*/accuracy", "eval/*/avg_at_k", "eval/*/pass_at_k")),
    Chart("Completion length", "tokens", ("train-seq_len/completion/mean", "train-seq_len/completion/max"), ("mean", "longest")),
    Chart("Truncated, and groups with equal rewards", "fraction", ("rollout/truncated_fraction", "group/equal_rewards_fraction"), ("truncated", "equal rewards")),
    Chart("Entropy", "nat per token", ("rollout/entropy", "policy/entropy"), ("sampler", "trainer")),
    Chart("Sampler against trainer", "nat", ("policy/logprob_gap/mean", "policy/logprob_gap/max"), ("mean gap", "largest gap")),
    Chart("KL", "nat per token", ("policy/kl_sampled", "policy/kl_reference"), ("to the sampler", "to the reference")),
    Chart("Clipped tokens", "fraction", ("policy/clip_fraction/low", "policy/clip_fraction/high"), ("low", "high")),
    Chart("Gradient norm", "before clipping", ("optimizer/gradient_norm",), ("gradient norm",)),
    Chart("Learning rate", "", ("optimizer/learning_rate",), ("learning rate",)),
)  # fmt: skip
"""Charts of learning, plotted against steps, tokens or hours."""

PHASES = Chart(
    "Seconds of a step",
    "s",
    tuple(f"time/train/{name}_s" for name in ("rollout", "reward", "advantages", "batch", "score", "update", "sync", "checkpoint")),
)  # fmt: skip
"""Chart of each step's time by phase, as stacked areas."""

WORK = (
    Chart("Tokens per second", "tokens/s", ("rollout/tokens_per_s", "throughput/train/valid_tokens_per_s_update", "throughput/train/valid_tokens_per_s"), ("decoded", "updated", "whole step")),
    Chart("Tokens of the update", "tokens", ("tokens/prompt", "tokens/completion", "tokens/padding"), ("prompt", "completion", "padding")),
    Chart("Slots at work", "fraction", ("rollout/slot_utilisation",), ("slot-steps that made a token",)),
    Chart("Memory of a device", "GiB", ("memory/train/bytes_in_use_max_gib", "memory/train/peak_bytes_in_use_max_gib"), ("in use", "peak")),
    Chart("Memory of the trainer on its host", "GiB", ("memory/train/host_max_gib", "memory/train/host_peak_max_gib"), ("resident", "peak")),
    Chart("Cores at work", "cores", ("throughput/train/busy_cores",), ("of the trainer",)),
)  # fmt: skip
"""Charts of how well the machine is used."""


def charts(wanted: Sequence[Chart], names: Sequence[str], samples: str) -> list[dict[str, object]]:
    """Convert charts to the page's JSON form, each with the metrics of `names` that it shows; empty charts are left
    out.

    `samples` is the number k of completions for avg@k and pass@k, for the labels. The mean accuracy over tasks is left
    out if there is only one task.
    """
    if sum(_matches(name, "eval/", "*", "/accuracy") for name in names) == 1:
        names = [name for name in names if name != ACCURACY]
    found = []
    for chart in wanted:
        lines: dict[str, str] = {}
        for index, metric in enumerate(chart.metrics):
            head, star, tail = metric.partition("*")
            fixed = chart.labels[index] if chart.labels and not star else None
            for name in names:
                if _matches(name, head, star, tail):
                    lines.setdefault(name, fixed or _short(name).replace("_at_k", f"@{samples}").replace("/", " "))
        if lines:
            shown = [{"metric": name, "label": label} for name, label in lines.items()]
            found.append({"title": chart.title, "unit": chart.unit, "lines": shown})
    return found


def _matches(name: str, head: str, star: str, tail: str) -> bool:
    if not star:
        return name == head
    return name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail)


def _short(name: str) -> str:
    """A metric's name without the prefix and suffix shared by all lines of its chart."""
    for start, end in (("train-reward/func/", "/mean"), ("eval/", ""), ("time/train/", "_s")):
        if name.startswith(start):
            return name.removeprefix(start).removesuffix(end)
    return name
