"""TPU kernels (Pallas, lowered by Mosaic) for the statistics of logits and the gradient of these statistics.

The forward pass reads logits once; the backward pass reads them once and writes their gradient once, to the same memory
if the caller allows it. The grid covers rows, blocks of tokens and tiles of the vocabulary; the last ones may be
partial. A tile is processed in strips of a few sublanes, so that intermediate values stay in registers.

XLA chooses the array layout with the least padding, while a kernel requires one layout; if they differ, XLA copies all
logits. The kernels therefore support both layouts.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from podium.kernels.tiles import LOWEST, Gradients, Interpret, Statistics, Tiles

STRIP = 2**15
"""Float32 logits per strip: half of the registers."""
SUBLANES = 8
LANES = 128
FORWARD_OPS = 8
BACKWARD_OPS = 7
ENTROPY_OPS = 4
"""Elementwise operations per logit declared to the compiler, per pass; the last term applies with entropy."""


def tpu_statistics(
    logits: jax.Array, targets: jax.Array, *, scale: float, entropy: bool, tiles: Tiles, interpret: Interpret
) -> Statistics:
    """`podium.kernels.tiles.Statistics` of logits [B, T, V] times `scale`, with targets [B, T]."""
    B, T, V = logits.shape
    grid = _Grid(logits.shape, tiles, interpret)
    count = 4 if entropy else 3
    of_tokens = jax.ShapeDtypeStruct(grid.by_token(targets).shape, jnp.float32)
    found = pl.pallas_call(
        functools.partial(_forward_kernel, V=V, scale=scale, entropy=entropy, vocab=grid.vocab),
        grid=grid.sizes,
        in_specs=[grid.tile, grid.line],
        out_specs=[grid.line] * count,
        out_shape=[of_tokens] * count,
        compiler_params=_PARAMS,
        cost_estimate=pl.CostEstimate(
            flops=(FORWARD_OPS + ENTROPY_OPS * entropy) * logits.size,
            transcendentals=logits.size,
            bytes_accessed=logits.size * logits.dtype.itemsize,
        ),
        interpret=interpret,
        name="logits_statistics",
    )(grid.ordered(logits), grid.by_token(targets))
    return Statistics(*(x.reshape(B, T) for x in found), *([] if entropy else [jnp.zeros((B, T))]))


def tpu_gradient(
    logits: jax.Array,
    targets: jax.Array,
    gradients: Gradients,
    *,
    scale: float,
    entropy: bool,
    tiles: Tiles,
    in_place: bool,
    interpret: Interpret,
) -> jax.Array:
    """The gradient of the logits, [B, T, V] in their dtype; `in_place` reuses their memory."""
    grid = _Grid(logits.shape, tiles, interpret)
    given = grid.ordered(logits)
    of_tokens = [grid.by_token(x) for x in (targets, *(gradients if entropy else gradients[:2]))]
    found = pl.pallas_call(
        functools.partial(_backward_kernel, scale=scale, entropy=entropy, vocab=grid.vocab),
        grid=grid.sizes,
        in_specs=[grid.tile] + [grid.line] * len(of_tokens),
        out_specs=grid.tile,
        out_shape=jax.ShapeDtypeStruct(given.shape, given.dtype),
        input_output_aliases={0: 0} if in_place else {},
        compiler_params=_PARAMS,
        cost_estimate=pl.CostEstimate(
            flops=(BACKWARD_OPS + ENTROPY_OPS * entropy) * logits.size,
            transcendentals=logits.size,
            bytes_accessed=2 * logits.size * logits.dtype.itemsize,
        ),
        interpret=interpret,
        name="logits_gradient",
    )(given, *of_tokens)
    return grid.ordered(found)


_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


class _Grid:
    """How logits are cut: rows, blocks of t tokens, vocabulary tiles of v."""

    def __init__(self, shape: tuple[int, ...], tiles: Tiles, interpret: Interpret) -> None:
        B, T, V = shape
        if not interpret and ((tiles.tokens % LANES and tiles.tokens < T) or (tiles.vocab % LANES and tiles.vocab < V)):
            raise ValueError(
                f"{tiles}: on TPU, expected multiples of {LANES}, or all of {T} tokens and {V} of vocabulary"
            )
        t, v = min(tiles.tokens, T), min(tiles.vocab, V)
        self.vocab = 0 if _padded(V, T) < _padded(T, V) else 1  # the tile dimension that runs along the vocabulary
        self.sizes = (B, pl.cdiv(T, t), pl.cdiv(V, v))
        if self.vocab == 0:
            self.tile = pl.BlockSpec((None, v, t), lambda b, i, j: (b, j, i))
            self.line = pl.BlockSpec((None, 1, t), lambda b, i, j: (b, 0, i))
        else:
            self.tile = pl.BlockSpec((None, t, v), lambda b, i, j: (b, i, j))
            self.line = pl.BlockSpec((None, t, 1), lambda b, i, j: (b, i, 0))

    def ordered(self, logits: jax.Array) -> jax.Array:
        """Transpose [B, T, V] to the kernels' layout, or back."""
        return jnp.swapaxes(logits, 1, 2) if self.vocab == 0 else logits

    def by_token(self, x: jax.Array) -> jax.Array:
        """Reshape [B, T] so that it runs along the tokens of a tile."""
        return jnp.expand_dims(x, 1 + self.vocab)


