"""Algorithms as data: advantage, loss and mean of each recipe, and the options that a config may change.

A recipe is a function that cites its paper and states how ours differs; `RECIPES` lists them. A config's options are
applied in `podium.algorithms.recipe_options`. Nothing here imports jax, so that an invalid combination is reported as a
config error; the losses are in `podium.algorithms.losses`.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from podium.algorithms.advantages import (
    RETURNS,
    VALUES,
    Mean,
    batch_mean_advantages,
    decoupled_advantages,
    gae_advantages,
    greedy_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    maxrl_advantages,
    no_advantages,
    pass_at_k_advantages,
    rescaled_advantages,
    reward_advantages,
    whitened_advantages,
)
from podium.config.errors import not_in
from podium.config.imports import imported, is_path

LIKELIHOOD = "likelihood"
"""Name of a part of the loss: -logprob of the tokens of demonstrations, which a recipe that samples mixes in."""
DataForm = Literal["text", "pair", "label"]
"""What a row of demonstrations holds: a completion, a chosen and a rejected one, or one with a label."""


class OptionRange(NamedTuple):
    """The range of a numeric option in `loss_options`, between `least` and `most`."""

    least: float = 0.0
    most: float = math.inf
    least_itself: bool = False
    """Whether `least` is allowed too; `most` never is."""

    def problem(self, value: float) -> str:
        """The rule that a value breaks; empty if it breaks none."""
        low = value < self.least or (value == self.least and not self.least_itself)
        if not low and value < self.most:
            return ""
        rule = (
            f"{value:g} must be {self.least:g} or more"
            if self.least_itself
            else f"{value:g} must be above {self.least:g}"
        )
        return rule if self.most == math.inf else f"{rule}, and below {self.most:g}"


class LossKind(NamedTuple):
    """The properties of a policy term: what it reads, and its options."""

    clips: bool
    """Whether it reads clip_low and clip_high."""
    data_form: DataForm = "text"
    """For a loss of preferences, what a row of its data holds: a pair, or a labelled completion; otherwise "text"."""
    covariant: bool = False
    """Whether it treats tokens differently that are chosen by their covariance over the optimizer step."""
    of_sequences: bool = False
    """Whether its ratio is that of the token's whole sequence."""
    options: Mapping[str, float] = MappingProxyType({})
    """The options that `loss_options` may set, with their defaults."""


