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
    """For each reward part, its values for the completions that have it."""
    prompt_tokens: np.ndarray  # [N]
    completion_tokens: np.ndarray  # [n]
    total_tokens: np.ndarray  # [n]
    truncated: int
    timeouts: int
    ungraded: int
    """Number of completions that no reward function could grade."""
    greedy: np.ndarray | None = None  # [m], rewards of greedy completions that did not fail; None if there are none
    entropy: float | None
    """Nats per token, estimated as the mean of -log p of the sampled tokens; None if none were sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentStats:
    """Counts and times of environments and tools in a rollout, over one or several hosts."""

    failures: tuple[str, ...] = ()
    """The traceback of each failure of an environment, retried or not, in the order of the prompts."""
    changed: int = 0
    """Number of environments that, opened again in a continued run, answered otherwise than before."""
    moved: int = 0
    """How often a conversation went on in another process because its own was lost through no fault of it."""
    reply_s: tuple[float, ...] = ()
    """Seconds of each reply."""
    begin_s: tuple[float, ...] = ()
    """Seconds of each beginning."""
    ran: tuple[ToolRun, ...] = ()
    unread_calls: int = 0
    """Answers with a call that could not be read."""
    extend_tokens: int = 0
    """Tokens that environments and tools gave the model."""
    idle_s: float = 0.0
    """Seconds in which the engine had nothing to do but to wait for environments."""

    def then(self, other: "EnvironmentStats") -> "EnvironmentStats":
        """Add those of a later round, or of another host."""
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
    """Sequences of the update that a conversation becomes, on average."""
    stops: Mapping[str, float]
    """Share of conversations by the reason for which they ended."""
    failed: int
    """Conversations that failed through no fault of the model, after all retries."""
    drawn_share: float
    """Share of the tokens after prompts that the model drew."""
    environments: EnvironmentStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelStats:
    """A level of a curriculum, or a task of a mixture by progress, in a step."""

    share: float
    """Share of the step's prompts of all tasks."""
    correct: float | None
    """Share of right answers; None where all conversations failed through no fault of the model."""


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
    """What `kl: k1_reward` takes from a step's rewards: `kl_coef` times each completion's KL to the reference."""

    kl: np.ndarray  # [N, G], log-ratios of the sampler to the reference, summed over each completion's tokens
    penalties: np.ndarray  # [N, G]
    rewards: np.ndarray  # [N, G], minus the penalties
    num_tokens: int

    @property
    def mean_kl(self) -> float | None:
        """Per token, in nat; None without tokens."""
        return float(np.sum(self.kl)) / self.num_tokens if self.num_tokens else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """What the positions in the rows of an update hold."""

    trained: int
    prompt: int
    padding: int
    demonstrated: int = 0
    """Tokens of demonstrations that are mixed in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSeconds:
    """Seconds for turning a step's groups into batches."""

    batch_s: float = 0.0
    """For packing samples into rows and sending them to the devices."""
    score_s: float = 0.0
    advantages_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueStats:
    """Values before a step's first update, beside what is learned; means over drawn tokens."""

    value: float
    returned: float
    """What the values learn."""
    explained_variance: float | None
    """1 - variance of (return - value) / variance of the return; None where all returns are equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerStats:
    """Statistics of the optimizer steps of a trained model beside the policy, means weighted by their tokens."""

    loss: float
    clip_fraction: float
    gradient_norm: float
    learning_rate: float
    """At the last of them."""
    update_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchStats:
    """Counts of a step's groups as they are turned into batches."""

    groups: int
    equal_groups: int
    """Groups with equal rewards, before any penalty."""
    dropped_groups: int
    sequences: int
    """Completions in the update."""
    tokens: TokenCounts
    kept: np.ndarray  # [n], indices in the step of the groups in the update
    advantages: np.ndarray  # [n G], advantages of their completions
    penalty: RewardPenalty | None
    """None unless `kl` is `k1_reward`."""
    taught_kl: float | None = None
    """Mean over the trained tokens of the policy's log-probability minus that of the model that teaches it, if any."""
    values: ValueStats | None = None
    """None unless values are learned."""
    seconds: BatchSeconds = BatchSeconds()


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """Statistics of one or several optimizer steps."""

    updates: int = 0
    tokens: float = 0.0
    """Tokens in the losses, counted once per update."""
    loss: float = 0.0
    """Mean over the updates, weighted by their tokens."""
    gradient_norm: float = 0.0
    """Mean over the updates, like `update_norm`."""
    update_norm: float = 0.0
    logprob_gap: float = 0.0
    """Mean |trainer's - sampler's log-probability|, in nats, over the step's first update only.

    Later updates use other weights than the sampler did. The same holds for `logprob_gap_max`.
    """
    logprob_gap_max: float = 0.0
    token_means: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Mean over tokens of every other statistic of `train_step`, by its name there."""
    learning_rate: float = 0.0
    """At the last update; without updates, what it would have been."""
    update_s: float = 0.0
    learners: Mapping[str, LearnerStats] = dataclasses.field(default_factory=dict)
    """Those of the models beside the policy that were updated, by the name of their role."""

    def then(self, later: "UpdateStats") -> "UpdateStats":
        """Combine with the statistics of later updates; both have at least one.

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
    """Seconds of a whole step."""

    step_s: float
    cpu_s: float
    """CPU time of the trainer, all threads."""
    sync_s: float
    checkpoint_s: float | None
    """For which the loop waited for the previous step's checkpoint; None: that step saved none."""
    mean_step_s: float | None = None
    """Mean of the last ten steps; None before the tenth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepStats:
    """All measurements of a step."""

    completions: CompletionStats
    rolled: RolloutStats
    batched: BatchStats
    updated: UpdateStats
    seconds: StepSeconds
    carried: CarryStats | None = None
    """None without carry-over."""
    conversations: ConversationStats | None = None
    """None where prompts are answered once."""
    levels: Mapping[str, LevelStats] = dataclasses.field(default_factory=dict)
    """Levels of curricula that prompts were drawn from, by label."""
    memory: tuple[int, int] | None = None
    """Bytes in use and at peak on the fullest device; None if devices do not report them (CPU)."""
    host_memory: tuple[int, int] | None = None
    """Resident bytes of the trainer's process, now and at peak, on the fullest host; None where there is no /proc."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScores:
    """A task's evaluation scores; shares are of all questions, 0 to 1."""

    accuracy: float
    accuracy_interval: tuple[float, float]
    completed_accuracy: float
    avg_at_k: float | None
    """None without sampled answers, like the next two."""
    pass_at_k: float | None
    pass_at_k_interval: tuple[float, float] | None
    passes: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """pass@j for each j from 1 to k, by j; empty without sampled answers."""
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """The mean of each part of the reward but `correct`, before its weight."""
    questions: int
    too_long: int
    """Questions that were too long to ask, and count as wrong."""
    completion_tokens: float
    truncated_fraction: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceStats:
    """The mean rewards of held-out preferences; None where there are none.

    A reward is beta times the log-ratio of the policy to the reference.
    """

    chosen: float | None
    """Of chosen, or of desirable completions."""
    rejected: float | None
    accuracy: float | None
    """Share of pairs whose chosen completion has the larger reward; None for labelled completions."""

    @property
    def margin(self) -> float | None:
        """The chosen ones' mean minus the rejected ones'."""
        return None if self.chosen is None or self.rejected is None else self.chosen - self.rejected


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationStats:
    """The results of one evaluation, and its duration."""

    tasks: Mapping[str, TaskScores]
    rollout_s: float
    reward_s: float
    step_s: float
    preferences: PreferenceStats | None = None
    """Of held-out preferences, in a run that learns from them."""

    @property
    def accuracy(self) -> float:
        """The mean over tasks, 0 to 1."""
        return float(np.mean([scores.accuracy for scores in self.tasks.values()]))
