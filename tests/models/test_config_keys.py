"""The keys of config.json that each family knows, against transformers' own configuration classes and its logits."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from others_code import others_code
from tiny_models import (
    LLAMA3_ROPE,
    LOGITS_TOLERANCE,
    YARN_ROPE,
    error_of_scale,
    hf_config,
    hf_tensors,
    make_logits,
    rules_on,
    tokens_of,
    write_model,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from podium.models.architecture import DecoderConfig, ModelError
from podium.models.families import FAMILIES
from podium.models.files.config_keys import IGNORED_BY_ALL, ONLY, TOWERS
from podium.models.files.hf import load_params
from podium.models.files.hf_config import from_hf_config, to_hf_config
from podium.models.files.source import read_architecture, resolve

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CASE = {
    "llama": "llama",
    "mistral": "mistral_window",
    "ministral": "ministral",
    "ministral3": "ministral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe_sparse_step",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gpt_oss": "gpt_oss",
    "gemma3_text": "gemma3_tied",
}
"""A tiny model of each family."""
NO_FIELD = {
    "head_dim": None,
    "layer_types": None,
    "original_max_position_embeddings": None,
    "rope_scaling": None,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "sliding_window_pattern": 6,
}
"""Keys that transformers reads beside the fields of a class, and what it computes without them."""


def known(model_type: str) -> set[str]:
    keys = FAMILIES[model_type].keys
    return {*keys.reads, *keys.only, *keys.ignored, *ONLY, *IGNORED_BY_ALL, *keys.aliases}


def test_each_family_has_a_case():
    assert set(CASE) == set(FAMILIES)
    assert all(hf_config(case)["model_type"] == family for family, case in CASE.items())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_transformers_class_is_known(model_type: str):
    fields = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    assert fields - known(model_type) == set()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_key_is_in_two_lists(model_type: str):
    keys = FAMILIES[model_type].keys
    lists = [set(keys.reads), set(keys.only), set(keys.ignored), set(IGNORED_BY_ALL)]
    assert sum(map(len, lists)) == len(set.union(*lists))
    assert not set(ONLY) & (set(keys.ignored) | IGNORED_BY_ALL)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_values_of_missing_keys_are_those_of_transformers_class(model_type: str):
    kind = CONFIG_MAPPING[model_type]
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    alias = {key: name for name, key in FAMILIES[model_type].keys.aliases.items()}
    wrong = {}
    for key, value in FAMILIES[model_type].keys.reads.items():
        if key in ("rope_theta", "rope_parameters", "rope_local_base_freq"):
            continue  # compared below
        name = key if key in fields else alias.get(key, key)
        expected = fields[name] if name in fields else NO_FIELD[key]
        if value != expected:
            wrong[key] = (value, expected)
    assert wrong == {}
    for key, values in FAMILIES[model_type].keys.only.items():
        assert fields.get(key, values[0]) == values[0], key


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_without_keys_is_transformers_default_model(model_type: str):
    theirs = CONFIG_MAPPING[model_type]()
    ours = from_hf_config({"model_type": model_type}, "config.json")
    assert (ours.vocab, ours.width, ours.layers) == (theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers)
    assert (ours.heads, ours.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.norm_eps, ours.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.max_positions == theirs.max_position_embeddings
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or [FULL if window is None else SLIDING] * ours.layers
    found = [getattr(block.mixer, "window", 0) for block in ours.blocks]  # 0: a delta net
    assert found == [{FULL: None, SLIDING: window, LINEAR: 0}[each] for each in types]
    nested = theirs.rope_parameters if FULL in theirs.rope_parameters else {FULL: theirs.rope_parameters}
    by_theta = {rope.theta: rope for rope in ours.ropes}
    assert set(by_theta) == {each["rope_theta"] for each in nested.values()}
    for each in nested.values():
        rope = by_theta[each["rope_theta"]]
        assert (rope.scaling is None) == (each["rope_type"] == "default")
        assert rope.dims == ours.head_dim * each.get("partial_rotary_factor", 1.0)
        if each["rope_type"] == "yarn":
            for key, name in (("factor", "factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
                assert getattr(rope.scaling, name) == each[key]
            assert rope.scaling.original_max_positions == each["original_max_position_embeddings"]
            assert rope.scaling.truncate == each.get("truncate", True)
    sharpening = getattr(ours.blocks[-1].mixer, "sharpening", None)
    assert (sharpening and sharpening.beta) == nested[FULL].get("llama_4_scaling_beta")


@pytest.mark.parametrize("model_type", TOWERS)
def test_every_key_beside_a_text_config_is_known(model_type: str):
    tower, kind = TOWERS[model_type], CONFIG_MAPPING[model_type]
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    beside = {"text_config", "tie_word_embeddings", *tower.ignored, *ONLY, *IGNORED_BY_ALL}
    assert set(fields) - beside == set()
    assert tower.tied == fields["tie_word_embeddings"]
    assert tower.text_types[0] == kind().text_config.model_type


def decoder_of(model_type: str, **changes: Any) -> DecoderConfig:
    return from_hf_config(hf_config(CASE[model_type]) | changes, "config.json")


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": False}, r"is_causal False is not supported; it must be True or absent"),
        ({"is_causal": None}, r"is_causal None is not supported; it must be True or absent"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 1}}}, r"per_layer_config .* is not supported"),
        ({"residual_multiplier": 0.2}, r"residual_multiplier 0\.2 is not supported: Podium does not know whether"),
        ({"quantization": {"bits": 4}}, r"quantization .* is not supported"),
    ],
)
def test_a_key_that_changes_the_model_or_is_unknown_is_refused(model_type: str, changes: dict, message: str):
    with pytest.raises(ModelError, match=message):
        decoder_of(model_type, **changes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_that_change_nothing_change_nothing(model_type: str):
    plain = decoder_of(model_type)
    for key in sorted(FAMILIES[model_type].keys.ignored | IGNORED_BY_ALL - {"architectures", "model_type"}):
        assert decoder_of(model_type, **{key: 7}) == plain, key
    assert decoder_of(model_type, unknown=None, other=False, more={}, text="") == plain


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((model_type, {"model_name": "unsloth/Some-Model"}) for model_type in FAMILIES),
        ("qwen3_5_text", {"output_gate_type": "swish"}),
        ("qwen3_5_text", {"output_gate_type": "silu"}),
        ("qwen3_5_moe_text", {"output_gate_type": "swish"}),
        ("qwen3", {"use_qk_norm": True}),
        ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),
    ],
)
def test_keys_of_published_models_that_say_what_is_computed_anyway_are_read(model_type: str, changes: dict):
    assert decoder_of(model_type, **changes) == decoder_of(model_type)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("said", [{"language_model_only": True}, {"model_name": "unsloth/Some-Model"}])
def test_keys_of_published_models_beside_a_text_config_are_read(model_type: str, said: dict):
    text = hf_config(CASE[TOWERS[model_type].text_types[0]])
    raw = {"model_type": model_type, "text_config": text, "vision_config": {"depth": 1}}
    assert from_hf_config(raw | said, "config.json") == from_hf_config(raw, "config.json")


def test_what_the_types_of_transformers_ignore_is_not_obeyed():
    biased = {"attention_bias": True}
    assert decoder_of("qwen2", **biased) == decoder_of("qwen2")
    assert decoder_of("mistral", **biased) == decoder_of("mistral")
    for key in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        assert decoder_of("gpt_oss", **{key: {"norm_topk_prob": False}.get(key, [0])}) == decoder_of("gpt_oss")
    sharp = {**YARN_ROPE, "llama_4_scaling_beta": 0.1}
    plain = {key: value for key, value in sharp.items() if key != "llama_4_scaling_beta"}
    for model_type in ("llama", "mistral", "qwen3"):
        assert decoder_of(model_type, rope_parameters=sharp) == decoder_of(model_type, rope_parameters=plain)
    assert decoder_of("ministral3", rope_parameters=sharp) != decoder_of("ministral3", rope_parameters=plain)


def test_the_original_positions_outside_of_the_rotary_settings_count():
    """As in transformers, before those inside; and without any they are the model's positions."""
    for model_type in ("llama", "mistral", "qwen2", "gpt_oss"):
        inside = decoder_of(model_type, rope_theta=None, rope_scaling=None, rope_parameters=YARN_ROPE)
        other = {**YARN_ROPE, "original_max_position_embeddings": 32}
        outside = decoder_of(
            model_type,
            rope_theta=None,
            rope_scaling=None,
            rope_parameters=YARN_ROPE,
            original_max_position_embeddings=32,
        )
        assert outside == decoder_of(model_type, rope_theta=None, rope_scaling=None, rope_parameters=other) != inside


