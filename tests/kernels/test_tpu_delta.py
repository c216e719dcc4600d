"""The kernel that decodes with delta nets on a TPU, emulated, against the recurrence written out in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from podium.config.recurrence import whole_tiles
from podium.kernels.tpu_delta import delta_step
from podium.models.blocks.kind import DeltaToken

L, M, R, K, V, N, P = 3, 9, 6, 2, 4, 8, 16
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


STATES, Q, KEYS, VALUES = normal(L, M, V, N, P), normal(R, K, N), normal(R, K, N), normal(R, V, P)
DECAY, BETA = RANDOM.random((R, V)).astype(np.float32), RANDOM.random((R, V)).astype(np.float32)
CELLS = np.array([4, 0, 7, 0, 2, 8], np.int32)


def naive(layer: int, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    states, y = STATES.astype(np.float64), np.zeros((R, V, P))
    for row, head in np.ndindex(R, V):
        if live[row]:
            key, query = KEYS[row, head // (V // K)], Q[row, head // (V // K)]
            state = states[layer, CELLS[row], head] * DECAY[row, head]
            state += BETA[row, head] * np.outer(key, VALUES[row, head] - key @ state)
            states[layer, CELLS[row], head], y[row, head] = state, query @ state
    return states, y


@pytest.mark.parametrize("live", ["110111", "010110", "000010", "000000"])
def test_live_rows_advance_and_all_other_cells_stay_as_they_are(live):
    """An idle row names a cell that may be another row's."""
    chosen, layer = np.array([each == "1" for each in live]) & (np.arange(R) != 3), 1
    token = DeltaToken(*map(jnp.asarray, (Q, KEYS, VALUES, DECAY, BETA)))
    states, y = delta_step(
        jnp.asarray(STATES), jnp.int32(layer), jnp.asarray(CELLS), jnp.asarray(chosen), token, interpret=True
    )
    expected, outputs = naive(layer, chosen)
    np.testing.assert_allclose(states, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, outputs, rtol=1e-5, atol=1e-5)
    untouched = np.ones((L, M), bool)
    untouched[layer, CELLS[chosen]] = False
    np.testing.assert_array_equal(np.asarray(states)[untouched], STATES[untouched])


def test_the_kernels_take_only_states_of_whole_tiles():
    assert whole_tiles((32, 128, 128))
    assert not whole_tiles((32, 128, 64))
    assert not whole_tiles((4096,))
