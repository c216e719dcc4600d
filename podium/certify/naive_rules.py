"""The algorithms as plain data, written independently from the papers; docs/algorithms.md has the same table.

Imports nothing from `podium.algorithms`, so that a mistake in a recipe is not repeated here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from podium.config.schema import AlgorithmConfig

OLD_LOGPROBS = "old_logprobs"
"""Name of a score of each token: its log-probability by the policy before the step's first update."""
ENTROPY = "entropy"
"""Name of a score: the entropy of the distribution that the policy gives there before the step's first update."""
KL_TO = "reference_logprobs"
"""Name of a score: the log-probability that a KL, or a loss of preferences, compares the policy's with."""
VALUES, RETURNS = "values", "returns"
"""Names of scores: the reward still to come, as estimated before the step's first update, and what that estimate is
trained to be."""
DRAWN_LOGPROBS = "drawn_logprobs"
"""Name of a score: the log-probability under the distribution drawn from, which has a repetition penalty."""
UNCERTAIN = "uncertain"
"""Name of a score: whether the policy term counts, because the token's entropy is among the highest."""
COVARIANT = "covariant"
"""Name of a score: whether the loss treats the token differently because of its covariance."""
KL_POINT = "reference_point"
"""Name of a score, one number for an optimizer step: the KL that KTO compares completions with."""

AdvantageName = Literal[
    "group",
    "leave_one_out",
    "greedy",
    "decoupled",
    "length_weighted",
    "rescaled",
    "pass_at_k",
    "maxrl",
    "batch_mean",
    "whitened",
    "whitened_groups",
    "reward",
    "none",
    "values",
]
OwnAdvantage = Callable[..., np.ndarray]
"""A user's own function from rewards and lengths, [N, G] each, and maybe their `parts` or `baselines`, to advantages
[N, G]; it is called, not checked."""


class Distillation(NamedTuple):
    """How the policy learns the distributions of another model, which stays as it is."""

    weight: float
    loss: Literal["sampled", "full"] = "sampled"
    """sampled: a token's advantage grows by its log-ratio; full: the loss has the divergence of the distributions."""
    reverse: float = 1.0
    """Share of KL(policy || other) in the divergence; the rest is KL(other || policy)."""
    own_prompts: bool = False
    """Whether the other model reads prompts other than the policy's."""

    @property
    def score(self) -> str:
        """The name of the other model's scores: log-probabilities of the tokens, or of the whole vocabulary."""
        return "teacher_hidden" if self.loss == "full" else "teacher_logprobs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What an update computes between rewards and gradient. Fields named as in `AlgorithmConfig` mean the same."""

    advantage: AdvantageName | OwnAdvantage
    mean: Literal["token", "sequence", "constant"]
    loss: str = "clipped"
    loss_options: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    advantage_options: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    std: Literal["none", "group", "batch"] = "group"
    std_ddof: int = 1
    std_eps: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: Literal["none", "k1_reward", "k2", "k3", "k3+"] = "none"
    kl_coef: float = 0.0
    kl_target: float | None = None
    kl_gain: float = 0.1
    kl_by_ratio: bool = False
    correction: Literal["none", "truncate", "mask", "reject"] = "none"
    correction_level: Literal["token", "sequence", "mean"] = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0
    drift_coef: float = 0.0
    off_policy_threshold: float | None = None
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    entropy_bonus: float = 0.0
    entropy_target: float | None = None
    entropy_step: float = 0.005
    entropy_bonus_max: float = 1.0
    top_entropy: float = 1.0
    router_loss_coef: float = 0.0
    mask_truncated: bool = False
    zero_variance: Literal["keep", "drop", "refill"] = "keep"
    zero_variance_metric: str | None = None
    max_refills: int = 3
    credit: Literal["episode", "turn"] = "episode"
    gamma: float = 1.0
    penalised: bool = False
    """Whether tokens are drawn with a repetition penalty, which the trained policy does not have."""
    distilled: Distillation | None = None
    updates_per_batch: int = 1
    minibatches: int = 1

    @property
    def preferences(self) -> bool:
        """Whether the loss compares completions of the data, by how much likelier they have become."""
        return self.loss in ("dpo", "ipo", "dpo_hinge", "kto")

    @property
    def read_scores(self) -> tuple[str, ...]:
        """Names of the scores by models that advantages or loss read."""
        distilled = self.distilled
        needed = {
            OLD_LOGPROBS: self.old_logprobs == "trainer" or (distilled is not None and distilled.loss == "sampled"),
            ENTROPY: self.top_entropy < 1,
            KL_TO: self.kl != "none" or self.preferences,
            VALUES: self.advantage == "values",
        }
        return (*(name for name, read in needed.items() if read), *(() if distilled is None else (distilled.score,)))

    @property
    def kept_scores(self) -> tuple[str, ...]:
        """Names of the scores that a batch keeps for its loss.

        With a single optimizer step per batch, the policy's log-probabilities before it are the current ones, so they
        are not stored. Losses of preferences have no ratio that would read them.
        """
        several = self.updates_per_batch * self.minibatches > 1
        kept = {
            OLD_LOGPROBS: self.old_logprobs == "trainer" and several and not self.preferences,
            KL_TO: self.kl in ("k2", "k3", "k3+") or self.preferences,
            RETURNS: self.advantage == "values",
            UNCERTAIN: self.top_entropy < 1,
            KL_POINT: self.loss == "kto",
            COVARIANT: self.loss in ("clip_cov", "kl_cov"),
            DRAWN_LOGPROBS: self.penalised and self.correction != "none",
        }
        return (*(name for name, read in kept.items() if read), *(() if self.compared is None else (self.compared,)))

    @property
    def compared(self) -> str | None:
        """The name of the scores that are whole distributions, which the loss compares; None if it compares none."""
        return None if self.distilled is None or self.distilled.loss == "sampled" else self.distilled.score


