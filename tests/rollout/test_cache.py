import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import DECODER, mesh_of

from podium.models.attention import causal_attention
from podium.models.params import ROLLOUT_AXES
from podium.rollout import cache as caches
from podium.rollout.cache import Cache, Prompts
from podium.sharding import ShardingRules


def rules_on(devices):
    return ShardingRules(mesh_of(devices), ROLLOUT_AXES)


def random_cache(slots, length, rules, seed=0):
    rng = np.random.default_rng(seed)
    abstract = caches.abstract_cache(DECODER, slots=slots, length=length, dtype=jnp.dtype("float32"), rules=rules)
    return jax.tree.map(lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding), abstract)


@pytest.mark.parametrize("devices", [1, 8])
def test_insert_copies_prompts_to_the_named_slots_and_leaves_the_others(devices):
    rules = rules_on(devices)
    cache, prompts = random_cache(16, 20, rules), random_cache(8, 12, rules, seed=1)
    rows = np.array([-1, 3, 3, -1, 0, -1, -1, 7, 1, -1, -1, -1, -1, -1, -1, 2], np.int32)
    put = jax.jit(lambda cache, prompts, rows: caches.insert(cache, prompts, rows, rules))
    got = put(cache, Prompts(kv=prompts, logits=jnp.zeros((8, 1))), rows)
    keys, values = np.array(cache.keys), np.array(cache.values)
    for slot, row in enumerate(rows):
        if row >= 0:
            keys[:, slot, :, :, :12], values[:, slot, :, :12] = prompts.keys[:, row], prompts.values[:, row]
    assert np.array_equal(got.keys, keys)
    assert np.array_equal(got.values, values)


def test_prompts_that_stay_on_their_device_are_not_sent():
    rules = rules_on(8)
    cache, prompts = random_cache(16, 20, rules), random_cache(16, 12, rules, seed=1)
    rows = np.array([-1, 0, 2, 3, -1, -1, 7, 7, -1, -1, 11, 10, 12, -1, -1, 14], np.int32)  # two slots to a device
    given = cache, Prompts(kv=prompts, logits=jnp.zeros((16, 1))), rows
    across, own = (
        jax.jit(lambda *given, crosses=crosses: caches.insert(*given, rules, crosses=crosses))
        for crosses in (True, False)
    )
    for one, other in zip(jax.tree.leaves(own(*given)), jax.tree.leaves(across(*given)), strict=True):
        assert np.array_equal(one, other)
    assert "all-gather" in across.lower(*given).compile().as_text()
    assert "all-gather" not in own.lower(*given).compile().as_text()


def test_insert_gathers_the_prompts_of_one_layer_at_a_time():
    rules = rules_on(8)
    cache, prompts = random_cache(16, 20, rules), random_cache(8, 12, rules)
    put = jax.jit(lambda cache, prompts, rows: caches.insert(cache, prompts, rows, rules))
    text = put.lower(cache, Prompts(kv=prompts, logits=jnp.zeros((8, 1))), np.zeros(16, np.int32)).compile().as_text()
    gathered = re.findall(r"f32\[(\d+),8,\S+ all-gather", text)
    assert gathered == ["1", "1"]  # keys and values


@pytest.mark.parametrize("devices", [1, 8])
def test_append_writes_one_position_of_one_layer_in_each_slot(devices):
    rules = rules_on(devices)
    cache, rng = random_cache(8, 10, rules), np.random.default_rng(2)
    k, v = rng.normal(size=(2, 8, DECODER.kv_heads, DECODER.head_dim)).astype(np.float32)
    lengths = np.array([0, 9, 3, 3, 5, 1, 2, 7], np.int32)
    append = jax.jit(lambda cache, k, v: caches.append(cache, jnp.int32(1), jnp.asarray(lengths), k, v, rules))
    got = append(cache, k, v)
    keys, values = np.array(cache.keys), np.array(cache.values)
    for slot, length in enumerate(lengths):
        keys[1, slot, :, :, length], values[1, slot, :, length] = k[slot], v[slot]
    assert np.array_equal(got.keys, keys)
    assert np.array_equal(got.values, values)


def test_attention_over_the_cache_is_causal_attention_at_each_slots_position():
    rules, rng = rules_on(1), np.random.default_rng(3)
    S, C, H, K, Q = 5, 9, DECODER.heads, DECODER.kv_heads, DECODER.head_dim
    q = rng.normal(size=(S, H, Q)).astype(np.float32)
    k, v = rng.normal(size=(2, S, C, K, Q)).astype(np.float32)
    lengths = np.array([0, 8, 3, 5, 1])
    cache = random_cache(S, C, rules)
    cache = jax.jit(lambda cache: caches.fill(cache, jnp.int32(1), jnp.asarray(k), jnp.asarray(v)))(cache)
    got = jax.jit(caches.attend)(cache, jnp.int32(1), lengths, q)
    mask = (np.arange(C)[None] <= lengths[:, None])[:, None]
    expected = causal_attention(jnp.asarray(q)[:, None], jnp.asarray(k), jnp.asarray(v), jnp.asarray(mask))[:, 0]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_what_stands_behind_a_slots_length_has_no_effect():
    rules, lengths = rules_on(1), np.array([2, 4], np.int32)
    cache = random_cache(2, 6, rules)
    q = np.ones((2, DECODER.heads, DECODER.head_dim), np.float32)
    changed = dataclasses.replace(cache, keys=cache.keys.at[:, 0, :, :, 3:].set(1e6).at[:, 1, :, :, 5:].set(-1e6))
    attend = jax.jit(caches.attend)
    assert np.array_equal(attend(cache, jnp.int32(0), lengths, q), attend(changed, jnp.int32(0), lengths, q))


def test_an_empty_cache_is_as_the_abstract_one_says():
    rules, sizes = rules_on(8), {"slots": 8, "length": 6, "dtype": jnp.dtype("bfloat16")}
    made, abstract = (make(DECODER, rules=rules, **sizes) for make in (caches.make_cache, caches.abstract_cache))
    assert isinstance(made, Cache)
    for array, expected in zip(jax.tree.leaves(made), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (expected.shape, expected.dtype, expected.sharding)
        assert not np.asarray(array, np.float32).any()
