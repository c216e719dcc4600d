"""GPU kernel for decoding: attention of one new token per row over pages of the cache (Pallas, lowered to Triton).

XLA gathers a row's pages into an array before it multiplies, so that keys and values are read, written and read again;
this kernel reads them where they are. A row's pages are split over several programs (flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), whose sums are joined at the end.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podium.config.attention import CACHE_BLOCK

MASKED = -1e30  # score of an invisible key; finite, so that differences of two are numbers
SMALLEST = 16  # rows and columns of Triton's smallest product
PROGRAMS = 256  # programs that keep a GPU busy
MOST_SPLITS = 8
WARPS = 4
STAGES = 2


def fits(page_tokens: int, head_dim: int) -> bool:
    """Whether the kernel can take pages and heads of these sizes: powers of two that Triton multiplies."""
    return all(size >= SMALLEST and size & (size - 1) == 0 for size in (page_tokens, head_dim))


@jax.named_scope("scores")
def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None,
    sinks: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Attend from each row's last token to its own and the tokens before it.

    Args:
        q: [R, H, Q], rotated.
        keys: [L, N, K, P, Q], all pages of all layers.
        values: [L, N, K, P, Q].
        layer: [] int32.
        tables: [R, C] int32, pages of each row's sequence.
        lengths: [R] int32, tokens of each row, the new one included; 0: the row attends to nothing.
        window: number of positions that the token attends to, including its own; None: all.
        sinks: [H], score of each head with a key that has no value; None: no such key.
        interpret: emulate the kernel without a GPU, slowly.

    Returns:
        [R, H, Q] in the dtype of `q`; 0 where a row attends to nothing.
    """
    (R, H, Q), (L, N, K, P, _) = q.shape, keys.shape
    G, splits = H // K, min(MOST_SPLITS, math.ceil(PROGRAMS / (R * K)))
    padded = max(SMALLEST, pl.next_power_of_2(G))
    queries = jnp.pad(q.reshape(R, K, G, Q), ((0, 0), (0, 0), (0, padded - G), (0, 0)))
    pages = pl.BlockSpec((L, N, None, P, Q), lambda r, k, s: (0, 0, k, 0, 0))
    sums = pl.BlockSpec((None, None, None, padded), lambda r, k, s: (r, k, s, 0))
    block = R * K * CACHE_BLOCK  # tokens of a block of all rows' caches, for each head
    top, total, weighted = pl.pallas_call(
        functools.partial(_kernel, splits=splits, window=window),
        grid=(R, K, splits),
        in_specs=[
            pl.BlockSpec((1,), lambda r, k, s: (0,)),
            pl.BlockSpec((None, tables.shape[1]), lambda r, k, s: (r, 0)),
            pl.BlockSpec((1,), lambda r, k, s: (r,)),
            pl.BlockSpec((None, None, padded, Q), lambda r, k, s: (r, k, 0, 0)),
            pages,
            pages,
        ],
        out_specs=[sums, sums, pl.BlockSpec((None, None, None, padded, Q), lambda r, k, s: (r, k, s, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((R, K, splits, padded), jnp.float32),
            jax.ShapeDtypeStruct((R, K, splits, padded), jnp.float32),
            jax.ShapeDtypeStruct((R, K, splits, padded, Q), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        # for the planner: the work on a block of the cache
        metadata={"flops": str(4 * block * G * Q), "bytes": str(2 * block * Q * keys.dtype.itemsize)},
    )(layer.reshape(1), tables, lengths, queries, keys, values)
    top, total, weighted = top[..., :G], total[..., :G], weighted[..., :G, :]
    highest = jnp.max(top, axis=2, keepdims=True)  # [R, K, 1, G]
    own = None if sinks is None else sinks.astype(jnp.float32).reshape(1, K, 1, G)
    highest = highest if own is None else jnp.maximum(highest, own)
    scale = jnp.exp(top - highest)
    divisor = jnp.sum(total * scale, axis=2)  # [R, K, G]
    if own is not None:
        divisor += jnp.exp(own - highest)[:, :, 0]
    found = jnp.sum(weighted * scale[..., None], axis=2) / jnp.maximum(divisor, jnp.finfo(jnp.float32).tiny)[..., None]
    return found.reshape(R, H, Q).astype(q.dtype)


_Sums = tuple[jax.Array, jax.Array, jax.Array]  # of a softmax: maximum score [G], divisor [G], weighted values [G, Q]


def _kernel(
    layer: jax.Ref,
    table: jax.Ref,
    length: jax.Ref,
    q: jax.Ref,
    keys: jax.Ref,
    values: jax.Ref,
    top: jax.Ref,
    total: jax.Ref,
    weighted: jax.Ref,
    *,
    splits: int,
    window: int | None,
) -> None:
    """One row's head and every `splits`-th of its pages."""
    P, split = keys.shape[2], pl.program_id(2)
    queries, end = q[...], length[0]
    oldest = 0 if window is None else jnp.maximum(end - window, 0)
    first = oldest // P + split

    def add(step: jax.Array, sums: _Sums) -> _Sums:
        top, total, weighted = sums
        column = first + step * splits
        page = table[column]
        position = column * P + jnp.arange(P)
        scores = _dot(queries, keys[layer[0], page, :, :].T) * queries.shape[-1] ** -0.5
        scores = jnp.where(((position >= oldest) & (position < end))[None], scores, MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        shares, kept = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        weighted = kept[:, None] * weighted + _dot(shares.astype(values.dtype), values[layer[0], page, :, :])
        return higher, kept * total + jnp.sum(shares, axis=1), weighted

    begun = jnp.full(queries.shape[0], MASKED), jnp.zeros(queries.shape[0]), jnp.zeros(queries.shape, jnp.float32)
    steps = jnp.maximum((end + P - 1) // P - first + splits - 1, 0) // splits
    top[...], total[...], weighted[...] = jax.lax.fori_loop(0, steps, add, begun)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Matrix product in float32; float32 operands are multiplied in full precision, not in TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
