"""Attention of packed rows as a TPU kernel (Pallas): no array of all scores, forward or backward.

As `podium.models.blockwise`, with the same blocks left out. All scores are made transposed, [keys, queries]: then
statistics of a query are rows, [1, t], which broadcast for nothing and take no room in HBM, and a softmax's sum goes
along sublanes. jax's own splash kernel compares segments for equality alone; a completion sees two segments.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from podium.config.attention import attended_pairs, cut
from podium.models.blockwise import MASKED, Ranges, pad_to


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def tpu_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, prompts: jax.Array, interpret: bool = False
) -> jax.Array:
    """`podium.models.blockwise.blockwise_attention` as a kernel; `interpret` runs it without a TPU, slowly."""
    return _forward(q, k, v, segments, prompts, interpret)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, prompts: jax.Array, interpret: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    call = _Call(q, k, interpret)
    B, H, Q, t, n = call.B, call.H, call.Q, call.t, call.n
    statistics = jax.ShapeDtypeStruct((B, H, 1, n * t), jnp.float32)
    out, log_total = call.run(
        functools.partial(_forward_kernel, t=t, n=n, B=B),
        grid=(B, H, n, n),
        inputs=("query_ids", "key_ids", "query", "key", "key"),
        outputs=(("query", jax.ShapeDtypeStruct((B, H, n * t, Q), q.dtype)), ("statistics", statistics)),
        scratch=[pltpu.VMEM((1, t), jnp.float32), pltpu.VMEM((1, t), jnp.float32), pltpu.VMEM((Q, t), jnp.float32)],
        products=2,
    )(*call.ids(segments, prompts), *map(call.heads_first, (q, k, v)))
    out = call.tokens_first(out, q)
    return out, (q, k, v, segments, prompts, out, log_total)


def _backward(interpret: bool, saved: tuple[jax.Array, ...], d_out: jax.Array) -> Any:
    q, k, v, segments, prompts, out, log_total = saved
    call = _Call(q, k, interpret)
    B, H, K, Q, t, n = call.B, call.H, call.K, call.Q, call.t, call.n
    d_total = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [B, T, H]
    d_total = jnp.swapaxes(pad_to(d_total, n * t), 1, 2)[:, :, None]  # [B, H, 1, T]
    given = (*call.ids(segments, prompts), *map(call.heads_first, (q, k, v, d_out)), log_total, d_total)
    of_queries, of_keys = (jax.ShapeDtypeStruct((B, heads, n * t, Q), q.dtype) for heads in (H, K))
    inputs = ("query_ids", "key_ids", "query", "key", "key", "query", "statistics", "statistics")
    (dq,) = call.run(
        functools.partial(_queries_kernel, t=t, n=n, B=B),
        grid=(B, H, n, n),
        inputs=inputs,
        outputs=(("query", of_queries),),
        scratch=[pltpu.VMEM((t, Q), jnp.float32)],
        products=3,
    )(*given)
    dk, dv = call.run(
        functools.partial(_keys_kernel, t=t, n=n, B=B),
        grid=(B, K, n, H // K * n),
        inputs=inputs,
        outputs=(("key", of_keys), ("key", of_keys)),
        scratch=[pltpu.VMEM((t, Q), jnp.float32), pltpu.VMEM((t, Q), jnp.float32)],
        products=4,
        by_keys=True,
    )(*given)
    return call.tokens_first(dq, q), call.tokens_first(dk, k), call.tokens_first(dv, v), None, None


tpu_attention.defvjp(_forward, _backward)


class _Call:
    """The sizes of a call, and how its arrays are cut: n blocks of t tokens, each of one head."""

    def __init__(self, q: jax.Array, k: jax.Array, interpret: bool) -> None:
        (self.B, self.T, self.H, self.Q), self.K = q.shape, k.shape[2]
        self.n, self.t = cut("tpu_kernel", self.T)
        self.interpret = interpret
        self.itemsize = q.dtype.itemsize

    def heads_first(self, x: jax.Array) -> jax.Array:
        """[B, T, H, Q] as [B, H, n t, Q]."""
        return jnp.swapaxes(pad_to(x, self.n * self.t), 1, 2)

    def tokens_first(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """[B, H, n t, Q] as `like`, [B, T, H, Q]."""
        return jnp.swapaxes(x, 1, 2)[:, : self.T].astype(like.dtype)

    def ids(self, segments: jax.Array, prompts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What blocks hold, [6 B n]; ids of queries as rows, [B, 2, n t]; of keys as a column, [B, n t, 1]."""
        segments, prompts = (pad_to(x, self.n * self.t) for x in (segments, prompts))
        own, prompt = (Ranges.of(x.reshape(self.B, self.n, self.t)) for x in (segments, prompts))
        ranges = jnp.stack([*own, *own, *prompt])  # of keys, of queries: their own, their prompts
        return ranges.reshape(-1), jnp.stack([segments, prompts], axis=1), segments[:, :, None]

    def run(
        self,
        kernel: Any,
        *,
        grid: tuple[int, ...],
        inputs: tuple[str, ...],
        outputs: tuple[tuple[str, Any], ...],
        scratch: list[Any],
        products: int,
        by_keys: bool = False,
    ) -> Any:
        """The kernel over a grid of rows, heads, blocks and blocks of the other side."""
        blocks = _blocks(self, by_keys)
        pairs = self.B * self.H * attended_pairs("tpu_kernel", self.T)
        moved = (2 * self.H + 2 * self.K) * self.B * self.T * self.Q * self.itemsize
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[blocks[name] for name in inputs],
                out_specs=[blocks[name] for name, _ in outputs],
                scratch_shapes=scratch,
            ),
            out_shape=[shape for _, shape in outputs],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=2 * products * pairs * self.Q, transcendentals=pairs, bytes_accessed=moved
            ),
            interpret=self.interpret,
        )


