"""Every way to attend gives what the reference gives, forward and backward, for rows packed in every way."""

import functools
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lowered_for_gpu, lowered_for_tpu
from tiny_models import rules_on

from podium.accelerators import find_accelerator
from podium.config import attention_blocks
from podium.config.attention_blocks import GPU_BLOCKS, attended_pairs, attention_backend, cut, gpu_block
from podium.kernels import gpu_attention, tpu_attention
from podium.models.attention import blockwise
from podium.models.attention.mask import Visibility
from podium.models.attention.packed_attention import causal_attention, row_attention
from podium.models.params import GATHERED_AXES, ROLLOUT_LAYOUTS
from podium.plan.request.topology import compiler_environment
from podium.sharding import ShardingRules, make_mesh

BACKENDS = {
    "blocks": blockwise.blockwise_attention,
    "tpu_kernel": functools.partial(tpu_attention.tpu_attention, interpret=True),
    "gpu_kernel": functools.partial(gpu_attention.gpu_attention, options=gpu_attention.Options(interpret=True)),
}
T = 150
# Segments and prompts of a row, as (segment, prompt, tokens).
ROWS = {
    "one sequence": [(1, 1, T)],
    "sequences": [(1, 1, 40), (2, 2, 90), (3, 3, 20)],
    "sequences and padding": [(1, 1, 3), (2, 2, 60), (0, 0, 87)],
    "completions of a prompt": [(1, 1, 20), (2, 1, 70), (3, 1, 60)],
    "two prompts and padding": [(1, 1, 9), (2, 1, 30), (3, 1, 1), (4, 4, 30), (5, 4, 31), (6, 4, 20), (0, 0, 29)],
    "padding alone": [(0, 0, T)],
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of which a row has several, the last one not whole."""
    monkeypatch.setattr(attention_blocks, "BLOCK", 32)
    monkeypatch.setattr(attention_blocks, "TPU_BLOCKS", (64,))


def visible(rows=tuple(ROWS), window: int | None = None) -> Visibility:
    """The visibility of rows; positions of completions follow their prompt's."""
    ids = [np.concatenate([np.full((n, 2), (own, prompt)) for own, prompt, n in ROWS[row]]) for row in rows]
    segments, prompts = np.stack(ids).astype(np.int32).transpose(2, 0, 1)
    return Visibility(jnp.array(segments), jnp.array(prompts), jnp.array(positions(segments, prompts)), window)


def positions(segments: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    found = np.zeros_like(segments)
    for place in np.ndindex(segments.shape):
        before = segments[place[0], : place[1]]
        found[place] = np.sum((before == segments[place]) | (before == prompts[place]))
    return found


def arrays(B: int, heads: tuple[int, int, int], dtype="float32") -> list[jax.Array]:
    """Queries, keys, values, and the gradient of what is attended."""
    H, K, Q = heads
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal((B, T, n, Q)), dtype) for n in (H, K, K, H)]


def reference(visibility):
    return lambda q, k, v, *sinks: causal_attention(q, k, v, visibility.mask(), *sinks)


