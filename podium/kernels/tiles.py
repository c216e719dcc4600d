"""Types that the kernels on logits share: how logits are cut into tiles, and their statistics by token."""

from typing import NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

Interpret = bool | pltpu.InterpretParams
"""How a kernel runs without its device: as a program of jax, or as on a TPU, where reads outside arrays fail."""
LOWEST = -1e30
"""The least distinct logit: lower ones, such as -inf, count as this, so that differences are finite."""


class Tiles(NamedTuple):
    """The size of the tile that a program of a kernel's grid gets."""

    tokens: int = 512
    """Tokens of a block on TPU, a multiple of 128; small blocks make the grid's steps cost more. On GPU it is 1."""
    vocab: int = 1024
    """Part of the vocabulary, a multiple of 128 on TPU, a power of two on GPU."""


class Statistics(NamedTuple):
    """Statistics of each token's logits, or of a device's part of the vocabulary; [B, T] float32."""

    top: jax.Array  # the largest
    total: jax.Array  # sum of exp(logit - top)
    chosen: jax.Array  # the target's logit; 0 if it lies in another device's part
    weighted: jax.Array  # sum of exp(logit - top) (logit - top); 0 without entropy


class Gradients(NamedTuple):
    """The inputs of the gradient of a token's logits; [B, T] float32."""

    log_total: jax.Array  # log of the sum of exp(logits) over the whole vocabulary
    of_logprob: jax.Array  # gradient of the target's log-probability
    of_entropy: jax.Array  # gradient of the entropy
    entropy: jax.Array
