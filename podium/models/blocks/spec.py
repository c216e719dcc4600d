"""The declaration of one weight. No jax."""

from collections.abc import Mapping
from typing import NamedTuple


class ParamSpec(NamedTuple):
    """A weight: its shape, the logical axis of each dimension, and its initial distribution."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # looked up in ShardingRules
    std: float  # of the initial normal distribution; 0: constant `mean`
    mean: float = 0.0
    stacked: int = 0
    """Number of leading dimensions that index separate weights, such as layers and experts."""
    group: str | None = None
    """Matrices of a layer with the same group share their input, and `Context.several` multiplies it with all of them.
    They differ only in the size of their first output dimension, along which they can be stored side by side. None: not
    part of a group."""


ParamSpecs = Mapping[str, ParamSpec]


def stacked(spec: ParamSpec, count: int) -> ParamSpec:
    """Stack `count` such weights: shape [count, ...]."""
    return spec._replace(shape=(count, *spec.shape), axes=(None, *spec.axes), stacked=spec.stacked + 1)


def matrix_dims(spec: ParamSpec) -> list[int]:
    """Indices of the first input and first output dimension of each matrix in a stack; fewer for norms and biases.

    A dimension without a logical axis, or with that of a head's elements, belongs to the dimension before it.
    """
    return [dim for dim, axis in enumerate(spec.axes) if dim >= spec.stacked and axis not in (None, "head_dim")]


def is_matrix(spec: ParamSpec) -> bool:
    """Whether each weight of a stack maps one named axis to another; norm scales and biases do not."""
    return len(matrix_dims(spec)) > 1


def matrix_outputs(spec: ParamSpec) -> int:
    """Index of a matrix's first output dimension."""
    return matrix_dims(spec)[1]