def naive(visibility: Visibility, q, k, v, sinks=None) -> np.ndarray:
    """In float64, by the rule written out: zeros where a token attends to nothing."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    segments, prompts, position = (
        np.asarray(x) for x in (visibility.segments, visibility.prompts, visibility.positions)
    )
    group = q.shape[2] // k.shape[2]
    out = np.zeros(q.shape)
    for b, i in np.ndindex(segments.shape):
        keys = [
            j
            for j in range(i + 1)
            if segments[b, j] and segments[b, j] in (segments[b, i], prompts[b, i])
            if visibility.window is None or position[b, i] - position[b, j] < visibility.window
        ]
        for h in range(q.shape[2]):
            scores = k[b, keys, h // group] @ q[b, i, h] / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.max()) if keys else scores
            rest = np.exp(float(sinks[h]) - scores.max()) if keys and sinks is not None else 0.0
            out[b, i, h] = weights @ v[b, keys, h // group] / (weights.sum() + rest) if keys else 0.0
    return out


def with_gradients(attend, q, k, v, d_out, *sinks):
    out, pull = jax.vjp(attend, q, k, v, *sinks)
    return [out, *pull(d_out)]


@pytest.mark.parametrize(
    "heads", [(6, 2, 16), *(pytest.param(each, marks=pytest.mark.long) for each in ((4, 4, 8), (2, 1, 64)))], ids=str
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_are_the_references(backend, heads):
    visibility = visible()
    live = (visibility.segments > 0)[:, :, None, None]
    q, k, v, d_out = arrays(len(live), heads)
    ours = lambda q, k, v: BACKENDS[backend](q, k, v, visibility)  # noqa: E731
    found = jax.jit(functools.partial(with_gradients, ours))(q, k, v, d_out * live)
    expected = with_gradients(reference(visibility), q, k, v, d_out * live)
    assert not np.any(np.where(live, 0.0, found[0]))  # padding gives zeros
    expected[0] = expected[0] * live
    for name, each, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("block", GPU_BLOCKS[1:])
def test_the_gpus_kernel_gives_the_same_in_the_smaller_blocks_of_wide_heads(block):
    visibility = visible(["completions of a prompt", "two prompts and padding"])
    live = (visibility.segments > 0)[:, :, None, None]
    q, k, v, d_out = arrays(len(live), (2, 1, 16))
    options = gpu_attention.Options(block=block, interpret=True)
    ours = lambda q, k, v: gpu_attention.gpu_attention(q, k, v, visibility, None, options)  # noqa: E731
    found = jax.jit(functools.partial(with_gradients, ours))(q, k, v, d_out * live)
    expected = with_gradients(reference(visibility), q, k, v, d_out * live)
    expected[0] = expected[0] * live
    for name, each, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=2e-5, err_msg=name)


def test_the_gpus_kernel_takes_blocks_that_fit_the_devices_shared_memory():
    l4, a100, h100 = 101_376, 166_912, 232_448
    assert [gpu_block(128, 2, memory) for memory in (l4, a100, h100, None)] == [64] * 4
    assert [gpu_block(256, 2, memory) for memory in (l4, a100, h100, None)] == [32, 64, 64, 64]
    assert [gpu_block(256, 4, memory) for memory in (l4, a100, h100, 1)] == [16, 32, 32, 16]
    q = jnp.zeros((1, 64, 2, 256), jnp.bfloat16)
    assert gpu_attention.options_for(q, SimpleNamespace(id=0, process_index=0, shared_memory_per_block_optin=l4)) == (
        32,
        False,
    )
    assert gpu_attention.options_for(q, jax.devices()[0]).block == 64  # a CPU says nothing of shared memory


COMPILED_FOR_GPUS = """
import os, sys
from podium.accelerators import find_accelerator
from podium.plan.request.topology import topology_devices
import jax, jax.numpy as jnp
from podium.kernels.gpu_attention import gpu_attention, options_for
from podium.models.attention.mask import Visibility

for machine in sys.argv[1:]:
    device = topology_devices(find_accelerator(machine))[0]
    on_it = jax.sharding.SingleDeviceSharding(device)
    q, k = (jax.ShapeDtypeStruct((1, 128, heads, 256), jnp.bfloat16, sharding=on_it) for heads in (4, 2))
    ids = jax.ShapeDtypeStruct((1, 128), jnp.int32, sharding=on_it)

    def total(q, k, v, ids):
        visibility = Visibility(ids, ids, ids)
        return gpu_attention(q, k, v, visibility, None, options_for(q, device)).astype(jnp.float32).sum()

    jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, k, ids).compile()
    print(machine)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="jax-cuda12-plugin, the GPU's compiler, is not installed",
)
def test_the_gpus_kernels_compile_with_heads_of_256_where_shared_memory_is_small():
    machines = ["l4-1", "rtx4090-1", "a100-80-1", "h100-1"]
    environment = {**os.environ, **compiler_environment(find_accelerator("l4-1"))}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_FOR_GPUS, *machines], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == machines, done.stderr[-2000:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_reaches_into_the_shared_prompt_by_positions(backend):
    visibility = visible(["completions of a prompt", "two prompts and padding", "one sequence"], window=45)
    live = (visibility.segments > 0)[:, :, None, None]
    q, k, v, d_out = arrays(len(live), (4, 2, 8))
    ours = lambda q, k, v: BACKENDS[backend](q, k, v, visibility)  # noqa: E731
    found = jax.jit(functools.partial(with_gradients, ours))(q, k, v, d_out * live)
    expected = with_gradients(reference(visibility), q, k, v, d_out * live)
    expected[0] = naive(visibility, q, k, v)
    for name, each, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=2e-5, err_msg=name)


