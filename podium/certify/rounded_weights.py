"""Checks frozen weights that are stored in fewer bits, without a model: int8 and NF4, there and back."""

import jax.numpy as jnp
import numpy as np

from podium.certify.check_result import Check, largest
from podium.models.blocks.spec import ParamSpec, stacked
from podium.models.params import SCALE
from podium.models.quantised import dequantised, int8, nf4

SHAPE = (2, 128, 24)
"""Layers, inputs and outputs of a matrix."""
BLOCK = 64
ABOVE_0 = (0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0)
BELOW_0 = (-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004)
LEVELS = np.array([*BELOW_0, 0.0, *ABOVE_0])
"""The levels of NF4 (arXiv:2305.14314)."""


def rounding_check() -> Check:
    """Compare stored weights with the nearest numbers that their format has."""
    return Check(
        name="rounded weights",
        claim="int8 and NF4 store the nearest of their numbers, with a scale for each output or for 64 inputs of it",
        difference=largest((_error("int8"), _error("nf4"))),
    )


def _error(form: str) -> float:
    """The largest error of a weight that was stored and read, relative to the largest weight."""
    weights = np.random.default_rng(0).normal(0.0, 0.3, SHAPE).astype(np.float32)
    spec = stacked(ParamSpec(SHAPE[1:], ("width", "mlp"), 1.0), SHAPE[0])
    codes, scales = (int8 if form == "int8" else nf4)(jnp.asarray(weights), spec)
    layers = [{"w": own, f"w{SCALE}": scale} for own, scale in zip(codes, scales, strict=True)]
    found = np.array([dequantised(each, jnp.dtype("float32"))["w"] for each in layers], np.float64)
    wide = weights.astype(np.float64)
    if form == "int8":
        step = np.abs(wide).max(axis=1, keepdims=True) / 127
        expected = np.round(wide / step) * step
    else:
        blocks = wide.reshape(SHAPE[0], -1, BLOCK, SHAPE[2])
        most = np.abs(blocks).max(axis=2, keepdims=True)
        nearest = np.abs(blocks[..., None] / most[..., None] - LEVELS).argmin(axis=-1)
        expected = (LEVELS[nearest] * most).reshape(SHAPE)
    return float(np.abs(found - expected).max() / np.abs(wide).max())
