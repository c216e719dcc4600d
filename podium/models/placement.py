"""Moves activations between devices inside a layer: between splits by rows, width and heads; and groups rows."""

import jax
import jax.numpy as jnp

from podium.sharding import ShardingRules


def to_rows(rules: ShardingRules, x: jax.Array) -> jax.Array:
    """Reshard [B, T, D] so that each device has whole tokens of its rows.

    Products with sharded weights leave the width D split over devices instead.
    """
    x = rules.constrain(x, "batch_by_width", "tokens_by_width", "width")
    x = rules.constrain(x, "rows", "tokens_by_width", "width_of_rows")
    return rules.constrain(x, "rows", "tokens", None)


def to_sequences(
    rules: ShardingRules, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reshard q [B, T, H, Q], k and v [B, T, K, Q] for attention: from parts of heads to whole heads of fewer rows."""
    if rules.num_shards("head_dim") == 1:
        return q, k, v
    B, T, H, Q = q.shape
    K = k.shape[2]
    parts = (q.reshape(B, T, K, H // K, Q), k[:, :, :, None], v[:, :, :, None])
    joined = rules.constrain(jnp.concatenate(parts, axis=3), "rows", None, "kv_heads", None, "head_dim")
    joined = rules.constrain(joined, "batch", None, "cache_heads", None, None)
    return joined[:, :, :, :-2].reshape(B, T, H, Q), joined[:, :, :, -2], joined[:, :, :, -1]


def from_sequences(rules: ShardingRules, attended: jax.Array) -> jax.Array:
    """The inverse of `to_sequences` for [B, T, H, Q]."""
    if rules.num_shards("head_dim") == 1:
        return attended
    return rules.constrain(attended, "rows", None, "heads", "head_dim")


def whole_rows(rules: ShardingRules, x: jax.Array) -> jax.Array:
    """Reshard [B, T, H, ...] for a recurrence: all tokens of some rows, and some of the heads ("state_heads")."""
    rest = [None] * (x.ndim - 3)
    x = rules.constrain(x, "rows", "tokens", "delta_heads", *rest)
    return rules.constrain(x, "batch", None, "state_heads", *rest)


def projected_rows(rules: ShardingRules, y: jax.Array) -> jax.Array:
    """The inverse of `whole_rows`."""
    rest = [None] * (y.ndim - 3)
    y = rules.constrain(y, "batch", None, "state_heads", *rest)
    return rules.constrain(y, "rows", "tokens", "delta_heads", *rest)


def split_rows(rules: ShardingRules, x: jax.Array, groups: int) -> jax.Array:
    """Group every device's rows: [B, T, ...] becomes [groups, B/groups, T, ...] without communication."""
    devices = rules.num_shards("batch")
    x = x.reshape(devices, groups, -1, *x.shape[1:])
    x = jnp.moveaxis(x, 1, 0).reshape(groups, -1, *x.shape[3:])
    return rules.constrain(x, None, "batch", "tokens", *[None] * (x.ndim - 3))


def merge_rows(rules: ShardingRules, x: jax.Array, *axes: str) -> jax.Array:
    """The inverse of `split_rows`, for arrays whose dimensions after the rows have these logical axes."""
    groups, devices = len(x), rules.num_shards("batch")
    x = x.reshape(groups, devices, -1, *x.shape[2:])
    x = jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[3:])
    return rules.constrain(x, "batch", *axes, *[None] * (x.ndim - 1 - len(axes)))
