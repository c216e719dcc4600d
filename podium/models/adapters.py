"""What LoRA does to weights outside of a forward pass: adapters merged, frozen matrices in int8, and whose they are."""

import hashlib
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from podium.models.architecture import DecoderConfig
from podium.models.blocks.spec import ParamSpec, matrix_outputs
from podium.models.blocks.weights import AnyWeight
from podium.models.linear import kept_dtype
from podium.models.params import (
    LORA_A,
    LORA_B,
    SCALE,
    frozen_dtype,
    frozen_specs,
    is_adapter,
)
from podium.sharding import Params, ShardingRules, param_shardings

INT8_MOST = 127


def merged(params: Params, scale: float) -> Params:
    """The weights of a layer with its adapters added, W + scale AB in float32; the adapters are left out.

    Raises ValueError where a matrix is int8: the sum would be rounded to its few steps, or be another model.
    """

    def whole(name: str, value: jax.Array) -> jax.Array:
        if name + LORA_A not in params:
            return value
        if value.dtype == jnp.int8:
            raise ValueError(f"{name} is kept in int8, into which adapters cannot be merged; set lora.base to bfloat16")
        a, b = (params[name + part].astype(jnp.float32) for part in (LORA_A, LORA_B))
        product = jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)
        return value.astype(jnp.float32) + scale * product

    return {name: whole(name, value) for name, value in params.items() if not is_adapter(name)}


def dequantised(w: Mapping[str, AnyWeight], dtype: jnp.dtype) -> dict[str, AnyWeight]:
    """The weights of a layer in `dtype`: int8 ones times their scales, in float32 and rounded once."""

    def whole(name: str, value: AnyWeight) -> AnyWeight:
        if name + SCALE not in w:
            return value
        scale = w[name + SCALE]
        assert isinstance(value, jax.Array) and isinstance(scale, jax.Array), "int8 weights are plain arrays"
        return (value.astype(jnp.float32) * jnp.expand_dims(scale, range(value.ndim - scale.ndim))).astype(dtype)

    return {name: whole(name, value) for name, value in w.items() if not name.endswith(SCALE)}


def quantised(value: jax.Array, spec: ParamSpec) -> tuple[jax.Array, jax.Array]:
    """A stack of matrices [L, in..., out...] as int8, and the float32 scale [L, out...] of each output.

    Symmetric: the largest number of an output's column is 127 steps from 0, and the others are rounded to the nearest.
    """
    inputs = tuple(range(spec.stacked, matrix_outputs(spec)))
    largest = jnp.max(jnp.abs(value.astype(jnp.float32)), axis=inputs, keepdims=True)
    scale = jnp.where(largest > 0, largest / INT8_MOST, 1.0)
    return jnp.round(value / scale).astype(jnp.int8), jnp.squeeze(scale, inputs)


def make_quantise(name: str, decoder: DecoderConfig, rules: ShardingRules):
    """The jitted `quantised` of a frozen weight, laid out as it is kept; it takes the float32 weight's memory."""
    specs = frozen_specs(decoder)
    shardings = param_shardings({part: specs[part] for part in (name, name + SCALE)}, rules)

    def quantise(value: jax.Array) -> Params:
        return dict(zip(shardings, quantised(value, specs[name]), strict=True))

    return jax.jit(quantise, out_shardings=shardings)


def abstract_frozen(decoder: DecoderConfig, rules: ShardingRules) -> dict[str, jax.ShapeDtypeStruct]:
    """What the frozen weights will be, without making them; none where all are trained."""
    specs = frozen_specs(decoder)
    shardings = param_shardings(specs, rules)
    dtypes = {name: kept_dtype(jnp.dtype(frozen_dtype(name, decoder)), rules) for name in specs}
    return {
        name: jax.ShapeDtypeStruct(spec.shape, dtypes[name], sharding=shardings[name]) for name, spec in specs.items()
    }


def fingerprint(params: Params) -> str:
    """A name of these very weights, the same on any mesh: a hash of names, shapes and sums over all their bits.

    Each number's bits are multiplied by an odd number that follows from its position, and added up modulo 2^32.
    """
    sums = jax.device_get(jax.jit(lambda params: {name: _sum_of_bits(x) for name, x in params.items()})(params))
    kinds = [f"{name} {params[name].dtype}{list(params[name].shape)} {int(sums[name])}" for name in sorted(params)]
    return hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:16]


def base_of(frozen: Params) -> str | None:
    """The fingerprint of frozen weights; None where there are none."""
    return fingerprint(frozen) if frozen else None


def _sum_of_bits(x: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):  # modulo 2^32, as all sums here
        stride = math.prod(x.shape[dim + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride)
    mixed = (position + 1) * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)
    return jnp.sum((bits + 1) * (mixed | 1), dtype=jnp.uint32)