def test_rope_scaling_counts_where_rope_parameters_differ():
    both = {"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    assert decoder_of("llama", **both) == decoder_of("llama", rope_scaling=LLAMA3_ROPE)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_moe", {"num_local_experts": 4}, r"num_local_experts 4 and num_experts 8 differ; remove one"),
        ("gpt_oss", {"num_experts": 4}, r"num_local_experts 8 and num_experts 4 differ; remove one"),
        ("qwen3_5_moe_text", {"num_local_experts": 4}, r"num_local_experts 4 is not supported"),
        (
            "qwen3_5_text",
            {"output_gate_type": "sigmoid"},
            r"output_gate_type 'sigmoid' .* it must be 'swish' or absent",
        ),
        ("qwen3_moe", {"use_qk_norm": False}, r"use_qk_norm False is not supported; it must be True or absent"),
        ("llama", {"use_qk_norm": True}, r"use_qk_norm True is not supported: Podium does not know whether"),
        ("mistral", {"layer_types": [FULL, SLIDING, FULL]}, r"only sliding_attention is supported, in every layer"),
        ("gemma3_text", {"sliding_window": None}, r"only full_attention is supported without a sliding_window"),
        ("gpt_oss", {"sliding_window": None}, r"only full_attention is supported without a sliding_window"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 5.0}},
            r"rope_theta is outside of these objects",
        ),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0 is not supported"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 4.0}}, r"has rope_type, and no type"),
        ("gemma3_text", {"rope_scaling": {**YARN_ROPE, "truncate": False}}, r"truncate False of rotary embeddings"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, r"rope_type \['yarn'\] is not supported"),
        ("mistral", {"rope_local_base_freq": 5.0}, r"rope_local_base_freq 5\.0 is not supported"),
        (
            "llama",
            {"rope_scaling": {"factor": 8.0}},
            r"factor 8\.0 of rotary embeddings is not supported with",
        ),
        ("llama", {"rope_scaling": {**YARN_ROPE, "attention_factor": 0}}, r"attention_factor must be a number above 0"),
        ("qwen2", {"rope_scaling": {**YARN_ROPE, "short_mscale": 2.0}}, r"short_mscale 2\.0 of rotary embeddings"),
        (
            "llama",
            {"rope_scaling": {**LLAMA3_ROPE, "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor 0\.5 is",
        ),
    ],
)
def test_contradictions_and_what_cannot_be_computed_are_refused(model_type: str, changes: dict, message: str):
    with pytest.raises(ModelError, match=message):
        decoder_of(model_type, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"hidden_size": 31}, r"hidden_size is 31, and 32 in text_config; one of them must be right"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings is False, and True in text_config"),
        ({"image_scale": 3.0}, r"image_scale 3\.0 is not supported: Podium does not know"),
        (
            {"text_config": hf_config("llama")},
            r"text_config of a gemma3 has model type 'llama'; it must be gemma3",
        ),
    ],
)
def test_keys_beside_a_text_config_are_read_too(changes: dict, message: str):
    raw = {"model_type": "gemma3", "text_config": hf_config("gemma3_tied"), "vision_config": {"a": 1}}
    assert from_hf_config(raw | {"hidden_size": 32}, "x") == from_hf_config(hf_config("gemma3_tied"), "x")
    with pytest.raises(ModelError, match=message):
        from_hf_config(raw | changes, "config.json")


