"""Which experts each token goes to, in pure jax: independent of devices and of the rest of Podium."""

import jax
import jax.numpy as jnp

from podium.models.blocks.choices import Balance, Recorded, Routing, choice_format, unknown_choice


def route(
    logits: jax.Array, top: int, *, normalized: bool, recorded: Recorded | None, replay: bool
) -> tuple[jax.Array, jax.Array, Routing]:
    """Choose the `top` experts of each token from a router's logits [B, T, E] float32.

    Args:
        logits: of the router.
        top: k.
        normalized: whether the gates of the chosen experts sum to 1; else they are shares of all experts.
        recorded: choices of an earlier pass.
        replay: whether to go to the recorded experts instead of choosing. The gates are computed again either way, so
            that gradients reach the router.

    Returns:
        Gates [B, T, k] float32, choices [B, T, k] int32, and what to report.
    """
    best, chosen = jax.lax.top_k(jax.lax.stop_gradient(logits), top)
    experts = jnp.arange(logits.shape[-1])
    balance = None
    if recorded is not None:
        known = recorded.choices[..., 0] != unknown_choice(recorded.choices.dtype)  # [B, T]
        repeated = jnp.where(known[..., None], recorded.choices.astype(jnp.int32), chosen)
        lowest = jnp.min(_picked(jax.lax.stop_gradient(logits), repeated), axis=-1)  # [B, T]
        differs = known & (lowest < best[..., -1])
        chosen = repeated if replay else chosen
        counted = recorded.counted
        hits = jnp.sum(chosen[..., None] == experts[None, None, None], axis=2)  # [B, T, E]
        balance = Balance(
            load=jnp.sum(jnp.where(counted[..., None], hits, 0), axis=1).astype(jnp.float32),
            shares=jnp.sum(jnp.where(counted[..., None], jax.nn.softmax(logits), 0.0), axis=1),
            compared=jnp.sum(known & counted, axis=1).astype(jnp.float32),
            differing=jnp.sum(differs & counted, axis=1).astype(jnp.float32),
        )
    picked = _picked(logits, chosen)
    of_all = jax.nn.logsumexp(picked if normalized else logits, axis=-1, keepdims=True)
    return jnp.exp(picked - of_all), chosen, Routing(chosen.astype(choice_format(logits.shape[-1])), balance)


def _picked(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """The logits [B, T, k] of the chosen experts; selected by comparison, so that the gradient needs no scatter."""
    hits = chosen[..., None] == jnp.arange(logits.shape[-1])[None, None, None]  # [B, T, k, E]
    return jnp.sum(jnp.where(hits, logits[:, :, None], 0.0), axis=-1)
