"""TPU attention kernel over packed rows (Pallas); never stores all scores of a row.

Computes the same as `podium.models.attention.blockwise` and skips the same blocks. Scores are transposed, [keys,
queries]: per-query statistics are then rows [1, t], which broadcast for free and take little HBM, and a softmax sums
along sublanes. jax's splash kernel only compares segments for equality, but a completion attends to two segments.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from podium.config.attention_blocks import attended_pairs, cut
from podium.models.attention.blockwise import MASKED, Gradients, Saved, sink_gradient
from podium.models.attention.mask import Visibility, pad_to
from podium.models.attention.mask_rule import Block, Bounds, Keys, Queries, meets, seen


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def tpu_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`podium.models.attention.blockwise.blockwise_attention` as a kernel; `interpret` emulates it without a TPU,
    slowly.
    """
    return _forward(q, k, v, visibility, sinks, interpret=interpret)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, sinks: jax.Array | None, interpret: bool
) -> tuple[jax.Array, Saved]:
    call = _Call(q, k, visibility.window, interpret)
    B, H, Q, t, n = call.B, call.H, call.Q, call.t, call.n
    statistics = jax.ShapeDtypeStruct((B, H, 1, n * t), jnp.float32)
    bounds, *ids = call.ids(visibility)
    scalars = (bounds,) if sinks is None else (bounds, sinks.astype(jnp.float32))
    out, log_total = call.run(
        _forward_kernel if sinks is None else _forward_kernel_with_sinks,
        grid=(B, H, n, n),
        inputs=("query_ids", "key_ids", "query", "key", "key"),
        outputs=(("query", jax.ShapeDtypeStruct((B, H, n * t, Q), q.dtype)), ("statistics", statistics)),
        scratch=[pltpu.VMEM((1, t), jnp.float32), pltpu.VMEM((1, t), jnp.float32), pltpu.VMEM((Q, t), jnp.float32)],
        products=2,
        scalars=len(scalars),
    )(*scalars, *ids, *map(call.heads_first, (q, k, v)))
    out = call.tokens_first(out, q)
    return out, (q, k, v, visibility, sinks, out, log_total)


