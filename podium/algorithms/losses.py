"""Per-token losses as pure functions of log-probabilities; the caller weights, masks and sums them.

Every array is [B, T] float32 over packed rows: `segments` numbers the sequences of a row from 1 to at most T (0 is
padding), `mask` marks the trained tokens, and advantages are already expanded to tokens. No gradient flows through the
policy's log-probabilities where they are used as data (denominators of ratios, weights, statistics).

A policy term takes `Tokens` and returns the loss of each token, not masked and not averaged. Its clip range is 1 -
clip_low to 1 + clip_high.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from podium.algorithms.recipes import (
    COVARIANT,
    DRAWN_LOGPROBS,
    LIKELIHOOD,
    LOSSES,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    REFERENCE_POINT,
    UNCERTAIN,
    Recipe,
)
from podium.config.imports import imported

# Differences of log-probabilities are clamped to this before exp (exp(20) is 5e8); beyond it the gradient is 0.
LOG_RATIO_BOUND = 20.0
# Maximum value of k3+ per token; its gradient is not clamped.
K3_PLUS_BOUND = 10.0


class TokenLoss(NamedTuple):
    """The policy term of each token, and where its clip was active (1.0) or not (0.0)."""

    values: jax.Array  # [B, T]
    clipped_low: jax.Array  # [B, T]
    clipped_high: jax.Array  # [B, T]
    stats: dict[str, jax.Array] = {}  # noqa: RUF012 (a NamedTuple's default; nothing changes it)
    """[B, T] by name: further statistics, of which the update reports the mean over its tokens."""


class Tokens(NamedTuple):
    """The inputs of a policy term for the tokens of packed rows, each [B, T]."""

    logprobs: jax.Array
    """Log-probabilities under the trained policy, with gradient."""
    old_logprobs: jax.Array
    """Log-probabilities under the policy in the ratio's denominator."""
    advantages: jax.Array
    segments: jax.Array
    """int32: the number of a token's sequence within its row."""
    mask: jax.Array
    scores: Mapping[str, jax.Array] = {}
    """The batch's scores by name."""
    prompts: jax.Array | None = None
    """int32: the segment of a token's prompt, which both completions of a pair share."""
    divergence: jax.Array | None = None
    """Divergence from the whole distribution of the model that teaches the policy, in nats; None without such a
    model."""

    @property
    def log_ratio(self) -> jax.Array:
        """A token's log-ratio, logprobs - old_logprobs, clamped to [-20, 20]."""
        return _log_ratio(self.logprobs, self.old_logprobs)

    @property
    def ratio(self) -> jax.Array:
        """A token's probability ratio, exp(logprobs - old_logprobs), at most exp(20)."""
        return jnp.exp(self.log_ratio)

    @property
    def sequence_ratio(self) -> jax.Array:
        """The geometric mean of a sequence's token ratios, at each of its tokens, at most exp(20)."""
        return jnp.exp(self.means(self.log_ratio))

    @property
    def share(self) -> jax.Array:
        """1 / masked tokens of the token's sequence, so that a sequence's shares add up to 1."""
        return 1 / jnp.maximum(self.sums(jnp.ones_like(self.logprobs)), 1.0)

    def sums(self, x: jax.Array) -> jax.Array:
        """The sum of `x` over a sequence's masked tokens, at each of its tokens."""
        return segment_sums(x, self.segments, self.mask)

    def means(self, x: jax.Array) -> jax.Array:
        """The mean of `x` over a sequence's masked tokens, at each of its tokens."""
        return segment_means(x, self.segments, self.mask)


Loss = Callable[[Tokens], TokenLoss]


