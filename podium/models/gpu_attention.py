"""Attention of packed rows as a GPU kernel (Pallas, lowered to Triton): no array of all scores, forward or backward.

As `podium.models.blockwise`. cuDNN's own compares no segments, and jax's kernel for equality alone; a completion sees
two segments. Each program of a grid goes through the blocks that its own block meets, which are listed before.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podium.config.attention import attended_pairs, cut
from podium.models.blockwise import MASKED, pad_to, seen_blocks

WARPS, STAGES = 4, 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def gpu_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, prompts: jax.Array, interpret: bool = False
) -> jax.Array:
    """`podium.models.blockwise.blockwise_attention` as a kernel; `interpret` runs it without a GPU, slowly."""
    return _forward(q, k, v, segments, prompts, interpret)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, prompts: jax.Array, interpret: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    call = _Call(q, k, interpret)
    seen = call.seen(segments, prompts)
    like, statistics = call.padded(q), jax.ShapeDtypeStruct((call.B, call.H, call.n * call.t), jnp.float32)
    out, log_total = call.run(
        _forward_kernel,
        heads=call.H,
        products=2,
        inputs=("listed", "count", "ids", "ids", "query", "keys", "keys"),
        outputs=(("query", like), ("statistic", statistics)),
    )(*_listed(seen), *call.ids(segments, prompts), *map(call.padded, (q, k, v)))
    return out[:, : call.T], (q, k, v, segments, prompts, out[:, : call.T], log_total)


def _backward(interpret: bool, saved: tuple[jax.Array, ...], d_out: jax.Array) -> Any:
    q, k, v, segments, prompts, out, log_total = saved
    call = _Call(q, k, interpret)
    seen, T = call.seen(segments, prompts), call.T
    d_total = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [B, T, H]
    d_total = jnp.swapaxes(call.padded(d_total), 1, 2)
    given = (*call.ids(segments, prompts), *map(call.padded, (q, k, v, d_out)), log_total, d_total)
    (dq,) = call.run(
        _queries_kernel,
        heads=call.H,
        products=3,
        inputs=("listed", "count", "ids", "ids", "query", "keys", "keys", "query", "statistic", "statistic"),
        outputs=(("query", call.padded(q)),),
    )(*_listed(seen), *given)
    dk, dv = call.run(
        functools.partial(_keys_kernel, group=call.H // call.K),
        heads=call.K,
        products=4,
        inputs=("listed", "count", "ids", "ids", "queries", "key", "key", "queries", "statistics", "statistics"),
        outputs=(("key", call.padded(k)), ("key", call.padded(v))),
    )(*_listed(jnp.swapaxes(seen, 1, 2)), *given)
    return dq[:, :T], dk[:, :T], dv[:, :T], None, None


gpu_attention.defvjp(_forward, _backward)


def _listed(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each block those that it meets first, [B, n, n] int32, and how many they are, [B, n] int32."""
    return jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32), jnp.sum(seen, axis=-1, dtype=jnp.int32)