def _blocks(call: _Call, by_keys: bool) -> dict[str, pl.BlockSpec]:
    """What of each array a step of the grid has; blocks that are left out repeat the last, and are not fetched."""
    Q, t, n, group = call.Q, call.t, call.n, call.H // call.K

    def place(head: Any, block: Any, step: Any) -> tuple[Any, Any, Any, Any]:
        """Heads of queries and keys, blocks of queries and keys."""
        if by_keys:
            return head * group + step // n, head, jnp.maximum(step % n, block), block
        return head, head // group, block, jnp.minimum(step, block)

    def spec(shape: tuple[int, ...], index: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda b, head, block, step, _: index(b, *place(head, block, step)))

    return {
        "query_ids": spec((1, 2, t), lambda b, h, k, i, j: (b, 0, i)),
        "key_ids": spec((1, t, 1), lambda b, h, k, i, j: (b, j, 0)),
        "query": spec((1, 1, t, Q), lambda b, h, k, i, j: (b, h, i, 0)),
        "key": spec((1, 1, t, Q), lambda b, h, k, i, j: (b, k, j, 0)),
        "statistics": spec((1, 1, 1, t), lambda b, h, k, i, j: (b, h, 0, i)),
    }


def _meet(ranges: Any, b: Any, i: Any, j: Any, *, B: int, n: int) -> Any:
    """Whether a block of queries may see something of a block of keys."""

    def of(which: int, block: Any) -> Any:
        return ranges[which * B * n + b * n + block]

    low, high = of(0, j), of(1, j)
    own = (low <= of(3, i)) & (of(2, i) <= high)
    prompt = (low <= of(5, i)) & (of(4, i) <= high)
    return (j <= i) & (own | prompt)


