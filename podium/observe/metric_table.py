"""The table of all metrics: names, units, definitions, and functions that read them. docs/metrics.md is generated from
it.

A new metric is one line. `<task>` stands for a task's name, `<part>` for a reward part.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from podium.accelerators import GIB
from podium.observe.stats import EvaluationStats, StepStats, TaskScores
from podium.tasks.conversation import ToolRun

SPREAD = ("mean", "std", "min", "max")
MEAN_MAX = ("mean", "max")
LOW_HIGH = ("low", "high")

Value = float | None | tuple[float, float] | np.ndarray | Mapping[str, float]
"""The result of a reader: a number, or None to omit the metric. For a metric with `parts`, one number for each, or an
array whose statistics the parts are; for a name with `<part>`, a value for each part."""


class Metric(NamedTuple):
    """One metric, or several metrics of one quantity, whose names differ in the last part."""

    name: str
    unit: str
    definition: str
    step: Callable[[StepStats], Value] | None = None
    """Reads the value from a step's statistics. If all three readers are unset, the code that measures the metric
    writes it."""
    evaluation: Callable[[EvaluationStats], Value] | None = None
    task: Callable[[TaskScores], Value] | None = None
    parts: tuple[str, ...] = ()
    """Last parts of the name: `name/mean`, `name/max`, ...; empty: the name is complete."""

    @property
    def names(self) -> tuple[str, ...]:
        """The complete names."""
        return tuple(f"{self.name}/{part}" for part in self.parts) or (self.name,)


def _kl_teacher(stats: StepStats) -> float | None:
    sampled = stats.batched.taught_kl
    return stats.updated.token_means.get("kl_teacher") if sampled is None else sampled


def _logprob_gap(stats: StepStats) -> tuple[float, float] | None:
    return (stats.updated.logprob_gap, stats.updated.logprob_gap_max) if stats.updated.updates else None


def _by_age(name: str) -> Callable[[StepStats], Mapping[str, float] | None]:
    """Make a reader for a statistic of `train_step` that is split by the age of tokens."""

    def read(stats: StepStats) -> Mapping[str, float] | None:
        means, begin = stats.updated.token_means, "age_share/"
        shares = {each.removeprefix(begin): mean for each, mean in means.items() if each.startswith(begin)}
        return {age: means[f"{name}/{age}"] / share for age, share in shares.items() if share} or None

    return read


def _loss_parts(stats: StepStats) -> Mapping[str, float] | None:
    begin = "loss_part/"
    means = stats.updated.token_means
    return {name.removeprefix(begin): mean for name, mean in means.items() if name.startswith(begin)} or None


def _effective_share(stats: StepStats) -> float | None:
    means = stats.updated.token_means
    return means["ratio"] ** 2 / means["squared_ratio"] if means.get("squared_ratio") else None  # 0: no token counted


def _token_ages(stats: StepStats) -> tuple[float, float] | None:
    ages = stats.carried and stats.carried.token_ages
    return None if ages is None else (float(np.mean(ages)), float(np.percentile(ages, 95)))


def clip_fractions(token_means: Mapping[str, float]) -> tuple[float, float] | None:
    """The shares of tokens (or of sequences, if the loss clips those) clipped at the low and at the high end; None
    without an update.
    """
    if sequences := token_means.get("sequences"):
        return token_means["sequences_clipped_low"] / sequences, token_means["sequences_clipped_high"] / sequences
    return (token_means["clip_low"], token_means["clip_high"]) if token_means else None


def _of_pairs(name: str, counted: str = "pairs") -> Callable[[StepStats], float | None]:
    """Make a reader for a preference loss's statistic, averaged over pairs or labelled completions."""

    def read(stats: StepStats) -> float | None:
        means = stats.updated.token_means
        count = means.get(counted, means.get("pairs"))
        return means[name] / count if count and name in means else None

    return read


_chosen, _rejected = _of_pairs("pairs_chosen", "chosen"), _of_pairs("pairs_rejected", "rejected")


def _margin(stats: StepStats) -> float | None:
    means = stats.updated.token_means
    chosen, rejected = means.get("chosen", means.get("pairs")), means.get("rejected", means.get("pairs"))
    if not chosen or not rejected or "pairs_chosen" not in means:
        return None
    return means["pairs_chosen"] / chosen - means["pairs_rejected"] / rejected


