"""The functions that open a gated linear unit. No jax: `podium.models.blocks.mathematics` computes them."""

from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
"""silu, or the tanh approximation of gelu (arXiv:1606.08415)."""