def test_a_head_is_tied_as_the_whole_config_says():
    text = {key: value for key, value in hf_config("ministral3").items() if key != "tie_word_embeddings"}
    for said, tied in (({}, True), ({"tie_word_embeddings": False}, False)):
        raw = {"model_type": "mistral3", "text_config": text, **said}
        assert from_hf_config(raw, "x").tied == tied == CONFIG_MAPPING["mistral3"](**said).tie_word_embeddings


@pytest.mark.parametrize("model_type", ["ministral3", "gpt_oss"])
def test_an_export_says_that_nothing_is_scaled_where_transformers_would_scale(model_type: str):
    plain = {"rope_type": "default", "rope_theta": 500.0}
    config = decoder_of(model_type, rope_scaling=None, rope_theta=None, rope_parameters=plain)
    assert config.ropes[0].scaling is None
    written = to_hf_config(config)
    assert from_hf_config(written, "x") == config
    again = CONFIG_MAPPING[model_type](**written).rope_parameters
    assert (again["rope_type"], again["rope_theta"]) == ("default", 500.0)


# Each key of each family, changed once: (key, value); None: the key is removed.
OTHERS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (63,),
    "hidden_size": (16,),
    "intermediate_size": (24,),
    "num_hidden_layers": (1, 2),
    "num_attention_heads": (2,),
    "num_key_value_heads": (1, 4),
    "head_dim": (8,),
    "max_position_embeddings": (64,),
    "rms_norm_eps": (1e-2,),
    "tie_word_embeddings": (True, False),
    "layer_types": ([FULL] * 3, [SLIDING] * 3, [FULL, SLIDING, FULL, SLIDING, SLIDING]),
    "rope_theta": (50.0, 7e4),
    "rope_scaling": (
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 4.0},
        LLAMA3_ROPE,
        YARN_ROPE,
        {key: value for key, value in YARN_ROPE.items() if key != "original_max_position_embeddings"},
        {**YARN_ROPE, "attention_factor": 1.3},
        {**YARN_ROPE, "mscale": 0.5},
        {**YARN_ROPE, "truncate": False},
        {"rope_type": "default", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8},
    ),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 90.0},
        {"rope_theta": 90.0},
        {},
        YARN_ROPE,
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24},
        {FULL: {"rope_type": "default", "rope_theta": 30.0}},
        {FULL: {"rope_theta": 30.0}, SLIDING: {"rope_theta": 20.0, "rope_type": "linear", "factor": 3.0}},
    ),
    "original_max_position_embeddings": (24,),
    "sliding_window": (4, None),
    "sliding_window_pattern": (2, 3),
    "rope_local_base_freq": (20.0,),
    "query_pre_attn_scalar": (64,),
    "num_experts": (4,),
    "num_local_experts": (4,),
    "num_experts_per_tok": (1, 2),
    "moe_intermediate_size": (12,),
    "shared_expert_intermediate_size": (12,),
    "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [1]),
    "swiglu_alpha": (1.2,),
    "swiglu_limit": (3.0,),
    "partial_rotary_factor": (0.5, 1.0),
    "full_attention_interval": (2,),
    "linear_conv_kernel_dim": (3,),
    "linear_key_head_dim": (4,),
    "linear_value_head_dim": (6,),
    "linear_num_key_heads": (4,),
    "linear_num_value_heads": (2,),
    "hidden_act": ("gelu", "swish", "gelu_pytorch_tanh"),
    "hidden_activation": ("silu", "gelu"),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "use_sliding_window": (True, False),
    "max_window_layers": (1,),
    "attn_logit_softcapping": (2.0,),
    "final_logit_softcapping": (2.0,),
    "use_bidirectional_attention": (True,),
    "is_causal": (False, True),
    "attn_output_gate": (False,),
    "output_gate_type": ("swish", "sigmoid"),
    "use_qk_norm": (True, False),
    "model_name": ("unsloth/Some-Model",),
    "attention_dropout": (0.5,),
    "pretraining_tp": (2,),
    "output_router_logits": (True,),
    "llama_4_scaling_beta": (0.5,),
    "attention_chunk_size": (8,),
    "is_decoder": (True,),
    "embedding_multiplier": (3.0,),
    "logits_scaling": (3.0,),
    "residual_multiplier": (0.3,),
    "attention_multiplier": (0.3,),
    "layer_norm_eps": (0.1,),
    "rotary_dim": (4,),
    "tie_last_hidden_states": (True,),
    "chunk_size_feed_forward": (8,),
    "initial_context_length": (8,),
    "experts_per_token": (1,),
    "dual_chunk_attention_config": ({"chunk_size": 8},),
    "pad_token_id": (3,),
}


