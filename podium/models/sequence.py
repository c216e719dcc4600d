"""Sequence parallelism: devices that have parts of a row's tokens attend as if each had whole rows of some heads.

Before attention a device gives away its tokens' queries but for its own heads, and gets those of all other tokens;
after it, the way back (DeepSpeed-Ulysses, arXiv:2309.14509). So every device attends for as many heads over the same
whole rows, and the work is even however tokens are cut; in ring attention the cut has to follow causality for that.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Attention = Callable[..., jax.Array]
"""`(q [B, T, H, Q], k [B, T, K, Q], v [B, T, K, Q], segments [B, T], prompts [B, T]) -> attended [B, T, H, Q]`."""


def over_tokens(attention: Attention, devices: int, axes: tuple[str, ...]) -> Attention:
    """The attention of whole rows, for arrays of which each of so many devices has a part of the tokens.

    To be mapped over the mesh: what it takes and gives are a device's own [B, T/devices, ...].

    Args:
        attention: of a device's rows and heads.
        devices: that split a row; they must divide the query heads.
        axes: of the mesh, along which they are.
    """
    if devices == 1:
        return attention

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, prompts: jax.Array) -> jax.Array:
        ids = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (segments, prompts))
        k, v = (_keys(x, q.shape[2], devices, axes) for x in (k, v))
        q = jax.lax.all_to_all(q, axes, split_axis=2, concat_axis=1, tiled=True)  # [B, T, H/devices, Q]
        return jax.lax.all_to_all(attention(q, k, v, *ids), axes, split_axis=1, concat_axis=2, tiled=True)

    return attend


def _keys(x: jax.Array, heads: int, devices: int, axes: tuple[str, ...]) -> jax.Array:
    """Keys or values [B, T/devices, K, Q] of all tokens, for those of H query heads that a device attends for.

    Where there are fewer than devices, or they do not divide, all are gathered, and each device takes what it needs.
    """
    kv_heads = x.shape[2]
    if kv_heads % devices == 0:
        return jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
    x = jax.lax.all_gather(x, axes, axis=1, tiled=True)  # [B, T, K, Q]
    own, queries = heads // devices, heads // kv_heads  # query heads of a device, and of a key
    needed = (jax.lax.axis_index(axes) * own + jnp.arange(own)) // queries  # by query head
    return jnp.take(x, needed[:1] if queries % own == 0 else needed, axis=2)
