"""XLA implementation of the kernels of `podium.kernels.tpu_logits`; `tiles` and `interpret` are ignored."""

import jax
import jax.numpy as jnp

from podium.kernels.tiles import LOWEST, Gradients, Interpret, Statistics, Tiles


def xla_statistics(
    logits: jax.Array, targets: jax.Array, *, scale: float, entropy: bool, tiles: Tiles, interpret: Interpret
) -> Statistics:
    """`podium.kernels.tiles.Statistics` of logits [B, T, V] times `scale`, with targets [B, T]."""
    del tiles, interpret
    x = _scaled(logits, scale)
    top = jnp.max(x, axis=-1)
    below = x - top[..., None]
    shares = jnp.exp(below)
    chosen = jnp.sum(jnp.where(_is_target(targets, x), x, 0.0), axis=-1)
    weighted = jnp.sum(shares * below, axis=-1) if entropy else jnp.zeros_like(top)
    return Statistics(top, jnp.sum(shares, axis=-1), chosen, weighted)


def xla_gradient(
    logits: jax.Array,
    targets: jax.Array,
    gradients: Gradients,
    *,
    scale: float,
    entropy: bool,
    tiles: Tiles,
    in_place: bool,
    interpret: Interpret,
) -> jax.Array:
    """The gradient of the logits, [B, T, V] in their dtype; XLA decides whether to reuse their memory."""
    del tiles, in_place, interpret
    log_total, of_logprob, of_entropy, entropies = (x[..., None] for x in gradients)
    x = _scaled(logits, scale)
    table = x - log_total
    slope = of_logprob + of_entropy * (table + entropies) if entropy else of_logprob
    found = jnp.where(_is_target(targets, x), of_logprob, 0.0) - jnp.exp(table) * slope
    return (found * scale).astype(logits.dtype)


def _scaled(logits: jax.Array, scale: float) -> jax.Array:
    return jnp.maximum(logits.astype(jnp.float32) * scale, LOWEST)


def _is_target(targets: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets.dtype, x.shape, 2) == targets[..., None]
