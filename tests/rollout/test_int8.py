"""Rollouts from int8 copies of the weights. Expectations are numpy's, from the trained weights alone."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import DECODER, tiny
from tiny_engine import (
    EOS,
    ONE_BUCKET,
    Letters,
    OfGpu,
    answers_of,
    make_pass,
    mesh_of,
    plain_logits,
    random_requests,
    tiny_params,
)

from podium.certify.tiny import tiny_clone
from podium.config.lora import MATRICES
from podium.models.architecture import Lora, rollout_decoder
from podium.models.blocks.weights import Codes
from podium.models.linear import integer_product
from podium.models.params import GROUP_AXES, ROLLOUT_AXES, TRAIN_AXES, is_adapter, param_specs
from podium.models.presets import preset_decoder
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.engine_weights import abstract_weights, engine_decoder, keeps, make_sync
from podium.rollout.programs import abstract_engine_cache, abstract_slots, make_engine_programs
from podium.sharding import ShardingRules, init_params, make_mesh

pytestmark = pytest.mark.usefixtures("whole_slots")

INT8, W8A8 = (dataclasses.replace(DECODER, rollout_weights=how) for how in ("int8", "w8a8"))
LORA = Lora(rank=2, alpha=4.0, targets=("q", "v", "up"))
INPUTS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
"""Input dimensions of each matrix, which come after that of the layers."""


def rounded(params, names=MATRICES):
    """The weights with the values of their int8 codes, and the scales [L, out...] of those."""
    found, scales = dict(params), {}
    for name in names:
        value = np.asarray(params[f"layers.{name}"], np.float32)
        inputs = tuple(range(1, 1 + INPUTS[name]))
        scale = np.abs(value).max(axis=inputs, keepdims=True) / np.float32(127)
        found[f"layers.{name}"] = np.clip(np.rint(value / scale), -127, 127) * scale
        scales[name] = scale.squeeze(inputs)
    return found, scales


def of_codes(synced, params):
    """These weights with the values of an engine's codes, which are within half a step of them."""
    found = dict(params)
    for name in MATRICES:
        codes, scale = (np.asarray(synced[f"layers.{name}{part}"]) for part in ("", ".scale"))
        assert (codes.dtype, scale.dtype) == (np.int8, np.float32)
        steps = np.expand_dims(scale, tuple(range(1, 1 + INPUTS[name])))
        found[f"layers.{name}"] = codes * steps
        error = np.abs(found[f"layers.{name}"] - np.asarray(params[f"layers.{name}"]))
        assert np.all(error <= 0.5 * steps * (1 + 1e-5))
    return found


def engine_of(decoder, params=None, *, devices=1, dtype=jnp.float32, frozen=None):
    rules = ShardingRules(mesh_of(devices), ROLLOUT_AXES)
    engine = RolloutEngine(Device(ONE_BUCKET, decoder, rules, dtype=dtype), Letters(EOS))
    if frozen is not None:
        engine.device.freeze(frozen)
    engine.load(tiny_params() if params is None else params)
    return engine


def differences(engine, params):
    """Of the sampler's log-probabilities from those of one plain pass with these weights."""
    for request, answer in zip(
        requests := random_requests(3, config=ONE_BUCKET), answers_of(engine, requests), strict=True
    ):
        for each in answer:
            tokens = [*request.prompt, *each.tokens]
            logprobs = jax.nn.log_softmax(plain_logits(params, tokens), axis=-1)
            own = logprobs[np.arange(len(request.prompt), len(tokens)) - 1, each.tokens]
            yield np.abs(np.asarray(own) - each.sampled_logprobs).max()


def test_codes_are_within_half_a_step_of_the_float32_masters_and_scales_are_by_output():
    params = tiny_params()
    synced = engine_of(INT8, params).device.params
    (near, scales), found = rounded(params), of_codes(synced, params)
    for name in MATRICES:
        np.testing.assert_allclose(synced[f"layers.{name}.scale"], scales[name], rtol=1e-6)
        np.testing.assert_allclose(found[f"layers.{name}"], near[f"layers.{name}"], atol=1e-6)
    others = {name for name in synced if name.removeprefix("layers.").removesuffix(".scale") not in MATRICES}
    assert all(np.array_equal(synced[name], params[name]) for name in others)


def test_the_samplers_logprobs_are_those_of_a_dense_model_with_the_codes_values():
    params = tiny_params()
    assert max(differences(engine_of(INT8, params), rounded(params)[0])) <= 1e-5
    assert max(differences(engine_of(INT8, params), params)) > 1e-3


def test_products_of_integers_stay_near_those_of_the_codes_values_and_are_other_ones():
    params = tiny_params()
    found = list(differences(engine_of(W8A8, params), rounded(params)[0]))
    assert 1e-4 < max(found) < 0.5


