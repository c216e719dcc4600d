"""What Qwen3.5 has that others have not: delta nets, gated attention, rotation of a part of a head."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_passes import POSITIONS, PROMPTS, SEGMENTS, TOKENS, WEIGHING, naive_pass
from safetensors.numpy import load_file, save_file
from tiny_models import error_of_scale, hf_config, hf_tensors, logits_of, make_logits, rules_on, tokens_of, write_model

from podium.certify.naive import in_float64
from podium.certify.naive import logits as naive_logits
from podium.certify.tiny import random_weights, tiny_clone
from podium.config.lora import LoraConfig
from podium.models.architecture import DecoderConfig, ModelError, with_lora
from podium.models.attention.mask import Visibility, packed_rows
from podium.models.attention.packed_attention import row_attention
from podium.models.blocks.attention import Attention
from podium.models.blocks.delta import DeltaNet
from podium.models.decoder import PassSettings, forward, head_weights
from podium.models.files.hf import load_params, save_model
from podium.models.files.hf_config import from_hf_config, to_hf_config
from podium.models.files.peft import load_adapter, save_adapter
from podium.models.files.source import read_architecture
from podium.models.logprobs import logits_at
from podium.models.params import GATHERED_AXES, TRAIN_AXES, param_specs, trained_specs
from podium.models.presets import preset_decoder
from podium.sharding import ShardingRules, make_mesh

CASE, MIXTURE = "qwen3_5", "qwen3_5_moe"


@functools.cache
def decoder_and_weights(case: str = CASE):
    said = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    decoder = from_hf_config(hf_config(case) | said | {"num_hidden_layers": 2}, case)
    return decoder, random_weights(decoder, seed=0)


@functools.cache
def pass_on(mesh: str, devices: int, groups: int = 1, case: str = CASE):
    """Value and gradients of a training pass over packed rows."""
    decoder, weights = decoder_and_weights(case)
    layout = ShardingRules(make_mesh(mesh, jax.devices()[:devices]), TRAIN_AXES)
    rules = ShardingRules(layout.mesh, GATHERED_AXES, stored=TRAIN_AXES)
    specs = param_specs(decoder)
    params = {name: jax.device_put(x, layout.sharding(*specs[name].axes)) for name, x in weights.items()}

    def loss(params):
        segments, prompts = jnp.asarray(SEGMENTS), jnp.asarray(PROMPTS)
        visibility = Visibility(segments, prompts)
        carried = [packed_rows(segments, prompts), visibility]

        def attend(rows, at, q, k, v):
            return rows, row_attention("blocks", rows, rules)(q, k, v, at.sinks)

        hidden, _, _ = forward(
            params,
            jnp.asarray(TOKENS),
            jnp.asarray(POSITIONS),
            attend,
            carried,
            recur=lambda rows, at, initial, advance: (rows, advance.packed(rows)),
            settings=PassSettings(
                config=decoder, rules=rules, dtype=jnp.dtype("float32"), remat="layer", groups=groups
            ),
        )
        return jnp.mean(logits_at(hidden, head_weights(params, rules, jnp.dtype("float32")), 1.0) * WEIGHING)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), jax.tree.map(np.asarray, gradients)


@functools.cache
def expected_pass(case: str):
    return naive_pass(*decoder_and_weights(case))


@pytest.mark.parametrize("case", [MIXTURE, pytest.param(CASE, marks=pytest.mark.long)])  # the mixture has both mixers
def test_packed_rows_and_their_gradients_are_those_of_plain_float64(case):
    value, gradients = pass_on("dp:1", 1, case=case)
    expected, size, wanted = expected_pass(case)
    assert abs(value - expected) <= 1e-5 * size
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert error_of_scale(gradient, wanted[name]) <= 3e-5, name


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["fsdp:2,tp:2,sp:2", "fsdp:8", "dp:4,tp:2", "sp:2,fsdp:4", "sp:4,dp:2"])
@pytest.mark.parametrize("case", [CASE, MIXTURE])
def test_devices_that_share_tokens_and_heads_compute_what_one_does(mesh, case):
    value, gradients = pass_on(mesh, 8, case=case)
    expected, wanted = pass_on("dp:1", 1, case=case)
    _, size, _ = expected_pass(case)  # the value itself may be near 0
    assert abs(value - expected) <= 1e-5 * size
    for name, gradient in gradients.items():
        assert error_of_scale(gradient, wanted[name]) <= 3e-5, name


@pytest.mark.long
def test_rows_in_groups_compute_what_they_do_together():
    value, gradients = pass_on("dp:1", 1, groups=2)
    expected, wanted = pass_on("dp:1", 1)
    _, size, _ = expected_pass(CASE)
    assert abs(value - expected) <= 1e-5 * size
    for name, gradient in gradients.items():
        assert error_of_scale(gradient, wanted[name]) <= 3e-5, name


def test_each_weight_lands_where_the_einsums_expect_it(tmp_path):
    """Queries, keys and values one after another; of attention, a query and its gate head by head."""
    stored, source = hf_tensors(CASE), write_model(tmp_path, CASE)
    params = load_params(source, read_architecture(source), rules_on("auto", 1))
    net, attention = "model.layers.1.linear_attn.", "model.layers.3.self_attn."
    same = np.testing.assert_array_equal
    same(params["layers.1.q"].shape, (1, 32, 2, 8))
    same(params["layers.1.k"][0, :, 1, 3], stored[net + "in_proj_qkv.weight"][16 + 8 + 3])
    same(params["layers.1.v"][0, :, 2, 5], stored[net + "in_proj_qkv.weight"][32 + 2 * 12 + 5])
    same(params["layers.1.v_taps"][0, :, 2, 5], stored[net + "conv1d.weight"][32 + 2 * 12 + 5, 0])
    same(params["layers.1.b"][0, :, 2], stored[net + "in_proj_b.weight"][2])
    same(params["layers.1.log_decay"][0], stored[net + "A_log"])
    same(params["layers.1.o"][0, 2, 5], stored[net + "out_proj.weight"][:, 2 * 12 + 5])
    same(params["layers.3.q"][0, :, 2, 5], stored[attention + "q_proj.weight"][2 * 32 + 5])
    same(params["layers.3.q_gate"][0, :, 2, 5], stored[attention + "q_proj.weight"][2 * 32 + 16 + 5])


def test_each_expert_s_weight_lands_where_the_einsums_expect_it(tmp_path):
    """All gates' rows come before all rows of up; an expert for every token has its own gate."""
    stored, source = hf_tensors(MIXTURE), write_model(tmp_path, MIXTURE)
    params = load_params(source, read_architecture(source), rules_on("auto", 1))
    layer, same = "model.layers.1.mlp.", np.testing.assert_array_equal
    same(params["layers.1.expert_gate"][0, 5, :, 3], stored[layer + "experts.gate_up_proj"][5, 3])
    same(params["layers.1.expert_up"][0, 5, :, 3], stored[layer + "experts.gate_up_proj"][5, 24 + 3])
    same(params["layers.1.expert_down"][0, 5, 3], stored[layer + "experts.down_proj"][5, :, 3])
    same(params["layers.1.up"][0, :, 7], stored[layer + "shared_expert.up_proj.weight"][7])
    same(params["layers.1.shared_router"][0, :, 0], stored[layer + "shared_expert_gate.weight"][0])
    same(params["layers.1.router"][0, :, 6], stored[layer + "gate.weight"][6])


