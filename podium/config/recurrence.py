"""Which recurrent states the TPU kernels accept; for the kernels and the planner. No jax."""

from collections.abc import Sequence

LANES = 128


def whole_tiles(state: Sequence[int]) -> bool:
    """Whether the kernels accept a state of these sizes: [V, N, P] in whole tiles."""
    return len(state) == 3 and all(size % LANES == 0 for size in state[1:])
