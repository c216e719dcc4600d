import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_copies import MACHINES, MODELS
from tiny_engine import DECODER, mesh_of

from podium.accelerators import find_accelerator
from podium.config.attention_blocks import kv_layout
from podium.config.schema import RolloutConfig
from podium.models.params import ROLLOUT_AXES
from podium.plan.request.topology import compiler_environment
from podium.rollout import cache as caches
from podium.rollout.cache import NO_PAGE, Cache
from podium.sharding import ShardingRules

H, K, Q = DECODER.heads, DECODER.kv_heads, DECODER.head_dim


def rules_on(devices):
    return ShardingRules(mesh_of(devices), ROLLOUT_AXES)


@pytest.fixture(params=["cpu", "gpu", "tpu apart", "tpu joined"])
def layout(request, monkeypatch):
    """How each platform stores the small heads of DECODER, on this CPU; a TPU heads of either kind."""
    platform, _, rows = request.param.partition(" ")
    lanes = {"apart": 2 * Q - 4, "joined": 2 * Q + 4}.get(rows)  # rows of the tests' heads are padded either way
    if lanes:
        monkeypatch.setattr("podium.config.attention_blocks.LANES", lanes)
    found = kv_layout(Q, platform)
    assert found.joined == (rows == "joined")
    monkeypatch.setattr(caches, "kv_layout", lambda head_dim, _: kv_layout(head_dim, platform))
    return found


def abstract_cache(pages, page_tokens, dtype, rules):
    tokens = pages * page_tokens // rules.num_shards("batch") - page_tokens
    config = RolloutConfig(
        max_prompt_tokens=tokens - 1, max_new_tokens=1, page_tokens=page_tokens, cache_tokens=pages * page_tokens
    )
    return caches.abstract_cache(DECODER, config, dtype=dtype, rules=rules)


def random_cache(pages, page_tokens, rules, seed=0):
    rng = np.random.default_rng(seed)
    abstract = abstract_cache(pages, page_tokens, jnp.dtype("float32"), rules)
    return jax.tree.map(lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding), abstract)


def pages_of(cache):
    """The keys and values of the only place."""
    return cache.places[0].kv


def sequence(cache, layer, table, length):
    """Keys and values [length, K, Q] of one sequence, by its pages."""
    joined = cache.layout.joined
    stored = np.asarray(cache.values if joined else cache.keys)[layer][table]
    keys = np.einsum("nkqp->npkq" if cache.layout.transposed else "nkpq->npkq", stored)[..., :Q]
    values = np.einsum("nkpq->npkq", np.asarray(cache.values[layer])[table])[..., Q * joined : Q * joined + Q]
    return tuple(x.reshape(-1, K, Q)[:length] for x in (keys, values))


def extended(cache, tables, starts, counts, T, rules, seed=1, window=None, sinks=None):
    """The cache with T random tokens behind each row's, what they see, and the tokens."""
    rng, R = np.random.default_rng(seed), len(starts)
    q, k, v = (rng.normal(size=(R, T, heads, Q)).astype(np.float32) for heads in (H, K, K))
    extend = jax.jit(lambda *given: caches.extend(*given, rules, window=window, sinks=sinks))
    spans = caches.Spans(tables, np.int32(starts), np.int32(counts))
    got, seen = extend(cache, jnp.int32(1), spans, caches.Heads(q, k, v))
    return got, np.asarray(seen), (q, k, v)