LOSSES: Mapping[str, LossKind] = {
    "clipped": LossKind(clips=True),
    "gspo": LossKind(clips=True, of_sequences=True),
    "cispo": LossKind(clips=True),
    "sapo": LossKind(clips=False, options={"tau_positive": 1.0, "tau_negative": 1.05}),
    "vespo": LossKind(
        clips=False,
        options={"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
    ),
    "dppo_tv": LossKind(clips=True, options={"weight_cap": 20.0}),
    "dppo_kl": LossKind(clips=True, options={"weight_cap": 20.0}),
    "gmpo": LossKind(clips=True),
    "clip_cov": LossKind(clips=True, covariant=True, options={"cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0}),
    "kl_cov": LossKind(clips=False, covariant=True, options={"cov_share": 2e-3, "kl_weight": 1.0}),
    "reinforce": LossKind(clips=False),
    "dpo": LossKind(clips=False, data_form="pair", options={"beta": 0.1, "label_smoothing": 0.0}),
    "ipo": LossKind(clips=False, data_form="pair", options={"beta": 0.1}),
    "dpo_hinge": LossKind(clips=False, data_form="pair", options={"beta": 0.1}),
    "kto": LossKind(
        clips=False, data_form="label", options={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    ),
}
"""The values of `algorithm.loss`; `podium.algorithms.losses.POLICY_LOSSES` has the functions of the same names."""
OPTION_RANGES: Mapping[str, OptionRange] = {
    "tau_positive": OptionRange(),
    "tau_negative": OptionRange(),
    "k_positive": OptionRange(least_itself=True),
    "lambda_positive": OptionRange(least_itself=True),
    "k_negative": OptionRange(least_itself=True),
    "lambda_negative": OptionRange(least_itself=True),
    "weight_cap": OptionRange(),
    "cov_share": OptionRange(most=1.0),
    "cov_low": OptionRange(least_itself=True),
    "cov_high": OptionRange(),
    "kl_weight": OptionRange(),
    "beta": OptionRange(),
    "label_smoothing": OptionRange(most=0.5, least_itself=True),
    "desirable_weight": OptionRange(),
    "undesirable_weight": OptionRange(),
}
"""The values that options of LOSSES may have."""
OLD_LOGPROBS, REFERENCE_LOGPROBS = "old_logprobs", "reference_logprobs"
"""The scores that options of `algorithm:` need: from the trainer before the first update, or the first model."""
TAUGHT_LOGPROBS, TAUGHT_HIDDEN = "teacher_logprobs", "teacher_hidden"
"""The scores of `teacher:` with `loss: sampled` and `full`; the latter are hidden states, [K, B, T, D]."""
COVARIANT = "covariant"
"""Name of a score: 1 at the tokens that the losses clip_cov and kl_cov choose, 0 elsewhere."""
ENTROPY = "entropy"
"""The score that `top_entropy` needs: the entropy of the policy before the first update."""
UNCERTAIN = "uncertain"
"""Name of a score: 1 at the tokens that `top_entropy` keeps in the policy term, 0 elsewhere."""
DRAWN_LOGPROBS = "drawn_logprobs"
"""Name of a score: log-probabilities under the distribution that tokens were drawn from, which a correction needs if a
repetition penalty makes it differ from the sampler's policy."""
REFERENCE_POINT = "reference_point"
"""Name of a score: the KL to the reference that KTO compares completions with, one number per optimizer step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teaching:
    """A recipe's terms for a teacher. The fields mean the same as in `TeacherConfig`."""

    weight: float
    loss: Literal["sampled", "full"] = "sampled"
    reverse: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the trainer computes between rewards and gradient. Fields named as in `AlgorithmConfig` mean the same."""

    advantage: partial[np.ndarray]
    """(rewards [N, G], lengths [N, G]) -> [N, G]. A config may change std, std_ddof and std_eps if they are bound here,
    and whatever else is by `advantage_options`. With a parameter `parts`, it also gets
    `podium.algorithms.advantages.RewardParts`. With a parameter `baselines`, it also gets the rewards [N] of greedy
    completions, one per prompt, which are not trained on. With a parameter `tokens`, it also gets
    `podium.algorithms.advantages.TokenScores`, and may return per-token advantages, [N, G, n]."""
    group_baseline: bool = True
    """Whether completions are compared with others of the same prompt: requires G >= 2; equal rewards teach nothing."""
    loss: str = "clipped"
    """The policy term: one of LOSSES, or `package.module:function`; `podium.algorithms.losses.make_loss` binds the
    options that it takes."""
    loss_options: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """All options of the loss but those of the clip, by name."""
    loss_parts: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Weights of further parts of the loss: `package.module:function`, of the same tokens as the policy term, or
    LIKELIHOOD, of the demonstrations that a config's `loss_parts` name."""
    mean: Mean
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
    updates_per_batch: int = 1
    minibatches: int = 1
    credit: Literal["episode", "turn"] = "episode"
    gamma: float = 1.0
    demonstrations: bool = False
    """Whether completions come from the data, one per prompt, instead of being sampled."""
    teaching: Teaching | None = None
    """None: without a teacher."""
    penalised: bool = False
    """Whether the sampler has a repetition penalty, which the trained policy does not."""
    needs: tuple[str, ...] = ()
    """Further scores that advantage or loss read: `values`, of a critic, which learns with the `gamma` and `lam` of the
    advantage; or `package.module:function`, which returns a `podium.train.scorers.Scorer` whose scores are passed as
    `scores["function"]`."""

    @property
    def chooses(self) -> bool:
        """Whether its loss treats tokens differently that are chosen by their covariance."""
        return self.loss in LOSSES and LOSSES[self.loss].covariant

    @property
    def corrects_penalty(self) -> bool:
        """Whether its correction reads DRAWN_LOGPROBS."""
        return self.penalised and self.correction != "none"

    @property
    def reads(self) -> frozenset[str]:
        """The advantage's inputs besides rewards and lengths, by the names of its parameters.

        These are `parts`, the parts of each reward; `baselines`, the reward of a greedy completion of each prompt;
        `tokens`, the scores of each token.
        """
        return frozenset(inspect.signature(self.advantage).parameters) & {"parts", "baselines", "tokens"}

    @property
    def data_form(self) -> DataForm:
        """The form of a row of its data, for recipes that learn from demonstrations."""
        return LOSSES[self.loss].data_form if self.loss in LOSSES else "text"

    @property
    def preferences(self) -> bool:
        """Whether completions of the data are compared with the reference's. Their rewards are 1 and -1."""
        return self.data_form != "text"

    @property
    def learns_values(self) -> bool:
        """Whether a critic's values are scores of the tokens."""
        return VALUES in self.needs

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the frozen first model are needed."""
        return self.kl != "none" or self.preferences

    @property
    def scores_old_logprobs(self) -> bool:
        """Whether the trainer must compute `old_logprobs` before the first update, or can use that update's own."""
        several = self.updates_per_batch * self.minibatches > 1
        return self.old_logprobs == "trainer" and several and not self.preferences  # whose losses have no ratio

    @property
    def scorers(self) -> tuple[str, ...]:
        """The scorers, other than teacher and critic, that run before advantages are computed.

        These are the ones that options require, and `needs`.

        A teacher's log-probabilities are compared with OLD_LOGPROBS: with the sampler's, rounding would be a reward.
        """
        compared = self.teaching is not None and self.teaching.loss == "sampled"
        old = (OLD_LOGPROBS,) if self.scores_old_logprobs or compared else ()
        reference = (REFERENCE_LOGPROBS,) if self.needs_reference else ()
        entropy = (ENTROPY,) if self.top_entropy < 1 else ()
        return (*old, *reference, *entropy, *(need for need in self.needs if need != VALUES))

    @property
    def loss_scores(self) -> tuple[str, ...]:
        """Names of the scores that a batch keeps for its updates: those that are not used in advantages alone."""
        kept = {
            OLD_LOGPROBS: self.scores_old_logprobs,
            REFERENCE_LOGPROBS: self.kl != "k1_reward",
            ENTROPY: False,
        }
        chosen = (*((UNCERTAIN,) if self.top_entropy < 1 else ()), *((COVARIANT,) if self.chooses else ()))
        hidden = (TAUGHT_HIDDEN,) if self.teaching is not None and self.teaching.loss == "full" else ()
        valued = (VALUES, RETURNS) if self.learns_values else ()
        drawn = (DRAWN_LOGPROBS,) if self.corrects_penalty else ()
        point = (REFERENCE_POINT,) if self.data_form == "label" else ()
        scored = (name for name in map(score_name, self.scorers) if kept.get(name, True))
        return (*scored, *chosen, *hidden, *valued, *point, *drawn)


def score_name(scorer: str) -> str:
    """The name of a scorer's scores: the function name of an import path, or else the scorer's name."""
    return scorer.rpartition(":")[2]


def grpo() -> Recipe:
    """GRPO, DeepSeekMath (arXiv:2402.03300): rewards standardised per group, PPO's clip, mean per sequence.

    Differs: no KL (the paper: k3 at 0.04; set kl and kl_coef). The unbiased standard deviation (n - 1) and its eps
    of 1e-6 are our choice; the paper states neither. The ratio's denominator is the sampler's own
    log-probabilities.
    """
    return Recipe(
        advantage=partial(group_advantages, std="group", std_ddof=1, std_eps=1e-6),
        mean="sequence",
    )


def dr_grpo() -> Recipe:
    """Dr. GRPO (arXiv:2503.20783): no standard deviation, and a constant divisor instead of the length.

    Differs: the constant is `rollout.max_new_tokens`, independent of the batch's padding.
    """
    return Recipe(
        advantage=partial(group_advantages, std="none", std_ddof=1, std_eps=1e-6),
        mean="constant",
    )


def dapo() -> Recipe:
    """DAPO (arXiv:2503.14476): clip-higher, mean over tokens, dynamic sampling, overlong filtering.

    Differs: dynamic sampling draws at most `max_refills` extra rounds. A group is refilled if its rewards are
    equal, rather than if its accuracies are 0 or 1. Truncated completions are masked; the soft overlong punishment
    is a task reward (`rewards: {length: 1.0}` with `grading.overlong_buffer_tokens`); with it, set `mask_truncated:
    false`, or the longest completions escape it.
    """
    return Recipe(
        advantage=partial(group_advantages, std="group", std_ddof=1, std_eps=1e-6),
        mean="token",
        clip_high=0.28,
        mask_truncated=True,
        zero_variance="refill",
    )


def rloo() -> Recipe:
    """RLOO (arXiv:2402.14740): a completion's baseline is the mean of the group's others; no length bias.

    Differs: the paper's KL in the reward is off (set `kl: k1_reward`), and its sum over tokens is divided by
    `rollout.max_new_tokens`. The paper has no ratio; ours is PPO's, which allows several updates per batch, and differs
    from 1 in the first update only by rounding between sampler and trainer. With `std: group` the others' standard
    deviation divides, which is NeMo-RL's `grpo`.
    """
    return Recipe(
        advantage=partial(leave_one_out_advantages, std="none", std_ddof=1, std_eps=1e-6),
        mean="constant",
    )


def remax() -> Recipe:
    """ReMax (arXiv:2310.10505): a completion's baseline is the reward of the prompt's greedy completion; no critic.

    Differs: `group_size` may be any number; the paper's is 1. The paper has no ratio; ours is PPO's, which allows
    several updates per batch. Its sum over tokens is divided by `rollout.max_new_tokens`. The KL in the reward is off;
    with `kl: k1_reward` the greedy completion is not charged it, as in verl.
    """
    return Recipe(advantage=partial(greedy_advantages), group_baseline=False, mean="constant")


def gdpo() -> Recipe:
    """GDPO (arXiv:2601.05242): each part of the reward standardised in its group, summed by weight, then standardised.

    Differs: the last standardisation is over the batch's completions, as in TRL; verl's is over tokens. The mean is
    over tokens, TRL's default. `zero_variance` looks at a group's summed rewards, which may be equal although their
    parts differ.
    """
    return Recipe(advantage=partial(decoupled_advantages, std_ddof=1, std_eps=1e-6), mean="token")


def opo() -> Recipe:
    """OPO (arXiv:2505.23585): rewards minus the mean of their group weighted by length, without clip and KL.

    Differs: the mean is over the batch's tokens, as in verl. The paper is on-policy; ours has PPO's ratio and clip,
    which allow several updates per batch.
    """
    return Recipe(advantage=partial(length_weighted_advantages), mean="token")


def gpg() -> Recipe:
    """GPG (arXiv:2504.02546): the log-likelihood weighted by centred rewards, rescaled for groups of equal rewards.

    Differs: groups are not resampled until enough of them have a gradient (`zero_variance: refill` resamples
    each); verl counts rewards of 0 where this counts groups of equal rewards. One update per batch, without a ratio.
    """
    return Recipe(
        advantage=partial(rescaled_advantages),
        loss="reinforce",
        mean="sequence",
        old_logprobs="trainer",
    )


def pass_at_k() -> Recipe:
    """Pass@k training (arXiv:2508.10751): a completion is paid for the sets of k completions that it is in.

    Differs: rewards may be any numbers, and a set has its best reward; the paper's are 0 or 1. Like the paper, it takes
    only the wider clip and the mean over tokens from DAPO. k is 4; set `advantage_options: {k: ...}`. verl's
    `grpo_passk` implements another paper (arXiv:2503.19595).
    """
    return Recipe(advantage=partial(pass_at_k_advantages, k=4), mean="token", clip_high=0.28)


def reinforce() -> Recipe:
    """REINFORCE (Williams, 1992, doi:10.1007/BF00992696) with the batch's mean reward as the baseline.

    Differs: the baseline contains the completion's own reward, which scales the gradient by 1 - 1 / B; the sum over
    tokens is divided by `rollout.max_new_tokens`. One update per batch, without a ratio.
    """
    return Recipe(
        advantage=partial(batch_mean_advantages),
        group_baseline=False,
        loss="reinforce",
        mean="constant",
        old_logprobs="trainer",
    )


def reinforce_pp() -> Recipe:
    """REINFORCE++ (arXiv:2501.03262): no group; returns standardised over all tokens of the batch, PPO's clip.

    Differs: the paper's KL in the reward is off; `kl: k1_reward` charges the whole completion its KL, instead of
    charging each token the KL from itself on. With minibatches, the batch is standardised rather than the
    minibatch.
    """
    return Recipe(
        advantage=partial(whitened_advantages, group_baseline=False, std_eps=1e-6),
        group_baseline=False,
        mean="token",
    )


def reinforce_pp_baseline() -> Recipe:
    """REINFORCE++-baseline (arXiv:2501.03262): rewards minus their group's mean, standardised over the batch's tokens.

    Differs: the paper's k2 loss to the reference is off (set `kl: k2` and kl_coef).
    """
    return Recipe(
        advantage=partial(whitened_advantages, group_baseline=True, std_eps=1e-6),
        mean="token",
    )


def gspo() -> Recipe:
    """GSPO (arXiv:2507.18071): GRPO with one ratio per sequence, the geometric mean of its tokens' ratios.

    Differs: no KL; standard deviation as in `grpo`; the sequence form, not GSPO-token. The ratio's denominator is the
    trainer's own log-probabilities before the batch's first update, because the clip is narrower than the rounding
    between two programs: with a bfloat16 sampler as denominator, everything would be clipped.
    """
    return Recipe(
        advantage=partial(group_advantages, std="group", std_ddof=1, std_eps=1e-6),
        loss="gspo",
        mean="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        old_logprobs="trainer",
    )


def cispo() -> Recipe:
    """CISPO, MiniMax-M1 (arXiv:2506.13585): clipped ratios weight the log-likelihood and stop no token's gradient.

    Differs: weights are clipped to [0, 5] (clip_low 1, clip_high 4); the paper gives no value for its upper bound
    and, as here, has no lower one.
    """
    return Recipe(
        advantage=partial(group_advantages, std="group", std_ddof=1, std_eps=1e-6),
        loss="cispo",
        mean="token",
        clip_low=1.0,
        clip_high=4.0,
    )


def sapo() -> Recipe:
    """SAPO (arXiv:2511.20347): GRPO with a soft gate of the ratio instead of the clip.

    Differs: the ratio's denominator is the sampler's own log-probabilities; standard deviation as in `grpo`.
    """
    return Recipe(
        advantage=partial(group_advantages, std="group", std_ddof=1, std_eps=1e-6),
        loss="sapo",
        mean="sequence",
    )


def vespo() -> Recipe:
    """VESPO (arXiv:2602.10693): the log-likelihood, weighted by a smooth function of the whole sequence's ratio.

    Differs: the mean is over the batch's tokens, as in TRL; the ratio is to the sampler, so it corrects for the
    difference between the two programs too; standard deviation as in `grpo`.
    """
    return Recipe(
        advantage=partial(group_advantages, std="group", std_ddof=1, std_eps=1e-6),
        loss="vespo",
        mean="token",
    )


def dppo() -> Recipe:
    """DPPO (arXiv:2602.04879): tokens whose probability moved too far have no gradient, instead of a clipped ratio.

    Differs: total variation of a token against all others; `loss: dppo_kl` bounds the KL instead (clip_low and
    clip_high of 0.05 are the authors'). Weights are capped at 20, which is verl's default; the authors' script has
    10,000 (`loss_options: {weight_cap: 10000}`).
    """
    return Recipe(
        advantage=partial(group_advantages, std="none", std_ddof=1, std_eps=1e-6),
        loss="dppo_tv",
        mean="constant",
        clip_low=0.15,
        clip_high=0.15,
    )


def gmpo() -> Recipe:
    """GMPO (arXiv:2507.20673): one ratio per sequence, the geometric mean of its tokens' clipped ratios.

    Differs: the ratio's denominator is the sampler's own log-probabilities; standard deviation as in `grpo`.
    """
    return Recipe(
        advantage=partial(group_advantages, std="group", std_ddof=1, std_eps=1e-6),
        loss="gmpo",
        mean="sequence",
        clip_low=0.4,
        clip_high=0.4,
    )


def maxrl() -> Recipe:
    """MaxRL (arXiv:2602.02710): centred rewards divided by the group's mean, so that rarely solved prompts weigh most.

    Differs: any non-negative rewards, while the paper's are 0 or 1; PPO's clip guards later updates; the sum over
    tokens is divided by `rollout.max_new_tokens`.
    """
    return Recipe(advantage=partial(maxrl_advantages), mean="constant")


def sft() -> Recipe:
    """Supervised fine-tuning, as before RLHF (arXiv:2203.02155): maximises the likelihood of completions in the data.

    Differs: it is the update of `reinforce` with all advantages 1 and no dropout; only evaluations sample
    completions. The mean is over the batch's tokens. `podium sft CONFIG` selects it, with `group_size: 1`.
    """
    return Recipe(
        advantage=partial(reward_advantages),
        group_baseline=False,
        loss="reinforce",
        mean="token",
        old_logprobs="trainer",
        demonstrations=True,
    )


def dpo() -> Recipe:
    """DPO (arXiv:2305.18290): makes the chosen completion of a pair likelier than the rejected one.

    Differs: no dropout. `loss: ipo` is IPO (arXiv:2310.12036) with log-ratios averaged over tokens, as TRL has it;
    `loss: dpo_hinge` is SLiC's hinge on DPO's margin (arXiv:2309.06657); `label_smoothing` is that of conservative DPO;
    `loss: kto` is KTO (arXiv:2402.01306) on labelled completions, with a KL that is estimated once per optimizer step.
    `podium dpo CONFIG` selects it, with `group_size: 2`, or 1 for kto.
    """
    return Recipe(
        advantage=partial(reward_advantages),
        group_baseline=False,
        loss="dpo",
        mean="sequence",
        old_logprobs="trainer",
        demonstrations=True,
    )


def distill() -> Recipe:
    """On-policy distillation (arXiv:2306.13649): the policy imitates `teacher:` on its own completions; no rewards.

    Differs: the gradient of the reverse KL is estimated at the sampled tokens, as an advantage of each, with PPO's clip
    (https://thinkingmachines.ai/blog/on-policy-distillation/); no completions of the teacher or of the data are mixed
    in. Rewards are recorded but not trained on.
    """
    return Recipe(advantage=partial(no_advantages), group_baseline=False, mean="token")


def ppo() -> Recipe:
    """PPO (arXiv:1707.06347) with a critic and generalised advantages (arXiv:1506.02438), standardised over the batch.

    Differs: policy and critic share no weights, and each has its own optimizer; lambda is 1, as in verl and OpenRLHF,
    because a shorter view reaches only the end of long answers (the papers: 0.95; set `advantage_options`). The ratio's
    denominator is the sampler's own log-probabilities. `kl: k1_reward` charges a completion at its last token.
    """
    return Recipe(
        advantage=partial(gae_advantages, gamma=1.0, lam=1.0, std="batch", std_ddof=1, std_eps=1e-8),
        group_baseline=False,
        mean="token",
        needs=(VALUES,),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "remax": remax,
    "gdpo": gdpo,
    "opo": opo,
    "gpg": gpg,
    "pass_at_k": pass_at_k,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo": dppo,
    "gmpo": gmpo,
    "maxrl": maxrl,
    "sft": sft,
    "dpo": dpo,
    "distill": distill,
    "ppo": ppo,
}
"""The values of `algorithm.recipe`. To add a recipe, write a function above and a line here."""


def find_recipe(name: str) -> Recipe:
    """The recipe with this name from RECIPES, or the Recipe (or function that returns one) at an import path.

    Raises ValueError if the name is unknown or the import fails.
    """
    if not is_path(name):
        if name not in RECIPES:
            raise ValueError(not_in(RECIPES, name))
        return RECIPES[name]()
    found = imported(name, what="a recipe")
    recipe = found() if callable(found) else found
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{name!r} gives {recipe!r}; it must be a podium.Recipe, or a function that returns one")
    return recipe


def why_not_mixed(name: str, main: str) -> str:
    """Why a recipe cannot be a part of the loss of the `main` one, and what to do instead."""
    try:
        recipe = find_recipe(name)
    except ValueError as error:
        return str(error)
    if recipe.preferences:
        return f"{name} learns from pairs, which need separate rows, and cannot be mixed; run podium dpo separately"
    if recipe.advantage.func is no_advantages:
        return f"{name} learns from a teacher, and so can {main}, of the same completions: set teacher, with its weight"
    if recipe.demonstrations:
        return f"{name} is a recipe of your own; the part that imitates data is sft: set it, with a weight"
    rule = f"{name} learns from completions that are drawn, as {main} does, and a run draws and grades them for one"
    return f"{rule} recipe; set algorithm.recipe to {name}, or a loss of your own here"