def _judged(name: str) -> Callable[[StepStats], float | None]:
    """Make a reader for a count of judges; the value is None in steps without judges."""

    def read(stats: StepStats) -> float | None:
        judged = stats.rolled.grading.judged
        return getattr(judged, name) if judged.requests or judged.cached else None

    return read


def _by_tool(read: Callable[[Sequence[ToolRun]], float]) -> Callable[[StepStats], Mapping[str, float] | None]:
    """Make a reader that applies `read` to the calls of each tool."""

    def of_each(stats: StepStats) -> Mapping[str, float] | None:
        if stats.conversations is None:
            return None
        ran = stats.conversations.environments.ran
        return {name: read([each for each in ran if each.name == name]) for name in sorted({each.name for each in ran})}

    return of_each


def _reply_s(stats: StepStats) -> tuple[float, float] | None:
    seconds = stats.conversations and stats.conversations.environments.reply_s
    return (float(np.mean(seconds)), float(np.percentile(seconds, 95))) if seconds else None


# fmt: off
METRICS: dict[str, tuple[Metric, ...]] = {
    "Time": (
        Metric("time/wall_s", "s", "Wall time since the run's folder was opened, summed over all processes of the run."),
        Metric("time/cpu_s", "s", "CPU time of the trainer and its finished child processes, summed like `time/wall_s`."),
        Metric("time/train/step_s", "s", "From the first prompt drawn to the new weights in the engine; without evaluation, checkpoint, and writing of metrics.", lambda s: s.seconds.step_s),
        Metric("time/train/step_avg_last10_s", "s", "Mean of the last 10 `time/train/step_s` of this process; from its 10th step on.", lambda s: s.seconds.mean_step_s),
        Metric("time/train/step_cpu_s", "s", "CPU time of the trainer, all threads, during `time/train/step_s`.", lambda s: s.seconds.cpu_s),
        Metric("time/train/rollout_s", "s", "Generating completions and decoding them to text, including prompts drawn for refills.", lambda s: s.rolled.answer_s - s.rolled.grading.reward_s - s.rolled.grading.scored_s),
        Metric("time/train/reward_s", "s", "Waiting for the grades of the step.", lambda s: s.rolled.grading.reward_s),
        Metric("time/train/reward_model_s", "s", "Scoring the step's answers with the reward models; only with `reward_models`.", lambda s: s.rolled.grading.scored_s or None),
        Metric("time/train/advantages_s", "s", "Turning rewards into advantages.", lambda s: s.batched.seconds.advantages_s),
        Metric("time/train/batch_s", "s", "Packing completions into rows and sending them to the devices.", lambda s: s.batched.seconds.batch_s),
        Metric("time/train/score_s", "s", "Log-probabilities of the reference, of a teacher, or of the trainer before the first update, and values of a critic; 0 if none is needed.", lambda s: s.batched.seconds.score_s),
        Metric("time/train/update_s", "s", "All updates of the step.", lambda s: s.updated.update_s),
        Metric("time/train/critic_s", "s", "All updates of the critic; only in runs with one.", lambda s: (own := s.updated.learners.get("critic")) and own.update_s),
        Metric("time/train/sync_s", "s", "Copying the new weights into the rollout's layout.", lambda s: s.seconds.sync_s),
        Metric("time/train/checkpoint_s", "s", "Wait for the checkpoint of the previous step; absent if that step did not save.", lambda s: s.seconds.checkpoint_s),
        Metric("time/eval/rollout_s", "s", "Generating the answers of one evaluation, all tasks.", evaluation=lambda e: e.rollout_s),
        Metric("time/eval/reward_s", "s", "Waiting for the grades of one evaluation.", evaluation=lambda e: e.reward_s),
        Metric("time/eval/step_s", "s", "One evaluation.", evaluation=lambda e: e.step_s),
    ),
    "Throughput and counts": (
        Metric("throughput/train/valid_tokens_per_s", "tokens/s", "`train-other/total_valid_token_count` / `time/train/step_s`, over all devices.", lambda s: s.batched.tokens.trained / s.seconds.step_s),
        Metric("throughput/train/valid_tokens_per_s_update", "tokens/s", "`train-other/total_valid_token_count` / `time/train/update_s`.", lambda s: s.batched.tokens.trained / s.updated.update_s),
        Metric("throughput/train/busy_cores", "cores", "`time/train/step_cpu_s` / `time/train/step_s`: cores of the first host that the trainer kept busy; grading processes are not counted.", lambda s: s.seconds.cpu_s / s.seconds.step_s),
        Metric("train-other/total_valid_token_count", "tokens", "Completion tokens in the loss, over all hosts.", lambda s: s.batched.tokens.trained),
        Metric("train-other/batch_global", "sequences", "Completions in the update, over all hosts.", lambda s: s.batched.sequences),
        Metric("tokens/demonstrations", "tokens", "Tokens of demonstrations in the rows of the update; only with a part of `algorithm.loss_parts` that imitates.", lambda s: s.batched.tokens.demonstrated or None),
        Metric("tokens/prompt", "tokens", "Prompt tokens in the rows of the update.", lambda s: s.batched.tokens.prompt),
        Metric("tokens/completion", "tokens", "Completion tokens in the rows of the update.", lambda s: s.batched.tokens.trained),
        Metric("tokens/padding", "tokens", "Row positions that hold no token.", lambda s: s.batched.tokens.padding),
    ),
    "Reward": (
        Metric("train-reward/total", "reward", "Weighted sum of the parts, over the completions of the step; without the KL of `k1_reward`.", lambda s: s.completions.rewards, parts=SPREAD),
        Metric("train-reward/penalised", "reward", "The total after the penalty of `kl: k1_reward`; only with it.", lambda s: s.batched.penalty and s.batched.penalty.rewards, parts=SPREAD),
        Metric("train-reward/kl_penalty", "reward", "Penalty of `kl: k1_reward`, `kl_coef` x the completion's KL; only with it.", lambda s: s.batched.penalty and s.batched.penalty.penalties, parts=MEAN_MAX),
        Metric("train-reward/func/<part>/mean", "reward", "One part of the reward, before its weight.", lambda s: {part: float(np.mean(x)) for part, x in s.completions.parts.items()}),
        Metric("train-reward/greedy", "reward", "Reward of the greedy completions that recipe remax compares with; only with it.", lambda s: s.completions.greedy, parts=MEAN_MAX),
        Metric("train-reward/advantage", "reward", "Advantages, over the completions in the update.", lambda s: s.batched.advantages if len(s.batched.advantages) else None, parts=SPREAD),
        Metric("group/equal_rewards_fraction", "fraction", (
            "Groups whose completions all got the same reward, before the KL of `k1_reward`; with "
            "`algorithm.zero_variance_metric`, equal in that part."
        ), lambda s: s.batched.equal_groups / s.batched.groups),
        Metric("group/dropped", "groups", "Groups left out of the update by `algorithm.zero_variance`.", lambda s: s.batched.dropped_groups),
        Metric("grading/ungraded", "completions", "Completions for which every reward function returned None; they count in no mean.", lambda s: s.completions.ungraded),
        Metric("grading/unscored", "completions", "Completions that were too long for a reward model, counted for each; their rewards are sums of the other parts. Only with `reward_models`.", lambda s: s.rolled.grading.unscored if s.rolled.grading.scored_s else None),
        Metric("judge/requests", "requests", "Requests sent to judges, retries included; only with `grading.judges`, like the next three.", _judged("requests")),
        Metric("judge/tokens", "tokens", "Tokens of the requests to judges and of their replies, as the servers count them.", _judged("tokens")),
        Metric("judge/cached", "completions", "Completions graded with an earlier reply of a judge: the answer to this prompt came before, or its step was interrupted and repeated.", _judged("cached")),
        Metric("judge/ungraded", "completions", "Completions for which a judge's reply has no number within its range; their rewards are sums of the other parts.", _judged("ungraded")),
        Metric("grading/timeouts", "completions", "Completions whose grading exceeded `grading.timeout_s`, or whose code exceeded its task's `timeout_s`.", lambda s: s.completions.timeouts),
    ),
    "Policy": (
        Metric("train-other/loss", "", "Loss of the whole batch, mean over the updates of the step, weighted by their tokens.", lambda s: s.updated.loss if s.updated.updates else None),
        Metric("policy/entropy", "nat", "Entropy of the trainer's next token, mean over the tokens in the loss; absent without an update. See also `rollout/entropy`.", lambda s: s.updated.token_means.get("entropy")),
        Metric("policy/logprob_gap", "nat", (
            "|trainer's - sampler's log-probability| of a sampled token before the first update, both before top-k, "
            "top-p and min-p; caused by rounding and stale weights."
        ), _logprob_gap, parts=MEAN_MAX),
        Metric("policy/kl_sampled", "nat", "KL(sampler || trainer) per token, as mean of r - 1 - log r with r = p_trainer / p_sampler.", lambda s: s.updated.token_means.get("kl_sampled")),
        Metric("policy/kl_reference", "nat", "KL(trainer || reference) per token as `algorithm.kl` estimates it; for `k1_reward` the mean of sampled - reference log-probability; only with `kl`.", lambda s: s.updated.kl(s.batched.penalty)),
        Metric("policy/routing_disagreement", "fraction", (
            "Tokens that the trainer's router would send to other experts than the sampler's router did, over layers "
            "and tokens whose experts were recorded; only with a mixture of experts, like the next three."
        ), lambda s: s.updated.token_means.get("routing_disagreement")),
        Metric("policy/router_load_max", "", "Load of the busiest expert over the mean load, in the tokens of the update; mean over layers. 1: all are used equally.", lambda s: s.updated.token_means.get("router_load_max")),
        Metric("policy/router_unused", "fraction", "Experts without a token in a micro-batch; mean over layers.", lambda s: s.updated.token_means.get("router_unused")),
        Metric("policy/router_balance", "", "The balance loss that `algorithm.router_loss_coef` weighs; 1: all experts are used equally.", lambda s: s.updated.token_means.get("router_balance")),
        Metric("policy/kl_teacher", "nat", "KL(trainer || teacher) per token before the step's first update, as mean of trainer's - teacher's log-probability; with `teacher.loss: full` the divergence in the loss, mean over the updates; only with `teacher`.", _kl_teacher),
        Metric("policy/correction_weight", "", "Importance weight of `algorithm.correction`, mean over the tokens.", lambda s: s.updated.token_means.get("correction_weight")),
        Metric("policy/correction_dropped", "fraction", "Tokens whose weight `algorithm.correction` made 0; only with it.", lambda s: s.updated.token_means.get("correction_dropped")),
        Metric("policy/off_policy_dropped", "fraction", "Tokens left out by `algorithm.off_policy_threshold`; only with it.", lambda s: s.updated.token_means.get("off_policy_dropped")),
        Metric("policy/covariant", "fraction", "Tokens that losses clip_cov and kl_cov choose by their covariance; only with them.", lambda s: s.updated.token_means.get("covariant")),
        Metric("policy/entropy_bonus", "", "Entropy bonus of the loss, mean over the updates; only with `algorithm.entropy_target`.", lambda s: s.updated.token_means.get("entropy_bonus")),
        Metric("policy/kl_coef", "", "Weight of the KL in the step, before it is adapted; only with `algorithm.kl_target`.", lambda s: s.updated.token_means.get("kl_coef")),
        Metric("policy/top_entropy", "fraction", "Tokens that `algorithm.top_entropy` keeps in the policy term; only with it.", lambda s: s.updated.token_means.get("top_entropy")),
        Metric("policy/likelihood_loss", "nat", "Mean of -log-probability over the tokens of demonstrations, before the weight of their part; only with a part of `algorithm.loss_parts` that imitates.", lambda s: s.updated.token_means.get("likelihood")),
        Metric("policy/loss_part/<part>", "", "Mean over the tokens of a loss of your own in `algorithm.loss_parts`, before its weight; `<part>` is the name of its function.", _loss_parts),
        Metric("policy/clip_fraction", "fraction", "Tokens whose ratio was clipped below or above; with `loss: gspo`, sequences.", lambda s: clip_fractions(s.updated.token_means), parts=LOW_HIGH),
        Metric("rewards/chosen", "reward", "Mean of beta x log-ratio of policy to reference, over the chosen or desirable completions; with `recipe: dpo`.", _chosen),
        Metric("rewards/rejected", "reward", (
            "Mean of beta x log-ratio of policy to reference, over the rejected or undesirable completions."
        ), _rejected),
        Metric("rewards/margins", "reward", "`rewards/chosen` - `rewards/rejected`.", _margin),
        Metric("rewards/accuracies", "fraction", "Pairs whose chosen completion has the larger reward; not with `loss: kto`.", _of_pairs("pairs_right")),
        Metric("rewards/reference_point", "nat", "Estimate of the policy's KL to the reference that `loss: kto` compares completions with, mean over the step's updates.", lambda s: s.updated.token_means.get("reference_point")),
        Metric("policy/dual_clip_fraction", "fraction", "Tokens whose loss `algorithm.dual_clip` bounds; only with it.", lambda s: s.updated.token_means.get("dual_clipped")),
    ),
    "Critic": (
        Metric("critic/loss", "reward^2", "Loss of the critic, mean over its updates of the step, weighted by their tokens; like all of these, only with recipe `ppo`.", lambda s: (own := s.updated.learners.get("critic")) and own.loss),
        Metric("critic/explained_variance", "", (
            "1 - variance of (return - value) / variance of the return, over drawn tokens before the step's first "
            "update. 1: perfect; 0: as good as a constant; absent if all returns are equal."
        ), lambda s: s.batched.values and s.batched.values.explained_variance),
        Metric("critic/value", "reward", "The critic's values before the step's first update, mean over drawn tokens.", lambda s: s.batched.values and s.batched.values.value),
        Metric("critic/return", "reward", "The returns that the critic learns, mean over drawn tokens.", lambda s: s.batched.values and s.batched.values.returned),
        Metric("critic/clip_fraction", "fraction", "Tokens whose value loss is cut off by `critic.clip`.", lambda s: (own := s.updated.learners.get("critic")) and own.clip_fraction),
        Metric("critic/gradient_norm", "", "Global norm of the critic's gradient before clipping, mean over its updates.", lambda s: (own := s.updated.learners.get("critic")) and own.gradient_norm),
        Metric("critic/learning_rate", "", "Learning rate of the critic's last update.", lambda s: (own := s.updated.learners.get("critic")) and own.learning_rate),
    ),
    "Optimizer": (
        Metric("optimizer/gradient_norm", "", "Global norm of the gradient before clipping, mean over the updates.", lambda s: s.updated.gradient_norm if s.updated.updates else None),
        Metric("optimizer/update_norm", "", "Global norm of the change of the parameters, mean over the updates.", lambda s: s.updated.update_norm if s.updated.updates else None),
        Metric("optimizer/learning_rate", "", "Learning rate of the last update; in a step without an update, the rate that it would have had.", lambda s: s.updated.learning_rate),
        Metric("optimizer/updates", "updates", "Optimizer steps made; 0 if a step had nothing to train on.", lambda s: s.updated.updates),
    ),
    "Rollout": (
        Metric("train-seq_len/prompt", "tokens", "Prompt, chat template included.", lambda s: s.completions.prompt_tokens, parts=MEAN_MAX),
        Metric("train-seq_len/completion", "tokens", "Completion, end-of-sequence included.", lambda s: s.completions.completion_tokens, parts=MEAN_MAX),
        Metric("train-seq_len/total", "tokens", "Prompt and completion.", lambda s: s.completions.total_tokens, parts=MEAN_MAX),
        Metric("rollout/truncated_fraction", "fraction", "Completions cut by `rollout.max_new_tokens`, and conversations ended by a limit.", lambda s: s.completions.truncated / max(1, len(s.completions.rewards))),
        Metric("rollout/entropy", "nat", "Entropy of the sampler per token, mean of -log p over all completion tokens, so it exists in every step. Watch it for collapse.", lambda s: s.completions.entropy),
        Metric("rollout/refill_rounds", "rounds", "Extra rounds of generation by `algorithm.zero_variance: refill`.", lambda s: s.rolled.refill_rounds),
        Metric("rollout/prefill_s", "s", "Prefill calls; if they overlap with decoding (TPU, GPU), only the time to issue them.", lambda s: s.rolled.calls.prefill_s),
        Metric("rollout/prefill_tokens", "tokens", "Prefilled tokens: prompts, once per group, and tokens whose keys and values were recomputed.", lambda s: s.rolled.scheduled.prefill_tokens),
        Metric("rollout/rebuilt_tokens", "tokens", "Prefilled tokens whose keys and values had been computed before.", lambda s: s.rolled.scheduled.rebuilt_tokens),
        Metric("rollout/decode_s", "s", "Decode calls.", lambda s: s.rolled.calls.decode_s),
        Metric("rollout/decode_steps", "steps", "Decode steps, each of all slots of a program at once.", lambda s: s.rolled.calls.decode_steps),
        Metric("rollout/slots_busy", "fraction", "Share of slots that drew a token, averaged over decode steps.", lambda s: s.rolled.slots_busy),
        Metric("rollout/slot_utilisation", "fraction", (
            "Like `slots_busy`, but only of the slots of the decode programs in use, which have fewer slots as work "
            "runs out."
        ), lambda s: s.rolled.slot_utilisation),
        Metric("rollout/pages_peak", "pages", "Largest number of KV cache pages in use.", lambda s: s.rolled.scheduled.pages_peak),
        Metric("rollout/preempted", "sequences", "Sequences that lost slot and pages to older ones; raise `rollout.cache_tokens`.", lambda s: s.rolled.scheduled.preempted),
        Metric("rollout/evicted", "sequences", "Parked or waiting sequences that lost their pages.", lambda s: s.rolled.scheduled.evicted),
        Metric("rollout/parked", "sequences", "Largest number of conversations that waited for their environments at a time, over all hosts; only with conversations.", lambda s: s.conversations and s.rolled.scheduled.parked),
        Metric("rollout/tokens_per_s", "tokens/s", "Completion tokens / seconds of `generate`.", lambda s: s.rolled.tokens_per_s),
        Metric("rollout/compilations", "programs", "Programs first called during `generate`; 0 after the first steps.", lambda s: s.rolled.calls.compilations),
        Metric("rollout/prompt_tokens", "tokens", "Prompt tokens prefilled, one copy per group.", lambda s: s.rolled.prompt_tokens),
        Metric("rollout/completion_tokens", "tokens", "Completion tokens generated.", lambda s: s.rolled.completion_tokens),
        Metric("rollout/dropped_prompts", "prompts", "Prompts above `rollout.max_prompt_tokens`, replaced by others.", lambda s: s.rolled.dropped_prompts),
    ),
    "Conversations": (
        Metric("env/turns", "turns", (
            "Answers of the model in a conversation. This section's metrics exist only if prompts are answered more "
            "than once."
        ), lambda s: s.conversations and s.conversations.turns, parts=MEAN_MAX),
        Metric("env/stop/<part>", "fraction", (
            "Conversations by the reason for which they ended: `stop` (ended by the model or environment), `length`, "
            "`turns`, `drawn`, `calls`, `timeout` (limits), `failed`."
        ), lambda s: s.conversations and s.conversations.stops),
        Metric("env/segments", "sequences", "Sequences per conversation in the update, on average: 1 with `rollout.thinking: keep`.", lambda s: s.conversations and s.conversations.segments),
        Metric("env/failed", "conversations", "Conversations that failed through no fault of the model after all retries; they count in no mean.", lambda s: s.conversations and s.conversations.failed),
        Metric("env/retried", "conversations", "Failures of environments, in all attempts.", lambda s: s.conversations and len(s.conversations.environments.failures)),
        Metric("env/changed", "conversations", (
            "Conversations that were in flight when a run was stopped, and whose environments answered differently "
            "when they were opened again, so that they were restarted. Only with `rollout.in_flight` above 1."
        ), lambda s: s.conversations.environments.changed if s.conversations and s.carried else None),
        Metric("env/moved", "conversations", (
            "How often a conversation moved to another process because its own ended or did not respond, through no "
            "fault of the conversation."
        ), lambda s: s.conversations and s.conversations.environments.moved),
        Metric("env/reply_s", "s", "An environment's reply to a turn, tools included.", _reply_s, parts=("mean", "p95")),
        Metric("env/begin_s", "s", "An environment's beginning.", lambda s: np.array(s.conversations.environments.begin_s) if s.conversations and s.conversations.environments.begin_s else None, parts=MEAN_MAX),
        Metric("env/idle_s", "s", "Waiting for environments while the engine had nothing to do, or until due replies arrived (`rollout.reproducible` with `rollout.in_flight` above 1).", lambda s: s.conversations and s.conversations.environments.idle_s),
        Metric("env/reply_tokens", "tokens", "Tokens that environments and tools gave the model, over all hosts.", lambda s: s.conversations and s.conversations.environments.extend_tokens),
        Metric("env/drawn_share", "fraction", "Share of the tokens after prompts that the model drew.", lambda s: s.conversations and s.conversations.drawn_share),
        Metric("tools/<part>/calls", "calls", "Calls of a tool; `unknown`: calls of unknown tools.", _by_tool(len)),
        Metric("tools/<part>/errors", "calls", "Calls answered with an error: wrong arguments, or the tool raised.", _by_tool(lambda ran: sum(each.error for each in ran))),
        Metric("tools/<part>/mean_s", "s", "Mean duration of a call.", _by_tool(lambda ran: float(np.mean([each.seconds for each in ran])))),
        Metric("tools/unread_calls", "turns", "Answers with a call that could not be read, such as broken JSON.", lambda s: s.conversations and s.conversations.environments.unread_calls),
    ),
    "Curriculum": (
        Metric("curriculum/<part>/share", "fraction", "The step's prompts from a level of a curriculum, or with `data.progress` of a task, which `<part>` names.", lambda s: {level: each.share for level, each in s.levels.items()}),
        Metric("curriculum/<part>/correct", "fraction", "Share of right answers to these prompts.", lambda s: {level: each.correct for level, each in s.levels.items() if each.correct is not None}),
        Metric("curriculum/retired", "prompts", "Prompts that `data.retire` no longer draws; absent while there are none.", lambda s: s.rolled.retired or None),
    ),
    "Carry-over": (
        Metric("async/staleness", "updates", (
            "Updates since a group's first token, over the groups of the step; at most `rollout.max_staleness`. This "
            "section's metrics exist only with `rollout.in_flight` above 1."
        ), lambda s: s.carried and s.carried.staleness, parts=MEAN_MAX),
        Metric("async/token_age", "updates", "Updates since a token was drawn, over the step's tokens.", _token_ages, parts=("mean", "p95")),
        Metric("async/crossed_share", "fraction", "Completions drawn by more than one version of the weights.", lambda s: s.carried and s.carried.crossed),
        Metric("async/waited_s", "s", "Decoding after enough groups were complete, to finish a group that must not become staler.", lambda s: s.rolled.waited_s if s.carried else None),
        Metric("async/in_flight", "prompts", "Prompts carried over to the next step, unfinished or complete.", lambda s: s.rolled.in_flight if s.carried else None),
        Metric("async/reward_by_age/<part>", "reward", "Mean total reward of groups by staleness; `<part>` is 0, 1, ...", lambda s: s.carried and s.carried.rewards),
        Metric("async/logprob_gap_by_age/<part>", "nat", "`policy/logprob_gap/mean` of tokens by age; `<part>` is 0 (rounding alone), 1, 2+ (drift); mean over the updates.", _by_age("age_gap")),
        Metric("async/clip_share_by_age/<part>", "fraction", "Share of tokens by age, as above, whose ratio was clipped below or above.", _by_age("age_clipped")),
        Metric("async/effective_share", "fraction", (
            "Effective sample size / tokens: squared mean of the tokens' ratios, trainer's to sampler's probability, "
            "/ mean of their squares. It may look healthy in runs that fail, so it raises no alarm."
        ), _effective_share),
        Metric("async/rebuild_s", "s", "Prefilling of rebuilt tokens: `rollout/prefill_s` x `rollout/rebuilt_tokens` / `rollout/prefill_tokens`.", lambda s: s.rolled.rebuild_s if s.carried else None),
        Metric("async/drawn_length", "tokens", "Lengths of completions that ended in the step; `train-seq_len/completion` has those that the step trains on.", lambda s: np.array(s.rolled.drawn_lengths) if s.carried and s.rolled.drawn_lengths else None, parts=MEAN_MAX),
        Metric("async/length_distance", "fraction", (
            "Kolmogorov-Smirnov distance between these lengths and those of the trained completions, 0 to 1. In a "
            "single step it is mostly chance; the run warns once if it exceeds 0.1 over ten steps."
        ), lambda s: s.carried and s.carried.length_distance),
    ),
    "Memory": (
        Metric("memory/train/bytes_in_use_max_gib", "GiB", "Largest `bytes_in_use` of a device after the update; absent if devices do not report it (CPU).", lambda s: s.memory and s.memory[0] / GIB),
        Metric("memory/train/peak_bytes_in_use_max_gib", "GiB", "Largest `peak_bytes_in_use` since the process began; temporaries inside a compiled program may be missing.", lambda s: s.memory and s.memory[1] / GIB),
        Metric("memory/train/host_max_gib", "GiB", "Largest resident memory of a trainer's process after the step, over all hosts; on a CPU the arrays are part of it.", lambda s: s.host_memory and s.host_memory[0] / GIB),
        Metric("memory/train/host_peak_max_gib", "GiB", "Largest peak of the resident memory of a trainer's process since it began, over all hosts.", lambda s: s.host_memory and s.host_memory[1] / GIB),
    ),
    "Plan": (
        Metric("plan/memory_error", "fraction", "Memory planned for the phase that needs most / measured peak - 1, after the ninth step of a process, or a later one that compiled nothing; on TPU and GPU."),
        Metric("plan/step_error", "fraction", "Seconds planned for a step / `time/train/step_s` of that step - 1; on TPU and GPU. Beyond 25 % the run prints the likeliest cause."),
        Metric("plan/<part>_error", "fraction", "Like `plan/step_s_error`, for a part of the step: `sync`, `rollout`, `reward`, `score`, `update`."),
    ),
    "Evaluation": (
        Metric("eval/accuracy", "fraction", "Mean of `eval/<task>/accuracy` over the tasks; `keep_best` ranks by it.", evaluation=lambda e: e.accuracy),
        Metric("eval-rewards/chosen", "reward", "`rewards/chosen` of held-out pairs or labelled completions, under the evaluated weights; with `recipe: dpo`.", evaluation=lambda e: e.preferences and e.preferences.chosen),
        Metric("eval-rewards/rejected", "reward", "`rewards/rejected` of held-out pairs or labelled completions.", evaluation=lambda e: e.preferences and e.preferences.rejected),
        Metric("eval-rewards/margins", "reward", "`eval-rewards/chosen` - `eval-rewards/rejected`.", evaluation=lambda e: e.preferences and e.preferences.margin),
        Metric("eval-rewards/accuracies", "fraction", "Held-out pairs whose chosen completion has the larger reward; 0 before the first update, where all are equal; not with `loss: kto`.", evaluation=lambda e: e.preferences and e.preferences.accuracy),
        Metric("eval/<task>/accuracy", "fraction", "Questions answered correctly with the likeliest tokens; without `eval.greedy`: `avg_at_k`. Questions that are too long count as wrong.", task=lambda t: t.accuracy),
        Metric("eval/<task>/accuracy_interval", "fraction", "95 % Wilson interval of the accuracy over the questions.", task=lambda t: t.accuracy_interval, parts=LOW_HIGH),
        Metric("eval/<task>/completed_accuracy", "fraction", "Like `accuracy`, but answers cut by `rollout.max_new_tokens` count as wrong.", task=lambda t: t.completed_accuracy),
        Metric("eval/<task>/avg_at_k", "fraction", "Mean correctness of k = `eval.samples` sampled answers; questions that are too long count as wrong.", task=lambda t: t.avg_at_k),
        Metric("eval/<task>/pass_at_k", "fraction", "Questions with at least one correct answer among k.", task=lambda t: t.pass_at_k),
        Metric("eval/<task>/pass_at/<part>", "fraction", (
            "For each `<part>` j from 1 to k, the probability that at least one of j answers is correct, estimated "
            "from all k without bias."
        ), task=lambda t: t.passes or None),
        Metric("eval/<task>/pass_at_k_interval", "fraction", "95 % Wilson interval of `pass_at_k`.", task=lambda t: t.pass_at_k_interval, parts=LOW_HIGH),
        Metric("eval/<task>/func/<part>/mean", "reward", "One part of the reward of the answers, before its weight; for `correct` see `accuracy`.", task=lambda t: t.scores or None),
        Metric("eval/<task>/questions", "questions", "Evaluation questions, including those that are too long.", task=lambda t: t.questions),
        Metric("eval/<task>/too_long", "questions", "Questions above `rollout.max_prompt_tokens`: not asked, and counted as wrong.", task=lambda t: t.too_long),
        Metric("eval/<task>/completion_tokens", "tokens", "Mean length of the answers.", task=lambda t: t.completion_tokens),
        Metric("eval/<task>/truncated_fraction", "fraction", "Answers cut by `rollout.max_new_tokens`.", task=lambda t: t.truncated_fraction),
    ),
}
# fmt: on
"""All metrics, by section of docs/metrics.md."""
