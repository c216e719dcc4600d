"""Attention of packed rows block by block in XLA, for every backend: no array of all scores, forward or backward.

The softmax runs along with the blocks (arXiv:2112.05682), and the backward pass makes each block of scores again
(arXiv:2205.14135). Blocks of keys that no query of a block sees are left out: the time follows what sees what, not T^2.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.config.attention import cut
from podium.models.linear import full_precision

NEVER = jnp.iinfo(jnp.int32).max
MASKED = -1e30  # a score that is not seen: finite, as the difference of two of them must be a number


class Ranges(NamedTuple):
    """The least and greatest id in each block of a row, without padding; of a block of padding, none between them."""

    low: jax.Array  # [B, n] int32
    high: jax.Array  # [B, n] int32

    @staticmethod
    def of(ids: jax.Array) -> "Ranges":
        """Of ids [B, n, t] int32; 0 is padding."""
        return Ranges(jnp.min(jnp.where(ids > 0, ids, NEVER), axis=-1), jnp.max(ids, axis=-1))


def pad_to(x: jax.Array, length: int) -> jax.Array:
    """[B, T, ...] with zeros behind, to `length` tokens."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


@jax.custom_vjp
def blockwise_attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, prompts: jax.Array) -> jax.Array:
    """Scaled dot-product attention of packed rows with grouped heads; scores and softmax in float32.

    Args:
        q: [B, T, H, Q].
        k: [B, T, K, Q], K divides H.
        v: [B, T, K, Q].
        segments: [B, T] int32, the segment of each token; 0 is padding, which sees nothing and gives zeros.
        prompts: [B, T] int32, the segment of the token's prompt, which it sees besides its own.

    Returns:
        [B, T, H, Q].
    """
    return _forward(q, k, v, segments, prompts)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, prompts: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def of_row(row: _Row) -> tuple[jax.Array, jax.Array]:
        n, K, M, Q = row.q.shape
        nothing = (jnp.full((n, K, M, 1), MASKED / 2), jnp.zeros((n, K, M, 1)), jnp.zeros((n, K, M, Q)))

        def add(i: jax.Array, j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, out = (x[i] for x in sums)
            scores = row.scores(i, j)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            shares, kept = jnp.exp(scores - higher), jnp.exp(top - higher)
            values = _einsum("kmn,knq->kmq", shares.astype(v.dtype), row.v[j])
            return higher, kept * total + jnp.sum(shares, axis=-1, keepdims=True), kept * out + values

        top, total, out = _over_pairs(row, add, nothing, keys=(False, False, False))
        divisor = jnp.where(total > 0, total, 1.0)
        return out / divisor, top + jnp.log(divisor)

    out, log_total = jax.lax.map(of_row, _Row.of(q, k, v, segments, prompts))
    out = _to_tokens(out, q)
    return out, (q, k, v, segments, prompts, out, log_total)


def _backward(saved: tuple[jax.Array, ...], d_out: jax.Array) -> Any:
    q, k, v, segments, prompts, out, log_total = saved
    rows, scale = _Row.of(q, k, v, segments, prompts), q.shape[-1] ** -0.5
    d_totals = jnp.sum((d_out * out).astype(jnp.float32), axis=-1, keepdims=True)
    of_out = (_cut(x, rows.segments.shape[1], k.shape[2]) for x in (d_out, d_totals))

    def of_row(given: tuple) -> tuple[jax.Array, ...]:
        row, log_sum, d_out, d_total = given

        def add(i: jax.Array, j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = sums[0][i], sums[1][j], sums[2][j]
            shares = jnp.exp(row.scores(i, j) - log_sum[i])  # [K, M, t]
            d_scores = (shares * (_einsum("kmq,knq->kmn", d_out[i], row.v[j]) - d_total[i])).astype(q.dtype)
            return (
                dq + _einsum("kmn,knq->kmq", d_scores, row.k[j]),
                dk + _einsum("kmn,kmq->knq", d_scores, row.q[i]),
                dv + _einsum("kmn,kmq->knq", shares.astype(v.dtype), d_out[i]),
            )

        nothing = tuple(jnp.zeros(x.shape) for x in (row.q, row.k, row.v))
        dq, dk, dv = _over_pairs(row, add, nothing, keys=(False, True, True))
        return dq * scale, dk * scale, dv

    found = jax.lax.map(of_row, (rows, log_total, *of_out))
    return *(_to_tokens(dx, x) for dx, x in zip(found, (q, k, v), strict=True)), None, None


blockwise_attention.defvjp(_forward, _backward)


class _Row(NamedTuple):
    """A row in n blocks of t tokens; the G query heads of a key head, M = G t queries, are multiplied at once."""

    q: jax.Array  # [n, K, M, Q]
    k: jax.Array  # [n, K, t, Q]
    v: jax.Array  # [n, K, t, Q]
    segments: jax.Array  # [n, t] int32
    prompts: jax.Array  # [n, t] int32
    seen: jax.Array  # [n, n] bool, which blocks of keys hold what a block of queries may see

    @staticmethod
    def of(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, prompts: jax.Array) -> "_Row":
        """All rows of a batch: each array with B in front."""
        n, t = cut("blocks", q.shape[1])
        segments, prompts = (pad_to(x, n * t).reshape(-1, n, t) for x in (segments, prompts))
        blocks = [_cut(x, n, k.shape[2]) for x in (q, k, v)]
        return _Row(blocks[0], blocks[1], blocks[2], segments, prompts, seen_blocks(segments, prompts))

    def scores(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """[K, M, t] float32, of the queries of block i with the keys of block j."""
        t, (K, M, Q) = self.segments.shape[1], self.q.shape[1:]
        keys, own, prompt = self.segments[j][None, :], self.segments[i][:, None], self.prompts[i][:, None]
        places = jnp.arange(t)
        earlier = j * t + places[None, :] <= i * t + places[:, None]
        hidden = jnp.where(earlier & (keys > 0) & ((keys == own) | (keys == prompt)), 0.0, MASKED)  # [t, t]
        scores = _einsum("kmq,knq->kmn", self.q[i], self.k[j]) * Q**-0.5
        return (scores.reshape(K, M // t, t, t) + hidden[None, None]).reshape(K, M, t)


def _over_pairs(row: _Row, add: Any, sums: tuple[jax.Array, ...], keys: tuple[bool, ...]) -> tuple[jax.Array, ...]:
    """Sums [n, ...] over all pairs of blocks that see each other; `keys` says which are of keys, not of queries.

    `add(i, j, sums)` gives what then stands in block i, or j of keys, of each.
    """
    queries, earlier = (jnp.asarray(each, jnp.int32) for each in np.tril_indices(len(row.seen)))

    def step(sums: tuple[jax.Array, ...], pair: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
        i, j = pair
        places = [j if of_keys else i for of_keys in keys]
        parts = jax.lax.cond(
            row.seen[i, j], add, lambda i, j, sums: tuple(x[at] for x, at in zip(sums, places, strict=True)), i, j, sums
        )
        return tuple(x.at[at].set(part) for x, at, part in zip(sums, places, parts, strict=True)), None

    return jax.lax.scan(step, sums, (queries, earlier))[0]


def seen_blocks(segments: jax.Array, prompts: jax.Array) -> jax.Array:
    """Which blocks of keys hold what a block of queries may see, [B, n, n] bool, from ids [B, n, t]."""
    keys = Ranges.of(segments)

    def meets(queries: Ranges) -> jax.Array:
        low, high = queries.low[:, :, None], queries.high[:, :, None]
        return (keys.low[:, None] <= high) & (low <= keys.high[:, None])

    return meets(keys) | meets(Ranges.of(prompts))


def _cut(x: jax.Array, n: int, kv_heads: int) -> jax.Array:
    """[B, T, H, Q] in blocks, [B, n, K, H/K t, Q]."""
    B, T, H, Q = x.shape
    t = math.ceil(T / n)
    x = pad_to(x, n * t).reshape(B, n, t, kv_heads, H // kv_heads, Q)
    return jnp.moveaxis(x, 2, 4).reshape(B, n, kv_heads, -1, Q)


def _to_tokens(x: jax.Array, like: jax.Array) -> jax.Array:
    """Blocks [B, n, K, H/K t, Q] as `like`, [B, T, H, Q]."""
    (B, T, H, Q), (_, n, K, M, _) = like.shape, x.shape
    x = jnp.moveaxis(x.reshape(B, n, K, H // K, M * K // H, Q), 4, 2)
    return x.reshape(B, -1, H, Q)[:, :T].astype(like.dtype)


def _einsum(pattern: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(pattern, x, y, precision=full_precision(y.dtype), preferred_element_type=jnp.float32)
