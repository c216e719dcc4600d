"""Attention whose devices have parts of the tokens is that of one device, however heads fall on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.models.attention.mask import Visibility
from podium.models.attention.packed_attention import row_attention
from podium.models.layer_context import merge_rows, split_rows
from podium.models.params import GATHERED_AXES, TRAIN_AXES
from podium.sharding import ShardingRules, make_mesh

B, T, Q = 2, 24, 8
TOLERANCE = 1e-6  # of the largest number


def attended(mesh: str, devices: int, arrays: tuple[np.ndarray, ...], ids: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """What is attended, and the gradients of a weighted sum of it; each head has a sink."""
    rules = ShardingRules(make_mesh(mesh, jax.devices()[:devices]), GATHERED_AXES)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = row_attention("blocks", Visibility(*map(jnp.asarray, ids)), rules)(q, k, v, sinks)
        return jnp.sum(out * arrays[3]), out

    sinks = jnp.arange(arrays[0].shape[2]) * 0.3
    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays[:3], sinks)
    return [np.asarray(x) for x in (out, *gradients)]


def test_each_group_of_rows_has_some_of_every_device_and_they_return_to_their_places():
    rules = ShardingRules(make_mesh("fsdp:2", jax.devices()[:2]), TRAIN_AXES)
    rows = jnp.broadcast_to(jnp.arange(8)[:, None, None], (8, 3, 1))  # the first four are on the first device
    split = jax.jit(lambda x: split_rows(rules, x, 2))(rows)
    assert split[:, :, 0, 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    merged = jax.jit(lambda x: merge_rows(rules, x, "tokens"))(split)
    assert merged[:, 2, 0].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mesh", "devices"),
    [
        (4, 4, "sp:4", 4),  # heads of keys for each device
        (4, 1, "sp:4", 4),  # one for all
        (6, 2, "sp:3", 3),  # a device whose queries want two heads of keys, beside such as want one
        (8, 4, "fsdp:2,sp:2,tp:2", 8),
    ],
)
def test_attention_of_split_rows_is_that_of_whole_ones(heads, kv_heads, mesh, devices):
    random = np.random.default_rng(0)
    arrays = tuple(random.standard_normal((B, T, n, Q)).astype(np.float32) for n in (heads, kv_heads, kv_heads, heads))
    segments = np.repeat([[1, 2, 3, 0], [1, 1, 2, 3]], T // 4, axis=1).astype(np.int32)
    ids = (segments, np.where(segments > 1, 1, segments).astype(np.int32))
    whole, split = attended("dp:1", 1, arrays, ids), attended(mesh, devices, arrays, ids)
    for expected, found in zip(whole, split, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
