"""The forms of a weight that layers multiply with. No jax, so that kinds of layers can be declared without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike


class Weight(NamedTuple):
    """A weight that is frozen, or whose gradient may have another format than its products, or another shape."""

    value: jax.Array
    """The multiplied values; no gradient flows here."""
    sums: jax.Array | None
    """Array that gets the gradient, in its format: zeros, or values that are not read. Its shape is that of `value`, or
    has two dimensions before it, for the parts of the rows and of each row's tokens. None: frozen."""
    kept: jax.Array | None = None
    """Stored array from which a cast (after `of_bits`) makes `value`, in the backward pass again, so that a loop over
    layers saves no copy of its inputs. None: `value` itself is saved."""
    layer: jax.Array | None = None
    """If set, [] int32: `value` is the stack of all layers of a place, and this is the layer's index in it; only used
    for matrices of experts, in passes without gradients. None: `value` is only this layer's weight."""


class Codes(NamedTuple):
    """A frozen matrix in int8; scale times codes are its values.

    The product with the codes is scaled, not the codes: XLA for GPUs would write the scaled matrix before the product.
    """

    codes: jax.Array  # [in..., out...] int8
    scale: jax.Array  # [out...] float32
    operands: DTypeLike
    """Format of the product's operands. int8: activations are rounded too, and no gradient flows."""
    parts: tuple[int, ...]
    """The number of parts into which devices split each input dimension; a rounded activation has a scale for each."""


class Adapted(NamedTuple):
    """A frozen matrix with its adapter; the product with x is xW + scale (xA)B."""

    matrix: AnyWeight | Codes  # [in..., out...]
    a: AnyWeight  # [in..., r]
    b: AnyWeight  # [r, out...]
    scale: float


AnyWeight: TypeAlias = Union["jax.Array", Weight]
LayerWeight: TypeAlias = Union["jax.Array", Weight, Codes, Adapted]
LayerWeights: TypeAlias = Mapping[str, LayerWeight]
"""The weights of one layer, by the names that its kinds declare."""
