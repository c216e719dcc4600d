"""GPU kernel for decoding: attention of one new token per row over pages of the cache (Pallas, lowered to Triton).

XLA gathers a row's pages into an array before it multiplies, so that keys and values are read, written and read again;
this kernel reads them where they are. It also writes the new token's key and value, which XLA does in two separate
kernels. A row's pages are split over several programs (flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), whose sums are joined at the end.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podium.config.attention_blocks import CACHE_BLOCK, GPU_SMALLEST
from podium.kernels.tiles import tile_product

MASKED = -1e30  # score of an invisible key; finite, so that differences of two are numbers
PROGRAMS = 256  # programs that keep a GPU busy
MOST_SPLITS = 8
WARPS = 4
STAGES = 2


class Token(NamedTuple):
    """The new token of each row."""

    q: jax.Array  # [R, H, Q], rotated
    k: jax.Array  # [R, K, Q], rotated
    v: jax.Array  # [R, K, Q]


class Pages(NamedTuple):
    """The cache's pages, and which of them each row reads and writes."""

    keys: jax.Array  # [L, N, K, P, Q], all pages of all layers
    values: jax.Array  # [L, N, K, P, Q]
    layer: jax.Array  # [] int32
    tables: jax.Array  # [R, C] int32, pages of each row's sequence
    lengths: jax.Array  # [R] int32, tokens of each row, the new one included; 0: the row has none