SINKS = jnp.array([-1.0, 3.0, 0.5, 40.0])
"""Of four heads; the last takes nearly everything."""


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_takes_its_share_of_each_softmax_and_has_a_gradient(backend, window):
    visibility = visible(["completions of a prompt", "two prompts and padding", "padding alone"], window=window)
    live = (visibility.segments > 0)[:, :, None, None]
    q, k, v, d_out = arrays(len(live), (4, 2, 8))
    ours = lambda q, k, v, sinks: BACKENDS[backend](q, k, v, visibility, sinks)  # noqa: E731
    found = jax.jit(functools.partial(with_gradients, ours))(q, k, v, d_out * live, SINKS)
    expected = with_gradients(reference(visibility), q, k, v, d_out * live, SINKS)
    expected[0] = naive(visibility, q, k, v, SINKS)
    for name, each, other in zip(("out", "dq", "dk", "dv", "d_sinks"), found, expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=2e-5, err_msg=name)
    assert np.abs(found[4]).max() > 1


def test_a_window_needs_positions():
    ones = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="a window of 2 positions needs each token's position"):
        Visibility(ones, ones, window=2)


def test_blocks_that_meet_hold_every_visible_pair():
    for window in (None, 1, 7, 45):
        visibility = visible(window=window)
        pairs = np.asarray(visibility.cut(5, 30).block_pairs())
        mask = np.asarray(visibility.mask()).reshape(-1, 5, 30, 5, 30).any(axis=(2, 4))
        assert not np.any(mask & ~pairs)
        assert pairs.sum() < (len(mask) * 15 if window is None else visible().cut(5, 30).block_pairs().sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_padding_change_nothing(backend):
    visibility = visible(["sequences and padding"])
    q, k, v, d_out = arrays(1, (2, 1, 8))
    live = (visibility.segments > 0)[:, :, None, None]
    ours = lambda q, k, v: BACKENDS[backend](q, k, v, visibility)  # noqa: E731
    compute = jax.jit(functools.partial(with_gradients, ours))
    found, expected = (compute(q, k, v, each) for each in (d_out, d_out * live))
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_as_close_as_the_references(backend):
    visibility = visible(["completions of a prompt"])
    q, k, v, d_out = arrays(1, (4, 2, 16), "bfloat16")
    exact = with_gradients(reference(visibility), *(x.astype("float32") for x in (q, k, v, d_out)))
    attend = lambda q, k, v: BACKENDS[backend](q, k, v, visibility)  # noqa: E731
    ours = jax.jit(functools.partial(with_gradients, attend))(q, k, v, d_out)
    theirs = with_gradients(reference(visibility), q, k, v, d_out)
    for each, other, true in zip(ours, theirs, exact, strict=True):
        assert each.dtype == jnp.bfloat16
        error, others = (float(jnp.linalg.norm(x.astype("float32") - true)) for x in (each, other))
        assert error <= 1.5 * others


@pytest.mark.parametrize("mesh", [pytest.param("1,8,1", marks=pytest.mark.long), "2,2,2", "1,1,2"])
def test_rows_and_heads_split_over_devices_attend_as_on_one(mesh):
    rules = ShardingRules(make_mesh(mesh, jax.devices()[: np.prod([int(n) for n in mesh.split(",")])]), GATHERED_AXES)
    visibility = visible(["two prompts and padding", "sequences"] * 4, window=40)
    q, k, v, d_out = arrays(8, (4, 2, 8))
    d_out = d_out * (visibility.segments > 0)[:, :, None, None]
    attend = lambda q, k, v: blockwise.blockwise_attention(q, k, v, visibility, SINKS)  # noqa: E731
    alone = jax.jit(functools.partial(with_gradients, attend))(q, k, v, d_out)
    alone.append(with_gradients(reference(visibility), q, k, v, d_out, SINKS)[-1])

    @jax.jit
    def split(q, k, v, d_out):
        return with_gradients(row_attention("blocks", visibility, rules), q, k, v, d_out, SINKS)

    for each, other in zip(split(q, k, v, d_out), alone, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-6 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("layout", ROLLOUT_LAYOUTS)
def test_every_rollout_layout_attends(layout):
    rules = ShardingRules(make_mesh("2,2,2"), ROLLOUT_LAYOUTS[layout])
    visibility = visible(["sequences and padding", "sequences"] * 4)
    q, k, v, _ = arrays(8, (4, 2, 8))
    found = jax.jit(row_attention("blocks", visibility, rules))(q, k, v)
    np.testing.assert_allclose(found, blockwise.blockwise_attention(q, k, v, visibility), atol=1e-6)


def test_blocks_of_keys_that_no_query_sees_are_skipped():
    visibility = visible(["completions of a prompt"])  # the third segment, from token 90, does not see the second
    q, k, v, _ = arrays(1, (2, 1, 8))
    row = blockwise._Row.of(q, k, v, visibility)
    assert row.meets.shape == (1, 5, 5)
    seen = [np.flatnonzero(row.meets[0, i]).tolist() for i in range(5)]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4]]


