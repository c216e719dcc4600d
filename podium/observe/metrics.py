"""The names of all metrics, each with its unit and definition; docs/metrics.md is made from this list.

`<part>` and `<task>` stand for a part of the reward and for a task. Who computes a metric writes its name in full (a
spread: all but its last part), so that a search finds the place.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SPREAD = ("mean", "std", "min", "max")
MEAN_MAX = ("mean", "max")


class Metric(NamedTuple):
    """One metric, or those of one quantity that differ by their last part."""

    name: str
    unit: str
    definition: str
    parts: tuple[str, ...] = ()
    """Last parts of the name: `name/mean`, `name/max`, ...; none: the name is complete."""

    @property
    def names(self) -> tuple[str, ...]:
        """The complete names."""
        return tuple(f"{self.name}/{part}" for part in self.parts) or (self.name,)


METRICS: dict[str, tuple[Metric, ...]] = {
    "Time": (
        Metric("time/wall_s", "s", "Since the run's folder was opened, summed over the processes that continued it."),
        Metric("time/cpu_s", "s", "CPU time of the trainer and of its ended children, summed like `time/wall_s`."),
        Metric(
            "time/train/step_s",
            "s",
            "From the first prompt drawn to the new weights in the engine. Evaluation, checkpoint and the writing of "
            "metrics are not in it.",
        ),
        Metric(
            "time/train/step_avg_last10_s",
            "s",
            "Mean of the last 10 `time/train/step_s` of this process; from its 10th step on.",
        ),
        Metric("time/train/step_cpu_s", "s", "CPU time of the trainer, all threads, during `time/train/step_s`."),
        Metric("time/train/rollout_s", "s", "Prompts drawn, tokenised, completed, detokenised."),
        Metric("time/train/reward_s", "s", "Waiting for the grades of the step."),
        Metric("time/train/advantages_s", "s", "Rewards to advantages."),
        Metric("time/train/batch_s", "s", "Completions to packed rows on the devices."),
        Metric(
            "time/train/score_s",
            "s",
            "Log-probabilities under the frozen reference, or the trainer's before the first update; 0 without either.",
        ),
        Metric("time/train/update_s", "s", "All updates of the step, to the end of the last."),
        Metric("time/train/sync_s", "s", "New weights into the rollout's layout."),
        Metric(
            "time/train/checkpoint_s",
            "s",
            "What the loop waited for the checkpoint of the step before; only where that step saved.",
        ),
        Metric("time/eval/rollout_s", "s", "Completions of one evaluation, all tasks."),
        Metric("time/eval/reward_s", "s", "Waiting for the grades of one evaluation."),
        Metric("time/eval/step_s", "s", "One evaluation."),
    ),
    "Throughput and counts": (
        Metric(
            "throughput/train/valid_tokens_per_s",
            "tokens/s",
            "`train-other/total_valid_token_count` / `time/train/step_s`, of this step, over all devices.",
        ),
        Metric(
            "throughput/train/valid_tokens_per_s_update",
            "tokens/s",
            "`train-other/total_valid_token_count` / `time/train/update_s`.",
        ),
        Metric("train-other/total_valid_token_count", "tokens", "Completion tokens in the loss, over all hosts."),
        Metric("train-other/batch_global", "sequences", "Completions in the update, over all hosts."),
        Metric("tokens/prompt", "tokens", "Prompt tokens in the rows of the update."),
        Metric("tokens/completion", "tokens", "Completion tokens in the rows of the update."),
        Metric("tokens/padding", "tokens", "Positions of the rows that hold neither."),
    ),
    "Reward": (
        Metric("train-reward/total", "reward", "Weighted sum of the parts, over the completions of the step.", SPREAD),
        Metric("train-reward/func/<part>/mean", "reward", "One part of the reward, before its weight."),
        Metric("train-reward/advantage", "reward", "Advantages, over the completions in the update.", SPREAD),
        Metric("group/equal_rewards_fraction", "fraction", "Groups whose completions all earned the same."),
        Metric("group/dropped", "groups", "Groups left out of the update by `algorithm.zero_variance`."),
        Metric("grading/timeouts", "completions", "Completions whose grading passed `grading.timeout_s`."),
    ),
    "Policy": (
        Metric("train-other/loss", "", "Loss of the whole batch, mean over the updates of the step."),
        Metric("policy/entropy", "nat", "Entropy of the next token, mean over the tokens in the loss."),
        Metric(
            "policy/logprob_gap",
            "nat",
            "|trainer's - sampler's log-probability| of a sampled token, before the first update: what rounding, "
            "truncated sampling and stale weights make of it.",
            MEAN_MAX,
        ),
        Metric(
            "policy/kl_sampled",
            "nat",
            "KL(sampler || trainer) per token, as mean of r - 1 - log r with r = p_trainer / p_sampler.",
        ),
        Metric("policy/kl_reference", "nat", "KL(trainer || reference) per token, as the loss has it; with `kl` only."),
        Metric("policy/correction_weight", "", "Importance weight of `algorithm.correction`, mean over the tokens."),
        Metric("policy/clip_fraction", "fraction", "Tokens whose ratio was clipped below or above.", ("low", "high")),
    ),
    "Optimizer": (
        Metric("optimizer/gradient_norm", "", "Global norm of the gradient before clipping, mean over the updates."),
        Metric("optimizer/update_norm", "", "Global norm of the change of the parameters, mean over the updates."),
        Metric("optimizer/learning_rate", "", "Learning rate of the last update."),
    ),
    "Rollout": (
        Metric("train-seq_len/prompt", "tokens", "Prompt, chat template included.", MEAN_MAX),
        Metric("train-seq_len/completion", "tokens", "Completion, end-of-sequence included.", MEAN_MAX),
        Metric("train-seq_len/total", "tokens", "Prompt and completion.", MEAN_MAX),
        Metric("rollout/truncated_fraction", "fraction", "Completions cut by `rollout.max_new_tokens`."),
        Metric("rollout/refill_rounds", "rounds", "Extra generations of `algorithm.zero_variance: refill`."),
        Metric("rollout/prefill_s", "s", "Prefill calls."),
        Metric("rollout/decode_s", "s", "Decode calls."),
        Metric("rollout/decode_steps", "steps", "Decode steps, each of all slots at once."),
        Metric("rollout/slot_utilisation", "fraction", "Slot-steps that made a token which was kept."),
        Metric("rollout/tokens_per_s", "tokens/s", "Completion tokens / seconds of `generate`."),
        Metric("rollout/compilations", "programs", "Programs compiled during `generate`; 0 after the first steps."),
        Metric("rollout/prompt_tokens", "tokens", "Prompt tokens prefilled, one copy per group."),
        Metric("rollout/completion_tokens", "tokens", "Completion tokens made."),
        Metric("rollout/dropped_prompts", "prompts", "Prompts above `rollout.max_prompt_tokens`, replaced by others."),
    ),
    "Memory": (
        Metric(
            "memory/train/bytes_in_use_max_gib",
            "GiB",
            "Largest `bytes_in_use` of the local devices after the update; absent where the device does not say (CPU).",
        ),
        Metric(
            "memory/train/peak_bytes_in_use_max_gib",
            "GiB",
            "Largest `peak_bytes_in_use` of the local devices since the process began. Temporaries inside a compiled "
            "program may be missing from it.",
        ),
    ),
    "Plan": (
        Metric(
            "plan/memory_error",
            "fraction",
            "Memory planned for the phase that needs most / peak measured on a device - 1, after the third step of a "
            "process; on TPU and GPU.",
        ),
        Metric(
            "plan/step_error",
            "fraction",
            "Seconds planned for a step / `time/train/step_s` of a process's third step - 1; on TPU and GPU.",
        ),
    ),
    "Evaluation": (
        Metric("eval/accuracy", "fraction", "Mean of `eval/<task>/accuracy` over the tasks; `keep_best` ranks by it."),
        Metric(
            "eval/<task>/accuracy",
            "fraction",
            "Questions answered correctly with the likeliest tokens; without `eval.greedy`: `avg_at_k`.",
        ),
        Metric(
            "eval/<task>/accuracy_interval",
            "fraction",
            "95 % Wilson interval of the accuracy over the questions.",
            ("low", "high"),
        ),
        Metric("eval/<task>/avg_at_k", "fraction", "Mean correctness of k = `eval.samples` sampled answers."),
        Metric("eval/<task>/pass_at_k", "fraction", "Questions with a correct one among k sampled answers."),
        Metric("eval/<task>/pass_at_k_interval", "fraction", "95 % Wilson interval of `pass_at_k`.", ("low", "high")),
        Metric("eval/<task>/questions", "questions", "Questions asked."),
        Metric("eval/<task>/completion_tokens", "tokens", "Mean length of the answers."),
        Metric("eval/<task>/truncated_fraction", "fraction", "Answers cut by `rollout.max_new_tokens`."),
    ),
}
"""All metrics, by the sections of docs/metrics.md."""


def find_metric(name: str) -> Metric | None:
    """The list's entry of a complete name such as `eval/gsm8k/accuracy`; None if it has none."""
    for metrics in METRICS.values():
        for metric in metrics:
            if any(_pattern(listed).fullmatch(name) for listed in metric.names):
                return metric
    return None


def _pattern(listed: str) -> re.Pattern[str]:
    return re.compile("".join("[^/]+" if part.startswith("<") else re.escape(part) for part in _split(listed)))


def _split(listed: str) -> list[str]:
    return [part for part in re.split(r"(<\w+>)", listed) if part]


def spread(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """`name/mean`, `name/std` (population), `name/min` and `name/max` of at least one value."""
    array = np.asarray(values, np.float64)
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/std": float(array.std()),
        f"{name}/min": float(array.min()),
        f"{name}/max": float(array.max()),
    }


def mean_max(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """`name/mean` and `name/max` of at least one value."""
    array = np.asarray(values, np.float64)
    return {f"{name}/mean": float(array.mean()), f"{name}/max": float(array.max())}
