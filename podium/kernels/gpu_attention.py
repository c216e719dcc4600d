"""GPU attention kernel over packed rows (Pallas, lowered to Triton); never stores all scores of a row.

Computes the same as `podium.models.attention.blockwise`. cuDNN's kernel ignores segments, and jax's only compares them
for equality, but a completion attends to two segments. Each program of the grid loops over the blocks that are visible
to its own block, which are listed in advance.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podium.config.attention_blocks import GPU_BLOCKS, gpu_block
from podium.kernels.tiles import tile_product
from podium.models.attention.blockwise import MASKED, Gradients, Saved, sink_gradient
from podium.models.attention.mask import Visibility, pad_to
from podium.models.attention.mask_rule import Keys, Queries, seen

WARPS = 4
STAGES = 2


class Options(NamedTuple):
    """How the kernel runs."""

    block: int = GPU_BLOCKS[0]
    """Tokens per block (`podium.config.attention_blocks.gpu_block`)."""
    interpret: bool = False
    """Whether to emulate it without a GPU, slowly."""


DEFAULTS = Options()


def options_for(q: jax.Array, device: object) -> Options:
    """How the kernel runs on a device for queries like `q`, [B, T, H, Q]."""
    return Options(gpu_block(q.shape[-1], q.dtype.itemsize, getattr(device, "shared_memory_per_block_optin", None)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def gpu_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    sinks: jax.Array | None = None,
    options: Options = DEFAULTS,
) -> jax.Array:
    """`podium.models.attention.blockwise.blockwise_attention` as a kernel."""
    return _forward(q, k, v, visibility, sinks, options=options)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, sinks: jax.Array | None, options: Options
) -> tuple[jax.Array, Saved]:
    call = _Call(q, k, visibility, options)
    like = call.padded(q)
    statistics = jax.ShapeDtypeStruct((call.B, call.H, call.n * call.t), jnp.float32)
    of_heads = () if sinks is None else (sinks.astype(jnp.float32)[:, None],)
    out, log_total = call.run(
        _forward_kernel if sinks is None else _forward_kernel_with_sink,
        heads=call.H,
        products=2,
        inputs=(*("sink" for _ in of_heads), "query", "keys", "keys"),
        outputs=(("query", like), ("statistic", statistics)),
    )(*_listed(call.meets), call.ids, *of_heads, call.padded(q), call.padded(k), call.padded(v))
    out = out[:, : call.T]
    return out, (q, k, v, visibility, sinks, out, log_total)


def _backward(options: Options, saved: Saved, d_out: jax.Array) -> Gradients:
    q, k, v, visibility, sinks, out, log_total = saved
    call = _Call(q, k, visibility, options)
    T = call.T
    d_total = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [B, T, H]
    d_total = jnp.swapaxes(call.padded(d_total), 1, 2)
    given = (call.ids, *map(call.padded, (q, k, v, d_out)), log_total, d_total)
    (dq,) = call.run(
        _queries_kernel,
        heads=call.H,
        products=3,
        inputs=("query", "keys", "keys", "query", "statistic", "statistic"),
        outputs=(("query", call.padded(q)),),
    )(*_listed(call.meets), *given)
    dk, dv = call.run(
        functools.partial(_keys_kernel, group=call.H // call.K),
        heads=call.K,
        products=4,
        inputs=("queries", "key", "key", "queries", "statistics", "statistics"),
        outputs=(("key", call.padded(k)), ("key", call.padded(v))),
    )(*_listed(jnp.swapaxes(call.meets, 1, 2)), *given)
    return dq[:, :T], dk[:, :T], dv[:, :T], None, sink_gradient(sinks, log_total, d_total)


gpu_attention.defvjp(_forward, _backward)


def _listed(meets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each block of queries, the indices of all key blocks, visible ones first, [B, n, n] int32, and the number of
    visible ones, [B, n].
    """
    return jnp.argsort(~meets, axis=-1, stable=True).astype(jnp.int32), jnp.sum(meets, axis=-1, dtype=jnp.int32)


