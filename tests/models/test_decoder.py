import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import tiny
from tiny_models import rules_on

from podium.models.architecture import DecoderConfig
from podium.models.attention.mask import Visibility
from podium.models.attention.packed_attention import causal_attention
from podium.models.blocks.kind import Stack
from podium.models.blocks.mathematics import rms_norm, rope_tables, rotate, rotate_by_product
from podium.models.blocks.rope import Rope, RopeScaling, YarnScaling
from podium.models.decoder import PassSettings, forward, head_weights
from podium.models.linear import activation_dtype
from podium.models.params import param_specs

CHANGED: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab": 64,
    "max_positions": 128,
    "tied": False,
    "qkv_bias": True,
    "qk_norm": True,
}
CONFIG = tiny(**CHANGED)
FLOAT32 = jnp.dtype("float32")
FREQUENCIES = Rope(theta=1e3, dims=8).frequencies()


def make_params(config: DecoderConfig = CONFIG, mesh: str = "dp:1", devices: int = 1):
    """Random weights; norms and biases are not what they start as either."""
    random, rules = np.random.default_rng(0), rules_on(mesh, devices)
    return {
        name: jax.device_put(
            (spec.mean + 0.2 * random.standard_normal(spec.shape)).astype(np.float32), rules.sharding(*spec.axes)
        )
        for name, spec in param_specs(config).items()
    }


def hidden_states(tokens, positions, mask, *, config=CONFIG, mesh="dp:1", devices=1, dtype=FLOAT32, remat="none"):
    rules = rules_on(mesh, devices)

    def attend(kv, layer, q, k, v):
        return kv, causal_attention(q, k, v, mask)

    def compute(params, tokens, positions):
        return forward(
            params,
            tokens,
            positions,
            attend,
            settings=PassSettings(config=config, rules=rules, dtype=dtype, remat=remat),
        )[0]

    return np.asarray(jax.jit(compute)(make_params(config, mesh, devices), tokens, positions))


def causal(T: int) -> np.ndarray:
    return np.tri(T, dtype=bool)[None]


def naive_forward(tokens: np.ndarray) -> np.ndarray:
    """The decoder for one sequence [T], in float64 numpy, a head at a time: hidden states [T, D]."""
    params = {name: np.asarray(value, np.float64) for name, value in make_params().items()}
    T, half = len(tokens), CONFIG.head_dim // 2
    angles = np.arange(T)[:, None] * 1e3 ** (-np.arange(half) / half)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale

    def turn(x):
        a, b = x[:, :half], x[:, half:]
        return np.hstack([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])

    x = params["embed"][tokens]
    for layer in range(CONFIG.layers):
        w = {name.removeprefix("layers."): value[layer] for name, value in params.items() if "layers." in name}
        y, added = norm(x, w["attention_norm"]), np.zeros_like(x)
        for head in range(CONFIG.heads):
            group = head * CONFIG.kv_heads // CONFIG.heads
            q = turn(norm(y @ w["q"][:, head] + w["q_bias"][head], w["q_norm"]))
            k = turn(norm(y @ w["k"][:, group] + w["k_bias"][group], w["k_norm"]))
            v = y @ w["v"][:, group] + w["v_bias"][group]
            scores = np.where(np.tri(T, dtype=bool), q @ k.T / math.sqrt(CONFIG.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            added += weights / weights.sum(axis=-1, keepdims=True) @ v @ w["o"][head]
        x = x + added
        y = norm(x, w["mlp_norm"])
        gate = y @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
    return norm(x, params["final_norm"])


def test_hidden_states_are_those_of_a_decoder_written_down_naively():
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
    found = hidden_states(tokens, np.broadcast_to(np.arange(12), (2, 12)), causal(12))
    for row, each in zip(found, tokens, strict=True):
        np.testing.assert_allclose(row, naive_forward(each), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "devices", "remat"), [("1,8,1", 8, "none"), ("2,2,2", 8, "layer"), ("tp:2", 2, "none")]
)
def test_hidden_states_do_not_depend_on_mesh_and_remat(mesh, devices, remat):
    tokens = np.random.default_rng(0).integers(0, 64, (8, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12), (8, 12))
    expected = np.stack([naive_forward(each) for each in tokens])
    found = hidden_states(tokens, positions, causal(12), mesh=mesh, devices=devices, remat=remat)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_is_done_otherwise_on_tpu_comes_to_the_same(monkeypatch):
    """Queries, keys and values in one product, and rotation by one: hidden states, and gradients but for rounding."""
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
    positions, rules = np.broadcast_to(np.arange(12), (2, 12)), rules_on("dp:1", 1)

    def attend(kv, layer, q, k, v):
        return kv, causal_attention(q, k, v, causal(12))

    found, joined = {}, f"bf16[2,12,{CONFIG.heads + 2 * CONFIG.kv_heads},{CONFIG.head_dim}]"
    for platform in ("gpu", "tpu"):
        monkeypatch.setattr(type(rules), "platform", platform)

        def loss(params):
            given = {"config": CONFIG, "rules": rules, "dtype": jnp.dtype("bfloat16"), "wide": True}
            hidden, _, _ = forward(params, tokens, positions, attend, settings=PassSettings(**given))
            return jnp.sum(jnp.sin(hidden.astype(jnp.float32))), hidden

        assert (joined in str(jax.make_jaxpr(loss)(make_params()))) == (platform == "tpu")
        found[platform] = jax.grad(loss, has_aux=True)(make_params())
    (expected, hidden), (gradients, same) = found["gpu"], found["tpu"]
    np.testing.assert_array_equal(same.astype(jnp.float32), hidden.astype(jnp.float32))
    for name, gradient in expected.items():
        assert jnp.linalg.norm(gradients[name] - gradient) <= 0.02 * jnp.linalg.norm(gradient), name


def test_a_packed_row_gives_what_its_sequences_give_alone():
    first, second = [5, 6, 7, 8, 9], [11, 12, 13]
    tokens = np.array([first + second + [0, 0]], np.int32)
    segments = np.array([[1] * 5 + [2] * 3 + [0] * 2], np.int32)
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 0, 0]], np.int32)
    packed = hidden_states(tokens, positions, Visibility(jnp.array(segments), jnp.array(segments)).mask())[0]
    for start, each in ((0, first), (5, second)):
        alone = hidden_states(np.array([each], np.int32), np.arange(len(each))[None], causal(len(each)))[0]
        np.testing.assert_allclose(packed[start : start + len(each)], alone, rtol=1e-4, atol=1e-5)
    assert np.isfinite(packed).all()


