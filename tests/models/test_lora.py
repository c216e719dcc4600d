"""Adapters beside frozen matrices, merged into them, and in the files of PEFT."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_decoder import DECODER, tiny
from tiny_models import make_logits, rules_on

from podium.config.lora import MATRICES
from podium.models.adapters import fingerprint, merged
from podium.models.architecture import Lora, ModelError, with_layers
from podium.models.files.peft import load_adapter, save_adapter
from podium.models.params import (
    LAYERS,
    TRAIN_AXES,
    count,
    frozen_specs,
    indivisible,
    is_adapter,
    param_specs,
    trained_specs,
)

LORA = Lora(rank=4, alpha=6.0, targets=MATRICES)
ADAPTED = tiny(tied=False, qkv_bias=True, qk_norm=True, lora=LORA)
TOKENS = np.random.default_rng(3).integers(0, DECODER.vocab, (2, 24)).astype(np.int32)


def weights(config=ADAPTED, rules=None):
    """Random weights and adapters, the second factors included."""
    random, rules = np.random.default_rng(0), rules or rules_on("auto", 1)
    return {
        name: jax.device_put(
            (spec.mean + 0.2 * random.standard_normal(spec.shape)).astype(np.float32), rules.sharding(*spec.axes)
        )
        for name, spec in param_specs(config).items()
    }


def dense(params, scale=LORA.scale):
    """W + sBA of every matrix, in plain einsums of each layer."""
    found = {name: value for name, value in params.items() if not is_adapter(name)}
    for name in MATRICES:
        a, b, w = params[f"layers.{name}.lora_a"], params[f"layers.{name}.lora_b"], found[LAYERS + name]
        sums = [
            np.tensordot(np.asarray(x, np.float64), np.asarray(y, np.float64), 1) for x, y in zip(a, b, strict=True)
        ]
        found[LAYERS + name] = jnp.asarray(np.asarray(w, np.float64) + scale * np.stack(sums), jnp.float32)
    return found


def logits(config, params, rules=None):
    return np.asarray(make_logits(config, rules or rules_on("auto", 1))(params, TOKENS))


def test_adapters_apart_merged_and_dense_give_the_same_logits():
    params = weights()
    apart = logits(ADAPTED, params)
    plain = dataclasses.replace(ADAPTED, lora=None)
    folded = {name: value for name, value in params.items() if not name.startswith(LAYERS)}
    layers = {name: value for name, value in params.items() if name.startswith(LAYERS)}
    folded |= jax.vmap(lambda layer: merged(layer, LORA.scale))(layers)
    scale = np.abs(apart).max()
    np.testing.assert_allclose(logits(plain, folded) / scale, apart / scale, atol=1e-5)
    np.testing.assert_allclose(logits(plain, dense(params)) / scale, apart / scale, atol=1e-5)
    base = {name: value for name, value in params.items() if not is_adapter(name)}
    assert np.abs(logits(plain, base) - apart).max() > 0.1 * scale


def test_gradients_of_adapters_are_those_of_the_dense_form():
    shallow, rules = with_layers(ADAPTED, 1), rules_on("auto", 1)  # float32's own error adds up
    params, plain = weights(shallow), dataclasses.replace(shallow, lora=None)
    base = {name: value for name, value in params.items() if not is_adapter(name)}
    adapters = {name: value for name, value in params.items() if is_adapter(name)}
    probe = np.random.default_rng(1).standard_normal((*TOKENS.shape, DECODER.vocab)).astype(np.float32)

    def apart(adapters):
        return jnp.sum(make_logits(shallow, rules)(base | adapters, TOKENS) * probe)

    def whole(adapters):
        both = {name: value for name, value in (base | adapters).items() if name.startswith(LAYERS)}
        added = jax.vmap(lambda layer: merged(layer, LORA.scale))(both)
        return jnp.sum(make_logits(plain, rules)(base | added, TOKENS) * probe)

    found, expected = jax.grad(apart)(adapters), jax.grad(whole)(adapters)
    errors = {name: np.linalg.norm(found[name] - value) for name, value in expected.items()}
    norms = {name: np.linalg.norm(value) for name, value in expected.items()}
    off = {name: float(errors[name] / norms[name]) for name in norms}
    assert max(off.values()) < 2e-6, off  # 1.1e-6 with jax 0.12


def test_a_new_adapter_changes_nothing():
    """The second factor is 0: what it adds is 0 to the last bit."""
    params = weights()
    params |= {name: jnp.zeros_like(value) for name, value in params.items() if name.endswith(".lora_b")}
    base = {name: value for name, value in params.items() if not is_adapter(name)}
    np.testing.assert_array_equal(logits(ADAPTED, params), logits(dataclasses.replace(ADAPTED, lora=None), base))
    np.testing.assert_array_equal(logits(ADAPTED, base), logits(ADAPTED, params))


@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:2,tp:2", "dp:2,fsdp:4"])
def test_meshes_give_the_same_logits(mesh):
    rules = rules_on(mesh, 4 if "tp" in mesh else 8)
    assert not list(indivisible(param_specs(ADAPTED), rules.num_shards))
    np.testing.assert_allclose(logits(ADAPTED, weights(rules=rules), rules), logits(ADAPTED, weights()), atol=2e-4)


def test_factors_are_split_as_the_matrix_is():
    specs = param_specs(ADAPTED)
    assert specs["layers.q.lora_a"].axes == (None, "width", "rank")
    assert specs["layers.q.lora_b"].axes == (None, "rank", "heads", "head_dim")
    assert specs["layers.o.lora_a"].shape == (2, 4, 8, 4)
    assert specs["layers.down.lora_b"].axes == (None, "rank", "width")
    assert all(axis not in TRAIN_AXES for axis in ("rank",))
    assert specs["layers.o.lora_a"].std == pytest.approx(1 / 32**0.5)
    assert set(trained_specs(ADAPTED)) | set(frozen_specs(ADAPTED)) == set(specs)
    assert count(trained_specs(ADAPTED)) == 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))


def test_targets_alone_have_adapters():
    lora = dataclasses.replace(LORA, targets=("q", "v"))
    assert {name.split(".")[1] for name in trained_specs(dataclasses.replace(ADAPTED, lora=lora))} == {"q", "v"}


# Whose they are, and in files


def test_the_fingerprint_is_the_same_on_any_mesh_and_another_for_any_other_weights():
    params = weights()
    name = fingerprint(params)
    assert fingerprint(weights(rules=rules_on("fsdp:8"))) == name
    assert fingerprint({**params, "final_norm": params["final_norm"].at[3].multiply(1 + 1e-6)}) != name
    swapped = params["embed"].at[jnp.array([0, 1])].set(params["embed"][jnp.array([1, 0])])
    assert fingerprint({**params, "embed": swapped}) != name


@pytest.fixture
def saved(tmp_path):
    """An adapter in PEFT's format, what is in it, and the weights beside it."""
    params = weights()
    adapters = {name: value for name, value in params.items() if is_adapter(name)}
    base = {name: value for name, value in params.items() if not is_adapter(name)}
    save_adapter(adapters, base, ADAPTED, tmp_path / "adapter", model="some/model")
    return tmp_path / "adapter", adapters, base