def clipped_policy_loss(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> TokenLoss:
    """PPO's clipped surrogate: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    With different widths this is DAPO's clip-higher (arXiv:2503.14476). `dual_clip` c bounds the loss for A < 0 by -c
    A, so that one unlikely token cannot dominate (arXiv:1912.09729); such tokens are the statistic `dual_clipped`, and
    count neither as low nor as high.
    """
    loss = _clipped(tokens.ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return loss
    bound = -dual_clip * tokens.advantages  # [B, T]
    bounded = (tokens.advantages < 0) & (loss.values > bound)
    values = jnp.where(bounded, bound, loss.values)
    return loss._replace(values=values, stats={"dual_clipped": bounded.astype(values.dtype)})


def gspo_loss(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped surrogate with the sequence's ratio, exp(mean_t log ratio_t): GSPO (arXiv:2507.18071).

    Advantages must be equal within a sequence. All tokens of a sequence have the same loss, and the gradient flows
    through the mean; with `mean="sequence"` the weighted sum is the paper's objective. The statistics `sequences`,
    `sequences_clipped_low` and `sequences_clipped_high` sum up to numbers of sequences.
    """
    ratio = tokens.sequence_ratio
    loss = _clipped(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return loss._replace(
        stats={
            "sequences": tokens.share,
            "sequences_clipped_low": tokens.share * loss.clipped_low,
            "sequences_clipped_high": tokens.share * loss.clipped_high,
        }
    )


def cispo_loss(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Log-likelihood weighted by a clipped ratio: -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprob.

    CISPO (arXiv:2506.13585): the clip bounds a token's weight but never stops its gradient.
    """
    ratio = stop_gradient(tokens.ratio)
    low, high = 1 - clip_low, 1 + clip_high
    return TokenLoss(
        values=-jnp.clip(ratio, low, high) * tokens.advantages * tokens.logprobs,
        clipped_low=(ratio < low).astype(ratio.dtype),
        clipped_high=(ratio > high).astype(ratio.dtype),
    )


def sapo_loss(tokens: Tokens, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """A soft gate of the ratio instead of a clip: -(4 / tau) sigmoid(tau (ratio - 1)) A. SAPO (arXiv:2511.20347).

    Its gradient is that of the surrogate at ratio 1, and fades as the ratio leaves it. `tau_positive` is tau where A >
    0, `tau_negative` elsewhere; with a larger tau the gradient fades faster.
    """
    tau = jnp.where(tokens.advantages > 0, tau_positive, tau_negative)
    gate = jax.nn.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau
    return _unclipped(-gate * tokens.advantages)


def vespo_loss(
    tokens: Tokens,
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> TokenLoss:
    """Log-likelihood weighted by a smooth function of the sequence's ratio: -sg(phi(w)) A logprob. VESPO
    (arXiv:2602.10693).

    w is the product of the sequence's token ratios, bounded to 1e-8 and e^20, and phi(w) = w^k exp(lambda (1 - w)),
    which is 1 at w = 1 and falls towards 0 on both sides; k and lambda depend on the advantage's sign (0 counts as
    positive).
    """
    log_w = tokens.sums(tokens.log_ratio)
    log_w = stop_gradient(jnp.clip(log_w, math.log(1e-8), LOG_RATIO_BOUND))
    good = tokens.advantages >= 0
    k, lambda_ = jnp.where(good, k_positive, k_negative), jnp.where(good, lambda_positive, lambda_negative)
    weight = jnp.exp(k * log_w + lambda_ * (1 - jnp.exp(log_w)))
    return _unclipped(-weight * tokens.advantages * tokens.logprobs)


def dppo_tv_loss(tokens: Tokens, *, clip_low: float, clip_high: float, weight_cap: float) -> TokenLoss:
    """Log-likelihood weighted by the ratio, except at tokens whose probability moved too far: DPPO by total variation.

    -sg(min(ratio, weight_cap)) A logprob (arXiv:2602.04879), or 0 where A > 0 and the probability rose by more than
    `clip_high`, or A <= 0 and it fell by more than `clip_low`.
    """
    moved = jnp.exp(tokens.logprobs) - jnp.exp(tokens.old_logprobs)
    return _masked(tokens, -moved > clip_low, moved > clip_high, weight_cap=weight_cap)


def dppo_kl_loss(tokens: Tokens, *, clip_low: float, clip_high: float, weight_cap: float) -> TokenLoss:
    """DPPO by KL (arXiv:2602.04879): like `dppo_tv_loss`, but measures the move by the KL of the binary choice token or
    not.

    With p the token's probability and q the old one, it is q log(q / p) + (1 - q) log((1 - q) / (1 - p)), with 1e-8
    added to 1 - q and 1 - p. `clip_low` bounds it where the probability fell, `clip_high` where it rose.
    """
    p, q = jnp.exp(tokens.logprobs), jnp.exp(tokens.old_logprobs)
    others = [jnp.maximum(1 - x, 0.0) + 1e-8 for x in (q, p)]  # rounding can make a probability larger than 1
    kl = q * (tokens.old_logprobs - tokens.logprobs) + (1 - q) * jnp.log(others[0] / others[1])
    low, high = (kl > clip_low) & (p < q), (kl > clip_high) & (p > q)
    return _masked(tokens, low, high, weight_cap=weight_cap)


def gmpo_loss(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """The geometric mean of clipped token ratios, times -A: GMPO (arXiv:2507.20673).

    Each log-ratio is clipped, as PPO clips ratios, to at most clip_high where A > 0 and at least -clip_low elsewhere.
    Advantages must be equal within a sequence. All tokens of a sequence have the same loss; with `mean="sequence"` the
    weighted sum is the paper's objective.
    """
    log_ratio = tokens.log_ratio
    is_high = (log_ratio > clip_high) & (tokens.advantages > 0)
    is_low = (log_ratio < -clip_low) & (tokens.advantages <= 0)
    clipped = jnp.where(is_high, clip_high, jnp.where(is_low, -clip_low, log_ratio))
    values = -jnp.exp(tokens.means(clipped)) * tokens.advantages
    return TokenLoss(values, is_low.astype(values.dtype), is_high.astype(values.dtype))


def clip_cov_loss(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped surrogate, but 0 at tokens that would lower the entropy most: Clip-Cov (arXiv:2505.22617).

    `tokens.scores` marks these tokens under COVARIANT; `podium.algorithms.selection.clip_cov_tokens` chooses them. The
    statistic `covariant` counts them.
    """
    loss = _clipped(tokens.ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    chosen = tokens.scores[COVARIANT]
    return loss._replace(values=loss.values * (1 - chosen), stats={"covariant": chosen})


def kl_cov_loss(tokens: Tokens, *, kl_weight: float) -> TokenLoss:
    """-ratio A, plus kl_weight x KL(old || policy) at tokens that would lower the entropy most: KL-Cov
    (arXiv:2505.22617).

    `tokens.scores` marks these tokens under COVARIANT; the KL at each is estimated as ratio - 1 - log ratio.
    """
    chosen = tokens.scores[COVARIANT]
    kl = k3_estimate(tokens.old_logprobs, tokens.logprobs)
    values = -tokens.ratio * tokens.advantages + kl_weight * chosen * kl
    return _unclipped(values)._replace(stats={"covariant": chosen})


def reinforce_loss(tokens: Tokens) -> TokenLoss:
    """Log-likelihood weighted by advantage, -A logprob: REINFORCE (Williams, 1992).

    Its gradient equals that of the clipped surrogate at ratio 1, so it is valid only for the first update of a batch.
    """
    return _unclipped(-tokens.advantages * tokens.logprobs)


def pair_margins(tokens: Tokens, *, by_token: bool) -> tuple[jax.Array, jax.Array]:
    """The log-ratios of policy to reference of the chosen and the rejected completion of a token's pair, [B, T] each.

    They are summed over the completion's tokens or, `by_token`, averaged. Advantages are 1 in chosen completions and -1
    in rejected ones.
    """
    assert tokens.prompts is not None, "the completions of a pair are found by their prompt"
    ratio = tokens.logprobs - stop_gradient(tokens.scores[REFERENCE_LOGPROBS])
    if by_token:
        ratio = ratio * tokens.share
    chosen = segment_sums(jnp.where(tokens.advantages > 0, ratio, 0.0), tokens.prompts, tokens.mask)
    return chosen, segment_sums(jnp.where(tokens.advantages < 0, ratio, 0.0), tokens.prompts, tokens.mask)


def dpo_loss(tokens: Tokens, *, beta: float, label_smoothing: float) -> TokenLoss:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m) of a pair: DPO (arXiv:2305.18290), e label_smoothing.

    m is the chosen completion's log-ratio of policy to reference minus the rejected one's. All tokens of a pair have
    its loss; with `mean="sequence"` the weighted sum is the mean over pairs. This holds for all losses of pairs.
    """
    chosen, rejected = pair_margins(tokens, by_token=False)
    margin = beta * (chosen - rejected)
    values = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)
    return _of_pairs(tokens, values, chosen, rejected, beta=beta)


def ipo_loss(tokens: Tokens, *, beta: float) -> TokenLoss:
    """(m - 1 / (2 beta))^2 of a pair, with log-ratios averaged over a completion's tokens: IPO (arXiv:2310.12036)."""
    chosen, rejected = pair_margins(tokens, by_token=True)
    values = jnp.square(chosen - rejected - 1 / (2 * beta))
    chosen, rejected = pair_margins(tokens, by_token=False)
    return _of_pairs(tokens, values, chosen, rejected, beta=beta)


def dpo_hinge_loss(tokens: Tokens, *, beta: float) -> TokenLoss:
    """max(0, 1 - beta m) of a pair: SLiC's hinge (arXiv:2305.10425) on DPO's margin m (arXiv:2309.06657)."""
    chosen, rejected = pair_margins(tokens, by_token=False)
    values = jnp.maximum(0.0, 1 - beta * (chosen - rejected))
    return _of_pairs(tokens, values, chosen, rejected, beta=beta)


def kto_loss(tokens: Tokens, *, beta: float, desirable_weight: float, undesirable_weight: float) -> TokenLoss:
    """KTO (arXiv:2402.01306): w (1 - sigmoid(beta s)) of a completion, s = r - z if it is desirable, else z - r.

    r is its log-ratio of policy to reference, and z the KL that the scores have as REFERENCE_POINT, without gradient.
    `advantages` are 1 in desirable completions and -1 in the others. All tokens of a completion have its loss; with
    `mean="sequence"` the weighted sum is the mean over completions.
    """
    ratio = tokens.sums(tokens.logprobs - stop_gradient(tokens.scores[REFERENCE_LOGPROBS]))
    point = stop_gradient(tokens.scores[REFERENCE_POINT])
    desirable = tokens.advantages > 0
    weight = jnp.where(desirable, desirable_weight, undesirable_weight)
    values = weight * jax.nn.sigmoid(-beta * jnp.where(desirable, ratio - point, point - ratio))
    share = tokens.share
    stats = {
        "chosen": jnp.where(desirable, share, 0.0),
        "rejected": jnp.where(desirable, 0.0, share),
        "pairs_chosen": share * beta * jnp.where(desirable, ratio, 0.0),
        "pairs_rejected": share * beta * jnp.where(desirable, 0.0, ratio),
        "reference_point": point,
    }
    return _unclipped(values)._replace(stats=stats)


def _of_pairs(tokens: Tokens, values: jax.Array, chosen: jax.Array, rejected: jax.Array, *, beta: float) -> TokenLoss:
    """The loss, with statistics that sum to the number of pairs, and to both completions' rewards, beta x log-ratio."""
    assert tokens.prompts is not None
    share = 1 / jnp.maximum(segment_sums(jnp.ones_like(values), tokens.prompts, tokens.mask), 1.0)
    stats = {
        "pairs": share,
        "pairs_chosen": share * beta * chosen,
        "pairs_rejected": share * beta * rejected,
        "pairs_right": jnp.where(chosen > rejected, share, 0.0),
    }
    return _unclipped(values)._replace(stats=stats)


POLICY_LOSSES: Mapping[str, Callable[..., TokenLoss]] = {
    "clipped": clipped_policy_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "vespo": vespo_loss,
    "dppo_tv": dppo_tv_loss,
    "dppo_kl": dppo_kl_loss,
    "gmpo": gmpo_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
    "reinforce": reinforce_loss,
    "dpo": dpo_loss,
    "ipo": ipo_loss,
    "dpo_hinge": dpo_hinge_loss,
    "kto": kto_loss,
}
"""By the names of `podium.algorithms.recipes.LOSSES`, which has their options."""


def make_loss(recipe: Recipe) -> Loss:
    """The recipe's policy term with its options bound.

    To add a loss, write a function above, its line in POLICY_LOSSES, and its options in
    `podium.algorithms.recipes.LOSSES`. A loss given by import path takes `Tokens` too, and returns a `TokenLoss` or
    [B, T].
    """
    function = POLICY_LOSSES.get(recipe.loss) or _imported_loss(recipe.loss)
    options = {name: getattr(recipe, name) for name in ("clip_low", "clip_high", "dual_clip")}
    options |= LOSSES[recipe.loss].options if recipe.loss in LOSSES else {}
    options |= recipe.loss_options
    known = inspect.signature(function).parameters
    return partial(function, **{name: value for name, value in options.items() if name in known})


def _imported_loss(path: str) -> Callable[..., TokenLoss]:
    """A user's loss, whose result is checked and made a `TokenLoss`."""
    function = imported(path, what="a loss", known=LOSSES)
    parameters = inspect.signature(function).parameters
    by_field = "old_logprobs" in parameters  # it takes the fields of `Tokens` as separate arguments

    @functools.wraps(function)
    def loss(tokens: Tokens, **options: object) -> TokenLoss:
        if "scores" in parameters:
            options["scores"] = tokens.scores
        found = function(*tokens[:5], **options) if by_field else function(tokens, **options)
        found = found if isinstance(found, TokenLoss) else _unclipped(found)
        if found.values.shape != tokens.logprobs.shape:
            raise ValueError(
                f"loss {path} gives {list(found.values.shape)} for log-probabilities of {list(tokens.logprobs.shape)};"
                " it must give the loss of each token, not masked and not averaged"
            )
        return found

    return loss


def kl_loss(kl: Literal["k2", "k3", "k3+"], logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """KL of the policy to the reference, estimated at the sampled token, with gradient (http://joschu.net/blog).

    With d = logprob - reference_logprob: k2 = d^2 / 2 has the gradient of KL(policy || reference) on-policy; k3 =
    exp(-d) + d - 1 has that of KL(reference || policy); "k3+" has k3's value, at most 10, with k2's gradient
    (arXiv:2506.09477). k1 = d is not offered as a loss, because its expected gradient is 0.
    """
    reference_logprobs = stop_gradient(reference_logprobs)
    k2 = jnp.square(logprobs - reference_logprobs) / 2
    if kl == "k2":
        return k2
    k3 = k3_estimate(logprobs, reference_logprobs)
    if kl == "k3":
        return k3
    return k2 + stop_gradient(jnp.minimum(k3, K3_PLUS_BOUND) - k2)


def k3_estimate(logprobs: jax.Array, other_logprobs: jax.Array) -> jax.Array:
    """Unbiased, non-negative estimate of KL(p || q) at a token drawn from p: exp(log q/p) - log q/p - 1.

    `logprobs` are under p, `other_logprobs` under q.
    """
    log_ratio = _log_ratio(other_logprobs, logprobs)
    return jnp.expm1(log_ratio) - log_ratio


def correction_weights(
    recipe: Recipe, old_logprobs: jax.Array, sampled_logprobs: jax.Array, segments: jax.Array, mask: jax.Array
) -> jax.Array:
    """Importance weight of each token from sampler to trainer, w = exp(old - sampled); no gradient flows.

    With `correction_level: sequence`, w is the product over the token's sequence, with `mean` its geometric mean.
    "truncate" gives min(w, correction_high); "mask" gives w where it is from correction_low to correction_high, and 0
    elsewhere; "reject" gives the token's own weight where the sequence's w is in that band, and 0 elsewhere.

    Args:
        recipe: the correction, its level and its bounds.
        old_logprobs: the trainer's, with the weights that sampled.
        sampled_logprobs: the sampler's, before truncation; with a repetition penalty, those after the penalty.
        segments: [B, T] int32.
        mask: [B, T].
    """
    of_token = stop_gradient(_log_ratio(old_logprobs, sampled_logprobs))
    log_weights = of_token
    if recipe.correction_level == "sequence":
        log_weights = jnp.clip(segment_sums(of_token, segments, mask), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    elif recipe.correction_level == "mean":
        log_weights = segment_means(of_token, segments, mask)
    weights = jnp.exp(log_weights)
    if recipe.correction == "truncate":
        return jnp.minimum(weights, recipe.correction_high)
    inside = (weights >= recipe.correction_low) & (weights <= recipe.correction_high)
    return jnp.where(inside, jnp.exp(of_token) if recipe.correction == "reject" else weights, 0.0)


def off_policy_mask(tokens: Tokens, *, threshold: float) -> jax.Array:
    """Which tokens are trained on, [B, T] bool: all except those of stale sequences with negative advantage.

    Where A < 0, sequences are left out if their mean of old - current log-probability exceeds `threshold`: the
    off-policy sequence masking of DeepSeek-V3.2 (arXiv:2512.02556), with the sampler's log-probabilities as
    `old_logprobs`.
    """
    drift = tokens.means(tokens.old_logprobs - stop_gradient(tokens.logprobs))
    return (tokens.advantages >= 0) | (drift <= threshold)


def policy_loss(
    recipe: Recipe, drawn: Tokens, *, kl_coef: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss that a recipe minimises per token: correction x policy term + kl_coef KL, without `entropy_loss`.

    A user's parts of `loss_parts` are added with their weights; LIKELIHOOD is of other tokens, and not among them.
    `drift_coef` adds the squared difference to the sampler's log-probability, without the correction's weight: Kimi
    K2.5 (arXiv:2602.02276), as implemented in prime-rl.

    Args:
        recipe: the terms and their options.
        drawn: the tokens, with the log-probabilities of the sampler, under its softmax before penalty, top-k, top-p and
            min-p, as `old_logprobs`. Its scores replace these in the ratio by the trainer's before the batch's first
            update, if they have OLD_LOGPROBS; otherwise, with `old_logprobs: trainer`, the ratio is to the current
            update's own. The k2, k3 and k3+ terms need REFERENCE_LOGPROBS, `top_entropy` needs UNCERTAIN, and a
            correction of a sampler with a repetition penalty needs DRAWN_LOGPROBS. Losses of pairs need `prompts`.
        kl_coef: [], the adapted coefficient of a run, in place of the recipe's; None: the recipe's.

    Returns:
        The loss [B, T], not masked and not averaged, and statistics [B, T] without gradient: always `clip_low`,
        `clip_high` and `kl_sampled`, and those of the policy term; `correction_weight`, `correction_dropped`,
        `off_policy_dropped`, `top_entropy`, `kl_reference`, `kl_teacher` and `loss_part/NAME` with these terms.
    """
    logprobs, sampled_logprobs, scores = drawn.logprobs, drawn.old_logprobs, drawn.scores
    of_this_update = sampled_logprobs if recipe.old_logprobs == "sampler" else logprobs
    tokens = drawn._replace(old_logprobs=stop_gradient(scores.get(OLD_LOGPROBS, of_this_update)))
    loss, stats = _policy_term(recipe, drawn, tokens)
    if recipe.drift_coef:
        loss = loss + recipe.drift_coef * jnp.square(logprobs - sampled_logprobs)
    if recipe.kl in ("k2", "k3", "k3+"):
        assert REFERENCE_LOGPROBS in scores, f"kl {recipe.kl} needs reference_logprobs"
        stats["kl_reference"] = kl = kl_loss(recipe.kl, logprobs, scores[REFERENCE_LOGPROBS])
        if recipe.kl_by_ratio:
            kl = kl * policy_ratio(recipe, tokens)
        loss = loss + (recipe.kl_coef if kl_coef is None else kl_coef) * kl
    for path, weight in recipe.loss_parts.items():
        if path != LIKELIHOOD:
            part = _imported_loss(path)(tokens).values
            loss = loss + weight * part
            stats[f"loss_part/{path.rpartition(':')[2]}"] = part
    if recipe.teaching is not None and drawn.divergence is not None:
        loss = loss + recipe.teaching.weight * drawn.divergence
        stats["kl_teacher"] = drawn.divergence
    return loss, jax.tree.map(stop_gradient, stats)


def _policy_term(recipe: Recipe, drawn: Tokens, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The recipe's policy term [B, T] of the tokens that count, with its correction's weights; and its statistics.

    `drawn` and `tokens` have the denominators of the correction and of the ratio as `old_logprobs`.
    """
    policy = make_loss(recipe)(tokens)
    loss = policy.values
    stats = {
        "clip_low": policy.clipped_low,
        "clip_high": policy.clipped_high,
        "kl_sampled": k3_estimate(drawn.old_logprobs, drawn.logprobs),
        **policy.stats,
    }
    if recipe.top_entropy < 1:
        stats["top_entropy"] = drawn.scores[UNCERTAIN]
        loss = loss * drawn.scores[UNCERTAIN]
    if recipe.correction != "none":
        proposed = drawn.scores[DRAWN_LOGPROBS] if recipe.corrects_penalty else drawn.old_logprobs
        weights = correction_weights(recipe, tokens.old_logprobs, proposed, tokens.segments, tokens.mask)
        stats |= {"correction_weight": weights, "correction_dropped": (weights == 0).astype(weights.dtype)}
        loss = loss * weights
    if (threshold := recipe.off_policy_threshold) is not None:
        kept = off_policy_mask(drawn, threshold=threshold)
        stats["off_policy_dropped"] = (~kept).astype(loss.dtype)
        loss = jnp.where(kept, loss, 0.0)
    return loss, stats


def policy_ratio(recipe: Recipe, tokens: Tokens) -> jax.Array:
    """The recipe's ratio of each token, [B, T] with gradient: with loss gspo that of its sequence, as in TRL.

    `kl_by_ratio` multiplies the KL by it, so that k3 is unbiased when tokens are not the current policy's:
    DeepSeek-V3.2 (arXiv:2512.02556).
    """
    of_sequences = recipe.loss in LOSSES and LOSSES[recipe.loss].of_sequences
    return tokens.sequence_ratio if of_sequences else tokens.ratio


class ValueLoss(NamedTuple):
    """The loss of a critic, per token; neither is masked."""

    values: jax.Array  # [B, T]
    clipped: jax.Array  # [B, T], 1 where the clip stops the gradient


def value_loss(values: jax.Array, old_values: jax.Array, returns: jax.Array, *, clip: float | None) -> ValueLoss:
    """Half the squared error of a critic's values, clipped around its values before the step (arXiv:1707.06347).

    0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), as verl and OpenRLHF write it.

    Args:
        values: [B, T] of the critic being trained.
        old_values: [B, T] of the critic before the step's first update.
        returns: [B, T], what it learns.
        clip: how far a value may move in a step; None: without bound.
    """
    error = (values - returns) ** 2
    if clip is None:
        return ValueLoss(0.5 * error, jnp.zeros_like(error))
    bounded = (jnp.clip(values, old_values - clip, old_values + clip) - returns) ** 2
    return ValueLoss(0.5 * jnp.maximum(error, bounded), (bounded > error).astype(error.dtype))


def entropy_loss(
    entropy: jax.Array, mask: jax.Array, *, num_tokens: jax.Array, entropy_bonus: float | jax.Array
) -> jax.Array:
    """The entropy bonus as a loss: -entropy_bonus times the mean entropy of the trained tokens, whatever `mean` is.

    `num_tokens` [] is the number of trained tokens of the optimizer step, over all micro-batches and hosts. Returns
    this micro-batch's share, []; the shares of all micro-batches add up to the step's bonus.
    """
    return -entropy_bonus * jnp.sum(entropy * mask) / jnp.maximum(num_tokens, 1.0)


def narrow_clip_warning(recipe: Recipe, logprob_gap: float) -> str | None:
    """A warning if the rounding difference between sampler and trainer is enough to clip tokens; None if not.

    `logprob_gap` is the mean |trainer's - sampler's log-probability| before the first update, in nat.
    """
    narrow = min(("clip_low", "clip_high"), key=lambda option: getattr(recipe, option))
    width = getattr(recipe, narrow)
    clips = recipe.loss not in LOSSES or LOSSES[recipe.loss].clips
    if not clips or recipe.old_logprobs == "trainer" or logprob_gap <= width:
        return None
    return (
        f"algorithm.{narrow} is {width:g}, and the sampler's log-probabilities differ from the trainer's by"
        f" {logprob_gap:.2g} on average, so rounding alone clips tokens; set algorithm.old_logprobs to trainer,"
        f" or widen algorithm.{narrow}"
    )


def segment_means(x: jax.Array, segments: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `x` [B, T] over each sequence's masked tokens, at every token of the sequence; 0 without masked
    tokens.

    Segment numbers are 0 to T, and differ between the sequences of a row.
    """
    counted = mask.astype(x.dtype)
    means = _by_segment(x * counted, segments) / jnp.maximum(_by_segment(counted, segments), 1.0)
    return jnp.take_along_axis(means, segments, axis=1)


def segment_sums(x: jax.Array, segments: jax.Array, mask: jax.Array) -> jax.Array:
    """The sum of `x` [B, T] over each sequence's masked tokens, at every token of the sequence; see `segment_means`."""
    return jnp.take_along_axis(_by_segment(x * mask.astype(x.dtype), segments), segments, axis=1)


def _by_segment(x: jax.Array, segments: jax.Array) -> jax.Array:
    """The sum of `x` [B, T] over each segment, [B, T + 1]."""
    _, T = x.shape
    return jax.vmap(partial(jax.ops.segment_sum, num_segments=T + 1))(x, segments)


def _clipped(ratio: jax.Array, advantages: jax.Array, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Compute -min(ratio A, clip(ratio) A), as the cases in which the clip stops the gradient."""
    low, high = 1 - clip_low, 1 + clip_high
    is_low = (ratio < low) & (advantages < 0)
    is_high = (ratio > high) & (advantages > 0)
    bounded = jnp.where(is_low, low, jnp.where(is_high, high, ratio))
    return TokenLoss(-bounded * advantages, is_low.astype(ratio.dtype), is_high.astype(ratio.dtype))


def _masked(tokens: Tokens, low: jax.Array, high: jax.Array, *, weight_cap: float) -> TokenLoss:
    """DPPO's loss: -sg(min(ratio, weight_cap)) A logprob, but 0 where A > 0 and `high`, or A <= 0 and `low`."""
    is_low, is_high = low & (tokens.advantages <= 0), high & (tokens.advantages > 0)
    weight = jnp.where(is_low | is_high, 0.0, jnp.minimum(tokens.ratio, weight_cap))
    values = -stop_gradient(weight) * tokens.advantages * tokens.logprobs
    return TokenLoss(values, is_low.astype(values.dtype), is_high.astype(values.dtype))


def _unclipped(values: jax.Array) -> TokenLoss:
    return TokenLoss(values, jnp.zeros_like(values), jnp.zeros_like(values))


def _log_ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    return jnp.clip(logprobs - old_logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