def _scores(query_ids: Any, key_ids: Any, q: Any, k: Any, i: Any, j: Any) -> jax.Array:
    """Transposed scores of two blocks, [t, t] float32, keys by queries; what is not seen is MASKED."""
    scores = _dot(k[0, 0], q[0, 0], (1, 1)) * q.shape[-1] ** -0.5
    keys, own, prompt = key_ids[0], query_ids[0, 0:1], query_ids[0, 1:2]  # [t, 1], [1, t], [1, t]
    t = scores.shape[0]
    key_places = j * t + jax.lax.broadcasted_iota(jnp.int32, (t, t), 0)
    query_places = i * t + jax.lax.broadcasted_iota(jnp.int32, (t, t), 1)
    seen = (key_places <= query_places) & (keys > 0) & ((keys == own) | (keys == prompt))
    return jnp.where(seen, scores, MASKED)


def _dot(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """The product of two matrices over one dimension each, float32; of float32 operands in full."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _forward_kernel(*refs: Any, t: int, n: int, B: int) -> None:
    ranges, query_ids, key_ids, q, k, v, out, log_total, top, total, sums = refs
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full((1, t), MASKED / 2, jnp.float32)
        total[...] = jnp.zeros((1, t), jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(_meet(ranges, b, i, j, B=B, n=n))
    def _() -> None:
        scores = _scores(query_ids, key_ids, q, k, i, j)
        higher = jnp.maximum(top[...], jnp.max(scores, axis=0, keepdims=True))
        shares, kept = jnp.exp(scores - higher), jnp.exp(top[...] - higher)
        top[...] = higher
        total[...] = kept * total[...] + jnp.sum(shares, axis=0, keepdims=True)
        sums[...] = kept * sums[...] + _dot(v[0, 0], shares.astype(v.dtype), (0, 0))  # [Q, t]

    @pl.when(j == n - 1)
    def _() -> None:
        seen = total[...] > 0
        divisor = jnp.where(seen, total[...], 1.0)
        out[0, 0] = jnp.where(seen, sums[...] / divisor, 0.0).T.astype(out.dtype)
        log_total[0, 0] = top[...] + jnp.log(divisor)


def _d_scores(scores: jax.Array, v: Any, d_out: Any, log_total: Any, d_total: Any) -> tuple[jax.Array, jax.Array]:
    """Shares of the softmax and gradients of the scores, both transposed, [t, t] float32."""
    shares = jnp.exp(scores - log_total[0, 0])
    return shares, shares * (_dot(v[0, 0], d_out[0, 0], (1, 1)) - d_total[0, 0])


def _queries_kernel(*refs: Any, t: int, n: int, B: int) -> None:
    ranges, query_ids, key_ids, q, k, v, d_out, log_total, d_total, dq, sums = refs
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(_meet(ranges, b, i, j, B=B, n=n))
    def _() -> None:
        scores = _scores(query_ids, key_ids, q, k, i, j)
        _, d_scores = _d_scores(scores, v, d_out, log_total, d_total)
        sums[...] += _dot(d_scores.astype(k.dtype), k[0, 0], (0, 0))

    @pl.when(j == n - 1)
    def _() -> None:
        dq[0, 0] = (sums[...] * q.shape[-1] ** -0.5).astype(dq.dtype)


def _keys_kernel(*refs: Any, t: int, n: int, B: int) -> None:
    ranges, query_ids, key_ids, q, k, v, d_out, log_total, d_total, dk, dv, k_sums, v_sums = refs
    b, j, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    i = step % n

    @pl.when(step == 0)
    def _() -> None:
        k_sums[...] = jnp.zeros(k_sums.shape, jnp.float32)
        v_sums[...] = jnp.zeros(v_sums.shape, jnp.float32)

    @pl.when(_meet(ranges, b, i, j, B=B, n=n))
    def _() -> None:
        scores = _scores(query_ids, key_ids, q, k, i, j)
        shares, d_scores = _d_scores(scores, v, d_out, log_total, d_total)
        k_sums[...] += _dot(d_scores.astype(q.dtype), q[0, 0], (1, 0))
        v_sums[...] += _dot(shares.astype(v.dtype), d_out[0, 0], (1, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        dk[0, 0] = (k_sums[...] * q.shape[-1] ** -0.5).astype(dk.dtype)
        dv[0, 0] = v_sums[...].astype(dv.dtype)