@pytest.mark.parametrize(
    ("pattern", "sizes", "parts"),
    [("bthq,hqd->btd", (4, 6), (2, 3)), ("btf,fd->btd", (8,), (4,)), ("btd,df->btf", (8,), (1,))],
)
def test_a_product_of_integers_is_numpys_with_a_scale_for_each_token_and_part(pattern, sizes, parts):
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 3, *sizes)).astype(np.float32)
    x[0, 1] = 0.0
    codes = random.integers(-127, 128, (*sizes, 5)).astype(np.int8)
    scale = random.uniform(0.1, 1.0, 5).astype(np.float32)
    found = integer_product(pattern, jnp.asarray(x), Codes(jnp.asarray(codes), jnp.asarray(scale), jnp.int8, parts))
    for b, t in np.ndindex(2, 3):
        expected = np.zeros(5)
        for part in np.ndindex(*parts):
            where = tuple(
                slice(size // n * i, size // n * (i + 1)) for size, n, i in zip(sizes, parts, part, strict=True)
            )
            row = x[b, t][where].reshape(-1)
            step = max(np.abs(row).max() / np.float32(127), np.float32(1e-30))
            sums = np.rint(row / step).astype(np.int64) @ codes[where].reshape(-1, 5).astype(np.int64)
            expected += sums * step * scale
        np.testing.assert_allclose(found[b, t], expected, rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_finite_do_not_become_numbers():
    params = tiny_params()
    params["layers.up"] = params["layers.up"].at[1, 0, 0].set(jnp.nan)
    engine = engine_of(W8A8, params)
    with pytest.raises(ValueError, match=r"weight layers.up.scale of layer 1 is not finite"):
        answers_of(engine, random_requests(1, config=ONE_BUCKET))


def lowered_decode(decoder, rules):
    """The lines of a decode program, as lowered."""
    programs = make_engine_programs(ONE_BUCKET, decoder, rules, jnp.dtype(jnp.bfloat16))
    cache = abstract_engine_cache(ONE_BUCKET, decoder, rules, jnp.dtype(jnp.bfloat16))
    weights = abstract_weights(decoder, rules, jnp.dtype(jnp.bfloat16))
    return (
        programs.decode.lower(weights, cache, *abstract_slots(ONE_BUCKET, decoder, 8, rules, penalised=False))
        .as_text()
        .splitlines()
    )


def dots_of(decoder, rules):
    """The operand formats of the products in a decode program."""
    lines = [line.rpartition(" : ")[2] for line in lowered_decode(decoder, rules) if "dot_general" in line]
    return [line for line in lines if "xi8>" in line]


def test_products_with_matrices_have_int8_operands():
    rules = ShardingRules(mesh_of(1), ROLLOUT_AXES)
    found = dots_of(W8A8, rules)
    assert len(found) == len(MATRICES)  # in the loop over layers
    assert all(line.count("xi8>") == 2 and line.endswith("xi32>") for line in found)
    assert not dots_of(INT8, rules)


@pytest.mark.parametrize("lora", [None, dataclasses.replace(LORA, base="int8", shared=True)])
def test_codes_become_operands_and_only_their_products_are_scaled(lora):
    rules = ShardingRules(mesh_of(1), ROLLOUT_AXES)
    decoder = INT8 if lora is None else dataclasses.replace(DECODER, lora=lora)
    lines = lowered_decode(decoder, rules)
    specs = param_specs(DECODER)
    for name in MATRICES:
        shape = "x".join(map(str, specs[f"layers.{name}"].shape[1:]))
        made = {line.split()[2] for line in lines if re.search(rf"(-> | : )tensor<{shape}x\w+>$", line)}
        assert "stablehlo.convert" in made, "codes are converted to the products' format"
        assert "stablehlo.multiply" not in made


def bytes_of(decoder, dtype=jnp.bfloat16):
    weights = abstract_weights(decoder, ShardingRules(mesh_of(1), ROLLOUT_AXES), jnp.dtype(dtype))
    return sum(each.size * each.dtype.itemsize for each in weights.values())


def test_the_layers_of_a_rollout_need_half_the_memory():
    large = preset_decoder("Qwen/Qwen3-8B")
    ends = 2 * 2 * large.vocab * large.width
    int8 = bytes_of(dataclasses.replace(large, rollout_weights="int8"))
    assert 0.5 < (int8 - ends) / (bytes_of(large) - ends) < 0.502


@pytest.mark.parametrize(("how", "mesh"), [("int8", "dp:2,tp:2"), ("w8a8", "fsdp:2,tp:2")])
def test_groups_of_devices_have_their_parts_of_the_codes(how, mesh):
    decoder = dataclasses.replace(DECODER, rollout_weights=how)
    rules = ShardingRules(make_mesh(mesh, jax.devices()[:4]), GROUP_AXES)
    params = init_params(0, param_specs(DECODER), ShardingRules(rules.mesh, TRAIN_AXES))
    synced = make_sync(decoder, rules, jnp.dtype("float32"))(params)
    alone = make_sync(decoder, ShardingRules(mesh_of(1), ROLLOUT_AXES), jnp.dtype("float32"))(
        {name: jnp.asarray(np.asarray(value)) for name, value in params.items()}
    )
    here = {name: np.asarray(value)[:300] if name == "embed" else np.asarray(value) for name, value in synced.items()}
    assert all(np.array_equal(here[name], value) for name, value in alone.items())
    states = hidden_states(synced, engine_decoder(decoder, rules), rules)
    one = ShardingRules(mesh_of(1), ROLLOUT_AXES)
    expected = hidden_states(alone, engine_decoder(decoder, one), one)
    # parts of the inputs of o and down have their own scales, which changes the rounding of activations
    bar = 1e-5 if how == "int8" else 0.02
    assert np.abs(states - expected).max() <= bar * np.abs(expected).max()


def hidden_states(params, decoder, rules):
    """The hidden states of two sequences, by one pass."""
    return np.asarray(make_pass(decoder, rules)(params))


@pytest.mark.parametrize(("how", "biased"), [("int8", False), ("w8a8", True)])
def test_a_gpus_layers_side_by_side_have_the_same_codes(how, biased):
    decoder = dataclasses.replace(tiny(qkv_bias=biased, qk_norm=biased), rollout_weights=how)
    params = init_params(0, param_specs(decoder), ShardingRules(mesh_of(1), TRAIN_AXES))
    found = {}
    for rules in (OfGpu(mesh_of(1), ROLLOUT_AXES), ShardingRules(mesh_of(1), ROLLOUT_AXES)):
        synced = make_sync(decoder, rules, jnp.dtype("float32"))(params)
        found[rules.platform] = hidden_states(synced, engine_decoder(decoder, rules), rules)
        assert synced.keys() == abstract_weights(decoder, rules, jnp.dtype("float32")).keys()
    assert np.abs(found["gpu"] - found["cpu"]).max() <= 1e-5 * np.abs(found["cpu"]).max()


@pytest.mark.parametrize("base", ["bfloat16", "int8"])
@pytest.mark.parametrize("merged", [False, True])
def test_with_adapters_the_base_alone_is_int8_or_what_they_are_merged_into(base, merged):
    lora = dataclasses.replace(LORA, base=base, merged=merged)
    decoder = dataclasses.replace(INT8, lora=lora)
    rules = ShardingRules(mesh_of(1), ROLLOUT_AXES)
    specs = param_specs(dataclasses.replace(decoder, lora=LORA))
    params = init_params(0, specs, ShardingRules(mesh_of(1), TRAIN_AXES))
    adapters = {name: value + 0.02 for name, value in params.items() if is_adapter(name)}
    stored = {name: value.astype(jnp.bfloat16) for name, value in tiny_params().items()}
    plain = {name: np.asarray(value, np.float32) for name, value in stored.items()}
    if base == "int8":
        stored = make_sync(dataclasses.replace(INT8, lora=None), rules, jnp.dtype("bfloat16"))(plain)
        plain = of_codes(stored, plain)
    shared = keeps(stored, decoder, rules, jnp.dtype("bfloat16"))
    assert shared == (merged or base == "int8")
    engine = engine_of(decoder, adapters, dtype=jnp.float32, frozen=stored)
    held = engine.device.params
    assert held["layers.q"].dtype == jnp.int8
    assert ("layers.q.lora_a" in held) == (not merged)
    folded = dict(plain) if merged else of_codes(held, plain)
    for name in LORA.targets:
        a, b = (np.asarray(adapters[f"layers.{name}.lora_{half}"], np.float32) for half in "ab")
        folded[f"layers.{name}"] = folded[f"layers.{name}"] + LORA.scale * np.einsum("ldr,lr...->ld...", a, b)
    expected = of_codes(held, folded) if merged else folded
    assert max(differences(engine, expected)) <= 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3.5-35B-A3B",
        pytest.param("openai/gpt-oss-20b", marks=pytest.mark.long),
        pytest.param("google/gemma-3-1b-it", marks=pytest.mark.long),
    ],
)
def test_other_families_keep_experts_and_routers_as_they_are(name):
    decoder = dataclasses.replace(tiny_clone(preset_decoder(name)), rollout_weights="w8a8")
    rules = ShardingRules(mesh_of(1), ROLLOUT_AXES)
    plain = dataclasses.replace(decoder, rollout_weights="dtype")
    params = init_params(0, param_specs(plain), ShardingRules(mesh_of(1), TRAIN_AXES))
    synced = make_sync(decoder, rules, jnp.dtype("float32"))(params)
    rounded_names = {name.rpartition(".")[2] for name, value in synced.items() if value.dtype == jnp.int8}
    assert {"q", "o"} <= rounded_names <= set(MATRICES)
    states = hidden_states(synced, rollout_decoder(decoder), rules)
    expected = hidden_states(params, plain, rules)
    assert 0 < np.abs(states - expected).max() < 0.2 * np.abs(expected).max()
