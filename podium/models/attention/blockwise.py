"""Block-by-block attention over packed rows in XLA, for all platforms; never stores all scores of a row.

The softmax is updated block by block (arXiv:2112.05682), and the backward pass recomputes the scores of each block
(arXiv:2205.14135). Pairs of blocks without a visible pair of tokens are skipped, so the time is proportional to the
number of visible block pairs, not to T^2.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.config.attention_blocks import cut
from podium.models.attention.mask import Visibility, pad_to
from podium.models.linear import full_precision

MASKED = -1e30  # score of an invisible pair; finite, so that differences are not NaN
Outputs = tuple[jax.Array, ...]  # one array per sum over pairs of blocks


@jax.custom_vjp
def blockwise_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, sinks: jax.Array | None = None
) -> jax.Array:
    """Scaled dot-product attention over packed rows with grouped heads; scores and softmax in float32.

    Args:
        q: [B, T, H, Q].
        k: [B, T, K, Q], K divides H.
        v: [B, T, K, Q].
        visibility: which tokens [B, T] attend to which.
        sinks: [H], score of each head with a key that has no value (`At.sinks`); None: no such key.

    Returns:
        [B, T, H, Q]; zeros at padding.
    """
    return _forward(q, k, v, visibility, sinks)[0]


Saved = tuple[jax.Array, jax.Array, jax.Array, Visibility, jax.Array | None, jax.Array, jax.Array]
"""Saved for the backward pass: queries, keys, values, visibility, sinks, output, and each softmax's log-sum-exp."""


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, sinks: jax.Array | None
) -> tuple[jax.Array, Saved]:
    def of_row(row: _Row) -> tuple[jax.Array, jax.Array]:
        n, K, M, Q = row.q.shape
        begun = (jnp.full((n, K, M, 1), MASKED / 2), jnp.zeros((n, K, M, 1)))
        if sinks is not None:  # a sink is the first key; it has no value
            of_heads = jnp.repeat(sinks.astype(jnp.float32).reshape(K, -1), M * K // len(sinks), axis=1)  # [K, M]
            begun = (jnp.broadcast_to(of_heads[None, ..., None], (n, K, M, 1)), jnp.ones((n, K, M, 1)))
        nothing = (*begun, jnp.zeros((n, K, M, Q)))

        def add(i: jax.Array, j: jax.Array, sums: Outputs) -> Outputs:
            top, total, out = (x[i] for x in sums)
            scores = row.scores(i, j)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            shares, kept = jnp.exp(scores - higher), jnp.exp(top - higher)
            values = _einsum("kmn,knq->kmq", shares.astype(v.dtype), row.v[j])
            return higher, kept * total + jnp.sum(shares, axis=-1, keepdims=True), kept * out + values

        top, total, out = _over_pairs(row, add, nothing, keys=(False, False, False))
        divisor = jnp.where(total > 0, total, 1.0)
        return out / divisor, top + jnp.log(divisor)

    out, log_total = jax.lax.map(of_row, _Row.of(q, k, v, visibility))
    out = _to_tokens(out, q)
    return out, (q, k, v, visibility, sinks, out, log_total)


Gradients = tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None]
"""Gradients of queries, keys, values, (none of) visibility, and sinks."""


def _backward(saved: Saved, d_out: jax.Array) -> Gradients:
    q, k, v, visibility, sinks, out, log_total = saved
    rows = _Row.of(q, k, v, visibility)
    scale = q.shape[-1] ** -0.5
    d_totals = jnp.sum((d_out * out).astype(jnp.float32), axis=-1, keepdims=True)
    n, kv_heads = rows.q.shape[1], k.shape[2]

    def of_row(given: tuple[_Row, jax.Array, jax.Array, jax.Array]) -> Outputs:
        row, log_sum, d_out, d_total = given

        def add(i: jax.Array, j: jax.Array, sums: Outputs) -> Outputs:
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

    d_total = _cut(d_totals, n, kv_heads)  # [B, n, K, M, 1]
    dq, dk, dv = jax.lax.map(of_row, (rows, log_total, _cut(d_out, n, kv_heads), d_total))
    if sinks is not None:
        by_head = (*log_total.shape[:3], len(sinks) // kv_heads, -1)  # [B, n, K, G, t]
        log_total, d_total = (jnp.moveaxis(x.reshape(by_head), 1, 3) for x in (log_total, d_total))
        log_total, d_total = (x.reshape(len(x), len(sinks), -1) for x in (log_total, d_total))
    d_sinks = sink_gradient(sinks, log_total, d_total)
    return _to_tokens(dq, q), _to_tokens(dk, k), _to_tokens(dv, v), None, d_sinks


blockwise_attention.defvjp(_forward, _backward)


def sink_gradient(sinks: jax.Array | None, log_total: jax.Array, d_total: jax.Array) -> jax.Array | None:
    """The gradient [H] of the sinks; None without sinks.

    Args:
        sinks: [H].
        log_total: log-sum-exp of each softmax, sink included, [B, H, T].
        d_total: sum over a query's elements of output times its gradient, [B, H, T].
    """
    if sinks is None:
        return None
    shares = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - log_total)
    return -jnp.sum(shares * d_total, axis=(0, 2)).astype(sinks.dtype)