def _padded(sublanes: int, lanes: int) -> int:
    """Elements that a matrix occupies in memory, padding included."""
    return pl.cdiv(sublanes, SUBLANES) * SUBLANES * pl.cdiv(lanes, LANES) * LANES


def _strips(shape: tuple[int, int], body: Callable[[jax.Array | int, int], None]) -> None:
    """Call `body(start, sublanes)` for each strip of a tile."""
    size = STRIP // shape[1] // 32 * 32
    if size < 1 or shape[0] % size or shape[0] == size:
        body(0, shape[0])
        return

    def step(index: jax.Array, _: None) -> None:
        body(pl.multiple_of(index * size, size), size)

    jax.lax.fori_loop(0, shape[0] // size, step, None)


class _Strip:
    """A strip of tile j: its logits in float32, their vocabulary indices, and the slices of rows and tokens."""

    def __init__(
        self, logits: jax.Ref, j: jax.Array, start: jax.Array | int, size: int, *, vocab: int, scale: float
    ) -> None:
        self.rows = pl.ds(start, size)
        self.tokens = self.rows if vocab == 1 else slice(None)
        x = logits[self.rows, :].astype(jnp.float32)
        self.logits = jnp.maximum(x * scale if scale != 1 else x, LOWEST)
        first = j * logits.shape[vocab] + (start if vocab == 0 else 0)
        self.places = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, vocab)


def _forward_kernel(
    logits: jax.Ref, targets: jax.Ref, *sums: jax.Ref, V: int, scale: float, entropy: bool, vocab: int
) -> None:
    top, total, chosen = sums[:3]
    j, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, LOWEST, jnp.float32)
        for each in sums[1:]:
            each[...] = jnp.zeros(each.shape, jnp.float32)

    def add(start: jax.Array | int, size: int, *, whole: bool) -> None:
        strip = _Strip(logits, j, start, size, vocab=vocab, scale=scale)
        x = strip.logits if whole else jnp.where(strip.places < V, strip.logits, LOWEST)
        at = strip.tokens
        along = functools.partial(jnp.sum, axis=vocab, keepdims=True)
        before = top[at, :]
        higher = jnp.maximum(before, jnp.max(x, axis=vocab, keepdims=True))
        kept, shares = jnp.exp(before - higher), jnp.exp(x - higher)
        if entropy:
            weighted = sums[3]
            moved = weighted[at, :] + (before - higher) * total[at, :]
            weighted[at, :] = kept * moved + along(shares * (x - higher))
        top[at, :] = higher
        total[at, :] = kept * total[at, :] + along(shares)
        chosen[at, :] += along(jnp.where(strip.places == targets[at, :], x, 0.0))

    if V % logits.shape[vocab] == 0:
        _strips(logits.shape, functools.partial(add, whole=True))
        return
    pl.when(j < last)(lambda: _strips(logits.shape, functools.partial(add, whole=True)))
    pl.when(j == last)(lambda: _strips(logits.shape, functools.partial(add, whole=False)))


def _backward_kernel(
    logits: jax.Ref,
    targets: jax.Ref,
    log_total: jax.Ref,
    of_logprob: jax.Ref,
    *rest: jax.Ref,
    scale: float,
    entropy: bool,
    vocab: int,
) -> None:
    *of_entropies, out = rest
    j = pl.program_id(2)

    def write(start: jax.Array | int, size: int) -> None:
        strip = _Strip(logits, j, start, size, vocab=vocab, scale=scale)
        at = strip.tokens
        table = strip.logits - log_total[at, :]
        gradient = of_logprob[at, :] * scale
        slope = gradient
        if entropy:
            of_entropy, entropies = of_entropies
            slope = gradient + of_entropy[at, :] * scale * (table + entropies[at, :])
        one = jnp.where(strip.places == targets[at, :], gradient, 0.0)
        out[strip.rows, :] = (one - jnp.exp(table) * slope).astype(out.dtype)

    _strips(logits.shape, write)
