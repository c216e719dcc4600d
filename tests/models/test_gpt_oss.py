"""What gpt-oss has on the hub: experts of a layer in one tensor, in MXFP4, with gate and up in turn."""

import functools
import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from others_code import others_code
from packed_passes import POSITIONS, PROMPTS, ROWS, SEGMENTS, TOKENS, WEIGHING, T, naive_pass
from safetensors.numpy import load_file, save_file
from tiny_models import error_of_scale, hf_config, hf_tensors, logits_of, make_logits, rules_on, tokens_of, write_model

from podium.certify.tiny import random_weights
from podium.models.architecture import ModelError
from podium.models.attention.mask import Visibility
from podium.models.attention.packed_attention import row_attention
from podium.models.blocks.activation import Clamped
from podium.models.blocks.mathematics import gated
from podium.models.decoder import PassSettings, forward, head_weights
from podium.models.files import mxfp4
from podium.models.files.hf import load_params, save_model
from podium.models.files.hf_config import from_hf_config, to_hf_config
from podium.models.files.source import ModelSource, read_architecture
from podium.models.logprobs import logits_at
from podium.models.params import GATHERED_AXES, TRAIN_AXES, param_specs
from podium.models.presets import preset_decoder
from podium.models.recorded_experts import joined_choices, recorded_choices
from podium.sharding import ShardingRules, make_mesh

CASE = "gpt_oss"
PACKED = ("gate_up_proj", "down_proj")


