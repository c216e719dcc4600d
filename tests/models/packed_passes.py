"""A training pass over packed rows of a tiny decoder, and the same pass by certify's naive form in float64.

Each of 8 rows holds a prompt of 6 tokens and three completions of 6 tokens behind it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.certify.naive import in_float64, logits
from podium.models.architecture import DecoderConfig

ROWS, T = 8, 24
TOKENS = np.random.default_rng(1).integers(0, 64, (ROWS, T)).astype(np.int32)
SEGMENTS = np.repeat([[1, 2, 3, 4]], T // 4, axis=1).repeat(ROWS, axis=0).astype(np.int32)
PROMPTS = np.minimum(SEGMENTS, 1)
POSITIONS = np.where(SEGMENTS > 1, 6, 0) + np.tile(np.arange(6), 4)[None].astype(np.int32)
WEIGHING = np.random.default_rng(2).standard_normal((ROWS, T, 64)).astype(np.float32)
"""The loss of a pass is the mean of all logits [B, T, V] times these numbers."""


class NaivePass(NamedTuple):
    """A pass in float64."""

    loss: float
    size: float
    """Mean absolute value of the terms of which the loss is the mean; they nearly cancel."""
    gradients: dict[str, np.ndarray]


def naive_pass(decoder: DecoderConfig, weights: Mapping[str, np.ndarray]) -> NaivePass:
    """Compute a pass in float64, each completion alone behind its prompt, whose own logits count once."""
    with in_float64():
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in weights.items()}
        rows = np.array([[*range(6), *range(6 * each, 6 * each + 6)] for each in (1, 2, 3)])
        weighing = np.stack([WEIGHING[:, row] for row in rows], axis=1).astype(np.float64)  # [B, 3, 12, V]
        weighing[:, 1:, :6] = 0

        def loss(weights: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            terms = jax.vmap(jax.vmap(lambda tokens: logits(weights, tokens, decoder)))(TOKENS[:, rows]) * weighing
            return jnp.sum(terms) / WEIGHING.size, jnp.sum(jnp.abs(terms)) / WEIGHING.size

        (value, size), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(wide)
        return NaivePass(float(value), float(size), {name: np.asarray(x) for name, x in gradients.items()})