def test_a_mixture_whose_experts_have_tensors_of_their_own_is_the_same_model(tmp_path):
    source, apart = (write_model(tmp_path / name, MIXTURE) for name in ("joined", "apart"))
    tensors, pattern = hf_tensors(MIXTURE), re.compile(r"(.*experts)\.(gate_up|down)_proj")
    for name in list(tensors):
        if found := pattern.fullmatch(name):
            whole, parts = tensors.pop(name), ("gate", "up") if found[2] == "gate_up" else ("down",)
            for expert, each in itertools.product(range(len(whole)), parts):
                rows = np.split(whole[expert], len(parts))[parts.index(each)]
                tensors[f"{found[1]}.{expert}.{each}_proj.weight"] = np.ascontiguousarray(rows)
    save_file(tensors, apart.path / "model.safetensors")
    config = read_architecture(source)
    found, expected = (load_params(each, config, rules_on("auto", 1)) for each in (apart, source))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("case", [MIXTURE, pytest.param(CASE, marks=pytest.mark.long)])  # the mixture has both mixers
def test_an_export_has_the_same_bits(case, tmp_path):
    source = write_model(tmp_path / "model", case)
    config = read_architecture(source)
    for mesh, devices in (("auto", 1), ("fsdp:2,tp:2", 4)):
        folder = tmp_path / f"export{devices}"
        save_model(load_params(source, config, rules_on(mesh, devices)), config, None, folder, dtype="float32")
        written, theirs = load_file(folder / "model.safetensors"), hf_tensors(case)
        assert written.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_array_equal(written[name], value, err_msg=name)