class _Call:
    """A call's sizes, and how its arrays are cut: n blocks of t tokens per head."""

    def __init__(self, q: jax.Array, k: jax.Array, visibility: Visibility, options: Options) -> None:
        self.B, self.T, self.H, self.Q = q.shape
        self.K = k.shape[2]
        self.t, self.interpret = options
        self.n = -(-self.T // self.t)
        cut_ids = visibility.cut(self.n, self.t)
        self.ids = jax.tree.map(lambda x: x.reshape(self.B, -1), cut_ids)  # [B, n t]
        self.meets = jnp.asarray(cut_ids.block_pairs())  # [B, n, n] bool, queries by keys

    def padded(self, x: jax.Array) -> jax.Array:
        """Pad [B, T, ...] to [B, n t, ...]."""
        return pad_to(x, self.n * self.t)

    def run(
        self,
        kernel: Callable[..., None],
        *,
        heads: int,
        products: int,
        inputs: tuple[str, ...],
        outputs: tuple[tuple[str, jax.Array | jax.ShapeDtypeStruct], ...],
    ) -> Callable[..., Sequence[jax.Array]]:
        """Wrap a kernel over a grid of blocks, rows and heads.

        The kernel's first arguments are the list of blocks, its length and the ids; `inputs` names the other arguments'
        blocks. `products` is the number of products of size queries x keys that the kernel computes.
        """
        blocks = _blocks(self)
        pairs = self.t * self.t * self.n * (self.n + 1) // 2
        flops = 2 * products * self.B * self.H * pairs * self.Q
        return pl.pallas_call(
            functools.partial(kernel, t=self.t),
            grid=(self.n, self.B, heads),
            in_specs=[
                blocks["listed"],
                blocks["count"],
                jax.tree.map(lambda _: blocks["ids"], self.ids),
                *(blocks[name] for name in inputs),
            ],
            out_specs=[blocks[name] for name, _ in outputs],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
            compiler_params=plgpu.CompilerParams(num_warps=WARPS * max(1, self.Q // 64), num_stages=STAGES),
            interpret=self.interpret,
            metadata={"flops": str(flops)},  # for the planner, since Triton discards cost estimates
        )


def _blocks(call: _Call) -> dict[str, pl.BlockSpec]:
    """The block of each array that one program of the grid gets."""
    Q, t, n = call.Q, call.t, call.n
    group = call.H // call.K
    return {
        "listed": pl.BlockSpec((None, None, n), lambda i, b, h: (b, i, 0)),
        "count": pl.BlockSpec((None, 1), lambda i, b, h: (b, i)),
        "ids": pl.BlockSpec((None, n * t), lambda i, b, h: (b, 0)),
        "sink": pl.BlockSpec((None, 1), lambda i, b, h: (h, 0)),
        "query": pl.BlockSpec((None, t, None, Q), lambda i, b, h: (b, i, h, 0)),
        "keys": pl.BlockSpec((None, n * t, None, Q), lambda i, b, h: (b, 0, h // group, 0)),
        "key": pl.BlockSpec((None, t, None, Q), lambda i, b, h: (b, i, h, 0)),
        "queries": pl.BlockSpec((None, n * t, group, Q), lambda i, b, h: (b, 0, h, 0)),
        "statistic": pl.BlockSpec((None, None, t), lambda i, b, h: (b, h, i)),
        "statistics": pl.BlockSpec((None, group, n * t), lambda i, b, h: (b, h, 0)),
    }


def _scores(ids: Visibility, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Scores [t, t] float32 of block i's queries and block j's keys; MASKED where invisible. `ids` holds Refs."""
    t = q.shape[0]
    columns = jax.tree.map(lambda x: x[pl.ds(i * t, t)][:, None], ids)
    rows = jax.tree.map(lambda x: x[pl.ds(j * t, t)][None, :], ids)
    places = jnp.arange(t)
    queries = Queries(i * t + places[:, None], columns.segments, columns.prompts, columns.positions)
    visible = seen(queries, Keys(j * t + places[None, :], rows.segments, rows.positions), ids.window)
    return jnp.where(visible, tile_product(q, k.T) * q.shape[-1] ** -0.5, MASKED)


_Sums = tuple[jax.Array, jax.Array, jax.Array]  # of a softmax: maximum score [t], divisor [t], weighted values [t, Q]


def _forward_kernel(
    listed: jax.Ref,
    count: jax.Ref,
    ids: Visibility,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    out: jax.Ref,
    log_total: jax.Ref,
    *,
    t: int,
    sink: jax.Ref | None = None,
) -> None:
    i = pl.program_id(0)
    queries = q[...]

    def add(step: jax.Array, sums: _Sums) -> _Sums:
        top, total, values = sums
        j = listed[step]
        keys = pl.ds(j * t, t)
        scores = _scores(ids, queries, k[keys, :], i, j)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        shares, kept = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        values = kept[:, None] * values + tile_product(shares.astype(v.dtype), v[keys, :])
        return higher, kept * total + jnp.sum(shares, axis=1), values

    begun = (jnp.full(t, MASKED / 2), jnp.zeros(t))
    if sink is not None:  # it is the first key, and has no value
        begun = (jnp.full(t, sink[0]), jnp.ones(t))
    top, total, values = jax.lax.fori_loop(0, count[0], add, (*begun, jnp.zeros(queries.shape, jnp.float32)))
    divisor = jnp.where(total > 0, total, 1.0)
    out[...] = (values / divisor[:, None]).astype(out.dtype)
    log_total[...] = top + jnp.log(divisor)


def _forward_kernel_with_sink(
    listed: jax.Ref, count: jax.Ref, ids: Visibility, sink: jax.Ref, *others: jax.Ref, t: int
) -> None:
    _forward_kernel(listed, count, ids, *others, t=t, sink=sink)


def _d_scores(
    scores: jax.Array, v: jax.Array, d_out: jax.Array, log_total: jax.Array, d_total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The softmax and the gradient of the scores, [t, t] float32 each."""
    shares = jnp.exp(scores - log_total[:, None])
    return shares, shares * (tile_product(d_out, v.T) - d_total[:, None])


def _queries_kernel(
    listed: jax.Ref,
    count: jax.Ref,
    ids: Visibility,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    d_out: jax.Ref,
    log_total: jax.Ref,
    d_total: jax.Ref,
    dq: jax.Ref,
    *,
    t: int,
) -> None:
    i = pl.program_id(0)
    queries = q[...]
    d_values = d_out[...]
    log_sum = log_total[...]
    d_sum = d_total[...]

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        j = listed[step]
        keys = k[pl.ds(j * t, t), :]
        scores = _scores(ids, queries, keys, i, j)
        _, d_scores = _d_scores(scores, v[pl.ds(j * t, t), :], d_values, log_sum, d_sum)
        return total + tile_product(d_scores.astype(keys.dtype), keys)

    total = jax.lax.fori_loop(0, count[0], add, jnp.zeros(queries.shape, jnp.float32))
    dq[...] = (total * queries.shape[-1] ** -0.5).astype(dq.dtype)


def _keys_kernel(
    listed: jax.Ref,
    count: jax.Ref,
    ids: Visibility,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    d_out: jax.Ref,
    log_total: jax.Ref,
    d_total: jax.Ref,
    dk: jax.Ref,
    dv: jax.Ref,
    *,
    t: int,
    group: int,
) -> None:
    j = pl.program_id(0)
    keys = k[...]
    values = v[...]

    def add(step: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dk_sum, dv_sum = sums
        i, head = listed[jax.lax.div(step, group)], jax.lax.rem(step, group)  # // and % do not lower to Triton
        of = pl.ds(i * t, t)
        queries, d_values = q[of, head, :], d_out[of, head, :]
        scores = _scores(ids, queries, keys, i, j)
        shares, d_scores = _d_scores(scores, values, d_values, log_total[head, of], d_total[head, of])
        dk_sum += tile_product(d_scores.T.astype(queries.dtype), queries)
        return dk_sum, dv_sum + tile_product(shares.T.astype(d_values.dtype), d_values)

    nothing = jnp.zeros(keys.shape, jnp.float32)
    dk_sum, dv_sum = jax.lax.fori_loop(0, count[0] * group, add, (nothing, nothing))
    dk[...] = (dk_sum * keys.shape[-1] ** -0.5).astype(dk.dtype)
    dv[...] = dv_sum.astype(dv.dtype)
