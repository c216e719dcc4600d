"""The algorithms as plain data, written independently from the papers; docs/algorithms.md has the same table.

Imports nothing from `podium.algorithms`, so that a mistake in a recipe is not repeated here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from podium.config.schema import AlgorithmConfig

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
    """Whether tokens are drawn with a repetition penalty, and the policy has none."""
    teacher_weight: float = 0.0
    """0: there is no teacher."""
    teacher_loss: Literal["sampled", "full"] = "sampled"
    teacher_reverse: float = 1.0
    teacher_privileged: bool = False
    """Whether the teacher reads its own prompt."""
    updates_per_batch: int = 1
    minibatches: int = 1

    @property
    def preferences(self) -> bool:
        """Whether the loss compares completions of the data with the reference's."""
        return self.loss in ("dpo", "ipo", "dpo_hinge", "kto")


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
