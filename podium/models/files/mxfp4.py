"""MXFP4, the format of gpt-oss's experts on the hub: numbers of 4 bits in blocks of 32 that share a power of two.

A tensor [..., D] is stored as two: `..._blocks` [..., D/32, 16], with two numbers in a byte, the first in its low half,
and `..._scales` [..., D/32], exponents plus 127 (Open Compute Project, Microscaling Formats v1.0). GGUF stores a block
as 17 bytes: its scale, then 16 bytes, the i-th of which holds number i in its low half and number i + 16 in its high
half. No jax.
"""

import functools

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""Numbers that share a scale."""
DTYPE = "MXFP4"
"""Podium's name for the format, which safetensors does not have."""
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


@functools.cache
def _pairs() -> np.ndarray:
    """A lookup table [256 scales x 256 bytes] of the two bfloat16 values of a byte at a scale, packed in a uint32."""
    values = np.concatenate([_POSITIVE, -_POSITIVE])
    of_byte = np.stack([values[np.arange(256) & 15], values[np.arange(256) >> 4]], axis=-1)  # [256, 2]
    with np.errstate(over="ignore"):
        scaled = np.ldexp(of_byte[None], np.arange(256)[:, None, None] - 127)
        return scaled.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers [..., D] of blocks [..., D/32, 16] and scales [..., D/32], which bfloat16 holds exactly."""
    return _both(blocks, scales).reshape(*scales.shape[:-1], -1)


def decoded_halves(blocks: np.ndarray) -> np.ndarray:
    """The numbers [..., D] of GGUF's blocks [..., D/32, 17], which bfloat16 holds exactly."""
    return _both(blocks[..., 1:], blocks[..., 0]).swapaxes(-1, -2).reshape(*blocks.shape[:-2], -1)


def _both(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The two numbers of each byte, [..., D/32, 16, 2]; those of low halves first."""
    number = scales.astype(np.uint16)[..., None] << 8 | blocks
    return _pairs().take(number).view(ml_dtypes.bfloat16).reshape(*blocks.shape, 2)