def test_layers_that_predict_ahead_are_left_out(tmp_path, caplog):
    source = write_model(tmp_path, CASE)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.norm.weight": np.ones(3, np.float32)}, file)
    with caplog.at_level(logging.WARNING):
        load_params(source, read_architecture(source), rules_on("auto", 1))
    assert "1 tensors that predict tokens after the next (mtp) are left out" in caplog.text
    assert "vision" not in caplog.text


SMALL = {
    CASE: (
        *("log_decay", "decay_bias", "a", "b", "z", "q_taps", "k_taps", "v_taps"),
        *("out_scale", "q_gate", "k_norm"),
    ),
    MIXTURE: ("shared_router", "gate", "router"),
}


@pytest.mark.parametrize("case", SMALL)
def test_every_small_weight_shows_in_the_logits(case, tmp_path):
    """Else the recorded logits would hold nothing of them."""
    source, tokens, rules = write_model(tmp_path / "model", case), tokens_of(case), rules_on("auto", 1)
    config = read_architecture(source)
    compute, params = make_logits(config, rules), load_params(source, config, rules)
    plain = np.asarray(compute(params, tokens))
    for name in SMALL[case]:
        without = {key: 0 * value if key.endswith(f".{name}") else value for key, value in params.items()}
        assert error_of_scale(np.asarray(compute(without, tokens)), plain) > 1e-3, name
    whole = write_model(tmp_path / "other", case, rope_parameters={"rope_theta": 1000.0, "partial_rotary_factor": 1.0})
    assert error_of_scale(logits_of(whole, tokens), plain) > 1e-3


def mixers_of(decoder: DecoderConfig) -> list[type]:
    return [type(block.mixer) for block in decoder.blocks]


def test_three_layers_in_four_are_delta_nets_unless_the_config_says_otherwise():
    assert mixers_of(preset_decoder("Qwen/Qwen3.5-9B")) == (3 * [DeltaNet] + [Attention]) * 8
    said = hf_config(CASE) | {"full_attention_interval": 2}
    assert mixers_of(from_hf_config(said, "x")) == [DeltaNet, Attention] * 2
    assert [rope.dims for rope in preset_decoder("Qwen/Qwen3.5-9B").ropes] == [64]
    config = from_hf_config(hf_config(CASE), "x")
    assert from_hf_config(to_hf_config(config), "x") == config
    older = {key: value for key, value in hf_config(CASE).items() if key != "rope_parameters"}
    assert from_hf_config(older | {"rope_theta": 1000.0}, "x") == config  # a quarter turns where nothing is said


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model_type": "qwen3_next"}, r"'qwen3_next' is not supported: its delta nets store .* fused .*in_proj_qkvz"),
        ({"attn_output_gate": False}, "attn_output_gate False is not supported; it must be True or absent"),
        ({"linear_num_value_heads": 3}, "3 value heads of the delta nets do not share 2 key heads evenly"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "one for each of the 4 layers, full_attention or linear_attention",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.2}},
            "rotation of 3 of 16 elements of a head",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(said, message):
    with pytest.raises(ModelError, match=message):
        from_hf_config(hf_config(CASE) | said, "config.json")


