"""MXFP4, the format of gpt-oss's experts on the hub: numbers of 4 bits in blocks of 32 that share a power of two.

A tensor [..., D] is stored as two: `..._blocks` [..., D/32, 16], with two numbers in a byte, the first in its low half,
and `..._scales` [..., D/32], exponents plus 127 (Open Compute Project, Microscaling Formats v1.0). GGUF stores a block
as 17 bytes: its scale, then bytes of which the i-th has the block's i-th number in its low half, and in its high half
the number 16 places on. No jax.
"""

import functools

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""Numbers that share a scale."""
DTYPE = "MXFP4"
"""Name of the format beside those of safetensors."""
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


@functools.cache
def _pairs() -> np.ndarray:
    """Both numbers of each byte with each scale, [256 scales x 256 bytes] of two bfloat16 as one uint32."""
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