def _backward(interpret: bool, saved: Saved, d_out: jax.Array) -> Gradients:
    q, k, v, visibility, sinks, out, log_total = saved
    call = _Call(q, k, visibility.window, interpret)
    B, H, K, Q, t, n = call.B, call.H, call.K, call.Q, call.t, call.n
    d_total = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [B, T, H]
    d_total = jnp.swapaxes(pad_to(d_total, n * t), 1, 2)[:, :, None]  # [B, H, 1, T]
    given = (*call.ids(visibility), *map(call.heads_first, (q, k, v, d_out)), log_total, d_total)
    of_queries = jax.ShapeDtypeStruct((B, H, n * t, Q), q.dtype)
    of_keys = jax.ShapeDtypeStruct((B, K, n * t, Q), q.dtype)
    inputs = ("query_ids", "key_ids", "query", "key", "key", "query", "statistics", "statistics")
    (dq,) = call.run(
        _queries_kernel,
        grid=(B, H, n, n),
        inputs=inputs,
        outputs=(("query", of_queries),),
        scratch=[pltpu.VMEM((t, Q), jnp.float32)],
        products=3,
    )(*given)
    dk, dv = call.run(
        _keys_kernel,
        grid=(B, K, n, H // K * n),
        inputs=inputs,
        outputs=(("key", of_keys), ("key", of_keys)),
        scratch=[pltpu.VMEM((t, Q), jnp.float32), pltpu.VMEM((t, Q), jnp.float32)],
        products=4,
        by_keys=True,
    )(*given)
    d_sinks = sink_gradient(sinks, log_total[:, :, 0], d_total[:, :, 0])
    return call.tokens_first(dq, q), call.tokens_first(dk, k), call.tokens_first(dv, v), None, d_sinks


tpu_attention.defvjp(_forward, _backward)


class _Sizes(NamedTuple):
    """Static sizes of a kernel."""

    B: int  # rows
    n: int  # blocks per row
    t: int  # tokens per block
    window: int | None  # visible positions per query


class _Call:
    """A call's sizes, and how its arrays are cut: n blocks of t tokens per head."""

    def __init__(self, q: jax.Array, k: jax.Array, window: int | None, interpret: bool) -> None:
        self.B, self.T, self.H, self.Q = q.shape
        self.K = k.shape[2]
        self.n, self.t = cut("tpu_kernel", self.T)
        self.sizes = _Sizes(self.B, self.n, self.t, window)
        self.interpret = interpret
        self.itemsize = q.dtype.itemsize

    def heads_first(self, x: jax.Array) -> jax.Array:
        """Transpose [B, T, H, Q] to [B, H, n t, Q], padded."""
        return jnp.swapaxes(pad_to(x, self.n * self.t), 1, 2)

    def tokens_first(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Transpose [B, H, n t, Q] to the shape of `like`, [B, T, H, Q]."""
        return jnp.swapaxes(x, 1, 2)[:, : self.T].astype(like.dtype)

    def ids(self, visibility: Visibility) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Bounds of the blocks; query ids as rows, [B, 2 or 3, n t]; key ids as columns, [B, n t, 1 or 2].

        The last row and column are the positions, included only if there is a window.
        """
        if visibility.window is None:
            visibility = dataclasses.replace(visibility, positions=None)  # other layers of the decoder may need them
        cut_ids = visibility.cut(self.n, self.t)
        blocks = cut_ids.blocks()
        bounds = [*blocks.segments, *blocks.prompts, *(blocks.positions or ())]
        segments, prompts, *positions = (x.reshape(self.B, -1) for x in jax.tree.leaves(cut_ids))
        queries = jnp.stack([segments, prompts, *positions], axis=1)
        keys = jnp.stack([segments, *positions], axis=2)
        return jnp.stack(bounds).reshape(-1), queries, keys

    def run(
        self,
        kernel: Callable[..., None],
        *,
        grid: tuple[int, ...],
        inputs: tuple[str, ...],
        outputs: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
        scratch: list[pl.MemoryRef],
        products: int,
        by_keys: bool = False,
        scalars: int = 1,
    ) -> Callable[..., Sequence[jax.Array]]:
        """Wrap a kernel over a grid of rows, heads, own blocks and blocks of the other side.

        The kernel's first argument is the blocks' bounds, and a second of `scalars` the sinks; `inputs` names the
        blocks of the others. `products` is the number of products of the size queries x keys that it computes.
        """
        blocks = _blocks(self, by_keys)
        pairs = self.B * self.H * attended_pairs("tpu_kernel", self.T)
        moved = (2 * self.H + 2 * self.K) * self.B * self.T * self.Q * self.itemsize
        return pl.pallas_call(
            functools.partial(kernel, sizes=self.sizes),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=scalars,
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
    """The block of each array that a grid step gets; skipped steps repeat the previous block, so nothing is fetched."""
    Q, t, n = call.Q, call.t, call.n
    group = call.H // call.K
    key_ids = 1 if call.sizes.window is None else 2

    def place(head: jax.Array, block: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Map a grid position to the indices of query head, key head, query block and key block."""
        if by_keys:
            return head * group + step // n, head, jnp.maximum(step % n, block), block
        return head, head // group, block, jnp.minimum(step, block)

    def spec(shape: tuple[int, ...], index: Callable[..., tuple[jax.Array | int, ...]]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda b, head, block, step, *_: index(b, *place(head, block, step)))

    return {
        "query_ids": spec((1, key_ids + 1, t), lambda b, h, k, i, j: (b, 0, i)),
        "key_ids": spec((1, t, key_ids), lambda b, h, k, i, j: (b, j, 0)),
        "query": spec((1, 1, t, Q), lambda b, h, k, i, j: (b, h, i, 0)),
        "key": spec((1, 1, t, Q), lambda b, h, k, i, j: (b, k, j, 0)),
        "statistics": spec((1, 1, 1, t), lambda b, h, k, i, j: (b, h, 0, i)),
    }


def _meet(bounds: jax.Ref, b: jax.Array, i: jax.Array, j: jax.Array, sizes: _Sizes) -> jax.Array:
    """Whether any query of one block may attend to any key of another."""

    def read(which: int, block: jax.Array) -> Bounds:
        least, greatest = (bounds[(2 * which + k) * sizes.B * sizes.n + b * sizes.n + block] for k in (0, 1))
        return Bounds(least, greatest)

    def block(index: jax.Array) -> Block:
        positions = None if sizes.window is None else read(2, index)
        return Block(index, read(0, index), read(1, index), positions)

    return jnp.asarray(meets(block(i), block(j), sizes.window))


def _scores(
    query_ids: jax.Ref, key_ids: jax.Ref, q: jax.Ref, k: jax.Ref, sizes: _Sizes, *, i: jax.Array, j: jax.Array
) -> jax.Array:
    """Transposed scores of block i's queries and block j's keys, [t, t] float32, keys by queries; MASKED if unseen."""
    scores = _dot(k[0, 0], q[0, 0], (1, 1)) * q.shape[-1] ** -0.5
    t = sizes.t
    windowed = sizes.window is not None
    queries = Queries(
        places=i * t + jax.lax.broadcasted_iota(jnp.int32, (t, t), 1),
        segments=query_ids[0, 0:1],  # [1, t]
        prompts=query_ids[0, 1:2],
        positions=query_ids[0, 2:3] if windowed else None,
    )
    keys = Keys(
        places=j * t + jax.lax.broadcasted_iota(jnp.int32, (t, t), 0),
        segments=key_ids[0, :, 0:1],  # [t, 1]
        positions=key_ids[0, :, 1:2] if windowed else None,
    )
    return jnp.where(seen(queries, keys, sizes.window), scores, MASKED)


def _dot(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Matrix product over one dimension of each operand, in float32; float32 operands in full precision."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _forward_kernel(
    bounds: jax.Ref,
    query_ids: jax.Ref,
    key_ids: jax.Ref,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    out: jax.Ref,
    log_total: jax.Ref,
    top: jax.Ref,
    total: jax.Ref,
    sums: jax.Ref,
    *,
    sizes: _Sizes,
    sinks: jax.Ref | None = None,
) -> None:
    b, head, i, j = (pl.program_id(axis) for axis in range(4))

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, MASKED / 2 if sinks is None else sinks[head], jnp.float32)
        total[...] = jnp.full(total.shape, 0 if sinks is None else 1, jnp.float32)  # a sink is the first key
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(_meet(bounds, b, i, j, sizes))
    def _() -> None:
        scores = _scores(query_ids, key_ids, q, k, sizes, i=i, j=j)
        higher = jnp.maximum(top[...], jnp.max(scores, axis=0, keepdims=True))
        shares, kept = jnp.exp(scores - higher), jnp.exp(top[...] - higher)
        top[...] = higher
        total[...] = kept * total[...] + jnp.sum(shares, axis=0, keepdims=True)
        sums[...] = kept * sums[...] + _dot(v[0, 0], shares.astype(v.dtype), (0, 0))  # [Q, t]

    @pl.when(j == sizes.n - 1)
    def _() -> None:
        any_seen = total[...] > 0
        divisor = jnp.where(any_seen, total[...], 1.0)
        out[0, 0] = jnp.where(any_seen, sums[...] / divisor, 0.0).T.astype(out.dtype)
        log_total[0, 0] = top[...] + jnp.log(divisor)


def _forward_kernel_with_sinks(bounds: jax.Ref, sinks: jax.Ref, *others: jax.Ref, sizes: _Sizes) -> None:
    _forward_kernel(bounds, *others, sizes=sizes, sinks=sinks)


def _d_scores(
    scores: jax.Array, v: jax.Ref, d_out: jax.Ref, log_total: jax.Ref, d_total: jax.Ref
) -> tuple[jax.Array, jax.Array]:
    """The softmax and the gradient of the scores, both transposed, [t, t] float32 each."""
    shares = jnp.exp(scores - log_total[0, 0])
    return shares, shares * (_dot(v[0, 0], d_out[0, 0], (1, 1)) - d_total[0, 0])


def _queries_kernel(
    bounds: jax.Ref,
    query_ids: jax.Ref,
    key_ids: jax.Ref,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    d_out: jax.Ref,
    log_total: jax.Ref,
    d_total: jax.Ref,
    dq: jax.Ref,
    sums: jax.Ref,
    *,
    sizes: _Sizes,
) -> None:
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(_meet(bounds, b, i, j, sizes))
    def _() -> None:
        scores = _scores(query_ids, key_ids, q, k, sizes, i=i, j=j)
        _, d_scores = _d_scores(scores, v, d_out, log_total, d_total)
        sums[...] += _dot(d_scores.astype(k.dtype), k[0, 0], (0, 0))

    @pl.when(j == sizes.n - 1)
    def _() -> None:
        dq[0, 0] = (sums[...] * q.shape[-1] ** -0.5).astype(dq.dtype)


def _keys_kernel(
    bounds: jax.Ref,
    query_ids: jax.Ref,
    key_ids: jax.Ref,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    d_out: jax.Ref,
    log_total: jax.Ref,
    d_total: jax.Ref,
    dk: jax.Ref,
    dv: jax.Ref,
    k_sums: jax.Ref,
    v_sums: jax.Ref,
    *,
    sizes: _Sizes,
) -> None:
    b, j, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    i = step % sizes.n

    @pl.when(step == 0)
    def _() -> None:
        k_sums[...] = jnp.zeros(k_sums.shape, jnp.float32)
        v_sums[...] = jnp.zeros(v_sums.shape, jnp.float32)

    @pl.when(_meet(bounds, b, i, j, sizes))
    def _() -> None:
        scores = _scores(query_ids, key_ids, q, k, sizes, i=i, j=j)
        shares, d_scores = _d_scores(scores, v, d_out, log_total, d_total)
        k_sums[...] += _dot(d_scores.astype(q.dtype), q[0, 0], (1, 0))
        v_sums[...] += _dot(shares.astype(v.dtype), d_out[0, 0], (1, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        dk[0, 0] = (k_sums[...] * q.shape[-1] ** -0.5).astype(dk.dtype)
        dv[0, 0] = v_sums[...].astype(dv.dtype)
