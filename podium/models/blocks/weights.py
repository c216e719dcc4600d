"""A weight as a layer's products take it. No jax, so that kinds of layers can be declared without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

if TYPE_CHECKING:
    import jax


class Weight(NamedTuple):
    """A weight whose gradient is float32, whatever its products are made in, or that has no gradient."""

    value: jax.Array
    """What is multiplied; no gradient flows to it."""
    sums: jax.Array | None
    """Float32, of the same shape: the gradient flows here. The numbers are not read. None: the weight is frozen."""
    kept: jax.Array | None = None
    """What a cast makes `value` of, and the backward pass again (`of_bits` first): a loop keeps no copy of its inputs.
    None: `value` itself is kept."""


class Adapted(NamedTuple):
    """A frozen matrix with its adapter, whose product with x is xW + scale (xA)B."""

    matrix: AnyWeight  # [in..., out...]
    a: AnyWeight  # [in..., r]
    b: AnyWeight  # [r, out...]
    scale: float


AnyWeight: TypeAlias = Union["jax.Array", Weight]
LayerWeight: TypeAlias = Union["jax.Array", Weight, Adapted]
LayerWeights: TypeAlias = Mapping[str, LayerWeight]
"""The weights of one layer, by the names under which its kinds declare them."""
