"""Frozen matrices stored in fewer bits than bfloat16: int8 with a scale per output, and NF4 with a scale per block.

NF4 (QLoRA, arXiv:2305.14314) stores a number as one of 16 levels, quantiles of a normal distribution, times the largest
absolute value of the 64 neighbours along a matrix's inputs. Codes and scales equal bitsandbytes' with blocks of 64,
without its second quantisation of the scales. A byte holds the codes of two rows of a block, 32 rows apart, because
half a block fills whole registers of a vector unit, while alternate rows would not.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from podium.config.lora import NF4_BLOCK
from podium.models.architecture import DecoderConfig
from podium.models.blocks.spec import ParamSpec, matrix_outputs
from podium.models.blocks.weights import AnyWeight
from podium.models.params import SCALE, frozen_dtype, frozen_specs, param_specs
from podium.sharding import Params, ShardingRules, param_shardings

INT8_MOST = 127
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The levels of NF4, from arXiv:2305.14314, appendix E."""


def int8(value: jax.Array, spec: ParamSpec) -> tuple[jax.Array, jax.Array]:
    """Quantise a stack of matrices [L, in..., out...] to int8, with a float32 scale [L, out...] per output.

    Symmetric: the largest absolute value of an output's column maps to 127, others to the nearest step.
    """
    inputs = tuple(range(spec.stacked, matrix_outputs(spec)))
    largest = jnp.max(jnp.abs(value.astype(jnp.float32)), axis=inputs, keepdims=True)
    scale = step_of(largest)
    return jnp.round(value / scale).astype(jnp.int8), jnp.squeeze(scale, inputs)


def step_of(largest: jax.Array) -> jax.Array:
    """The scale by which the largest absolute value of some numbers is code 127; 1 where all are 0.

    If the numbers contain NaN or infinity, so does the scale, so that products are NaN.
    """
    return jnp.where(largest == 0, 1.0, largest / INT8_MOST)


def nf4(value: jax.Array, spec: ParamSpec) -> tuple[jax.Array, jax.Array]:
    """Quantise a stack of matrices [L, in..., d, out...] to NF4.

    Args:
        value: float32; d, the last input dimension, is a multiple of 64.
        spec: the matrices' spec before quantisation.

    Returns:
        Codes, uint8 [L, in..., d / 2, out...]: in each block of 32 rows, row i holds the code of the block's row i in
        its upper 4 bits and that of row 32 + i in its lower ones; and scales, float32 [L, in..., d / 64, out...].
    """
    dim = matrix_outputs(spec) - 1
    blocks = _split(value.astype(jnp.float32), dim, NF4_BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=dim + 1, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1.0)
    middles = jnp.asarray([(low + high) / 2 for low, high in itertools.pairwise(NF4_LEVELS)])
    upper, lower = jnp.split(jnp.searchsorted(middles, blocks / scale).astype(jnp.uint8), 2, axis=dim + 1)
    return _joined((upper << 4) | lower, dim), jnp.squeeze(scale, dim + 1)


def dequantised(w: Mapping[str, AnyWeight], dtype: jnp.dtype) -> dict[str, AnyWeight]:
    """A layer's weights in `dtype`; codes are multiplied by their scales in float32 and rounded once."""

    def whole(name: str, value: AnyWeight) -> AnyWeight:
        if name + SCALE not in w:
            return value
        scale = w[name + SCALE]
        assert isinstance(value, jax.Array) and isinstance(scale, jax.Array), "quantised weights are plain arrays"
        if value.dtype == jnp.uint8:
            return _of_nf4(value, scale).astype(dtype)
        return (value.astype(jnp.float32) * jnp.expand_dims(scale, range(value.ndim - scale.ndim))).astype(dtype)

    return {name: whole(name, value) for name, value in w.items() if not name.endswith(SCALE)}


def make_quantise(name: str, decoder: DecoderConfig, rules: ShardingRules):
    """The jitted quantisation of a frozen weight, float32 in its own shape, to its stored format and layout."""
    own = param_specs(dataclasses.replace(decoder, lora=None))[name]
    specs = frozen_specs(decoder)
    shardings = param_shardings({part: specs[part] for part in (name, name + SCALE)}, rules)
    form = int8 if frozen_dtype(name, decoder) == "int8" else nf4

    def quantise(value: jax.Array) -> Params:
        return dict(zip(shardings, form(value, own), strict=True))

    return jax.jit(quantise, out_shardings=shardings)


def _of_nf4(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """The float32 values of the codes and scales that `nf4` returns."""
    (dim,) = (dim for dim, (size, blocks) in enumerate(zip(codes.shape, scale.shape, strict=True)) if size != blocks)
    # If the levels were constants, XLA for GPUs would make an array of a layer's size of each, before the loop over
    # layers.
    codes, levels = jax.lax.optimization_barrier((codes, jnp.asarray(NF4_LEVELS, jnp.float32)))
    packed = _split(codes, dim, NF4_BLOCK // 2)
    whole = jnp.concatenate([packed >> 4, packed & 15], axis=dim + 1)
    return _joined(_chosen(whole, levels) * jnp.expand_dims(scale, dim + 1), dim)


def _chosen(codes: jax.Array, levels: jax.Array) -> jax.Array:
    """The level [16] of each code, chosen bit by bit: vector units have no fast lookup in a table."""
    chosen = list(levels)
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        chosen = [jnp.where(is_set, high, low) for low, high in zip(chosen[::2], chosen[1::2], strict=True)]
    (found,) = chosen
    return found


def _split(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Split dimension `dim` into blocks: [..., n * size, ...] -> [..., n, size, ...]."""
    return x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])


def _joined(x: jax.Array, dim: int) -> jax.Array:
    """Join dimensions `dim` and `dim + 1`; undoes `_split`."""
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
