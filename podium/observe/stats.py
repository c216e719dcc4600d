"""Statistics of a step and of an evaluation, typed; `podium.observe.metrics` gives the numbers their names.

What the engine counts of itself is `podium.rollout.request.RolloutStats`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from podium.rollout.request import RolloutStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionStats:
    """The completions of a step, over all hosts, whether they are trained on or not."""

    rewards: np.ndarray  # [n], weighted sums of the parts, as the task gave them
    parts: Mapping[str, np.ndarray]
    """By part of the reward, those of the completions that have it."""
    prompt_tokens: np.ndarray  # [N]
    completion_tokens: np.ndarray  # [n]
    total_tokens: np.ndarray  # [n]
    truncated: int
    timeouts: int
    entropy: float
    """Nat per token, estimated by the mean of -log p of the sampled tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CarryStats:
    """How old a step's completions are, where they are carried over updates; in updates."""

    staleness: np.ndarray  # [N] of the groups, since their first token
    token_ages: np.ndarray  # [tokens]
    crossed: float
    """Share of the completions that more than one version of the weights has drawn."""
    rewards: Mapping[str, float]
    """Mean total of the completions, by the staleness of their group."""
    length_distance: float | None
    """Between the lengths of the step's completions and of the completions that ended in it; None where none did."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardKl:
    """The KL to the reference that `kl: k1_reward` charges to each completion."""

    sums: np.ndarray  # [N, G], sampled - reference log-probability, summed over the completion's tokens
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchStats:
    """Counts of a step's groups on their way into batches."""

    groups: int
    equal_groups: int
    """Whose completions all earned the same, before any penalty."""
    dropped_groups: int
    sequences: int
    """Completions in the update."""
    trained_tokens: int
    prompt_tokens: int
    padding_tokens: int
    kept: np.ndarray  # [n], the groups in the update, by their position in the step
    advantages: np.ndarray  # [n G], of their completions
    penalties: np.ndarray | None  # [N G], what `kl: k1_reward` took off the rewards
    penalised_rewards: np.ndarray | None  # [N G], what it left
    reward_kl: RewardKl | None
    batch_s: float = 0.0
    """Packing samples into rows, and sending them to the devices."""
    score_s: float = 0.0
    advantages_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """Statistics of one optimizer step, or of several."""

    updates: int = 0
    tokens: float = 0.0
    """Tokens in the losses, a token once per update."""
    loss: float = 0.0
    """Mean over the updates, weighted by their tokens."""
    gradient_norm: float = 0.0
    """Mean over the updates, as `update_norm`."""
    update_norm: float = 0.0
    logprob_gap: float = 0.0
    """As `logprob_gap_max` of the first update: later ones have other weights than the sampler."""
    logprob_gap_max: float = 0.0
    token_means: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Means over the tokens of every other statistic of `train_step`, by its name there."""
    learning_rate: float = 0.0
    """At the last update; without any, what it would have been."""
    update_s: float = 0.0

    def then(self, later: "UpdateStats") -> "UpdateStats":
        """Combine with the statistics of later updates, at least one each.

        Means over tokens are weighted by tokens, means over weights by updates.
        """
        updates, tokens = self.updates + later.updates, self.tokens + later.tokens

        def by_tokens(mine: float, other: float) -> float:
            return (mine * self.tokens + other * later.tokens) / tokens

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
class StepStats:
    """Everything that is measured in a step."""

    completions: CompletionStats
    rolled: RolloutStats
    batched: BatchStats
    updated: UpdateStats
    step_s: float
    cpu_s: float
    sync_s: float
    checkpoint_s: float | None
    """What the loop waited for the checkpoint of the step before; None: that step saved none."""
    mean_step_s: float | None = None
    """Mean of the last ten steps; None before the tenth."""
    carried: CarryStats | None = None
    """None where each step completes its own."""
    memory: tuple[int, int] | None = None
    """Bytes in use, and at most, on the device with most in use; None where devices do not say (CPU)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScores:
    """How a task's evaluation questions were answered; shares are of all of them, 0 to 1."""

    accuracy: float
    accuracy_interval: tuple[float, float]
    completed_accuracy: float
    avg_at_k: float | None
    """None without sampled answers, as the two below."""
    pass_at_k: float | None
    pass_at_k_interval: tuple[float, float] | None
    questions: int
    too_long: int
    """Questions that could not be asked, and count as wrong."""
    completion_tokens: float
    truncated_fraction: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationStats:
    """The results of one evaluation, and how long it took."""

    tasks: Mapping[str, TaskScores]
    rollout_s: float
    reward_s: float
    step_s: float

    @property
    def accuracy(self) -> float:
        """The mean over tasks, 0 to 1."""
        return float(np.mean([scores.accuracy for scores in self.tasks.values()]))
