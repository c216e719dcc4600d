"""The GPU's decode kernel, emulated, against a softmax over each row's own keys in float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from podium.config.attention_blocks import gpu_kernel_decodes
from podium.kernels.gpu_decode import Pages, Token, paged_attention

L, N, K, G, P, Q = 2, 23, 2, 3, 16, 32
LENGTHS = (1, 16, 17, 0, 90, 128)
COLUMNS = 8


def arrays(window, seed=0):
    """Queries, pages with all tokens, and tables; with a window, the pages of a long row are a ring."""
    random = np.random.default_rng(seed)
    keys, values = (random.standard_normal((L, N, K, P, Q), np.float32) for _ in range(2))
    q = random.standard_normal((len(LENGTHS), K * G, Q), np.float32)
    pages = iter(random.permutation(N))
    tables = np.full((len(LENGTHS), COLUMNS), 2**30, np.int32)
    for row, length in enumerate(LENGTHS):
        used = min(-(-length // P), COLUMNS if window is None else 6)
        tables[row, :used] = [next(pages) for _ in range(used)]
        tables[row, used : -(-length // P)] = tables[row, : -(-length // P) - used]  # a ring's pages repeat
    return q, keys, values, tables


def without_last(keys, values, tables, layer):
    """The pages before each row's last token is written, and the keys and values [R, K, Q] of those tokens."""
    before, new = (keys.copy(), values.copy()), np.ones((2, len(LENGTHS), K, Q), np.float32)
    for row, length in enumerate(LENGTHS):
        for pages, own in zip(before, new, strict=True):
            if length:
                at = layer, tables[row, (length - 1) // P], slice(None), (length - 1) % P
                own[row], pages[at] = pages[at], 1e6  # to be overwritten, and read nowhere
    return before, new


def expected(q, keys, values, tables, layer, window, sinks):
    """[R, H, Q] float64."""
    out = np.zeros(q.shape)
    for row, length in enumerate(LENGTHS):
        positions = np.arange(0 if window is None else max(0, length - window), length)
        pages, offsets = tables[row][positions // P], positions % P
        for head in range(K * G):
            k, v = (x[layer, pages, head // G, offsets].astype(np.float64) for x in (keys, values))
            scores = k @ q[row, head] / np.sqrt(Q)
            own = [] if sinks is None else [sinks[head]]
            weights = np.exp(np.concatenate([scores, own]))
            if len(weights):
                out[row, head] = weights[: len(scores)] @ v / weights.sum()
    return out


@pytest.mark.parametrize("layer", range(L))
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("sinks", [None, np.linspace(-2, 2, K * G, dtype=np.float32)])
def test_it_is_a_softmax_over_each_rows_visible_keys(layer, window, sinks):
    q, keys, values, tables = arrays(window)
    before, (k, v) = without_last(keys, values, tables, layer)
    found, *written = paged_attention(
        Token(*map(jnp.asarray, (q, k, v))),
        Pages(*map(jnp.asarray, before), jnp.int32(layer), jnp.asarray(tables), jnp.asarray(LENGTHS, jnp.int32)),
        window=window,
        sinks=None if sinks is None else jnp.asarray(sinks),
        interpret=True,
    )
    wanted = expected(q, keys, values, tables, layer, window, sinks)
    assert np.abs(np.asarray(found) - wanted).max() < 1e-5
    assert all(np.array_equal(found, whole) for found, whole in zip(written, (keys, values), strict=True))
    assert not np.asarray(found)[LENGTHS.index(0)].any()


def test_sizes_that_triton_does_not_multiply_are_left_to_xla():
    assert gpu_kernel_decodes(16, 64)
    assert gpu_kernel_decodes(64, 128)
    assert not gpu_kernel_decodes(8, 64)
    assert not gpu_kernel_decodes(48, 64)
    assert not gpu_kernel_decodes(64, 80)