def test_an_adapter_comes_back_as_it_was(saved):
    folder, adapters, base = saved
    found = load_adapter(folder, ADAPTED, rules_on("fsdp:2,tp:2", 4), base)
    assert found.keys() == adapters.keys()
    for name, value in adapters.items():
        np.testing.assert_array_equal(found[name], value)


def test_files_are_named_and_laid_out_as_peft_has_them(saved):
    folder, adapters, _ = saved
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["peft_type"]) == (4, 6.0, "LORA")
    assert described["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tensors = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1."
    a, b = tensors[f"{prefix}self_attn.o_proj.lora_A.weight"], tensors[f"{prefix}self_attn.o_proj.lora_B.weight"]
    np.testing.assert_array_equal(a, np.asarray(adapters["layers.o.lora_a"][1]).reshape(32, 4).T)
    np.testing.assert_array_equal(b, np.asarray(adapters["layers.o.lora_b"][1]).T)
    assert tensors[f"{prefix}self_attn.q_proj.lora_B.weight"].shape == (32, 4)
    assert len(tensors) == 2 * 2 * len(MATRICES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"use_rslora": True}, "use_rslora True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern .* is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported; it must be 'none'"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; it must be 'LORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"something_new": 3}, "something_new 3 is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save .* not supported.*merge the adapter into its base model"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices .* not supported.*merge the adapter into its"),
        ({"r": 8}, "r is 8 and lora.rank is 4; set lora.rank to the adapter's"),
        ({"lora_alpha": 7}, "lora_alpha is 7 and lora.alpha is 6"),
    ],
)
def test_options_that_we_lack_are_named(saved, change, message):
    folder, _, base = saved
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load_adapter(folder, ADAPTED, rules_on("auto", 1), base)


def test_what_changes_nothing_is_accepted(saved):
    folder, *_ = saved
    path = folder / "adapter_config.json"
    more = {"lora_dropout": 0.05, "layers_pattern": None, "rank_pattern": {}, "lora_bias": False, "revision": "main"}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    (folder / "podium.json").unlink()
    load_adapter(folder, ADAPTED, rules_on("auto", 1), {})


