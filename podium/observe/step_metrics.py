"""The metrics of a step: the only place that names them, and how their values follow from its statistics.

A new metric is one entry here; `<part>` stands for a part of the reward. docs/metrics.md is made from this list.
"""

import numpy as np

from podium.accelerators import GIB
from podium.observe.metric import LOW_HIGH, MEAN_MAX, SPREAD, Metric
from podium.observe.stats import StepStats


def _kl_reference(stats: StepStats) -> float | None:
    charged = stats.batched.reward_kl
    if charged is None:
        return stats.updated.token_means.get("kl_reference")
    return float(np.sum(charged.sums)) / charged.num_tokens if charged.num_tokens else None


def _clip_fractions(stats: StepStats) -> tuple[float, float] | None:
    means = stats.updated.token_means
    return (means["clip_low"], means["clip_high"]) if means else None


STEP_METRICS: dict[str, tuple[Metric, ...]] = {
    "Time": (
        Metric("time/wall_s", "s", "Since the run's folder was opened, summed over the processes that continued it."),
        Metric("time/cpu_s", "s", "CPU time of the trainer and of its ended children, summed like `time/wall_s`."),
        Metric(
            "time/train/step_s",
            "s",
            "From the first prompt drawn to the new weights in the engine. Evaluation, checkpoint and the writing of "
            "metrics are not in it.",
            step=lambda s: s.times.step_s,
        ),
        Metric(
            "time/train/step_avg_last10_s",
            "s",
            "Mean of the last 10 `time/train/step_s` of this process; from its 10th step on.",
            step=lambda s: s.times.mean_step_s,
        ),
        Metric(
            "time/train/step_cpu_s",
            "s",
            "CPU time of the trainer, all threads, during `time/train/step_s`.",
            step=lambda s: s.times.cpu_s,
        ),
        Metric(
            "time/train/rollout_s",
            "s",
            "Prompts drawn, tokenised, completed, detokenised.",
            step=lambda s: s.times.rollout_s - s.rolled.reward_s,
        ),
        Metric("time/train/reward_s", "s", "Waiting for the grades of the step.", step=lambda s: s.rolled.reward_s),
        Metric("time/train/advantages_s", "s", "Rewards to advantages.", step=lambda s: s.batched.advantages_s),
        Metric(
            "time/train/batch_s",
            "s",
            "Completions to packed rows on the devices.",
            step=lambda s: s.batched.batch_s + s.updated.place_s,
        ),
        Metric(
            "time/train/score_s",
            "s",
            "Log-probabilities under the frozen reference, or the trainer's before the first update; 0 without either.",
            step=lambda s: s.updated.score_s + (s.batched.reward_kl.seconds if s.batched.reward_kl else 0.0),
        ),
        Metric(
            "time/train/update_s",
            "s",
            "All updates of the step, to the end of the last.",
            step=lambda s: s.updated.update_s,
        ),
        Metric("time/train/sync_s", "s", "New weights into the rollout's layout.", step=lambda s: s.times.sync_s),
        Metric(
            "time/train/checkpoint_s",
            "s",
            "What the loop waited for the checkpoint of the step before; only where that step saved.",
            step=lambda s: s.times.checkpoint_s,
        ),
        Metric(
            "time/eval/rollout_s", "s", "Completions of one evaluation, all tasks.", evaluation=lambda e: e.rollout_s
        ),
        Metric("time/eval/reward_s", "s", "Waiting for the grades of one evaluation.", evaluation=lambda e: e.reward_s),
        Metric("time/eval/step_s", "s", "One evaluation.", evaluation=lambda e: e.step_s),
    ),
    "Throughput and counts": (
        Metric(
            "throughput/train/valid_tokens_per_s",
            "tokens/s",
            "`train-other/total_valid_token_count` / `time/train/step_s`, of this step, over all devices.",
            step=lambda s: s.batched.trained_tokens / s.times.step_s,
        ),
        Metric(
            "throughput/train/valid_tokens_per_s_update",
            "tokens/s",
            "`train-other/total_valid_token_count` / `time/train/update_s`.",
            step=lambda s: s.batched.trained_tokens / s.updated.update_s,
        ),
        Metric(
            "train-other/total_valid_token_count",
            "tokens",
            "Completion tokens in the loss, over all hosts.",
            step=lambda s: s.batched.trained_tokens,
        ),
        Metric(
            "train-other/batch_global",
            "sequences",
            "Completions in the update, over all hosts.",
            step=lambda s: s.batched.sequences,
        ),
        Metric(
            "tokens/prompt",
            "tokens",
            "Prompt tokens in the rows of the update.",
            step=lambda s: s.batched.prompt_tokens,
        ),
        Metric(
            "tokens/completion",
            "tokens",
            "Completion tokens in the rows of the update.",
            step=lambda s: s.batched.trained_tokens,
        ),
        Metric(
            "tokens/padding",
            "tokens",
            "Positions of the rows that hold neither.",
            step=lambda s: s.batched.padding_tokens,
        ),
    ),
    "Reward": (
        Metric(
            "train-reward/total",
            "reward",
            "Weighted sum of the parts, over the completions of the step; without the KL of `k1_reward`.",
            step=lambda s: s.completions.rewards,
            parts=SPREAD,
        ),
        Metric(
            "train-reward/penalised",
            "reward",
            "What `kl: k1_reward` leaves of the total; with it only.",
            step=lambda s: s.batched.penalised_rewards,
            parts=SPREAD,
        ),
        Metric(
            "train-reward/kl_penalty",
            "reward",
            "What `kl: k1_reward` takes off the total, `kl_coef` x the completion's KL; with it only.",
            step=lambda s: s.batched.penalties,
            parts=MEAN_MAX,
        ),
        Metric(
            "train-reward/func/<part>/mean",
            "reward",
            "One part of the reward, before its weight.",
            step=lambda s: {part: float(np.mean(x)) for part, x in s.completions.parts.items()},
        ),
        Metric(
            "train-reward/advantage",
            "reward",
            "Advantages, over the completions in the update.",
            step=lambda s: s.batched.advantages if len(s.batched.advantages) else None,
            parts=SPREAD,
        ),
        Metric(
            "group/equal_rewards_fraction",
            "fraction",
            "Groups whose completions all earned the same, before the KL of `k1_reward`.",
            step=lambda s: s.batched.equal_groups / s.batched.groups,
        ),
        Metric(
            "group/dropped",
            "groups",
            "Groups left out of the update by `algorithm.zero_variance`.",
            step=lambda s: s.batched.dropped_groups,
        ),
        Metric(
            "grading/timeouts",
            "completions",
            "Completions whose grading passed `grading.timeout_s`.",
            step=lambda s: s.completions.timeouts,
        ),
    ),
    "Policy": (
        Metric(
            "train-other/loss",
            "",
            "Loss of the whole batch, mean over the updates of the step, weighted by their tokens.",
            step=lambda s: s.updated.loss if s.updated.updates else None,
        ),
        Metric(
            "policy/entropy",
            "nat",
            "Entropy of the trainer's next token, mean over the tokens in the loss; absent without an update. For all "
            "completions see `rollout/entropy`.",
            step=lambda s: s.updated.token_means.get("entropy"),
        ),
        Metric(
            "policy/logprob_gap",
            "nat",
            "|trainer's - sampler's log-probability| of a sampled token, before the first update: what rounding, "
            "truncated sampling and stale weights make of it.",
            step=lambda s: (s.updated.logprob_gap, s.updated.logprob_gap_max) if s.updated.updates else None,
            parts=MEAN_MAX,
        ),
        Metric(
            "policy/kl_sampled",
            "nat",
            "KL(sampler || trainer) per token, as mean of r - 1 - log r with r = p_trainer / p_sampler.",
            step=lambda s: s.updated.token_means.get("kl_sampled"),
        ),
        Metric(
            "policy/kl_reference",
            "nat",
            "KL(trainer || reference) per token as `algorithm.kl` estimates it: the value of k2, k3 or k3+ in the "
            "loss, or for `k1_reward` the mean of sampled - reference log-probability; with `kl` only.",
            step=_kl_reference,
        ),
        Metric(
            "policy/correction_weight",
            "",
            "Importance weight of `algorithm.correction`, mean over the tokens.",
            step=lambda s: s.updated.token_means.get("correction_weight"),
        ),
        Metric(
            "policy/clip_fraction",
            "fraction",
            "Tokens whose ratio was clipped below or above.",
            step=_clip_fractions,
            parts=LOW_HIGH,
        ),
    ),
    "Optimizer": (
        Metric(
            "optimizer/gradient_norm",
            "",
            "Global norm of the gradient before clipping, mean over the updates.",
            step=lambda s: s.updated.gradient_norm if s.updated.updates else None,
        ),
        Metric(
            "optimizer/update_norm",
            "",
            "Global norm of the change of the parameters, mean over the updates.",
            step=lambda s: s.updated.update_norm if s.updated.updates else None,
        ),
        Metric(
            "optimizer/learning_rate",
            "",
            "Learning rate of the last update; in a step without update, what it would have been.",
            step=lambda s: s.updated.learning_rate,
        ),
        Metric(
            "optimizer/updates",
            "updates",
            "Optimizer steps made; 0 where a step had nothing to train on.",
            step=lambda s: s.updated.updates,
        ),
    ),
    "Rollout": (
        Metric(
            "train-seq_len/prompt",
            "tokens",
            "Prompt, chat template included.",
            step=lambda s: s.completions.prompt_tokens,
            parts=MEAN_MAX,
        ),
        Metric(
            "train-seq_len/completion",
            "tokens",
            "Completion, end-of-sequence included.",
            step=lambda s: s.completions.completion_tokens,
            parts=MEAN_MAX,
        ),
        Metric(
            "train-seq_len/total",
            "tokens",
            "Prompt and completion.",
            step=lambda s: s.completions.total_tokens,
            parts=MEAN_MAX,
        ),
        Metric(
            "rollout/truncated_fraction",
            "fraction",
            "Completions cut by `rollout.max_new_tokens`.",
            step=lambda s: s.completions.truncated / len(s.completions.rewards),
        ),
        Metric(
            "rollout/entropy",
            "nat",
            "Entropy of the sampler per token: mean of -log p over all completion tokens of the step, dropped and "
            "truncated ones included, so it exists in every step. Watch it for collapse.",
            step=lambda s: s.completions.entropy,
        ),
        Metric(
            "rollout/refill_rounds",
            "rounds",
            "Extra generations of `algorithm.zero_variance: refill`.",
            step=lambda s: s.rolled.refill_rounds,
        ),
        Metric("rollout/prefill_s", "s", "Prefill calls.", step=lambda s: s.rolled.prefill_s),
        Metric("rollout/decode_s", "s", "Decode calls.", step=lambda s: s.rolled.decode_s),
        Metric(
            "rollout/decode_steps",
            "steps",
            "Decode steps, each of all slots at once.",
            step=lambda s: s.rolled.decode_steps,
        ),
        Metric(
            "rollout/slot_utilisation",
            "fraction",
            "Slot-steps that made a token which was kept.",
            step=lambda s: s.rolled.slot_utilisation,
        ),
        Metric(
            "rollout/tokens_per_s",
            "tokens/s",
            "Completion tokens / seconds of `generate`.",
            step=lambda s: s.rolled.tokens_per_s,
        ),
        Metric(
            "rollout/compilations",
            "programs",
            "Programs compiled during `generate`; 0 after the first steps.",
            step=lambda s: s.rolled.compilations,
        ),
        Metric(
            "rollout/prompt_tokens",
            "tokens",
            "Prompt tokens prefilled, one copy per group.",
            step=lambda s: s.rolled.prompt_tokens,
        ),
        Metric(
            "rollout/completion_tokens", "tokens", "Completion tokens made.", step=lambda s: s.rolled.completion_tokens
        ),
        Metric(
            "rollout/dropped_prompts",
            "prompts",
            "Prompts above `rollout.max_prompt_tokens`, replaced by others.",
            step=lambda s: s.rolled.dropped_prompts,
        ),
    ),
    "Memory": (
        Metric(
            "memory/train/bytes_in_use_max_gib",
            "GiB",
            "Largest `bytes_in_use` of the local devices after the update; absent where the device does not say (CPU).",
            step=lambda s: s.memory.in_use / GIB if s.memory else None,
        ),
        Metric(
            "memory/train/peak_bytes_in_use_max_gib",
            "GiB",
            "Largest `peak_bytes_in_use` of the local devices since the process began. Temporaries inside a compiled "
            "program may be missing from it.",
            step=lambda s: s.memory.peak / GIB if s.memory else None,
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
}
"""By the sections of docs/metrics.md."""
