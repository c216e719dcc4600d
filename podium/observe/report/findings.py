"""Diagnoses a run from its metrics by rules with fixed thresholds; a finding is a problem, its evidence, and a remedy.

A rule is a function from a run's records to a finding or None; `RULES` lists them. Rules compare the first and the last
quarter of a run, of at least three steps each.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

from podium.observe.alarms import MOSTLY_CUT, SOLVED, gap_limit, milder_weights
from podium.observe.history import Series
from podium.observe.metrics import GAP_METRIC, REWARD, TRUNCATED, UPDATES
from podium.observe.report.read import RunRecords

MIN_STEPS = 6
IDLE_SHARE = 0.25
"""A run is reported as idle if at least this share of its steps made no update."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """An observation about a run."""

    rule: str
    level: Literal["problem", "hint"]
    title: str
    evidence: str
    advice: str


Rule = Callable[[RunRecords], Finding | None]


def findings(run: RunRecords) -> list[Finding]:
    """The findings of all rules, problems first."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    return sorted(found, key=lambda finding: finding.level != "problem")


def quarters(run: RunRecords, name: str) -> tuple[float, float] | None:
    """The mean of a metric over the first and the last quarter of its steps; None for fewer than MIN_STEPS."""
    series = run.metrics.get(name)
    if series is None or len(series.values) < MIN_STEPS:
        return None
    size = max(3, len(series.values) // 4)
    return mean(series.values[:size]), mean(series.values[-size:])


def mean(values: list[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def solved(run: RunRecords) -> bool:
    """Whether the reward of the last quarter is at least SOLVED."""
    reward = quarters(run, REWARD)
    return reward is not None and reward[1] >= SOLVED


def nothing_learned(run: RunRecords) -> Finding | None:
    """Report that nine of ten groups have equal rewards."""
    equal, reward = quarters(run, "group/equal_rewards_fraction"), quarters(run, REWARD)
    if equal is None or reward is None or equal[1] < 0.9 or solved(run):
        return None
    truncated = quarters(run, TRUNCATED)
    cut = truncated is not None and truncated[1] > MOSTLY_CUT
    advice = "Use easier questions, a reward with more levels, or more completions per question (group_size)."
    if cut:
        cap = run.setting("rollout.max_new_tokens")
        advice = f"Raise rollout.max_new_tokens (now {cap}): many answers are cut."
    return Finding(
        "nothing_learned",
        "problem",
        "All completions of a question get the same reward: there is nothing to learn from",
        f"{equal[1]:.0%} of groups have equal rewards in the last quarter; mean reward {reward[1]:.2f}",
        advice,
    )


def entropy_collapse(run: RunRecords) -> Finding | None:
    """Report that entropy is below a tenth of its start and below 0.05 nat, although the task is not solved."""
    entropy = quarters(run, "rollout/entropy")
    if entropy is None or solved(run) or entropy[1] > 0.1 * entropy[0] or entropy[1] > 0.05:
        return None
    return Finding(
        "entropy_collapse",
        "problem",
        "Entropy has collapsed: the model repeats itself instead of exploring",
        f"sampler's entropy {entropy[0]:.3f} nat per token at first, {entropy[1]:.3f} at last",
        "Lower the learning rate, widen algorithm.clip_high, or set algorithm.entropy_bonus.",
    )


def lengths_at_cap(run: RunRecords) -> Finding | None:
    """Report that more than a quarter of the completions are cut by max_new_tokens."""
    truncated = quarters(run, TRUNCATED)
    if truncated is None or truncated[1] <= MOSTLY_CUT:
        return None
    return Finding(
        "lengths_at_cap",
        "problem",
        "Many completions are cut before they end",
        f"{truncated[1]:.0%} in the last quarter hit rollout.max_new_tokens = {run.setting('rollout.max_new_tokens')}",
        "Raise rollout.max_new_tokens, or ask for shorter answers in the prompt or by a length reward.",
    )


def eval_flat(run: RunRecords) -> Finding | None:
    """Report that the reward rises by 0.1 or more, but evaluation accuracy by less than a quarter of that."""
    reward, accuracy = quarters(run, REWARD), run.metrics.get("eval/accuracy")
    if reward is None or accuracy is None or len(accuracy.values) < 2:
        return None
    rise, gain = reward[1] - reward[0], accuracy.values[-1] - accuracy.values[0]
    if rise < 0.1 or gain >= 0.25 * rise or accuracy.values[0] >= SOLVED:
        return None
    return Finding(
        "eval_flat",
        "problem",
        "The reward rises but the evaluation does not: the policy may exploit the reward, or memorise the questions",
        f"mean reward {reward[0]:.2f} to {reward[1]:.2f}, "
        f"eval/accuracy {accuracy.values[0]:.2f} to {accuracy.values[-1]:.2f}",
        "Read high-reward samples below; tighten the reward; train on more questions.",
    )


def one_part_eats(run: RunRecords) -> Finding | None:
    """Report that one reward part rises by 0.1 or more while another falls by 0.1 or more."""
    moves: dict[str, float] = {}
    for name in run.metrics:
        if name.startswith("train-reward/func/") and (parts := quarters(run, name)):
            moves[name.split("/")[2]] = parts[1] - parts[0]
    if len(moves) < 2:
        return None
    up, down = max(moves, key=lambda part: moves[part]), min(moves, key=lambda part: moves[part])
    if moves[up] < 0.1 or moves[down] > -0.1:
        return None
    return Finding(
        "one_part_eats",
        "problem",
        f"The reward part '{up}' is learned at the cost of '{down}'",
        f"'{up}' {moves[up]:+.2f}, '{down}' {moves[down]:+.2f} from the first to the last quarter",
        f"Raise the weight of '{down}', or count '{up}' only if '{down}' is earned.",
    )


def gap_too_large(run: RunRecords) -> Finding | None:
    """Report that trainer and sampler differ from the start by more than their number formats explain."""
    gap, in_flight = quarters(run, GAP_METRIC), run.setting("rollout.in_flight", 1)
    weights = str(run.setting("rollout.weights", "dtype"))
    limit = gap_limit(str(run.setting("train.dtype")), str(run.setting("rollout.dtype")), weights)
    if gap is None or gap[0] <= limit or (isinstance(in_flight, int | float) and in_flight > 1):
        return None
    if weights != "dtype":
        return Finding(
            "gap_too_large",
            "problem",
            "The rollout's rounded weights change the sampling policy",
            f"{GAP_METRIC} {gap[0]:.4f} nat from the start, above {limit:g}, with rollout.weights {weights}",
            f"Set rollout.weights to {milder_weights(weights)}.",
        )
    return Finding(
        "gap_too_large",
        "problem",
        "Completions were sampled with other weights than those that were trained",
        f"{GAP_METRIC} {gap[0]:.4f} nat from the start, where rounding explains at most {limit:g}",
        "On several hosts check that all have the same model; otherwise set rollout.dtype and train.dtype to "
        "float32, and report a bug if the gap stays.",
    )


def gap_growing(run: RunRecords) -> Finding | None:
    """Report that sampler and trainer log-probabilities differ by more than 0.02 nat, and by twice as much as
    at first.
    """
    gap = quarters(run, GAP_METRIC)
    if gap is None or gap[1] < 0.02 or gap[1] < 2 * gap[0]:
        return None
    return Finding(
        "gap_growing",
        "problem",
        "Sampler and trainer disagree more and more about log-probabilities",
        f"{GAP_METRIC} {gap[0]:.4f} nat at first, {gap[1]:.4f} at last",
        "Set rollout.dtype=float32, or algorithm.correction=truncate; a lower learning rate slows the growth.",
    )


def always_clipped(run: RunRecords) -> Finding | None:
    """Report that the gradient norm exceeds its bound in more than nine of ten steps."""
    norms, bound = run.metrics.get("optimizer/gradient_norm"), run.setting("train.optimizer.clip_norm")
    if norms is None or not isinstance(bound, int | float) or not bound or len(norms.values) < MIN_STEPS:
        return None
    share = mean([float(value > bound) for value in norms.values])
    if share <= 0.9:
        return None
    median = sorted(norms.values)[len(norms.values) // 2]
    return Finding(
        "always_clipped",
        "hint",
        "The gradient is clipped in nearly every step, so the step size depends on clipping, not only on the "
        "learning rate",
        f"{share:.0%} of steps above train.optimizer.clip_norm = {bound:g}; median norm {median:.3g}",
        "Raise train.optimizer.clip_norm, or keep it and tune the learning rate for it.",
    )


def eval_noise(run: RunRecords) -> Finding | None:
    """Report that the evaluation's 95 % interval is wider than the gain in accuracy."""
    for task, accuracy in evaluated_tasks(run):
        low, high = (run.metrics.get(f"eval/{task}/accuracy_interval/{end}") for end in ("low", "high"))
        if low is None or high is None or len(accuracy.values) < 2:
            continue
        gain, half = accuracy.values[-1] - accuracy.values[0], (high.values[-1] - low.values[-1]) / 2
        if gain > 0 and half > gain:
            return Finding(
                "eval_noise",
                "hint",
                f"The gain on {task} is within the evaluation's noise",
                f"accuracy {accuracy.values[0]:.3f} to {accuracy.values[-1]:.3f}, 95 % interval ±{half:.3f}",
                "Evaluate on more questions (eval.questions), or with more samples (eval.samples).",
            )
    return None


def mostly_padding(run: RunRecords) -> Finding | None:
    """Report that more than half of the positions in the update are padding."""
    kinds = [quarters(run, f"tokens/{kind}") for kind in ("prompt", "completion", "padding")]
    if any(kind is None for kind in kinds):
        return None
    prompt, completion, padding = (kind[1] for kind in kinds if kind)
    share = padding / max(1.0, prompt + completion + padding)
    if share <= 0.5:
        return None
    return Finding(
        "mostly_padding",
        "hint",
        "More than half of the update's positions are padding",
        f"{share:.0%} of row positions are padding",
        "Lower train.tokens_per_device or train.rows_per_device, so that rows are filled; on a TPU or GPU, steps take"
        " smaller shapes from the ninth on.",
    )


def bound_by_slots(run: RunRecords) -> Finding | None:
    """Report that the rollout takes over 60 % of the step with over 90 % of slots busy and fewer slots than
    completions.
    """
    rollout, step = quarters(run, "time/train/rollout_s"), quarters(run, "time/train/step_s")
    busy, slots = quarters(run, "rollout/slot_utilisation"), run.setting("rollout.slots")
    wanted = (run.setting("prompts_per_step") or 0) * (run.setting("group_size") or 0)
    if rollout is None or step is None or busy is None or not isinstance(slots, int) or slots >= wanted:
        return None
    if rollout[1] <= 0.6 * step[1] or busy[1] <= 0.9:
        return None
    return Finding(
        "bound_by_slots",
        "hint",
        "Decoding waits for slots",
        f"rollout {rollout[1] / step[1]:.0%} of the step, {slots} slots {busy[1]:.0%} busy for {wanted} completions",
        f"Raise rollout.slots (up to {wanted}); `podium plan` shows whether they fit.",
    )


def idle_steps(run: RunRecords) -> Finding | None:
    """Report that a quarter of the steps or more made no update, if `nothing_learned` does not apply."""
    updates = run.metrics.get(UPDATES)
    if updates is None or len(updates.values) < MIN_STEPS or nothing_learned(run) is not None:
        return None
    idle = sum(value == 0 for value in updates.values)
    if idle < IDLE_SHARE * len(updates.values):
        return None
    advice = "Use more completions per question (group_size), or questions that the model sometimes gets right."
    if solved(run):
        advice = "The questions are solved: end the run earlier (steps), or use harder questions."
    return Finding(
        "idle_steps",
        "hint",
        "Many steps made no update: in each group, all completions earned the same reward",
        f"{idle} of {len(updates.values)} steps",
        advice,
    )


def evaluated_tasks(run: RunRecords) -> list[tuple[str, Series]]:
    """The evaluated tasks with their accuracies, excluding the mean over tasks."""
    names = [name for name in run.metrics if re.fullmatch(r"eval/.+/accuracy", name)]
    return [(name.removeprefix("eval/").removesuffix("/accuracy"), run.metrics[name]) for name in names]


RULES: tuple[Rule, ...] = (
    nothing_learned,
    idle_steps,
    entropy_collapse,
    lengths_at_cap,
    eval_flat,
    one_part_eats,
    gap_too_large,
    gap_growing,
    always_clipped,
    eval_noise,
    mostly_padding,
    bound_by_slots,
)
