"""Sequence parallelism: devices that hold parts of a row's tokens attend as if each held whole rows of some heads.

Before attention, each device sends its tokens' queries of other heads away and receives all other tokens' queries of
its own heads; afterwards the reverse (DeepSpeed-Ulysses, arXiv:2309.14509). Every device computes equally many heads of
the same whole rows, so the work is balanced however tokens are split; ring attention would need a causal split for
that.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from podium.models.attention.mask import Visibility

Attention = Callable[[jax.Array, jax.Array, jax.Array, Visibility, jax.Array | None], jax.Array]
"""`(q [B, T, H, Q], k [B, T, K, Q], v [B, T, K, Q], visibility [B, T], sinks [H] or None) -> attended [B, T, H, Q]`."""


def over_tokens(attention: Attention, devices: int, axes: tuple[str, ...]) -> Attention:
    """Wrap attention over whole rows for arrays whose tokens are split over `devices`.

    Call the result inside `shard_map`: arguments and result are one device's part, [B, T/devices, ...].

    Args:
        attention: attention over whole rows with a device's heads.
        devices: number of devices that a row is split over; must divide the query heads.
        axes: the mesh axes of these devices.
    """
    if devices == 1:
        return attention

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, sinks: jax.Array | None) -> jax.Array:
        whole = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), visibility)
        k, v = (_keys(x, q.shape[2], devices, axes) for x in (k, v))
        if sinks is not None:
            own = len(sinks) // devices
            sinks = jax.lax.dynamic_slice_in_dim(sinks, jax.lax.axis_index(axes) * own, own)
        q = jax.lax.all_to_all(q, axes, split_axis=2, concat_axis=1, tiled=True)  # [B, T, H/devices, Q]
        return jax.lax.all_to_all(attention(q, k, v, whole, sinks), axes, split_axis=1, concat_axis=2, tiled=True)

    return attend


def _keys(x: jax.Array, heads: int, devices: int, axes: tuple[str, ...]) -> jax.Array:
    """Keys or values [B, T/devices, K, Q] of all tokens, for the device's share of the H query heads.

    If `devices` does not divide the K heads, all are gathered, and each device selects those it needs.
    """
    kv_heads = x.shape[2]
    if kv_heads % devices == 0:
        return jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
    x = jax.lax.all_gather(x, axes, axis=1, tiled=True)  # [B, T, K, Q]
    own, queries = heads // devices, heads // kv_heads  # query heads per device, and per key head
    needed = (jax.lax.axis_index(axes) * own + jnp.arange(own)) // queries  # key head of each query head
    return jnp.take(x, needed[:1] if queries % own == 0 else needed, axis=2)