@jax.named_scope("scores")
def paged_attention(
    new: Token, pages: Pages, *, window: int | None, sinks: jax.Array | None, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write each row's new token to its page, and attend from it to itself and the tokens before it.

    Args:
        new: the tokens.
        pages: where they go, and what they attend to.
        window: number of positions that the token attends to, including its own; None: all.
        sinks: [H], score of each head with a key that has no value; None: no such key.
        interpret: emulate the kernel without a GPU, slowly.

    Returns:
        The output [R, H, Q] in the dtype of `new.q`, 0 where a row has no token; keys and values, updated in place.
    """
    (R, H, Q), (L, N, K, P, _) = new.q.shape, pages.keys.shape
    G, splits = H // K, min(MOST_SPLITS, math.ceil(PROGRAMS / (R * K)))
    # One array, so that XLA makes it in one kernel. Its rows after the queries give results that are cut off.
    padded = max(GPU_SMALLEST, pl.next_power_of_2(G + 2))
    rows = jnp.concatenate([new.q.reshape(R, K, G, Q), new.k[:, :, None], new.v[:, :, None]], axis=2)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padded - G - 2), (0, 0)))
    stored = pl.BlockSpec((L, N, None, P, Q), lambda r, k, s: (0, 0, k, 0, 0))
    sums = pl.BlockSpec((None, None, None, padded), lambda r, k, s: (r, k, s, 0))
    block = R * K * CACHE_BLOCK  # tokens of a block of all rows' caches, for each head
    top, total, weighted, keys, values = pl.pallas_call(
        functools.partial(_kernel, group=G, splits=splits, window=window),
        grid=(R, K, splits),
        in_specs=[
            pl.BlockSpec((1,), lambda r, k, s: (0,)),
            pl.BlockSpec((None, pages.tables.shape[1]), lambda r, k, s: (r, 0)),
            pl.BlockSpec((1,), lambda r, k, s: (r,)),
            pl.BlockSpec((None, None, padded, Q), lambda r, k, s: (r, k, 0, 0)),
            stored,
            stored,
        ],
        out_specs=[
            sums,
            sums,
            pl.BlockSpec((None, None, None, padded, Q), lambda r, k, s: (r, k, s, 0, 0)),
            stored,
            stored,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((R, K, splits, padded), jnp.float32),
            jax.ShapeDtypeStruct((R, K, splits, padded), jnp.float32),
            jax.ShapeDtypeStruct((R, K, splits, padded, Q), jnp.float32),
            jax.ShapeDtypeStruct(pages.keys.shape, pages.keys.dtype),
            jax.ShapeDtypeStruct(pages.values.shape, pages.values.dtype),
        ],
        input_output_aliases={4: 3, 5: 4},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        # for the planner: the work on a block of the cache
        metadata={"flops": str(4 * block * G * Q), "bytes": str(2 * block * Q * pages.keys.dtype.itemsize)},
    )(pages.layer.reshape(1), pages.tables, pages.lengths, rows, pages.keys, pages.values)
    top, total, weighted = (x[:, :, :, :G] for x in (top, total, weighted))
    attended = _divided(top, total, weighted, None if sinks is None else sinks.reshape(1, K, G))
    return attended.reshape(R, H, Q).astype(new.q.dtype), keys, values


def _divided(top: jax.Array, total: jax.Array, weighted: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Join the sums of a softmax over parts of the keys, [R, K, splits, G] and [..., Q]; returns [R, K, G, Q].

    Parts are added one by one, without a reduction over an axis, so that XLA fuses everything into one kernel.
    """
    highest = functools.reduce(jnp.maximum, [top[:, :, i] for i in range(top.shape[2])])  # [R, K, G]
    highest = highest if sinks is None else jnp.maximum(highest, sinks.astype(jnp.float32))
    divisor = jnp.zeros_like(highest) if sinks is None else jnp.exp(sinks.astype(jnp.float32) - highest)
    attended = jnp.zeros_like(weighted[:, :, 0])
    for i in range(top.shape[2]):
        scale = jnp.exp(top[:, :, i] - highest)
        divisor += total[:, :, i] * scale
        attended += weighted[:, :, i] * scale[..., None]
    return attended / jnp.maximum(divisor, jnp.finfo(jnp.float32).tiny)[..., None]


_Sums = tuple[jax.Array, jax.Array, jax.Array]  # of a softmax: maximum score [G], divisor [G], weighted values [G, Q]


def _kernel(
    layer: jax.Ref,
    table: jax.Ref,
    length: jax.Ref,
    new: jax.Ref,
    keys: jax.Ref,
    values: jax.Ref,
    top: jax.Ref,
    total: jax.Ref,
    weighted: jax.Ref,
    written_keys: jax.Ref,
    written_values: jax.Ref,
    *,
    group: int,
    splits: int,
    window: int | None,
) -> None:
    """Attention of one head of a row over every `splits`-th of its pages; the first such program also adds the new
    token.

    No program reads the new token from its page, which another may be writing. In `new`, its key and its value follow
    the `group` of queries.
    """
    P, split = keys.shape[2], pl.program_id(2)
    queries, last = new[...], length[0] - 1
    oldest = 0 if window is None else jnp.maximum(length[0] - window, 0)
    has_new = (split == 0) & (last >= 0)
    first = oldest // P + split

    def add(step: jax.Array, sums: _Sums) -> _Sums:
        top, total, weighted = sums
        column = first + step * splits
        page = table[column]
        position = column * P + jnp.arange(P)
        scores = tile_product(queries, keys[layer[0], page, :, :].T) * queries.shape[-1] ** -0.5
        scores = jnp.where(((position >= oldest) & (position < last))[None], scores, MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        shares, kept = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        weighted = kept[:, None] * weighted + tile_product(shares.astype(values.dtype), values[layer[0], page, :, :])
        return higher, kept * total + jnp.sum(shares, axis=1), weighted

    k, v = new[group, :], new[group + 1, :]
    own = jnp.sum(queries.astype(jnp.float32) * k.astype(jnp.float32)[None], axis=1) * queries.shape[-1] ** -0.5
    value = jnp.broadcast_to(v.astype(jnp.float32)[None], queries.shape)
    begun = (
        jnp.where(has_new, own, MASKED),
        jnp.where(has_new, jnp.ones_like(own), 0.0),
        jnp.where(has_new, value, 0.0),
    )
    steps = jnp.maximum((last + P - 1) // P - first + splits - 1, 0) // splits
    top[...], total[...], weighted[...] = jax.lax.fori_loop(0, steps, add, begun)

    @pl.when(has_new)
    def _() -> None:
        page, offset = table[last // P], last % P
        written_keys[layer[0], page, offset, :] = k
        written_values[layer[0], page, offset, :] = v
