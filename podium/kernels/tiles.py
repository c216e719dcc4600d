"""What the kernels on logits have in common: how logits are cut into tiles, and what is known of them by token."""

from typing import NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

Interpret = bool | pltpu.InterpretParams
"""How a kernel runs without its device: as a program of jax, or as on a TPU, where reads outside of arrays fail."""
LOWEST = -1e30
"""The least logit that is told from others: what lies below, -inf say, counts as this. Differences are numbers."""


class Tiles(NamedTuple):
    """How many numbers a program of a kernel's grid is given at once."""

    tokens: int = 512
    """Tokens of a block on TPU, a multiple of 128; a program of a GPU has one. Few: the grid's steps cost more."""
    vocab: int = 1024
    """Part of the vocabulary, a multiple of 128 on TPU, a power of two on GPU."""


class Statistics(NamedTuple):
    """Of each token's logits, or of the part of the vocabulary that a device has; [B, T] float32."""

    top: jax.Array  # the largest
    total: jax.Array  # sum of exp(logit - top)
    chosen: jax.Array  # the target's; 0 where it lies outside
    weighted: jax.Array  # sum of exp(logit - top) (logit - top), where an entropy is wanted


class Gradients(NamedTuple):
    """What the gradient of a token's logits is made of; [B, T] float32."""

    log_total: jax.Array  # log of the sum of exp(logits) over the whole vocabulary
    of_logprob: jax.Array  # gradient of the target's log-probability
    of_entropy: jax.Array  # gradient of the entropy
    entropy: jax.Array