def changes_of(model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A config.json for each change of a key, and for each key that is missing or null."""
    plain = hf_config(CASE[model_type])
    for key in sorted({*OTHERS, *plain} - {"model_type"}):
        for value in OTHERS.get(key, ()):
            yield f"{key} {value}", {**plain, key: value}
            if key == "rope_parameters":
                without = {name: each for name, each in plain.items() if name not in ("rope_theta", "rope_scaling")}
                yield f"{key} alone {value}", {**without, key: value}
        if key in plain:
            yield f"{key} missing", {name: value for name, value in plain.items() if name != key}
            yield f"{key} null", {**plain, key: None}


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_key_changed_once_gives_transformers_logits_or_is_refused(model_type: str, tmp_path: Path):
    torch = others_code("torch")
    import transformers

    transformers.logging.set_verbosity(60)
    transformers.logging.disable_progress_bar()
    case = CASE[model_type]
    write_model(tmp_path, case)
    tokens, rules = tokens_of(case), rules_on("auto", 1)
    made: dict[DecoderConfig, np.ndarray] = {}
    compared, wrong = 0, []
    for name, raw in changes_of(model_type):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        source = resolve(str(tmp_path))
        try:
            config = read_architecture(source)
            if config not in made:
                made[config] = np.asarray(make_logits(config, rules)(load_params(source, config, rules), tokens))
        except ModelError:
            continue
        try:
            model, said = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path, dtype=torch.float32, output_loading_info=True
            )
            assert not said["missing_keys"] and not said["mismatched_keys"], said
            with torch.no_grad():
                theirs = model.eval()(torch.tensor(tokens.astype(np.int64))).logits.numpy()
        except Exception:  # whatever transformers raises: there are no logits to compare with
            continue
        compared += 1
        apart = error_of_scale(made[config], theirs)
        if apart > LOGITS_TOLERANCE:
            wrong.append(f"{name}: {apart:.2g} of the scale apart")
    assert wrong == [], "\n".join(wrong)
    assert compared > 40 and len(made) > 5, "too few of the changes were computed"


def test_the_case_of_each_family_is_on_disk_what_its_config_says(tmp_path: Path):
    """So that the test above compares the same weights: a changed size is refused by their shapes."""
    source = write_model(tmp_path, "llama", hidden_size=16)
    with pytest.raises(ModelError, match="the weights do not match its config"):
        load_params(source, read_architecture(source), rules_on("auto", 1))
    assert hf_tensors("llama")["model.norm.weight"].shape == (32,)
