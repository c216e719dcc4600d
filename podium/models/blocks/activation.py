"""Names of the activations of gated linear units. No jax: `podium.models.blocks.mathematics` computes them."""

from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
"""silu, or the tanh approximation of gelu (arXiv:1606.08415)."""
