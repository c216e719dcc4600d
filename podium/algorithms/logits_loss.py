"""GRPO loss from logits: `podium.kernels.logits` and the terms of `podium.algorithms.losses`, by token."""

from typing import NamedTuple

import jax
from jax.lax import stop_gradient

from podium.algorithms.losses import clipped_policy_loss, kl_loss
from podium.kernels.logits import DEFAULTS, LogitsOptions, logprobs_of_logits


class LogitsLoss(NamedTuple):
    """Of each token, [B, T] float32; only `losses` have a gradient."""

    losses: jax.Array  # not masked and not averaged
    logprobs: jax.Array
    entropy: jax.Array  # 0 unless `options.entropy`
    kl: jax.Array | None  # k3 to the reference, where there is one
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
    """-min(ratio A, clip(ratio) A) + kl_coef k3 - entropy_bonus entropy, of each token (arXiv:2402.03300, eq. 3).

    The mean is the caller's: `jnp.sum(found.losses * mask) / num_tokens`, say. `kl_coef` is GRPO's beta.

    Args:
        logits: [B, T, V], aligned with `targets`: the logits that the model computed one token before each.
        targets: [B, T] int32, the tokens.
        advantages: [B, T], or [B, 1] for one per completion.
        old_logprobs: [B, T] of the policy that the ratio is taken to; None: on-policy, this one's own.
        reference_logprobs: [B, T] of the frozen first model, for the KL.
        clip_low: the ratio's lower bound is 1 - clip_low.
        clip_high: its upper bound is 1 + clip_high.
        kl_coef: weight of the KL; needs `reference_logprobs`.
        entropy_bonus: weight of the entropy; needs `options.entropy`.
        options: temperature, kernel, and where logits are.

    Raises:
        ValueError: a term lacks what it needs, or logits cannot be used so.
    """
    if kl_coef and reference_logprobs is None:
        raise ValueError(f"kl_coef {kl_coef} needs reference_logprobs, of the model that the policy is held to")
    if entropy_bonus and not options.entropy:
        raise ValueError(f"entropy_bonus {entropy_bonus} needs entropies; give LogitsOptions(entropy=True)")
    logprobs, entropy = logprobs_of_logits(logits, targets, options)
    old = stop_gradient(logprobs if old_logprobs is None else old_logprobs)
    every = targets  # segments and mask, which this term does not read
    policy = clipped_policy_loss(
        logprobs, old, advantages, every, every, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    losses, kl = policy.values - entropy_bonus * entropy, None
    if reference_logprobs is not None:
        kl = kl_loss("k3", logprobs, reference_logprobs)
        losses = losses + kl_coef * kl
    return LogitsLoss(losses, *jax.tree.map(stop_gradient, (logprobs, entropy, kl, *policy[1:])))
