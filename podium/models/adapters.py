"""LoRA's operations on stored weights: merging adapters into matrices, and fingerprints."""

import functools
import hashlib
import math

import jax
import jax.numpy as jnp

from podium.models.architecture import DecoderConfig
from podium.models.blocks.weights import AnyWeight
from podium.models.linear import kept_dtype
from podium.models.params import (
    LORA_A,
    LORA_B,
    frozen_dtype,
    frozen_specs,
    is_adapter,
)
from podium.models.quantised import dequantised
from podium.sharding import Params, ShardingRules, param_shardings


def merged(params: Params, scale: float) -> Params:
    """A layer's weights with the adapters merged into them: W + scale AB, computed in float32. The adapters are left
    out.

    Matrices stored as codes become float32 too, with or without an adapter.
    """

    def whole(name: str, value: AnyWeight) -> jax.Array:
        assert isinstance(value, jax.Array), "stored weights are plain arrays"
        if name + LORA_A not in params:
            return value
        a, b = (params[name + part].astype(jnp.float32) for part in (LORA_A, LORA_B))
        product = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
        for _ in range(a.ndim + b.ndim - value.ndim - 2):  # dimensions that index matrices, such as experts
            product = jax.vmap(product)
        product = product(a, b)
        return value.astype(jnp.float32) + scale * product

    plain = dequantised(params, jnp.dtype(jnp.float32))
    return {name: whole(name, value) for name, value in plain.items() if not is_adapter(name)}


def abstract_frozen(decoder: DecoderConfig, rules: ShardingRules) -> dict[str, jax.ShapeDtypeStruct]:
    """The frozen weights as abstract arrays; empty if all weights are trained."""
    specs = frozen_specs(decoder)
    shardings = param_shardings(specs, rules)
    dtypes = {name: kept_dtype(jnp.dtype(frozen_dtype(name, decoder)), rules) for name in specs}
    return {
        name: jax.ShapeDtypeStruct(spec.shape, dtypes[name], sharding=shardings[name]) for name, spec in specs.items()
    }


def fingerprint(params: Params) -> str:
    """Identify weights by a hash of names, shapes and checksums over all bits; the same on any mesh.

    A checksum multiplies each element's bits by an odd number derived from its position, and adds them modulo 2^32.
    Weights that `podium.models.linear.kept` stores as bits have the same fingerprint as before.
    """
    sums = jax.device_get(jax.jit(lambda params: {name: _sum_of_bits(x) for name, x in params.items()})(params))
    dtypes = {name: "bfloat16" if x.dtype == jnp.uint16 else x.dtype for name, x in params.items()}
    kinds = [f"{name} {dtypes[name]}{list(params[name].shape)} {int(sums[name])}" for name in sorted(params)]
    return hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:16]


def base_of(frozen: Params) -> str | None:
    """The fingerprint of the frozen weights; None if all weights are trained."""
    return fingerprint(frozen) if frozen else None


def _sum_of_bits(x: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):  # arithmetic modulo 2^32, as in all these sums
        stride = math.prod(x.shape[dim + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride)
    mixed = (position + 1) * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)
    return jnp.sum((bits + 1) * (mixed | 1), dtype=jnp.uint32)