def test_certify_s_clone_has_both_kinds_and_rotates_a_part_of_a_head():
    clone = tiny_clone(preset_decoder("Qwen/Qwen3.5-9B"))
    assert mixers_of(clone) == [DeltaNet, Attention]
    assert (clone.head_dim, [rope.dims for rope in clone.ropes]) == (16, [4])


def test_adapters_of_delta_nets_and_attention_are_added_to_their_matrices():
    """Against the naive form, which merges them."""
    decoder = with_lora(decoder_and_weights()[0], LoraConfig(rank=2, alpha=4.0, targets=["attention"]))
    weights = random_weights(decoder, seed=0)
    adapted = {name for name in weights if name.endswith(".lora_a")}
    assert adapted == {f"layers.{place}.{name}.lora_a" for place in (0, 1) for name in "qkvo"}
    found = make_logits(decoder, rules_on("auto", 1))({name: jnp.asarray(x) for name, x in weights.items()}, TOKENS[:1])
    with in_float64():
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in weights.items()}
        expected = np.asarray(jax.jit(lambda tokens: naive_logits(wide, tokens, decoder))(TOKENS[0]))
    assert error_of_scale(np.asarray(found[0]), expected) <= 1e-5


ADAPTERS = LoraConfig(rank=2, alpha=3.0, targets=["attention", "mlp"])


@pytest.fixture
def adapted(tmp_path):
    """A model's folder, its decoder and weights, random adapters, and a folder of these in PEFT's format."""
    source = write_model(tmp_path / "model", CASE)
    plain = read_architecture(source)
    decoder = with_lora(plain, ADAPTERS)
    base = load_params(source, plain, rules_on("auto", 1))
    random = np.random.default_rng(1)
    specs = trained_specs(decoder)
    adapters = {name: jnp.asarray(random.normal(0, 0.2, each.shape), jnp.float32) for name, each in specs.items()}
    save_adapter(adapters, base, decoder, tmp_path / "adapter", model="base")
    return source, decoder, base, adapters, tmp_path / "adapter"


