"""The kernels of `podium.kernels.tpu_logits` for a GPU (Pallas, lowered to Triton), with one program per token."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podium.kernels.tiles import LOWEST, Gradients, Interpret, Statistics, Tiles

WARPS = 8


def gpu_statistics(
    logits: jax.Array, targets: jax.Array, *, scale: float, entropy: bool, tiles: Tiles, interpret: Interpret
) -> Statistics:
    """`podium.kernels.tiles.Statistics` of logits [B, T, V] times `scale`, with targets [B, T]."""
    B, T, V = logits.shape
    whole, one = _blocks(V)
    found = pl.pallas_call(
        functools.partial(_forward_kernel, V=V, v=tiles.vocab, scale=scale, entropy=entropy),
        grid=(B, T),
        in_specs=[whole, one],
        out_specs=[one] * 4,
        out_shape=[jax.ShapeDtypeStruct((B, T), jnp.float32)] * 4,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="logits_statistics",
    )(logits, targets)
    return Statistics(*found)


def gpu_gradient(
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
    B, T, V = logits.shape
    whole, one = _blocks(V)
    return pl.pallas_call(
        functools.partial(_backward_kernel, V=V, v=tiles.vocab, scale=scale, entropy=entropy),
        grid=(B, T),
        in_specs=[whole, one, jax.tree.map(lambda _: one, gradients)],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        input_output_aliases={0: 0} if in_place else {},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="logits_gradient",
    )(logits, targets, gradients)


def _blocks(V: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """The block of the logits for one program, and the block of per-token arrays."""
    return pl.BlockSpec((None, None, V), lambda b, t: (b, t, 0)), pl.BlockSpec((None, None), lambda b, t: (b, t))


def _part(
    logits: jax.Ref, index: jax.Array, V: int, v: int, scale: float
) -> tuple[jax.Array, jax.Array, slice | pl.Slice]:
    """Part `index` of the vocabulary: its logits [v] float32, their vocabulary indices, and its slice."""
    where = pl.ds(index * v, v)
    columns = index * v + jnp.arange(v)
    x = plgpu.load(logits.at[where], mask=columns < V, other=LOWEST).astype(jnp.float32)
    return jnp.where(columns < V, jnp.maximum(x * scale, LOWEST), LOWEST), columns, where


def _forward_kernel(
    logits: jax.Ref, target: jax.Ref, *sums: jax.Ref, V: int, v: int, scale: float, entropy: bool
) -> None:
    wanted = target[...]

    def add(index: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, chosen, weighted = found
        x, columns, _ = _part(logits, index, V, v, scale)
        higher = jnp.maximum(top, jnp.max(x))
        kept, shares = jnp.exp(top - higher), jnp.exp(x - higher)
        if entropy:
            weighted = kept * (weighted + (top - higher) * total) + jnp.sum(shares * (x - higher))
        total = kept * total + jnp.sum(shares)
        return higher, total, chosen + jnp.sum(jnp.where(columns == wanted, x, 0.0)), weighted

    nothing = jnp.float32(0.0)
    found = jax.lax.fori_loop(0, pl.cdiv(V, v), add, (jnp.float32(LOWEST), nothing, nothing, nothing))
    for each, value in zip(sums, found, strict=True):
        each[...] = value


def _backward_kernel(
    logits: jax.Ref,
    target: jax.Ref,
    gradients: Gradients,
    out: jax.Ref,
    *,
    V: int,
    v: int,
    scale: float,
    entropy: bool,
) -> None:
    wanted = target[...]
    log_sum = gradients.log_total[...]
    gradient = gradients.of_logprob[...]

    def write(index: jax.Array, _: None) -> None:
        x, columns, where = _part(logits, index, V, v, scale)
        table = x - log_sum
        slope = gradient + gradients.of_entropy[...] * (table + gradients.entropy[...]) if entropy else gradient
        found = (jnp.where(columns == wanted, gradient, 0.0) - jnp.exp(table) * slope) * scale
        plgpu.store(out.at[where], found.astype(out.dtype), mask=columns < V)

    jax.lax.fori_loop(0, pl.cdiv(V, v), write, None)
