"""GRPO's loss per token from logits: `podium.kernels.logits` with the terms of `podium.algorithms.losses`."""

from typing import NamedTuple

import jax
from jax.lax import stop_gradient

from podium.algorithms.losses import Tokens, clipped_policy_loss, kl_loss
from podium.kernels.logits import DEFAULTS, LogitsOptions, logprobs_of_logits


class LogitsLoss(NamedTuple):
    """Per-token results, [B, T] float32; only `losses` has a gradient."""

    losses: jax.Array  # not masked and not averaged
    logprobs: jax.Array
    entropy: jax.Array  # 0 unless `options.entropy`
    kl: jax.Array | None  # k3 to the reference; None without one
    clipped_low: jax.Array  # 1 where the clip stops the gradient
    clipped_high: jax.Array


def grpo_loss_of_logits(
    logits: jax.Array,
    targets: jax.Array,
    advantages: jax.Array,
    *,
    old_logprobs: jax.Array | None = None,
    reference_logprobs: jax.Array | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_bonus: float = 0.0,
    options: LogitsOptions = DEFAULTS,
) -> LogitsLoss:
    """The loss -min(ratio A, clip(ratio) A) + kl_coef k3 - entropy_bonus entropy per token (arXiv:2402.03300, eq. 3).

    The caller takes the mean, for example `jnp.sum(found.losses * mask) / num_tokens`. `kl_coef` is GRPO's beta.

    Args:
        logits: [B, T, V], computed by the model from the tokens before each target.
        targets: [B, T] int32, the tokens.
        advantages: [B, T], or [B, 1] for one per completion.
        old_logprobs: [B, T] under the policy in the ratio's denominator; None: on-policy, the current
            log-probabilities.
        reference_logprobs: [B, T] under the frozen first model, for the KL.
        clip_low: the ratio's lower bound is 1 - clip_low.
        clip_high: its upper bound is 1 + clip_high.
        kl_coef: weight of the KL; needs `reference_logprobs`.
        entropy_bonus: weight of the entropy; needs `options.entropy`.
        options: temperature, kernel, and sharding of the logits.

    Raises:
        ValueError: an input of a term is missing, or the logits do not suit the options.
    """
    if kl_coef and reference_logprobs is None:
        raise ValueError(f"kl_coef {kl_coef} needs reference_logprobs, the log-probabilities of the reference model")
    if entropy_bonus and not options.entropy:
        raise ValueError(f"entropy_bonus {entropy_bonus} needs entropies; pass LogitsOptions(entropy=True)")
    logprobs, entropy = logprobs_of_logits(logits, targets, options)
    old = stop_gradient(logprobs if old_logprobs is None else old_logprobs)
    every = targets  # placeholders for segments and mask, which this term does not read
    tokens = Tokens(logprobs, old, advantages, every, every)
    policy = clipped_policy_loss(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    losses, kl = policy.values - entropy_bonus * entropy, None
    if reference_logprobs is not None:
        kl = kl_loss("k3", logprobs, reference_logprobs)
        losses = losses + kl_coef * kl
    told = (logprobs, entropy, kl, policy.clipped_low, policy.clipped_high)
    return LogitsLoss(losses, *jax.tree.map(stop_gradient, told))