def described_in(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def logits_of_merged(source, plain, folder):
    """Logits of the model with each adapter of the folder added to its tensor, as PEFT does."""
    said, factors = described_in(folder), load_file(folder / "adapter_model.safetensors")
    (file,) = source.path.glob("*.safetensors")
    tensors = load_file(file)
    for name in (name for name in factors if "lora_A" in name):
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b, own = factors[name], factors[name.replace("lora_A", "lora_B")], module.rpartition(".")[2]
        rank, alpha = (
            said.get(f"{key}_pattern", {}).get(own, said[key2])
            for key, key2 in (("rank", "r"), ("alpha", "lora_alpha"))
        )
        assert a.shape[0] == rank
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + alpha / rank * b @ a
    save_file(tensors, file)
    rules = rules_on("auto", 1)
    return np.asarray(make_logits(plain, rules)(load_params(source, plain, rules), TOKENS[:1]))


def test_adapters_in_peft_s_format_are_read_back_and_add_the_same(adapted):
    source, decoder, base, adapters, folder = adapted
    found = load_adapter(folder, decoder, rules_on("fsdp:2,tp:2", 4), base)
    assert found.keys() == adapters.keys()
    for name, value in adapters.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    ours = np.asarray(make_logits(decoder, rules_on("auto", 1))(base | adapters, TOKENS[:1]))
    plain = np.asarray(make_logits(decoder, rules_on("auto", 1))(base, TOKENS[:1]))
    merged = logits_of_merged(source, dataclasses.replace(decoder, lora=None), folder)
    assert error_of_scale(ours, merged) <= 3e-5  # sums in another order: 1.4e-5 on a CPU with AVX2 alone
    assert error_of_scale(plain, merged) > 1e-2


def test_adapters_have_the_names_of_transformers_modules(adapted):
    """Read from its source, since its models need torch."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "models" / "qwen3_5" / "modeling_qwen3_5.py"
    classes = dict(re.findall(r"^class (\w+)\(.*?\):\n(.*?)(?=^class |\Z)", path.read_text(), re.MULTILINE | re.DOTALL))
    *_, folder = adapted
    modules = {name.partition(".lora_")[0] for name in load_file(folder / "adapter_model.safetensors")}
    for module in modules:
        found = re.fullmatch(r"base_model\.model\.model\.layers\.\d+\.(\w+)\.(\w+)", module)
        assert found, module
        kind = re.search(rf"self\.{found[1]} = (\w+)\(", classes["Qwen3_5DecoderLayer"])
        assert kind, module
        assert f"self.{found[2]} = nn.Linear(" in classes[kind[1]], module
    said = described_in(folder)
    assert set(said["target_modules"]) == {module.rpartition(".")[2] for module in modules}
    assert {"in_proj_qkv", "out_proj", "q_proj", "o_proj", "gate_proj"} <= set(said["target_modules"])
    assert (said["rank_pattern"], said["alpha_pattern"]) == ({"in_proj_qkv": 6}, {"in_proj_qkv": 9.0})


def rewritten(folder, change, **said):
    """Change the tensors of an adapter's folder, and keys of its config."""
    path = folder / "adapter_model.safetensors"
    save_file({name: change(name, x) for name, x in load_file(path).items()}, path)
    (folder / "adapter_config.json").write_text(json.dumps(described_in(folder) | said))


def test_an_adapter_of_one_rank_beside_joined_matrices_is_read_as_one_of_each(adapted):
    """As PEFT itself makes it: queries, keys and values share the first factor."""
    source, decoder, base, _, folder = adapted
    random = np.random.default_rng(2)

    def shared(name, x):
        if "in_proj_qkv" not in name:
            return x
        return random.normal(0, 0.2, (2, x.shape[1]) if "lora_A" in name else (len(x), 2)).astype(np.float32)

    rewritten(folder, shared, rank_pattern={}, alpha_pattern={})
    found = load_adapter(folder, decoder, rules_on("auto", 1), base)
    np.testing.assert_array_equal(found["layers.0.q.lora_a"], found["layers.0.v.lora_a"])
    ours = np.asarray(make_logits(decoder, rules_on("auto", 1))(base | found, TOKENS[:1]))
    assert error_of_scale(ours, logits_of_merged(source, dataclasses.replace(decoder, lora=None), folder)) <= 1e-5


def test_adapters_of_what_has_none_are_refused(adapted):
    """The rows of gates beside queries; and what joins one matrix's first factor with another's second."""
    *_, decoder, base, _, folder = adapted

    def read():
        return load_adapter(folder, decoder, rules_on("auto", 1), base)

    with pytest.raises(
        ModelError, match=r"alpha_pattern .* it must be \{'in_proj_qkv': 9.0\}, which gives each matrix"
    ):
        rewritten(folder, lambda _, x: x, alpha_pattern={"in_proj_qkv": 3.0})
        read()
    for module, matrices in (("q_proj", "layers.3.q"), ("in_proj_qkv", "layers.0.q and layers.0.k and layers.0.v")):
        path = folder / "adapter_model.safetensors"
        kept = path.read_bytes()
        rewritten(
            folder,
            lambda name, x, module=module: x + 1 if f"{module}.lora_B" in name else x,
            alpha_pattern={"in_proj_qkv": 9.0},
        )
        with pytest.raises(
            ModelError, match=rf"it changes more than {matrices}, whose tensor .* leave this module out"
        ):
            read()
        path.write_bytes(kept)