class _Row(NamedTuple):
    """A row cut into n blocks of t tokens; the G query heads of a key head are multiplied at once, M = G t queries."""

    q: jax.Array  # [n, K, M, Q]
    k: jax.Array  # [n, K, t, Q]
    v: jax.Array  # [n, K, t, Q]
    visibility: Visibility  # [n, t]
    meets: jax.Array  # [n, n] bool, whether any query of a block may attend to any key of another

    @staticmethod
    def of(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility) -> "_Row":
        """Cut all rows of a batch; each array has a leading dimension B."""
        n, t = cut("blocks", q.shape[1])
        visibility, kv_heads = visibility.cut(n, t), k.shape[2]
        pairs = jnp.asarray(visibility.block_pairs())
        return _Row(_cut(q, n, kv_heads), _cut(k, n, kv_heads), _cut(v, n, kv_heads), visibility, pairs)

    def scores(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Scores [K, M, t] float32 of the queries in block i with the keys in block j."""
        t, (K, M, Q) = self.k.shape[2], self.q.shape[1:]
        hidden = jnp.where(self.visibility.pair(i, j), 0.0, MASKED)  # [t, t]
        scores = _einsum("kmq,knq->kmn", self.q[i], self.k[j]) * Q**-0.5
        return (scores.reshape(K, M // t, t, t) + hidden[None, None]).reshape(K, M, t)


def _over_pairs(
    row: _Row, add: Callable[[jax.Array, jax.Array, Outputs], Outputs], sums: Outputs, keys: tuple[bool, ...]
) -> Outputs:
    """Sums [n, ...] over all visible pairs of blocks; `keys` says of each sum whether it is per key block.

    `add(i, j, sums)` returns the new value of each sum's block i, or of its block j if the sum is per key block.
    """
    queries, earlier = (jnp.asarray(each, jnp.int32) for each in np.tril_indices(len(row.meets)))

    def step(sums: Outputs, pair: tuple[jax.Array, jax.Array]) -> tuple[Outputs, None]:
        i, j = pair
        places = [j if of_keys else i for of_keys in keys]
        parts = jax.lax.cond(
            row.meets[i, j],
            add,
            lambda i, j, sums: tuple(x[at] for x, at in zip(sums, places, strict=True)),
            i,
            j,
            sums,
        )
        return tuple(x.at[at].set(part) for x, at, part in zip(sums, places, parts, strict=True)), None

    return jax.lax.scan(step, sums, (queries, earlier))[0]


def _cut(x: jax.Array, n: int, kv_heads: int) -> jax.Array:
    """Cut [B, T, H, Q] into blocks [B, n, K, H/K t, Q]."""
    B, T, H, Q = x.shape
    t = math.ceil(T / n)
    x = pad_to(x, n * t).reshape(B, n, t, kv_heads, H // kv_heads, Q)
    return jnp.moveaxis(x, 2, 4).reshape(B, n, kv_heads, -1, Q)


def _to_tokens(x: jax.Array, like: jax.Array) -> jax.Array:
    """Join blocks [B, n, K, H/K t, Q] to the shape of `like`, [B, T, H, Q]."""
    (B, T, H, Q), (_, n, K, M, _) = like.shape, x.shape
    x = jnp.moveaxis(x.reshape(B, n, K, H // K, M * K // H, Q), 4, 2)
    return x.reshape(B, -1, H, Q)[:, :T].astype(like.dtype)


def _einsum(pattern: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(pattern, x, y, precision=full_precision(y.dtype), preferred_element_type=jnp.float32)
