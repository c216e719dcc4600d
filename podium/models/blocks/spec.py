"""The declaration of one weight. No jax."""

from typing import NamedTuple


class ParamSpec(NamedTuple):
    """One weight: its shape, the logical axis of each dimension, and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # looked up in ShardingRules
    std: float  # of the initial normal; 0: constant
    mean: float = 0.0
    stacked: int = 0
    """Leading dimensions that count weights of this kind, such as layers and experts."""


ParamSpecs = dict[str, ParamSpec]


def stacked(spec: ParamSpec, count: int) -> ParamSpec:
    """A stack of `count` such weights, [count, ...]."""
    return spec._replace(shape=(count, *spec.shape), axes=(None, *spec.axes), stacked=spec.stacked + 1)


def matrix_dims(spec: ParamSpec) -> list[int]:
    """The first input dimension and the first output dimension of each matrix in a stack; fewer for norms and biases.

    A dimension without a logical axis, or of a head's numbers, belongs to the dimension before it.
    """
    return [dim for dim, axis in enumerate(spec.axes) if dim >= spec.stacked and axis not in (None, "head_dim")]


def is_matrix(spec: ParamSpec) -> bool:
    """Whether a weight, layer by layer, maps one named axis to another; norm scales and biases do not."""
    return len(matrix_dims(spec)) > 1


def matrix_outputs(spec: ParamSpec) -> int:
    """The first output dimension of a matrix."""
    return matrix_dims(spec)[1]
