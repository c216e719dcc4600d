"""Adapters beside experts: each expert has its own, wherever it is stored, and files name them one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import error_of_scale, hf_config

from podium.certify.naive import in_float64
from podium.certify.naive import logits as naive_logits
from podium.certify.tiny import random_weights
from podium.config.lora import EXPERTS, LoraConfig
from podium.config.schema import RolloutConfig
from podium.models.adapters import merged
from podium.models.architecture import Lora, ModelError, with_lora
from podium.models.attention.packed_attention import causal_attention
from podium.models.decoder import PassSettings, forward
from podium.models.files.hf_config import from_hf_config
from podium.models.files.peft import load_adapter, save_adapter
from podium.models.flops import trained_elements
from podium.models.layouts import Layout
from podium.models.params import GATHERED_AXES, TRAIN_AXES, count, frozen_dtype, is_adapter, param_specs, trained_specs
from podium.models.presets import preset_decoder
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.sampling.sampler import rollout_rules
from podium.sharding import ShardingRules, make_mesh, param_shardings

pytestmark = pytest.mark.usefixtures("whole_slots")

LORA = Lora(rank=2, alpha=3.0, targets=("q", *EXPERTS))
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 8)).astype(np.int32)


@functools.cache
def decoder_and_weights(case: str = "qwen3_moe"):
    layers = {"num_hidden_layers": 2 if case == "gpt_oss" else 1}
    decoder = dataclasses.replace(from_hf_config(hf_config(case) | layers, case), lora=LORA)
    return decoder, random_weights(decoder, seed=0)


def rules_on(mesh: str, devices: int) -> tuple[ShardingRules, ShardingRules]:
    layout = ShardingRules(make_mesh(mesh, jax.devices()[:devices]), TRAIN_AXES)
    return layout, ShardingRules(layout.mesh, GATHERED_AXES, stored=TRAIN_AXES)


@functools.cache
def pass_on(mesh: str, devices: int, case: str = "qwen3_moe", folded: bool = False):
    """Value and gradients of the adapters; `folded`: of a pass with W + scale AB in their place."""
    decoder, weights = decoder_and_weights(case)
    layout, rules = rules_on(mesh, devices)
    shardings = param_shardings(param_specs(decoder), layout)
    params = {name: jax.device_put(x, shardings[name]) for name, x in weights.items()}
    adapters = {name: x for name, x in params.items() if is_adapter(name)}
    plain = dataclasses.replace(decoder, lora=None) if folded else decoder

    def loss(adapters):
        used = params | adapters
        for place in decoder.places if folded else ():
            own = {name: x for name, x in used.items() if name.startswith(place.prefix)}
            used = {name: x for name, x in used.items() if name not in own}
            used |= jax.vmap(lambda layer: merged(layer, LORA.scale))(own)

        def attend(carried, at, q, k, v):
            return carried, causal_attention(q, k, v, jnp.tril(jnp.ones((8, 8), bool))[None], at.sinks)

        positions = jnp.broadcast_to(jnp.arange(8)[None], (8, 8))
        given = {"config": plain, "rules": rules, "dtype": jnp.dtype("float32"), "remat": "layer"}
        return jnp.sum(jnp.sin(forward(used, TOKENS, positions, attend, settings=PassSettings(**given))[0]))

    value, gradients = jax.jit(jax.value_and_grad(loss))(adapters)
    return float(value), jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize("case", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_adapters_beside_experts_are_the_experts_with_them_added(case):
    value, gradients = pass_on("dp:1", 1, case)
    expected, wanted = pass_on("dp:1", 1, case, folded=True)
    assert abs(value - expected) <= 1e-5 * abs(expected)
    assert {name.rsplit(".", 2)[-2] for name in gradients} == {"q", *EXPERTS}
    for name, gradient in gradients.items():
        assert error_of_scale(gradient, wanted[name]) <= 1e-5, name
        assert np.abs(gradient).max() > 0


@pytest.mark.parametrize(
    "mesh", ["fsdp:2,tp:2,sp:2", *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("fsdp:8", "dp:4,tp:2"))]
)
def test_devices_that_share_adapted_experts_compute_what_one_does(mesh):
    value, gradients = pass_on(mesh, 8)
    expected, wanted = pass_on("dp:1", 1)
    assert abs(value - expected) <= 1e-5 * abs(expected)
    for name, gradient in gradients.items():
        assert error_of_scale(gradient, wanted[name]) <= 1e-5, name


@pytest.mark.parametrize(
    ("merge", "layout", "devices"),
    [
        (False, Layout(name="hybrid", group=4), 8),
        pytest.param(True, Layout(name="replicated"), 1, marks=pytest.mark.long),
        pytest.param(False, Layout(name="replicated"), 1, marks=pytest.mark.long),
    ],
)
def test_the_sampler_s_log_probabilities_are_those_of_plain_float64(merge, layout, devices):
    decoder, weights = decoder_and_weights()
    decoder = dataclasses.replace(decoder, lora=dataclasses.replace(LORA, merged=merge))
    mesh = make_mesh("auto", jax.devices()[:devices])
    rules = rollout_rules(layout, decoder, mesh)
    config = RolloutConfig(
        max_prompt_tokens=8, max_new_tokens=4, slots=8, refill_steps=2, prefill_rows=8, page_tokens=4
    )
    engine = RolloutEngine(Device(config, decoder, rules, dtype=jnp.dtype("float32")), None)
    shardings = param_shardings(param_specs(decoder), ShardingRules(mesh, TRAIN_AXES))
    params = {name: jax.device_put(x, shardings[name]) for name, x in weights.items()}
    engine.device.freeze({name: x for name, x in params.items() if not is_adapter(name)})
    engine.load({name: x for name, x in params.items() if is_adapter(name)})
    prompt = tuple(TOKENS[0, :5].tolist())
    answers, _ = engine.generate([Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=4), seed=0)])
    drawn = answers[0][0].tokens
    with in_float64():
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in weights.items()}
        compute = jax.jit(lambda tokens: jax.nn.log_softmax(naive_logits(wide, tokens, decoder), axis=-1))
        table = compute(jnp.array([*prompt, *drawn]))
    expected = np.asarray(table)[np.arange(len(drawn)) + 4, drawn]
    assert error_of_scale(answers[0][0].full_logprobs, expected) <= 1e-5


def test_a_file_of_adapters_names_each_expert_and_is_read_back(tmp_path):
    decoder, weights = decoder_and_weights()
    adapters = {name: jnp.asarray(x) for name, x in weights.items() if is_adapter(name)}
    frozen = {name: jnp.asarray(x) for name, x in weights.items() if not is_adapter(name)}
    save_adapter(adapters, frozen, decoder, tmp_path / "adapter", model="base")
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.experts.5.gate_proj.lora_A.weight"
    np.testing.assert_array_equal(file[name], weights["layers.expert_gate.lora_a"][0, 5].T)
    for mesh, devices in (("dp:1", 1), ("fsdp:2,tp:2,sp:2", 8)):
        found = load_adapter(tmp_path / "adapter", decoder, rules_on(mesh, devices)[0], frozen)
        for name, value in adapters.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_file_has_no_names_for_experts_that_are_stored_in_one_tensor(tmp_path):
    decoder, weights = decoder_and_weights("gpt_oss")
    adapters = {name: jnp.asarray(x) for name, x in weights.items() if is_adapter(name)}
    with pytest.raises(
        ModelError,
        match=r"expert_gate: PEFT has no name for .* a gpt_oss stores in one tensor; export the merged",
    ):
        save_adapter(adapters, {}, decoder, tmp_path / "adapter", model="base")


def test_experts_are_adapted_only_by_name_and_stay_in_bfloat16():
    model = preset_decoder("Qwen/Qwen3-30B-A3B")
    assert with_lora(model, LoraConfig()).lora.targets == ("q", "k", "v", "o")
    named = with_lora(model, LoraConfig(rank=8, targets=["attention", "experts"], base="int8"))
    assert named.lora.targets == ("q", "k", "v", "o", *EXPERTS)
    assert frozen_dtype("layers.expert_gate", named) == "bfloat16"
    assert frozen_dtype("layers.q", named) == "int8"
    assert "layers.expert_gate.scale" not in param_specs(named)
    of_experts = 48 * 128 * 3 * (2048 + 768) * 8
    rest = count(trained_specs(named)) - of_experts
    assert trained_elements(named) == rest + of_experts * 8 // 128
    with pytest.raises(ModelError, match=r"no matrix experts to which an adapter can be added"):
        with_lora(preset_decoder("Qwen/Qwen3-8B"), LoraConfig(targets=["experts"]))