def packed(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and scales of a tensor of this shape, with numbers of about 0.1."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 32, 16), dtype=np.uint8)
    return blocks, random.integers(120, 124, blocks.shape[:-1], dtype=np.uint8)


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """By the format's definition, number by number: [..., D] float32."""
    found = np.zeros((*blocks.shape[:-1], 32), np.float32)
    sizes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for place in np.ndindex(found.shape):
        half = (int(blocks[(*place[:-1], place[-1] // 2)]) >> 4 * (place[-1] % 2)) & 15
        found[place] = (-1) ** (half >> 3) * sizes[half & 7] * 2.0 ** (int(scales[place[:-1]]) - 127)
    return found.reshape(*blocks.shape[:-2], -1)


def write_packed(folder: Path) -> tuple[ModelSource, ModelSource]:
    """The same model twice: with experts in MXFP4 as on the hub, and in bfloat16 as transformers would read them."""
    tensors, whole = hf_tensors(CASE), hf_tensors(CASE)
    for seed, name in enumerate(name for name in sorted(tensors) if name.endswith(PACKED)):
        E, inner, outer = tensors.pop(name).shape
        blocks, scales = packed((E, outer, inner), seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = np.ascontiguousarray(unpacked(blocks, scales).swapaxes(1, 2).astype(ml_dtypes.bfloat16))
    config = hf_config(CASE)
    for kind, files in (("packed", tensors), ("whole", whole)):
        (folder / kind).mkdir()
        said = config | ({"quantization_config": {"quant_method": "mxfp4"}} if kind == "packed" else {})
        (folder / kind / "config.json").write_text(json.dumps(said))
        save_file(files, folder / kind / "model.safetensors")
    return tuple(ModelSource("folder", folder / kind, kind) for kind in ("packed", "whole"))


def test_four_bits_are_a_sign_and_a_size_and_the_first_of_a_byte_is_the_low_half():
    blocks = np.zeros((1, 16), np.uint8)
    blocks[0, :3] = (0x71, 0x2F, 0x80)
    found = mxfp4.decoded(blocks, np.array([128], np.uint8))
    np.testing.assert_array_equal(found[:6].astype(np.float32), [1, 12, -12, 2, 0, -0.0])
    blocks, scales = packed((3, 2, 64), 7)
    np.testing.assert_array_equal(mxfp4.decoded(blocks, scales).astype(np.float32), unpacked(blocks, scales))


@pytest.mark.parametrize(
    ("mesh", "devices"), [("auto", 1), pytest.param("fsdp:2,tp:2,sp:2", 8, marks=pytest.mark.long)]
)
def test_a_model_in_mxfp4_is_that_in_bfloat16_and_is_written_so(mesh, devices, tmp_path):
    (tmp_path / "hub").mkdir()
    source, whole = write_packed(tmp_path / "hub")
    config, rules = read_architecture(source), rules_on(mesh, devices)
    assert config == read_architecture(whole)
    found, expected = (load_params(each, config, rules) for each in (source, whole))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    save_model(found, config, None, tmp_path / "export")
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    written, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "export", whole.path))
    assert written.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(written[name], value.astype(ml_dtypes.bfloat16), err_msg=name)


def test_gate_and_up_alternate_in_a_tensor_of_all_experts(tmp_path):
    stored = hf_tensors(CASE)
    params = load_params(source := write_model(tmp_path, CASE), read_architecture(source), rules_on("auto", 1))
    layer = "model.layers.3.mlp.experts."  # the second of its place, the full attention's
    same = np.testing.assert_array_equal
    same(params["layers.1.expert_gate"][1, 5], stored[layer + "gate_up_proj"][5, :, ::2])
    same(params["layers.1.expert_up"][1, 5], stored[layer + "gate_up_proj"][5, :, 1::2])
    same(params["layers.1.expert_up_bias"][1, 5], stored[layer + "gate_up_proj_bias"][5, 1::2])
    same(params["layers.1.expert_down"][1, 5], stored[layer + "down_proj"][5])
    same(params["layers.1.router"][1], stored["model.layers.3.mlp.router.weight"].T)
    same(params["layers.1.sinks"][1], stored["model.layers.3.self_attn.sinks"])


def test_half_a_tensor_in_mxfp4_is_refused(tmp_path):
    source, _ = write_packed(tmp_path)
    tensors = load_file(source.path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, source.path / "model.safetensors")
    with pytest.raises(ModelError, match=r"mlp.experts.down_proj_blocks and _scales are not a tensor in MXFP4"):
        load_params(source, read_architecture(source), rules_on("auto", 1))


def test_the_clamped_unit_is_bounded_on_one_side_of_the_gate_and_both_of_the_rest():
    act = Clamped(alpha=1.702, limit=7.0)
    gate, up = jnp.array([9.0, -9.0, 1.0, 1.0]), jnp.array([0.5, 0.5, 9.0, -9.0])
    sigmoid = 1 / (1 + np.exp(-1.702 * np.array([7.0, -9.0, 1.0, 1.0])))
    expected = np.array([7.0, -9.0, 1.0, 1.0]) * sigmoid * np.array([1.5, 1.5, 8.0, -6.0])
    np.testing.assert_allclose(gated(gate, up, act), expected, rtol=1e-5)


def test_the_limit_and_every_small_weight_show_in_the_logits(tmp_path):
    """Else the recorded logits would hold nothing of them."""
    source, tokens, rules = write_model(tmp_path / "model", CASE), tokens_of(CASE), rules_on("auto", 1)
    config = read_architecture(source)
    compute, params = make_logits(config, rules), load_params(source, config, rules)
    plain = np.asarray(compute(params, tokens))
    other = write_model(tmp_path / "other", CASE, swiglu_limit=7.0)
    assert error_of_scale(logits_of(other, tokens), plain) > 1e-3
    for name in ("sinks", "o_bias", "router_bias", "expert_gate_bias", "expert_up_bias", "expert_down_bias"):
        without = {key: 0 * value if key.endswith(f".{name}") else value for key, value in params.items()}
        assert error_of_scale(np.asarray(compute(without, tokens)), plain) > 1e-3, name


def test_a_gpt_oss_is_read_in_the_hubs_words_and_in_those_of_transformers_5():
    hub = hf_config(CASE) | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    config = from_hf_config(hub, "config.json")
    rope = {**hub["rope_scaling"], "rope_theta": hub["rope_theta"]}
    assert from_hf_config({**hub, "rope_scaling": None, "rope_theta": None, "rope_parameters": rope}, "x") == config
    assert from_hf_config(to_hf_config(config), "x") == config
    assert [attention.window for _, attention in config.attention_layers()] == [8, None, 8]
    assert preset_decoder("openai/gpt-oss-20b").ropes[0].length == pytest.approx(0.1 * np.log(32) + 1)
    with pytest.raises(ModelError, match=r"quantization_config .* is not supported"):
        from_hf_config({**hub, "quantization_config": {"quant_method": "fp8"}}, "x")
    with pytest.raises(ModelError, match="attention_bias False is not supported; it must be True or absent"):
        from_hf_config({**hub, "attention_bias": False}, "x")


@functools.cache
def decoder_and_weights():
    decoder = from_hf_config(hf_config(CASE) | {"num_hidden_layers": 2}, CASE)
    return decoder, random_weights(decoder, seed=0)


@functools.cache
def pass_on(mesh: str, devices: int, backend: str = "blocks", replay: bool = False, dtype="float32", wide=False):
    """Value, gradients and choices of a training pass over packed rows; `replay` repeats those of one without."""
    decoder, weights = decoder_and_weights()
    layout = ShardingRules(make_mesh(mesh, jax.devices()[:devices]), TRAIN_AXES)
    rules = ShardingRules(layout.mesh, GATHERED_AXES, stored=TRAIN_AXES)
    specs = param_specs(decoder)
    params = {name: jax.device_put(x, layout.sharding(*specs[name].axes)) for name, x in weights.items()}
    recorded = None
    if replay:
        choices = pass_on(mesh, devices, backend, False, dtype, wide)[2]
        recorded = recorded_choices(jnp.asarray(choices), jnp.ones((ROWS, T), bool), decoder)

    def loss(params):
        def attend(carried, at, q, k, v):
            visibility = Visibility(*map(jnp.asarray, (SEGMENTS, PROMPTS, POSITIONS)), at.window)
            return carried, row_attention(backend, visibility, rules)(q, k, v, at.sinks)

        options = {"config": decoder, "rules": rules, "dtype": jnp.dtype(dtype), "remat": "layer", "wide": wide}
        hidden, _, told = forward(
            params, TOKENS, jnp.asarray(POSITIONS), attend, recorded=recorded, settings=PassSettings(**options)
        )
        logits = logits_at(hidden, head_weights(params, rules, jnp.dtype(dtype)), 1.0)
        return jnp.mean(logits * WEIGHING), joined_choices(told, decoder)

    (value, choices), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return float(value), jax.tree.map(np.asarray, gradients), np.asarray(choices)


@functools.cache
def expected_pass():
    return naive_pass(*decoder_and_weights())


@pytest.mark.parametrize("backend", ["blocks", pytest.param("reference", marks=pytest.mark.long)])
def test_packed_rows_and_their_gradients_are_those_of_plain_float64(backend):
    value, gradients, _ = pass_on("dp:1", 1, backend)
    expected, size, wanted = expected_pass()
    assert abs(value - expected) <= 1e-5 * size
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert error_of_scale(gradient, wanted[name]) <= 1e-5, name


MESHES = (
    "fsdp:2,tp:2,sp:2",
    *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("fsdp:8", "dp:4,tp:2", "sp:2,fsdp:4", "sp:4,dp:2")),
)


@pytest.mark.parametrize("mesh", MESHES)
def test_devices_that_share_experts_tokens_and_heads_compute_what_one_does(mesh):
    value, gradients, choices = pass_on(mesh, 8)
    expected, wanted, same = pass_on("dp:1", 1)
    assert abs(value - expected) <= 1e-5 * abs(expected)
    np.testing.assert_array_equal(choices, same)
    for name, gradient in gradients.items():
        assert error_of_scale(gradient, wanted[name]) <= 1e-5, name


@pytest.mark.long
def test_replay_of_its_own_choices_changes_no_bit():
    value, gradients, choices = pass_on("dp:1", 1, replay=True)
    expected, wanted, same = pass_on("dp:1", 1)
    assert value == expected
    np.testing.assert_array_equal(choices, same)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, wanted[name], err_msg=name)


@pytest.mark.long
def test_gradients_that_are_reduced_in_float32_are_near_those_of_float32():
    """Of products in bfloat16; biases and sinks, too."""
    _, gradients, choices = pass_on("dp:1", 1, dtype="bfloat16", wide=True)
    _, wanted, same = pass_on("dp:1", 1)
    assert np.mean(choices == same) > 0.9
    for name, gradient in gradients.items():
        assert gradient.dtype == np.float32
        assert np.linalg.norm(gradient - wanted[name]) <= 0.3 * np.linalg.norm(wanted[name]), name


@pytest.mark.parity
def test_mxfp4_is_decoded_as_by_transformers():
    """All bytes with all scales, bit for bit."""
    torch = others_code("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    every = np.arange(256, dtype=np.uint8)
    blocks = np.broadcast_to(every.reshape(1, 1, 16, 16), (1, 256, 16, 16)).copy()
    scales = np.broadcast_to(every[None, :, None], (1, 256, 16)).copy()
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.bfloat16)
    bits = theirs.contiguous().view(torch.int16).numpy()
    np.testing.assert_array_equal(mxfp4.decoded(blocks, scales).swapaxes(1, 2).view(np.int16), bits)