def test_an_adapter_of_another_model_is_refused(saved):
    folder, _, base = saved
    rules = rules_on("auto", 1)
    with pytest.raises(ModelError, match=r"was trained on base weights .*set model to 'some/model'"):
        load_adapter(folder, ADAPTED, rules, {**base, "embed": base["embed"] + 1})
    wider = tiny(tied=False, qkv_bias=True, qk_norm=True, lora=LORA, mlp_width=64)
    (folder / "podium.json").unlink()
    with pytest.raises(ModelError, match=r"gate_proj.lora_B.weight in .*expected shape \[64, 4\], found \[48, 4\]"):
        load_adapter(folder, wider, rules, base)
    fewer = dataclasses.replace(ADAPTED, lora=dataclasses.replace(LORA, targets=("q",)))
    with pytest.raises(ModelError, match=r"is unexpected.*set lora.targets to its target_modules"):
        load_adapter(folder, fewer, rules, base)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: x for name, x in tensors.items() if "k_proj" not in name}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"k_proj.* is missing from .*set lora.targets"):
        load_adapter(folder, ADAPTED, rules, base)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.embed_tokens.lora_embedding_A"])
def test_a_trained_head_or_embedding_beside_adapters_is_refused_by_name(name, saved):
    """PEFT saves them with a vocabulary that has grown, without a word in its config."""
    folder, _, base = saved
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {f"base_model.model.{name}": np.ones((4, 4), np.float32)}, path)
    with pytest.raises(ModelError, match=rf"tensor base_model\.model\.{name} in .*neither head nor embedding.*merge"):
        load_adapter(folder, ADAPTED, rules_on("auto", 1), base)


Q_FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize("prefix", ["model.language_model.layers", "language_model.model.layers"])
def test_names_of_a_model_with_a_vision_tower_are_read(prefix, saved):
    """As PEFT saves an adapter beside the text model of one."""
    folder, adapters, base = saved
    path = folder / "adapter_model.safetensors"
    save_file({name.replace("model.layers", prefix): each for name, each in load_file(path).items()}, path)
    found = load_adapter(folder, ADAPTED, rules_on("auto", 1), base)
    for name, value in adapters.items():
        np.testing.assert_array_equal(found[name], value)


def test_names_that_peft_would_not_load_are_refused(saved):
    folder, _, base = saved
    path = folder / "adapter_model.safetensors"
    save_file({name.removeprefix("base_model.model."): each for name, each in load_file(path).items()}, path)
    with pytest.raises(ModelError, match=r"is missing from .*, and 27 more"):
        load_adapter(folder, ADAPTED, rules_on("auto", 1), base)


def test_of_two_factors_of_one_name_none_is_taken(saved):
    folder, _, base = saved
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {Q_FACTOR.replace(".weight", ".default.weight"): tensors[Q_FACTOR] + 1}, path)
    with pytest.raises(ModelError, match=r"q_proj\.lora_A\.(default\.)?weight in .*: its name is used twice"):
        load_adapter(folder, ADAPTED, rules_on("auto", 1), base)


def test_a_factor_that_is_not_floating_point_is_refused(saved):
    folder, _, base = saved
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {Q_FACTOR: (10 * tensors[Q_FACTOR]).astype(np.int8)}, path)
    with pytest.raises(ModelError, match=r"q_proj\.lora_A\.weight in .*: expected dtype F32, F16, BF16, found I8"):
        load_adapter(folder, ADAPTED, rules_on("auto", 1), base)


@pytest.mark.parametrize("option", [{"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"q_proj": 8}}])
def test_the_way_out_of_an_option_that_we_lack_keeps_what_the_adapter_computes(option, saved):
    folder, _, base = saved
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | option))
    with pytest.raises(
        ModelError, match=r"is not supported; merge the adapter into its base model with PEFT"
    ) as failure:
        load_adapter(folder, ADAPTED, rules_on("auto", 1), base)
    assert "false" not in str(failure.value)


def test_a_base_that_is_stored_otherwise_is_said_to_be_unchecked(saved, caplog):
    folder, _, base = saved
    path = folder / "podium.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kept": "int8"}))
    load_adapter(folder, ADAPTED, rules_on("auto", 1), base)
    assert "weights stored in int8, and lora.base is bfloat16, so it is not checked whether they are" in caplog.text


def test_damaged_and_missing_files_are_named(saved):
    folder, _, base = saved
    weights_file = folder / "adapter_model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:100])
    with pytest.raises(ModelError, match="truncated or damaged"):
        load_adapter(folder, ADAPTED, rules_on("auto", 1), base)
    weights_file.unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model.safetensors"):
        load_adapter(folder, ADAPTED, rules_on("auto", 1), base)
