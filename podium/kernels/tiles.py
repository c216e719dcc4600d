"""Shared by kernels: tile sizes and statistics of kernels on logits, and the product of tiles in GPU kernels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

Interpret = bool | pltpu.InterpretParams
"""How to emulate a kernel without its device: as a jax program, or as a TPU that fails on out-of-bounds reads."""
LOWEST = -1e30
"""Lowest logit that is distinguished: lower ones, such as -inf, count as this, so that differences are finite."""


class Tiles(NamedTuple):
    """The tile size of one program of a kernel's grid."""

    tokens: int = 512
    """Tokens per block on TPU, a multiple of 128; smaller blocks add grid overhead. Ignored on GPU, which uses 1."""
    vocab: int = 1024
    """Vocabulary entries per tile: a multiple of 128 on TPU, a power of two on GPU."""


class Statistics(NamedTuple):
    """Statistics of each token's logits, over the whole vocabulary or a device's part of it; [B, T] float32."""

    top: jax.Array  # maximum logit
    total: jax.Array  # sum of exp(logit - top)
    chosen: jax.Array  # the target's logit; 0 if another device holds it
    weighted: jax.Array  # sum of exp(logit - top) (logit - top); 0 without entropy


class Gradients(NamedTuple):
    """Inputs for the gradient of a token's logits; [B, T] float32, or a kernel's Refs of their blocks."""

    log_total: jax.Array  # log of the sum of exp(logits) over the whole vocabulary
    of_logprob: jax.Array  # gradient of the target's log-probability
    of_entropy: jax.Array  # gradient of the entropy
    entropy: jax.Array


def tile_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Matrix product of a GPU kernel's tiles, in float32; float32 operands in full precision, not in TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
