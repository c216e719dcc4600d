"""Names of the activations of gated linear units. No jax: `podium.models.blocks.mathematics` computes them."""

import dataclasses
from typing import Literal, TypeAlias


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clamped:
    """gate sigmoid(alpha gate) (up + 1) for a gate of at most `limit` and an `up` of at most +- `limit` (gpt-oss)."""

    alpha: float
    limit: float


Named: TypeAlias = Literal["silu", "gelu_tanh"]
"""silu, or the tanh approximation of gelu (arXiv:1606.08415)."""
Activation: TypeAlias = Named | Clamped
"""act(gate) up for a named act, or `Clamped`."""
