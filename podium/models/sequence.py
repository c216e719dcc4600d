"""Sequence parallelism: devices that hold parts of a row's tokens attend as if each held whole rows of some heads.

Before attention, a device sends its tokens' queries for all other heads away and receives all other tokens' queries for
its own heads; after it, the reverse (DeepSpeed-Ulysses, arXiv:2309.14509). Every device thus attends for equally many
heads over the same whole rows, and the work is balanced however tokens are cut; ring attention needs a cut that
follows causality for that.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from podium.models.visibility import Visibility

Attention = Callable[[jax.Array, jax.Array, jax.Array, Visibility], jax.Array]
"""`(q [B, T, H, Q], k [B, T, K, Q], v [B, T, K, Q], visibility [B, T]) -> attended [B, T, H, Q]`."""


def over_tokens(attention: Attention, devices: int, axes: tuple[str, ...]) -> Attention:
    """The attention of whole rows, for arrays whose tokens are split over `devices`.

    It is called inside `shard_map`: its arguments and its result are a device's own part, [B, T/devices, ...].

    Args:
        attention: of a device's rows and heads.
        devices: over which a row is split; they must divide the query heads.
        axes: of the mesh, over which they are arranged.
    """
    if devices == 1:
        return attention

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility) -> jax.Array:
        whole = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), visibility)
        k, v = (_keys(x, q.shape[2], devices, axes) for x in (k, v))
        q = jax.lax.all_to_all(q, axes, split_axis=2, concat_axis=1, tiled=True)  # [B, T, H/devices, Q]
        return jax.lax.all_to_all(attention(q, k, v, whole), axes, split_axis=1, concat_axis=2, tiled=True)

    return attend


def _keys(x: jax.Array, heads: int, devices: int, axes: tuple[str, ...]) -> jax.Array:
    """Keys or values [B, T/devices, K, Q] of all tokens, for the query heads, of H, that a device attends for.

    If the devices do not divide the K heads, all are gathered, and each device picks what it needs.
    """
    kv_heads = x.shape[2]
    if kv_heads % devices == 0:
        return jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
    x = jax.lax.all_gather(x, axes, axis=1, tiled=True)  # [B, T, K, Q]
    own, queries = heads // devices, heads // kv_heads  # query heads of a device, and of a key
    needed = (jax.lax.axis_index(axes) * own + jnp.arange(own)) // queries  # by query head
    return jnp.take(x, needed[:1] if queries % own == 0 else needed, axis=2)
