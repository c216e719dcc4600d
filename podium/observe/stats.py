"""Typed statistics of a step and of an evaluation; `podium.observe.metrics` converts them to named metrics.

The engine's own statistics are `podium.rollout.request.RolloutStats`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from podium.rollout.request import RolloutStats
from podium.tasks.conversation import ToolRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionStats:
    """The completions of a step, over all hosts, including those not trained on."""

    rewards: np.ndarray  # [n], weighted sums of the parts, as graded by the task
    parts: Mapping[str, np.ndarray]
    """The values of each reward part, for the completions that have it."""
    prompt_tokens: np.ndarray  # [N]
    completion_tokens: np.ndarray  # [n]
    total_tokens: np.ndarray  # [n]
    truncated: int
    timeouts: int
    ungraded: int
    """Number of completions that no reward function could grade."""
    greedy: np.ndarray | None = None  # [m], rewards of greedy completions that did not fail; None if not sampled
    entropy: float | None
    """Nats per token, estimated as the mean of -log p of the sampled tokens; None if none were sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentStats:
    """Counts and times of environments and tools in a rollout, over one or several hosts."""

    failures: tuple[str, ...] = ()
    """The traceback of each failure of an environment, retried or not, in the order of the prompts."""
    changed: int = 0
    """Number of environments that answered differently when they were opened again in a resumed run."""
    moved: int = 0
    """How often a conversation moved to another process because its own was lost, through no fault of the
    conversation."""
    reply_s: tuple[float, ...] = ()
    """Duration of each reply in seconds."""
    begin_s: tuple[float, ...] = ()
    """Duration of starting each environment, in seconds."""
    ran: tuple[ToolRun, ...] = ()
    unread_calls: int = 0
    """Answers with a call that could not be parsed."""
    extend_tokens: int = 0
    """Tokens of replies from environments and tools."""
    idle_s: float = 0.0
    """Seconds in which the engine was idle, waiting for environments."""

    def then(self, other: "EnvironmentStats") -> "EnvironmentStats":
        """Combine with the statistics of a later round, or of another host."""
        return EnvironmentStats(
            failures=self.failures + other.failures,
            changed=self.changed + other.changed,
            moved=self.moved + other.moved,
            reply_s=self.reply_s + other.reply_s,
            begin_s=self.begin_s + other.begin_s,
            ran=self.ran + other.ran,
            unread_calls=self.unread_calls + other.unread_calls,
            extend_tokens=self.extend_tokens + other.extend_tokens,
            idle_s=self.idle_s + other.idle_s,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationStats:
    """The conversations of a step, over all hosts."""

    turns: np.ndarray  # [n], answers of the model in each
    segments: float
    """Sequences per conversation in the update, on average."""
    stops: Mapping[str, float]
    """Share of conversations by finish reason."""
    failed: int
    """Conversations that failed through no fault of the model, after all retries."""
    drawn_share: float
    """Share of the tokens after prompts that the model generated."""
    environments: EnvironmentStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelStats:
    """Statistics of a curriculum level, or of a task with `data.progress`, in a step."""

    share: float
    """Share of all prompts of the step."""
    correct: float | None
    """Share of right answers; None if all conversations failed through no fault of the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CarryStats:
    """Ages of a step's completions in a run with carry-over, in updates."""

    staleness: np.ndarray  # [N], updates since the first token of each group
    token_ages: np.ndarray  # [tokens]
    crossed: float
    """Share of completions drawn by more than one weight version."""
    rewards: Mapping[str, float]
    """Mean total reward of completions by the staleness of their group."""
    length_distance: float | None
    """Distance between lengths of the step's completions and of those that ended in the step; None if none ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardPenalty:
    """The penalty that `kl: k1_reward` subtracts from a step's rewards: `kl_coef` times each completion's KL to the
    reference.
    """

    kl: np.ndarray  # [N, G], log-ratios of the sampler to the reference, summed over each completion's tokens
    penalties: np.ndarray  # [N, G]
    rewards: np.ndarray  # [N, G], minus the penalties
    num_tokens: int

    @property
    def mean_kl(self) -> float | None:
        """Mean KL per token, in nat; None without tokens."""
        return float(np.sum(self.kl)) / self.num_tokens if self.num_tokens else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """What the row positions of an update contain."""

    trained: int
    prompt: int
    padding: int
    demonstrated: int = 0
    """Tokens of mixed-in demonstrations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSeconds:
    """Seconds for turning a step's groups into batches."""

    batch_s: float = 0.0
    """Seconds for packing samples into rows and sending them to the devices."""
    score_s: float = 0.0
    advantages_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueStats:
    """Estimated values before a step's first update, and the returns that they are trained on; means over sampled
    tokens.
    """

    value: float
    returned: float
    """Mean of the returns."""
    explained_variance: float | None
    """1 - variance of (return - value) / variance of the return; None if all returns are equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerStats:
    """Statistics of the optimizer steps of a trained model other than the policy; means are weighted by tokens."""

    loss: float
    clip_fraction: float
    gradient_norm: float
    learning_rate: float
    """Learning rate at the last optimizer step."""
    update_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchStats:
    """Counts of a step's groups as they are turned into batches."""

    groups: int
    equal_groups: int
    """Groups with equal rewards, before any penalty."""
    dropped_groups: int
    sequences: int
    """Number of completions in the update."""
    tokens: TokenCounts
    kept: np.ndarray  # [n], indices in the step of the groups in the update
    advantages: np.ndarray  # [n G], advantages of their completions
    penalty: RewardPenalty | None
    """The KL penalty; None unless `kl` is `k1_reward`."""
    taught_kl: float | None = None
    """Mean over the trained tokens of the policy's log-probability minus that of the model that teaches it, if any."""
    values: ValueStats | None = None
    """Statistics of estimated values; None unless values are learned."""
    seconds: BatchSeconds = BatchSeconds()


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """Statistics of one or several optimizer steps."""

    updates: int = 0
    tokens: float = 0.0
    """Tokens in the losses, counted once per update."""
    loss: float = 0.0
    """Mean loss over the updates, weighted by their tokens."""
    gradient_norm: float = 0.0
    """Mean global norm of the gradients, before clipping, over the updates."""
    update_norm: float = 0.0
    """Mean global norm of the change of the parameters over the updates."""
    logprob_gap: float = 0.0
    """Mean |trainer's - sampler's log-probability|, in nats, over the step's first update only.

    Later updates use other weights than the sampler did. The same holds for `logprob_gap_max`.
    """
    logprob_gap_max: float = 0.0
    token_means: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Means over tokens of the other statistics of `train_step`, by name."""
    learning_rate: float = 0.0
    """Learning rate of the last update; without updates, the rate that it would have had."""
    update_s: float = 0.0
    learners: Mapping[str, LearnerStats] = dataclasses.field(default_factory=dict)
    """Statistics of the other updated models, by role name."""

    def kl(self, penalty: RewardPenalty | None) -> float | None:
        """Mean KL to the reference per token, in nat: that of the rewards' `penalty`, or else that in the loss; None if
        it is in neither.
        """
        return self.token_means.get("kl_reference") if penalty is None else penalty.mean_kl

    def then(self, later: "UpdateStats") -> "UpdateStats":
        """Combine with the statistics of later updates; both must have at least one update.

        Means over tokens are weighted by tokens, means over weights by updates.
        """
        updates, tokens = self.updates + later.updates, self.tokens + later.tokens

        def by_tokens(mine: float, other: float) -> float:
            return (mine * self.tokens + other * later.tokens) / (tokens or 1.0)

        def by_updates(mine: float, other: float) -> float:
            return (mine * self.updates + other * later.updates) / updates

        names = dict.fromkeys((*self.token_means, *later.token_means))
        return UpdateStats(
            updates=updates,
            tokens=tokens,
            loss=by_tokens(self.loss, later.loss),
            gradient_norm=by_updates(self.gradient_norm, later.gradient_norm),
            update_norm=by_updates(self.update_norm, later.update_norm),
            logprob_gap=self.logprob_gap,
            logprob_gap_max=self.logprob_gap_max,
            token_means={
                name: by_tokens(self.token_means.get(name, 0.0), later.token_means.get(name, 0.0)) for name in names
            },
            learning_rate=later.learning_rate,
            update_s=self.update_s + later.update_s,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Times of a whole step in seconds."""

    step_s: float
    cpu_s: float
    """CPU time of the trainer, over all threads."""
    sync_s: float
    checkpoint_s: float | None
    """How long the loop waited for the previous step's checkpoint; None if that step was not saved."""
    mean_step_s: float | None = None
    """Mean seconds of the last ten steps; None before the tenth step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepStats:
    """All measurements of a step."""

    completions: CompletionStats
    rolled: RolloutStats
    batched: BatchStats
    updated: UpdateStats
    seconds: StepSeconds
    carried: CarryStats | None = None
    """Ages of completions; None without carry-over."""
    conversations: ConversationStats | None = None
    """Statistics of conversations; None if prompts are answered only once."""
    levels: Mapping[str, LevelStats] = dataclasses.field(default_factory=dict)
    """The curriculum levels that prompts were drawn from, by label."""
    memory: tuple[int, int] | None = None
    """Bytes in use and at peak on the fullest device; None if devices do not report them (CPU)."""
    host_memory: tuple[int, int] | None = None
    """Resident bytes of the trainer's process, now and at peak, on the fullest host; None on systems without /proc."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScores:
    """A task's evaluation scores; shares (0 to 1) are relative to all questions."""

    accuracy: float
    accuracy_interval: tuple[float, float]
    completed_accuracy: float
    avg_at_k: float | None
    """Mean correctness of sampled answers; None without them, like the next two."""
    pass_at_k: float | None
    pass_at_k_interval: tuple[float, float] | None
    passes: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """pass@j for each j from 1 to k, by j; empty without sampled answers."""
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """The mean of each part of the reward except `correct`, before its weight."""
    questions: int
    too_long: int
    """Questions that were too long to ask, and count as wrong."""
    completion_tokens: float
    truncated_fraction: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceStats:
    """The mean rewards of held-out preferences; None without such completions.

    A reward is beta times the log-ratio of the policy to the reference.
    """

    chosen: float | None
    """Mean reward of chosen, or of desirable, completions."""
    rejected: float | None
    accuracy: float | None
    """Share of pairs whose chosen completion has the larger reward; None for labelled completions."""

    @property
    def margin(self) -> float | None:
        """The mean of chosen completions minus that of rejected ones."""
        return None if self.chosen is None or self.rejected is None else self.chosen - self.rejected


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationStats:
    """The results of one evaluation, and its duration."""

    tasks: Mapping[str, TaskScores]
    rollout_s: float
    reward_s: float
    step_s: float
    preferences: PreferenceStats | None = None
    """Results on held-out preferences, in a run that learns from preferences."""

    @property
    def accuracy(self) -> float:
        """Mean accuracy over tasks, 0 to 1."""
        return float(np.mean([scores.accuracy for scores in self.tasks.values()]))
