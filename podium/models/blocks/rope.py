"""Rotary position embeddings (arXiv:2104.09864), as specified by a config. No jax."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies (arXiv:2407.21783; config.json `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: base, elements per head, and scaling of the frequencies."""

    theta: float
    dims: int
    scaling: RopeScaling | None = None

    def frequencies(self) -> np.ndarray:
        """Radians per position for each pair of a head, [Q/2] float32."""
        half = self.dims // 2
        frequencies = 1.0 / self.theta ** (np.arange(half, dtype=np.float64) / half)
        if (scaling := self.scaling) is not None:
            wavelengths = 2 * np.pi / frequencies
            turns = scaling.original_max_positions / wavelengths  # rotations within the original context
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            kept = np.clip(kept, 0.0, 1.0)  # 1: fast pairs are kept, 0: slow pairs are divided by the factor
            frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        return frequencies.astype(np.float32)