def attended(q, keys, values, mask, sinks):
    """What queries [T, H, Q] take of S keys and values [S, K, Q] by a mask [1, T, S], in float64."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    keys, values = (np.repeat(x, H // K, axis=1) for x in (keys, values))
    scores = np.where(mask, np.einsum("thq,shq->hts", q, keys) / np.sqrt(Q), -np.inf)
    sink = -np.inf if sinks is None else np.asarray(sinks, np.float64)[:, None, None]
    largest = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - largest)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
    return np.einsum("hts,shq->thq", weights, values)


CASES = [
    # starts, counts, T: decoding; prompts; chunks behind others, within and over pages; rows without anything
    ([0, 3, 4, 9], [1, 1, 1, 1], 1),
    ([7, 0, 15, 2], [1, 0, 1, 0], 1),
    ([0, 0, 0, 0], [10, 4, 1, 0], 10),
    ([4, 3, 11, 0], [4, 5, 2, 6], 6),
    ([1, 2, 3, 12], [3, 3, 3, 3], 3),
]


@pytest.mark.parametrize(
    ("starts", "counts", "T", "window", "sinks"),
    [
        *((*case, window, None) for case in CASES for window in (None, 3)),
        *((*case, 3, jnp.linspace(-1, 2, H)) for case in (CASES[0], CASES[3])),
    ],
)
def test_new_tokens_are_written_after_the_old_ones_and_attend_to_what_their_window_holds(
    starts, counts, T, window, sinks, layout
):
    rules, P = rules_on(1), 4
    cache = pages_of(random_cache(24, P, rules))
    tables = np.random.default_rng(2).permutation(24)[:16].reshape(4, 4).astype(np.int32)
    got, seen, (q, k, v) = extended(cache, tables, starts, counts, T, rules, window=window, sinks=sinks)
    touched = set()
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if not count:
            continue
        total = start + count
        keys, values = sequence(got, 1, tables[row], total)
        before = sequence(cache, 1, tables[row], start)
        assert np.array_equal(keys, np.concatenate([before[0], k[row, :count]]))
        assert np.array_equal(values, np.concatenate([before[1], v[row, :count]]))
        back = (start + np.arange(count))[None, :, None] - np.arange(total)[None, None]
        mask = (back >= 0) & (back < (window or total))
        expected = attended(q[row, :count], keys, values, mask, sinks)
        np.testing.assert_allclose(seen[row, :count], expected, atol=2e-6)
        touched |= {(int(tables[row, p // P]), p % P) for p in range(start, total)}
    for x, y in ((np.asarray(cache.values), np.asarray(got.values)),):
        changed = {(int(n), int(p)) for n, p in np.argwhere((x != y).any(axis=(0, 2, 4)))}
        assert changed == touched
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(got), strict=True):
        assert np.array_equal(before[0], after[0])  # another layer


@pytest.mark.parametrize("block_pages", [1, 3])
@pytest.mark.parametrize(("T", "counts"), [(1, [1, 1, 1, 1, 1, 0]), (6, [6, 5, 1, 6, 4, 0])])
def test_a_window_reads_its_own_pages_of_each_row_however_far_apart_their_lengths_are(
    T, counts, block_pages, layout, monkeypatch
):
    """Pages that no query of a row sees hold NaN, which would be in the row's output if they were read."""
    rules, P, window, rounds, loop = rules_on(1), 4, 9, [], jax.lax.fori_loop

    def counted(first, end, body, begun):
        jax.debug.callback(lambda first, end: rounds.append(int(end - first)), first, end)
        return loop(first, end, body, begun)

    monkeypatch.setattr(caches, "cache_block_pages", lambda *_: block_pages)
    monkeypatch.setattr(jax.lax, "fori_loop", counted)
    starts = [0, 5, 11, 66, 121, 0]
    kept = pages_of(random_cache(200, P, rules))
    tables = np.random.default_rng(2).permutation(200)[: 6 * 32].reshape(6, 32).astype(np.int32)
    unseen = [page for table, start in zip(tables, starts, strict=True) for page in table[: max(0, start - 8) // P]]
    cache = jax.tree.map(lambda x: x.at[:, np.array(unseen)].set(np.nan), kept)
    got, seen, (q, *_) = extended(cache, tables, starts, counts, T, rules, window=window)
    jax.effects_barrier()
    pages = (window - 1 + T + P - 2) // P + 1
    assert len(rounds) == 1 and rounds[0] <= -(-pages // block_pages)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        first = max(0, start - window + 1)
        keys, values = (x[first:] for x in sequence(got, 1, tables[row], start + count))
        back = (start + np.arange(count))[None, :, None] - np.arange(first, start + count)[None, None]
        expected = attended(q[row, :count], keys, values, (back >= 0) & (back < window), None) if count else q[row, :0]
        np.testing.assert_allclose(seen[row, :count], expected, atol=2e-6)


@pytest.mark.parametrize("T", [1, 10])
def test_places_that_are_written_differ_so_that_no_gpu_sorts_them(T):
    rules = rules_on(1)
    heads = caches.Heads(*(np.zeros((2, T, each, Q), np.float32) for each in (H, K, K)))
    spans = caches.Spans(np.zeros((2, 4), np.int32), np.zeros(2, np.int32), np.ones(2, np.int32))
    lowered = jax.jit(lambda *given: caches.extend(*given, rules)).lower(
        random_cache(16, 4, rules).places[0].kv, jnp.int32(0), spans, heads
    )
    scatters = re.findall(r"stablehlo.scatter.*", lowered.as_text())
    assert scatters and all("unique_indices = true" in each for each in scatters)


def test_each_device_has_pages_of_its_own():
    rules, one = rules_on(8), rules_on(1)
    cache = pages_of(random_cache(32, 4, rules))
    whole = jax.tree.map(lambda x: jax.device_put(np.asarray(x), one.sharding()), cache)
    local = np.array([[1, 3], [0, 2]] * 8, np.int32)  # two rows on each of 8 devices, of 4 pages each
    everywhere = local + 4 * np.repeat(np.arange(8), 2)[:, None].astype(np.int32)
    starts, counts = [3, 0] * 8, [1] * 16
    for T in (1, 3):
        split, seen, _ = extended(cache, local, starts, counts, T, rules)
        together, expected, _ = extended(whole, everywhere, starts, counts, T, one)
        assert np.array_equal(split.keys, together.keys)
        assert np.array_equal(split.values, together.values)
        np.testing.assert_allclose(seen[:, :1], expected[:, :1], atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_pages_are_copied_within_their_device(layout, platform, monkeypatch):
    monkeypatch.setattr(ShardingRules, "platform", platform)
    rules = rules_on(8)
    cache = random_cache(32, 4, rules)
    sources, targets = np.zeros(16, np.int32), np.full(16, NO_PAGE, np.int32)
    sources[[2, 3, 10]], targets[[2, 3, 10]] = [1, 0, 3], [2, 3, 0]  # two on device 1, one on device 5
    got = jax.jit(lambda *given: caches.copy_pages(*given, rules))(cache, sources, targets)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(got), strict=True):
        axis = 1 if before.ndim == 5 else 0  # states have no layers
        expected, pages = (np.moveaxis(np.array(before), axis, 0) for _ in range(2))
        expected[4 + 2], expected[4 + 3], expected[20] = pages[4 + 1], pages[4], pages[23]
        assert np.array_equal(np.moveaxis(after, axis, 0), expected)


@pytest.mark.parametrize("each", [1, 3])
def test_a_gpu_copies_at_once_what_others_copy_in_turn(each, monkeypatch):
    rules, x = rules_on(1), np.random.default_rng(0).standard_normal((2, 12, 5)).astype(np.float32)

    def copied(x, sources, targets):
        return caches._copied(x, (None, "batch", None), each, sources=sources, targets=targets, rules=rules)

    sources, targets = np.array([1, 1, 0, 0], np.int32), np.array([0, 3, NO_PAGE, NO_PAGE], np.int32)
    in_turn = jax.jit(copied)(x, sources, targets)
    monkeypatch.setattr(ShardingRules, "platform", "gpu")
    at_once = jax.jit(lambda *given: copied(*given))(x, sources, targets)  # traced anew
    runs = x.reshape(2, 12 // each, each, 5)
    expected = runs.copy()
    expected[:, [0, 3]] = runs[:, [1, 1]]
    for found in (in_turn, at_once):
        assert np.array_equal(found, expected.reshape(x.shape))


def test_neither_other_rows_nor_what_stands_behind_a_sequence_changes_its_bits():
    rules = rules_on(1)
    cache = pages_of(random_cache(16, 4, rules))
    tables = np.arange(16, dtype=np.int32).reshape(2, 8)
    _, short, _ = extended(cache, tables, [2, 1], [1, 1], 1, rules)
    changed = dataclasses.replace(cache, values=cache.values.at[:, 1:8].set(1e6))
    _, long, _ = extended(changed, tables, [2, 30], [1, 1], 1, rules)
    assert np.array_equal(short[0], long[0])
    assert not np.array_equal(short[1], long[1])


def test_a_cpu_decodes_rows_in_groups_of_one_length_with_the_same_bits(monkeypatch):
    rules, rng = rules_on(1), np.random.default_rng(0)
    cache = pages_of(random_cache(24 * 8, 4, rules))
    tables = rng.permutation(24 * 8).astype(np.int32).reshape(24, 8)
    starts, counts = rng.integers(0, 31, 24), rng.integers(0, 2, 24)
    found = []
    for rows in (24, 8):  # as many as there are: one group
        monkeypatch.setattr(caches, "CPU_ROWS", rows)
        found.append(extended(cache, tables, starts, counts, 1, rules, window=9)[1])
        found.append(extended(cache, tables, starts, counts, 1, rules)[1])
    assert np.array_equal(found[0][counts > 0], found[2][counts > 0])
    assert np.array_equal(found[1][counts > 0], found[3][counts > 0])
    assert not np.array_equal(found[0][counts > 0], found[1][counts > 0])


def test_an_empty_cache_is_as_the_abstract_one_says():
    rules = rules_on(8)
    abstract = abstract_cache(16, 6, jnp.dtype("bfloat16"), rules)
    made = caches.make_empty(abstract)()
    assert isinstance(made, Cache)
    assert made.hidden.page_tokens == pages_of(made).page_tokens == 6
    for array, expected in zip(jax.tree.leaves(made), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (expected.shape, expected.dtype, expected.sharding)
        assert not np.asarray(array, np.float32).any()


@pytest.mark.parametrize(
    ("head_dim", "numbers"),
    [(16, 128), (64, 128), (80, 256), (96, 256), (120, 256), (128, 256), (192, 384), (256, 512)],
)
def test_rows_on_a_tpu_fill_whole_tiles(head_dim, numbers):
    """Numbers stored for a key and its value; neither may be cut."""
    layout = kv_layout(head_dim, "tpu")
    assert layout.numbers == numbers
    assert layout.width % 128 == 0
    assert layout.width >= (2 if layout.joined else 1) * head_dim
    for platform in ("cpu", "gpu"):
        assert kv_layout(head_dim, platform).numbers == 2 * head_dim


def copies_on(machine, *models):
    """What programs that are compiled for a machine do with the cache, by model."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, **compiler_environment(find_accelerator(machine)), "PYTHONPATH": str(root)}
    command = [sys.executable, str(Path(__file__).with_name("cache_copies.py")), machine, *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU's compiler, is not installed")
@pytest.mark.parametrize(
    ("machine", "models"),
    [
        ("v6e-1", ["Qwen2.5-0.5B"]),
        *(pytest.param(machine, list(MODELS), marks=pytest.mark.long) for machine in MACHINES),
    ],
)
def test_no_program_on_a_tpu_copies_a_cache(machine, models):
    """Not laid out anew, as rows that do not fill tiles would be, and no second one among the temporary arrays."""
    for model, programs in copies_on(machine, *models).items():
        for name, program in programs.items():
            assert program["copies"] == 0, (model, name)
            assert program["temporaries"] < 0.45, (model, name)  # a copy of keys or of values alone is 0.5
