"""Rotary position embeddings (arXiv:2104.09864), as specified by a config. No jax."""

import dataclasses
import math
from typing import TypeAlias

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies (arXiv:2407.21783; config.json `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def stretch(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale frequencies [Q/2]: high ones are kept, low ones divided by `factor`, those between interpolated.

        High means more than `high_freq_factor` rotations within the original context, low fewer than `low_freq_factor`.
        """
        turns = self.original_max_positions / (2 * np.pi / frequencies)  # rotations within the original context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All rotary frequencies divided by a factor (config.json `rope_type: linear`); in Gemma 3 from 4B on."""

    factor: float

    def stretch(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide all frequencies [Q/2] by `factor`."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's scaling of rotary frequencies (arXiv:2309.00071; config.json `rope_type: yarn`), used by Ministral 3."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    length: float = 1.0
    """Factor of cosines and sines."""
    truncate: bool = True
    """Whether the bounds of the interpolated range of pairs are rounded outwards to integers."""

    def stretch(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale frequencies [Q/2]: high ones are kept, low ones divided by `factor`, those between interpolated.

        High means at least `beta_fast` rotations within the original context, low at most `beta_slow`. Between them,
        the weight of the unscaled frequency falls linearly with the pair's index, from 1 to 0.
        """
        half, slowest = len(frequencies), math.log(frequencies[0] / frequencies[-1])

        def pair_of(rotations: float) -> float:
            turns = math.log(self.original_max_positions / (rotations * 2 * math.pi))
            return turns * (half - 1) / slowest

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first = max(first, 0)
        last = max(min(last, 2 * half - 1), first + 0.001)
        kept = 1 - np.clip((np.arange(half) - first) / (last - first), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


Scaling: TypeAlias = RopeScaling | LinearScaling | YarnScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: base, rotated elements of a head (its first ones), and scaling of the frequencies."""

    theta: float
    dims: int
    scaling: Scaling | None = None

    @property
    def length(self) -> float:
        """Factor of cosines and sines."""
        return self.scaling.length if isinstance(self.scaling, YarnScaling) else 1.0

    def frequencies(self) -> np.ndarray:
        """Radians per position for each rotated pair of a head, [dims/2] float32."""
        half = self.dims // 2
        frequencies = 1.0 / self.theta ** (np.arange(half, dtype=np.float64) / half)
        if self.scaling is not None:
            frequencies = self.scaling.stretch(frequencies)
        return frequencies.astype(np.float32)