class _Call:
    """The sizes of a call, and how its arrays are cut: n blocks of t tokens, each of one head."""

    def __init__(self, q: jax.Array, k: jax.Array, interpret: bool) -> None:
        (self.B, self.T, self.H, self.Q), self.K = q.shape, k.shape[2]
        self.n, self.t = cut("gpu_kernel", self.T)
        self.interpret = interpret

    def padded(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] as [B, n t, ...]."""
        return pad_to(x, self.n * self.t)

    def ids(self, segments: jax.Array, prompts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Segments and prompts, [B, n t] each."""
        return self.padded(segments), self.padded(prompts)

    def seen(self, segments: jax.Array, prompts: jax.Array) -> jax.Array:
        """Which blocks of keys a block of queries meets, [B, n, n] bool."""
        cut_ids = (x.reshape(self.B, self.n, self.t) for x in self.ids(segments, prompts))
        return seen_blocks(*cut_ids) & jnp.tri(self.n, dtype=bool)[None]

    def run(
        self,
        kernel: Any,
        *,
        heads: int,
        products: int,
        inputs: tuple[str, ...],
        outputs: tuple[tuple[str, jax.Array | jax.ShapeDtypeStruct], ...],
    ) -> Any:
        """The kernel over a grid of blocks, rows and heads, which makes so many products of queries with keys."""
        blocks = _blocks(self)
        flops = 2 * products * self.B * self.H * attended_pairs("gpu_kernel", self.T) * self.Q
        return pl.pallas_call(
            functools.partial(kernel, t=self.t),
            grid=(self.n, self.B, heads),
            in_specs=[blocks[name] for name in inputs],
            out_specs=[blocks[name] for name, _ in outputs],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
            compiler_params=plgpu.CompilerParams(num_warps=WARPS * max(1, self.Q // 64), num_stages=STAGES),
            interpret=self.interpret,
            metadata={"flops": str(flops)},  # for the planner: Triton drops a cost estimate
        )


def _blocks(call: _Call) -> dict[str, pl.BlockSpec]:
    """What of each array a program of the grid has."""
    H, K, Q, t, n = call.H, call.K, call.Q, call.t, call.n
    group = H // K
    return {
        "listed": pl.BlockSpec((None, None, n), lambda i, b, h: (b, i, 0)),
        "count": pl.BlockSpec((None, 1), lambda i, b, h: (b, i)),
        "ids": pl.BlockSpec((None, n * t), lambda i, b, h: (b, 0)),
        "query": pl.BlockSpec((None, t, None, Q), lambda i, b, h: (b, i, h, 0)),
        "keys": pl.BlockSpec((None, n * t, None, Q), lambda i, b, h: (b, 0, h // group, 0)),
        "key": pl.BlockSpec((None, t, None, Q), lambda i, b, h: (b, i, h, 0)),
        "queries": pl.BlockSpec((None, n * t, group, Q), lambda i, b, h: (b, 0, h, 0)),
        "statistic": pl.BlockSpec((None, None, t), lambda i, b, h: (b, h, i)),
        "statistics": pl.BlockSpec((None, group, n * t), lambda i, b, h: (b, h, 0)),
    }


def _scores(segments: Any, prompts: Any, q: jax.Array, k: jax.Array, i: Any, j: Any) -> jax.Array:
    """[t, t] float32, queries by keys; what is not seen is MASKED."""
    t = q.shape[0]
    of_queries, of_keys = pl.ds(i * t, t), pl.ds(j * t, t)
    own, prompt, keys = segments[of_queries][:, None], prompts[of_queries][:, None], segments[of_keys][None, :]
    places = jnp.arange(t)
    earlier = j * t + places[None, :] <= i * t + places[:, None]
    seen = earlier & (keys > 0) & ((keys == own) | (keys == prompt))
    return jnp.where(seen, _dot(q, k.T) * q.shape[-1] ** -0.5, MASKED)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """The product of two matrices, float32; of float32 operands in full, not in TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def _forward_kernel(*refs: Any, t: int) -> None:
    listed, count, segments, prompts, q, k, v, out, log_total = refs
    i, queries = pl.program_id(0), q[...]

    def add(step: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, values = sums
        j = listed[step]
        keys = pl.ds(j * t, t)
        scores = _scores(segments, prompts, queries, k[keys, :], i, j)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        shares, kept = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        values = kept[:, None] * values + _dot(shares.astype(v.dtype), v[keys, :])
        return higher, kept * total + jnp.sum(shares, axis=1), values

    first = (jnp.full(t, MASKED / 2), jnp.zeros(t), jnp.zeros(queries.shape, jnp.float32))
    top, total, values = jax.lax.fori_loop(0, count[0], add, first)
    divisor = jnp.where(total > 0, total, 1.0)
    out[...] = (values / divisor[:, None]).astype(out.dtype)
    log_total[...] = top + jnp.log(divisor)


def _d_scores(scores: jax.Array, v: jax.Array, d_out: jax.Array, log_total: Any, d_total: Any) -> tuple:
    """Shares of the softmax and gradients of the scores, [t, t] float32."""
    shares = jnp.exp(scores - log_total[:, None])
    return shares, shares * (_dot(d_out, v.T) - d_total[:, None])


def _queries_kernel(*refs: Any, t: int) -> None:
    listed, count, segments, prompts, q, k, v, d_out, log_total, d_total, dq = refs
    i, queries, d_values, log_sum, d_sum = pl.program_id(0), q[...], d_out[...], log_total[...], d_total[...]

    def add(step: Any, total: jax.Array) -> jax.Array:
        j = listed[step]
        keys = k[pl.ds(j * t, t), :]
        scores = _scores(segments, prompts, queries, keys, i, j)
        _, d_scores = _d_scores(scores, v[pl.ds(j * t, t), :], d_values, log_sum, d_sum)
        return total + _dot(d_scores.astype(keys.dtype), keys)

    total = jax.lax.fori_loop(0, count[0], add, jnp.zeros(queries.shape, jnp.float32))
    dq[...] = (total * queries.shape[-1] ** -0.5).astype(dq.dtype)


def _keys_kernel(*refs: Any, t: int, group: int) -> None:
    listed, count, segments, prompts, q, k, v, d_out, log_total, d_total, dk, dv = refs
    j, keys, values = pl.program_id(0), k[...], v[...]

    def add(step: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dk_sum, dv_sum = sums
        i, head = listed[jax.lax.div(step, group)], jax.lax.rem(step, group)  # // and % do not lower to Triton
        of = pl.ds(i * t, t)
        queries, d_values = q[of, head, :], d_out[of, head, :]
        scores = _scores(segments, prompts, queries, keys, i, j)
        shares, d_scores = _d_scores(scores, values, d_values, log_total[head, of], d_total[head, of])
        dk_sum += _dot(d_scores.T.astype(queries.dtype), queries)
        return dk_sum, dv_sum + _dot(shares.T.astype(d_values.dtype), d_values)

    nothing = jnp.zeros(keys.shape, jnp.float32)
    dk_sum, dv_sum = jax.lax.fori_loop(0, count[0] * group, add, (nothing, nothing))
    dk[...] = (dk_sum * keys.shape[-1] ** -0.5).astype(dk.dtype)
    dv[...] = dv_sum.astype(dv.dtype)