def test_values_that_no_query_sees_may_be_anything():
    visibility = visible(["completions of a prompt"])
    q, k, v, _ = arrays(1, (2, 1, 8))
    hidden = v.at[:, 30:90].set(jnp.nan)  # of the second segment, in its own blocks
    found = blockwise.blockwise_attention(q, k, hidden, visibility)
    np.testing.assert_array_equal(found[:, 90:], blockwise.blockwise_attention(q, k, v, visibility)[:, 90:])


def test_rows_are_cut_so_that_little_is_padded(monkeypatch):
    monkeypatch.setattr(attention_blocks, "TPU_BLOCKS", (512, 384, 256, 128))
    found = {length: cut("tpu_kernel", length) for length in (100, 2176, 2304, 2560)}
    assert found == {100: (1, 128), 2176: (6, 384), 2304: (6, 384), 2560: (5, 512)}
    assert [cut("blocks", length) for length in (20, 32, 33, 100)] == [(1, 20), (1, 32), (2, 17), (4, 25)]
    assert attended_pairs("reference", 10) == 100
    assert attended_pairs("tpu_kernel", 1024) == 3 * 512 * 512


def test_auto_is_the_machines_kernel_and_one_that_it_lacks_is_an_error():
    chosen = [attention_backend("auto", kernels) for kernels in ("none", "gpu", "tpu")]
    assert chosen == ["blocks", "gpu_kernel", "tpu_kernel"]
    assert attention_backend("kernel", "gpu") == "gpu_kernel"
    assert attention_backend("reference", "tpu") == "reference"
    with pytest.raises(ValueError, match=r"train\.attention: kernel needs .* capability 8\.0 .* set it to blocks"):
        attention_backend("kernel", "none")


def test_the_reference_is_one_of_the_choices():
    visibility = visible()
    q, k, v, _ = arrays(len(visibility.segments), (4, 2, 8))
    found = row_attention("reference", visibility, rules_on("dp:1", 1))(q, k, v)
    np.testing.assert_array_equal(found, reference(visibility)(q, k, v))


@pytest.mark.parametrize("sinks", [None, jnp.zeros(4, jnp.bfloat16)], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 50])
def test_the_tpus_kernels_lower_for_a_tpu_whether_or_not_other_layers_need_positions(window, sinks, monkeypatch):
    monkeypatch.setattr(attention_blocks, "TPU_BLOCKS", (128,))
    q, k = (jnp.zeros((2, 256, n, 64), jnp.bfloat16) for n in (4, 2))
    ones = jnp.ones((2, 256), jnp.int32)
    visibility = Visibility(ones, ones, ones, window)

    def total(q, k, v):
        return tpu_attention.tpu_attention(q, k, v, visibility, sinks).astype(jnp.float32).sum()

    text = lowered_for_tpu(jax.grad(total, argnums=(0, 1, 2)), q, k, k)
    assert text.count("custom_call @tpu_custom_call") == 3


@pytest.mark.parametrize(("window", "sinks"), [(None, None), (50, None), (50, jnp.zeros(4, jnp.bfloat16))])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_the_gpus_kernels_lower_for_a_gpu_and_declare_their_operations(heads, window, sinks):
    H, K = heads
    T, Q = 128, 64
    q, k = (jnp.zeros((2, T, n, Q), jnp.bfloat16) for n in (H, K))
    ones = jnp.ones((2, T), jnp.int32)
    visibility = Visibility(ones, ones, ones, window)

    def total(q, k, v):
        return gpu_attention.gpu_attention(q, k, v, visibility, sinks).astype(jnp.float32).sum()

    text = lowered_for_gpu(jax.grad(total, argnums=(0, 1, 2)), q, k, k)
    pairs = 2 * H * attended_pairs("gpu_kernel", T) * Q
    for products in (2, 3, 4):  # forward, for queries, for keys and values
        assert text.count(f"22{2 * products * pairs}") == 1