RULES: dict[str, Rules] = {
    "grpo": Rules(advantage="group", mean="sequence"),
    "dr_grpo": Rules(advantage="group", std="none", mean="constant"),
    "dapo": Rules(
        advantage="group", mean="token", clip_high=0.28, mask_truncated=True, zero_variance="refill", max_refills=3
    ),
    "rloo": Rules(advantage="leave_one_out", std="none", mean="constant"),
    "remax": Rules(advantage="greedy", mean="constant"),
    "gdpo": Rules(advantage="decoupled", mean="token"),
    "opo": Rules(advantage="length_weighted", mean="token"),
    "gpg": Rules(advantage="rescaled", mean="sequence", loss="reinforce", old_logprobs="trainer"),
    "pass_at_k": Rules(advantage="pass_at_k", advantage_options={"k": 4}, mean="token", clip_high=0.28),
    "reinforce": Rules(advantage="batch_mean", mean="constant", loss="reinforce", old_logprobs="trainer"),
    "reinforce_pp": Rules(advantage="whitened", mean="token"),
    "reinforce_pp_baseline": Rules(advantage="whitened_groups", mean="token"),
    "gspo": Rules(
        advantage="group", mean="sequence", loss="gspo", clip_low=3e-4, clip_high=4e-4, old_logprobs="trainer"
    ),
    "cispo": Rules(advantage="group", mean="token", loss="cispo", clip_low=1.0, clip_high=4.0),
    "sapo": Rules(advantage="group", mean="sequence", loss="sapo"),
    "vespo": Rules(advantage="group", mean="token", loss="vespo"),
    "dppo": Rules(advantage="group", std="none", mean="constant", loss="dppo_tv", clip_low=0.15, clip_high=0.15),
    "gmpo": Rules(advantage="group", mean="sequence", loss="gmpo", clip_low=0.4, clip_high=0.4),
    "maxrl": Rules(advantage="maxrl", mean="constant"),
    "sft": Rules(advantage="reward", mean="token", loss="reinforce", old_logprobs="trainer"),
    "dpo": Rules(advantage="reward", mean="sequence", loss="dpo", old_logprobs="trainer"),
    "distill": Rules(advantage="none", mean="token"),
    "ppo": Rules(
        advantage="values", advantage_options={"gamma": 1.0, "lam": 1.0}, std="batch", std_eps=1e-8, mean="token"
    ),
}
"""By the name of the recipe."""


def rules_of(config: AlgorithmConfig) -> Rules:
    """The rules of a config's recipe, with the options that the config sets. KeyError for a user's own recipe."""
    options = config.model_dump(exclude={"recipe", "loss_parts"}, exclude_none=True)
    if options.get("loss") == "reinforce":
        options.setdefault("old_logprobs", "trainer")  # it has no ratio
    own = RULES[config.recipe]
    if "advantage_options" in options:
        options["advantage_options"] = {**own.advantage_options, **options["advantage_options"]}
    return dataclasses.replace(own, **options)
