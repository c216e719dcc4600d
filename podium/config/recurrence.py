"""Which recurrent states the TPU's kernels take, for the kernels and the planner. No jax."""

from collections.abc import Sequence

LANES = 128


def whole_tiles(state: Sequence[int]) -> bool:
    """Whether the kernels take a state [V, N, P] of these sizes; other arrays, or parts of tiles, they do not."""
    return len(state) == 3 and all(size % LANES == 0 for size in state[1:])