def test_completions_behind_one_prompt_give_what_they_give_alone():
    prompt, first, second = [5, 6, 7], [8, 9], [10, 11, 12]
    tokens = np.array([prompt + first + second], np.int32)
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 3, 3]])
    positions = np.array([[0, 1, 2, 3, 4, 3, 4, 5]], np.int32)
    packed = hidden_states(tokens, positions, Visibility(segments, jnp.ones_like(segments)).mask())[0]
    for start, each in ((3, first), (5, second)):
        whole = np.array([prompt + each], np.int32)
        alone = hidden_states(whole, np.arange(whole.shape[1])[None], causal(whole.shape[1]))[0]
        np.testing.assert_allclose(packed[start : start + len(each)], alone[3:], rtol=1e-4, atol=1e-5)


def test_a_packed_token_sees_its_own_past_and_its_prompt():
    segments = jnp.array([[1, 1, 2, 2, 3, 4, 0]])  # 2 and 3 complete prompt 1; 4 stands alone; 0 is padding
    prompts = jnp.array([[1, 1, 1, 1, 1, 4, 0]])
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    assert Visibility(segments, prompts).mask()[0].astype(int).tolist() == expected


def test_attention_is_a_softmax_of_scaled_products_by_groups_of_heads():
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 5, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    mask = np.tri(5, dtype=bool)[None] & np.array([[[True]], [[True]]])
    mask[1, :, 1] = np.eye(5, dtype=bool)[1]  # in row 1 only token 1 sees token 1
    found = causal_attention(q, k, v, mask)
    for b, head in np.ndindex(2, 4):
        scores = np.where(mask[b], q[b, :, head] @ k[b, :, head // 2].T / math.sqrt(8), -np.inf)
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(found[b, :, head], weights @ v[b, :, head // 2], rtol=1e-5, atol=1e-6)


def test_rotation_by_hand():
    frequencies = Rope(theta=100.0, dims=4).frequencies()  # pairs turn by 1 and 0.1 radians per position
    assert frequencies.tolist() == pytest.approx([1.0, 0.1])
    cos, sin = rope_tables(jnp.array([[2]]), frequencies)
    assert (cos[0, 0].tolist(), sin[0, 0].tolist()) == (
        pytest.approx([math.cos(2), math.cos(0.2)]),
        pytest.approx([math.sin(2), math.sin(0.2)]),
    )
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)  # pairs (1, 3) and (2, 4): halves, not neighbours
    expected = [
        math.cos(2) - 3 * math.sin(2),
        2 * math.cos(0.2) - 4 * math.sin(0.2),
        3 * math.cos(2) + math.sin(2),
        4 * math.cos(0.2) + 2 * math.sin(0.2),
    ]
    assert rotate(x, cos, sin).ravel().tolist() == pytest.approx(expected, rel=1e-6)


def test_scores_of_rotated_queries_and_keys_depend_on_their_distance_alone():
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        turned = [rotate(x, *rope_tables(jnp.array([[at]]), FREQUENCIES)) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(104, 100), rel=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-2)


def test_llama_3_frequencies_by_hand():
    """factor 8 between 1 and 4 turns of 64 positions, theta 10000, 8 pairs."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
    plain = 1e4 ** -(np.arange(8) / 8)  # 1, 0.316, 0.1, 0.0316, ...
    found = Rope(theta=1e4, dims=16, scaling=scaling).frequencies()
    # turns of 64 positions: 10.2, 3.22, 1.02, 0.32, ...
    assert found[0] == pytest.approx(plain[0])  # more than 4 turns: kept
    assert found[3:].tolist() == pytest.approx((plain[3:] / 8).tolist())  # less than one: stretched
    turns = 64 * plain[1] / (2 * math.pi)
    smooth = (turns - 1) / 3
    assert found[1] == pytest.approx((1 - smooth) * plain[1] / 8 + smooth * plain[1])
    assert found.dtype == np.float32


def test_yarn_frequencies_by_turns():
    """gpt-oss: pairs of 32 turns of 4,096 positions or more are kept, those of one turn or less divided by 32; between
    these, what is kept falls with the logarithm of the turns."""
    scaling = YarnScaling(factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_positions=4096, truncate=False)
    plain = 150_000.0 ** -(np.arange(32) / 32)
    kept = np.log(4096 * plain / (2 * math.pi)) / math.log(32)  # 1 at 32 turns, 0 at one
    assert sum(0 < each < 1 for each in kept) > 5 and kept[0] > 1 and kept[-1] < 0
    kept = np.clip(kept, 0, 1)
    found = Rope(theta=150_000.0, dims=64, scaling=scaling).frequencies()
    np.testing.assert_allclose(found, plain * (kept + (1 - kept) / 32), rtol=1e-5)


def test_rms_norm_by_hand():
    x = jnp.array([[3.0, 4.0]])
    scale = jnp.array([1.0, 2.0])
    root = math.sqrt(12.5 + 0.5)
    np.testing.assert_allclose(rms_norm(x, scale, 0.5, 0.0, False), [[3 / root, 8 / root]], rtol=1e-6)


def test_a_wide_norm_rounds_once():
    random = np.random.default_rng(0)
    x, scale = (jnp.asarray(random.standard_normal((64,)), jnp.bfloat16) for _ in range(2))
    exact = np.asarray(x, np.float64) / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2)) * np.asarray(scale, np.float64)
    once = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float32)
    wide, plain = (np.asarray(rms_norm(x, scale, 0.0, 0.0, each), np.float32) for each in (True, False))
    assert np.mean(wide == once) > 0.95  # a product in float32 is not the exact one
    assert np.mean(plain == once) < 0.9


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_helpers_return_the_dtype_that_they_are_given(dtype):
    x, cos, sin = jnp.ones((1, 1, 1, 8), dtype), *rope_tables(jnp.array([[3]]), FREQUENCIES)
    assert rms_norm(x, jnp.ones(8, dtype), 1e-5, 0.0, False).dtype == dtype
    assert rotate(x, cos, sin).dtype == dtype
    tokens, positions = np.zeros((1, 4), np.int32), np.arange(4)[None]
    hidden = hidden_states(tokens, positions, causal(4), dtype=jnp.dtype(dtype))
    assert hidden.dtype == activation_dtype(rules_on("dp:1", 1), jnp.dtype(dtype)) == jnp.float32  # on CPU


def test_the_head_is_the_embedding_where_they_are_tied():
    rules, tied = rules_on("dp:1", 1), dataclasses.replace(CONFIG, tied=True)
    assert "head" not in param_specs(tied)
    params = make_params(tied)
    assert np.array_equal(head_weights(params, rules, FLOAT32), params["embed"])
    untied = make_params()
    assert np.array_equal(head_weights(untied, rules, FLOAT32), untied["head"])


def test_specs_have_the_weights_of_the_family():
    specs = param_specs(tiny(**CHANGED | {"qkv_bias": False, "qk_norm": False, "tied": True}))
    assert {name: spec.shape for name, spec in specs.items()} == {
        "embed": (64, 32),
        "layers.attention_norm": (2, 32),
        "layers.q": (2, 32, 4, 8),
        "layers.k": (2, 32, 2, 8),
        "layers.v": (2, 32, 2, 8),
        "layers.o": (2, 4, 8, 32),
        "layers.mlp_norm": (2, 32),
        "layers.gate": (2, 32, 48),
        "layers.up": (2, 32, 48),
        "layers.down": (2, 48, 32),
        "final_norm": (32,),
    }
    assert all(len(spec.shape) == len(spec.axes) for spec in specs.values())
    more = set(param_specs(CONFIG)) - set(specs)
    assert more == {"head", *(f"layers.{part}" for part in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"))}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rotation_by_a_product_is_the_rotation_to_the_last_bit(dtype: jnp.dtype):
    """Its gradient too."""
    x, d = (jax.random.normal(jax.random.key(seed), (2, 5, 3, 16)).astype(dtype) for seed in (0, 1))
    tables = rope_tables(jnp.arange(10).reshape(2, 5) * 7, Rope(theta=1e3, dims=16).frequencies())
    (expected, back), (found, back_by_product) = (
        jax.vjp(lambda x, turn=turn: turn(x, *tables), x) for turn in (rotate, rotate_by_product)
    )
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))
    (expected,), (found,) = back(d), back_by_product(d)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))


def test_no_policy_keeps_the_product_of_a_rotation():
    tables = rope_tables(jnp.arange(5)[None], Rope(theta=1e3, dims=16).frequencies())
    rotated = jax.checkpoint(
        lambda x: jnp.sin(rotate_by_product(jnp.sin(x), *tables)).sum(),
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    )
    _, back = jax.vjp(rotated, jnp.ones((1, 5, 3, 16)))
    assert [x.shape for x in jax.tree.leaves(back) if x.ndim == 4] == [(1, 5, 3, 16)]  # its argument


def test_a_rotation_of_a_part_of_a_head_leaves_the_rest_as_it_is():
    """By slices and by a product, with its gradient."""
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 12)).astype(np.float32)
    tables = rope_tables(jnp.broadcast_to(jnp.arange(5)[None], (2, 5)), FREQUENCIES[:2])
    whole = rotate(jnp.asarray(x[..., :4]), *tables)
    for turn in (rotate, rotate_by_product):
        found, back = jax.vjp(lambda x, turn=turn: turn(x, *tables), jnp.asarray(x))
        np.testing.assert_allclose(found[..., :4], whole, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found[..., 4:], x[..., 4:])
        np.testing.assert_allclose(back(found)[0], x, rtol=1e-5, atol=1e-6)  # a rotation: its transpose is its inverse


@pytest.mark.parametrize("remat", ["layer", "products", "offload"])
def test_layers_of_a_pattern_are_recomputed_only_when_their_gradient_is_there(remat):
    """Else a compiler recomputes all of a pattern at once. In a loop over single layers it cannot."""
    pair = dataclasses.replace(CONFIG, stacks=(Stack(pattern=tuple(CONFIG.blocks[:1]) * 2, repeats=2),))
    barriers = []
    for decoder in (CONFIG, pair):
        rules, tokens = rules_on("dp:1", 1), jnp.zeros((1, 4), jnp.int32)

        def total(params, tokens=tokens, decoder=decoder, rules=rules):
            attend = lambda kv, layer, q, k, v: (kv, causal_attention(q, k, v, causal(4)))  # noqa: E731
            passed = forward(
                params,
                tokens,
                jnp.arange(4)[None],
                attend,
                settings=PassSettings(config=decoder, rules=rules, dtype=FLOAT32, remat=remat),
            )
            return jnp.sum(passed[0])

        lowered = jax.jit(jax.grad(total)).lower(make_params(decoder))
        barriers.append(lowered.as_text().count("optimization_barrier"))
    one_layer, two_layers = barriers  # of the bodies of two loops
    assert two_layers - 2 * one_layer >= 2 * 2  # of each layer before its recomputation, and behind its gradients
