"""GGUF files of mixtures of experts, of delta nets and of Ministral 3, as llama.cpp's converter writes them.

The names of tensors are those that the gguf library maps Hugging Face's to, and of keys those that its writer has. What
the converter does to weights is computed here row by row, by loops that share nothing with the reader.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import finish
from safetensors.numpy import load_file, save_file
from test_gpt_oss import write_packed
from tiny_models import hf_config, hf_tensors, logits_of, rules_on, tokens_of, write_model

from podium.models.architecture import ModelError
from podium.models.files.hf import load_params
from podium.models.files.source import ModelSource, read_architecture

gguf = pytest.importorskip("gguf", reason="the gguf library (extra demo) is not installed")
ARCHITECTURES = {
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "mistral": gguf.MODEL_ARCH.MISTRAL3,
}
FIXED = {"gpt_oss": {"swiglu_limit": None}}
"""Keys of config.json that no file says, and llama.cpp's code has as transformers has them by default."""
Tensors = dict[str, np.ndarray]


def rows_in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Of each head first dimensions 0 and Q/2, then 1 and Q/2 + 1, and so on."""
    size = len(weight) // heads
    return weight[
        [head * size + i + half * size // 2 for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    ]


def tiled(config: dict[str, Any], size: int) -> list[int]:
    """Rows of value heads, of `size` each, the first of each key head before the second ones."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    shared = values // keys
    return [(k * shared + j) * size + i for j in range(shared) for k in range(keys) for i in range(size)]


def exponential(value: np.ndarray) -> np.ndarray:
    return np.exp(value.astype(np.float64)).astype(np.float32)


def of_delta_net(name: str, value: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """A delta net's tensor, and the name from which llama.cpp maps its own."""
    size, keys = config["linear_value_head_dim"], 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if "in_proj_qkv" in name or "conv1d" in name:
        value = value.reshape(len(value), -1)
        return name, value[[*range(keys), *(keys + row for row in tiled(config, size))]]
    if "in_proj_z" in name:
        return name, value[tiled(config, size)]
    if "out_proj" in name:
        return name, value[:, tiled(config, size)]
    if "A_log" in name:
        return name, -exponential(value[tiled(config, 1)])
    if "dt_bias" in name:
        return name.replace("dt_bias", "dt_proj.bias"), value[tiled(config, 1)]
    return name, value if "norm" in name else value[tiled(config, 1)]


def of_gpt_oss(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that a tensor of gpt-oss becomes: outputs before inputs, gate and up apart."""
    bias = name.endswith("_bias")
    if not bias and "proj" in name:
        value = value.swapaxes(1, 2)
    end = ".bias" if bias else ".weight"
    stem = name.removesuffix("_bias")
    if stem.endswith("gate_up_proj"):
        for lane, part in enumerate(("gate_proj", "up_proj")):
            yield stem.replace("gate_up_proj", part) + end, value[:, lane::2]
    else:
        yield stem + end, value


def converted(case: str, tensors: Tensors) -> Tensors:
    """A case's tensors as llama.cpp's converter names, cuts, permutes and shifts them."""
    config, found = hf_config(case), {}
    names = gguf.get_tensor_name_map(ARCHITECTURES[case], config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = {}

    def keep(name: str, value: np.ndarray) -> None:
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        found[new] = np.ascontiguousarray(value)

    for name, value in tensors.items():
        if "norm.weight" in name and "qwen3_5" in case and "linear_attn" not in name:
            value = value + np.float32(1)
        if case.endswith("stral3") or case == "mistral":
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
            for part, key in heads.items():
                value = rows_in_pairs(value, config[key]) if part in name else value
        if "linear_attn" in name:
            keep(*of_delta_net(name, value, config))
        elif "sinks" in name:
            keep(name + ".weight", value)
        elif ".experts." not in name:
            keep(name, value)
        elif case == "gpt_oss":
            for each in of_gpt_oss(name, value):
                keep(*each)
        elif name.endswith("gate_up_proj"):
            half = value.shape[1] // 2
            keep(name.replace("gate_up_proj", "gate_proj.weight"), value[:, :half])
            keep(name.replace("gate_up_proj", "up_proj.weight"), value[:, half:])
        elif name.endswith("down_proj"):
            keep(name + ".weight", value)
        else:  # one tensor for each expert
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = value
    for name, each in experts.items():
        keep(name, np.stack([each[number] for number in range(len(each))]))
    return found


def add_yarn(writer: Any, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def write(path: Path, case: str, tensors: Tensors, formats: dict[str, Any] | None = None, **extra: Any) -> ModelSource:
    """A file with a case's metadata; `extra` are keys of the architecture, with __ for dots."""
    config = hf_config(case)
    architecture = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[case]]
    writer = gguf.GGUFWriter(path, architecture)
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + extra.get("nextn_predict_layers", 0))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if "moe" not in case:
        writer.add_feed_forward_length(config["intermediate_size"])
    if rope.get("rope_type") == "yarn":
        add_yarn(writer, rope)
    if count := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if case == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "qwen3_5" in case:
        writer.add_rope_dimension_count(int(head * rope["partial_rotary_factor"]))
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
        writer.add_full_attention_interval(4)
    for key, value in extra.items():
        writer.add_key_value(f"{architecture}.{key.replace('__', '.')}", value, gguf.GGUFValueType.get_type(value))
    return finish(writer, path, tensors, formats)


def stored(case: str) -> Tensors:
    """A case's weights; those of Qwen3.5 are such that adding 1, and taking an exponential, loses nothing."""
    tensors = hf_tensors(case)
    for name, value in tensors.items() if "qwen3_5" in case else ():
        if "norm.weight" in name:
            tensors[name] = np.round(value * 1024) / 1024
        if "A_log" in name:
            tensors[name] = np.log(exponential(value).astype(np.float64)).astype(np.float32)
    return tensors


@pytest.mark.parametrize("case", [*ARCHITECTURES])
def test_a_file_is_the_model_of_the_folder_that_it_was_converted_from(case: str, tmp_path: Path):
    expected = write_model(tmp_path / "folder", case, **FIXED.get(case, {}))
    save_file(stored(case), expected.path / "model.safetensors")
    found = write(tmp_path / "model.gguf", case, converted(case, stored(case)))
    assert read_architecture(found) == read_architecture(expected)
    ours, theirs = (load_params(each, read_architecture(each), rules_on("auto", 1)) for each in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    tokens = tokens_of(case)
    np.testing.assert_array_equal(logits_of(found, tokens), logits_of(expected, tokens))


@pytest.mark.parametrize(
    ("case", "mesh"),
    [("gpt_oss", "fsdp:2,tp:2,sp:2"), pytest.param("qwen3_5_moe", "fsdp:4,tp:2", marks=pytest.mark.long)],
)
def test_devices_read_their_own_parts(case: str, mesh: str, tmp_path: Path):
    found = write(tmp_path / "model.gguf", case, converted(case, hf_tensors(case)))
    config = read_architecture(found)
    one, all_ = (load_params(found, config, rules_on(*devices)) for devices in (("auto", 1), (mesh, 8)))
    for name, value in one.items():
        np.testing.assert_array_equal(all_[name], value, err_msg=name)


def test_experts_in_mxfp4_are_those_of_the_folder_bit_for_bit(tmp_path: Path):
    """Their bytes are laid out here code by code."""
    expected, whole = write_packed(tmp_path)
    tensors, formats = converted("gpt_oss", load_file(whole.path / "model.safetensors")), {}
    on_hub = load_file(expected.path / "model.safetensors")
    for name in (name.removesuffix("_blocks") for name in on_hub if name.endswith("_blocks")):
        block = name.split(".")[2]
        for lane, part in enumerate(("gate", "up") if "gate_up" in name else ("down",)):
            rows = slice(lane, None, 2) if "gate_up" in name else slice(None)
            new = f"blk.{block}.ffn_{part}_exps.weight"
            tensors[new] = in_halves(on_hub[f"{name}_blocks"][:, rows], on_hub[f"{name}_scales"][:, rows])
            formats[new] = gguf.GGMLQuantizationType.MXFP4
    found = write(tmp_path / "model.gguf", "gpt_oss", tensors, formats)
    ours, theirs = (load_params(each, read_architecture(expected), rules_on("auto", 1)) for each in (found, expected))
    for name, value in theirs.items():
        np.testing.assert_array_equal(np.asarray(ours[name]).view(np.int32), np.asarray(value).view(np.int32), name)


def in_halves(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The hub's blocks [E, F, D/32, 16], in whose bytes neighbours lie, as GGUF's bytes [E, F, D/32 * 17]."""
    found = np.zeros((*scales.shape, 17), np.uint8)
    found[..., 0] = scales
    for number in range(32):
        code = blocks[..., number // 2] >> 4 * (number % 2) & 15
        found[..., 1 + number % 16] |= code << 4 * (number // 16)
    return found.reshape(*scales.shape[:-1], -1)


def test_blocks_that_predict_tokens_after_the_next_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tensors = converted("qwen3_5", hf_tensors("qwen3_5"))
    tensors |= {
        "blk.4.nextn.eh_proj.weight": np.ones((32, 64), np.float32),
        "blk.4.attn_norm.weight": np.ones(32, np.float32),
    }
    source = write(tmp_path / "model.gguf", "qwen3_5", tensors, nextn_predict_layers=1)
    assert read_architecture(source) == read_architecture(write_model(tmp_path / "folder", "qwen3_5"))
    with caplog.at_level(logging.WARNING):
        load_params(source, read_architecture(source), rules_on("auto", 1))
    assert "2 tensors that predict tokens after the next are left out" in caplog.text


@pytest.mark.parametrize("said", [0, 1])
def test_a_block_without_what_predicts_ahead_is_not_left_out(said: int, tmp_path: Path):
    """Whether or not the file counts it among those that predict tokens after the next."""
    tensors = converted("qwen3_5", hf_tensors("qwen3_5")) | {"blk.4.attn_norm.weight": np.ones(32, np.float32)}
    source = write(tmp_path / "model.gguf", "qwen3_5", tensors, nextn_predict_layers=said)
    with pytest.raises(ModelError, match=r"tensor blk\.4\.attn_norm\.weight in .* is unexpected"):
        load_params(source, read_architecture(source), rules_on("auto", 1))


def test_the_gate_of_a_shared_expert_may_be_a_vector(tmp_path: Path):
    tensors = converted("qwen3_5_moe", hf_tensors("qwen3_5_moe"))
    whole = write(tmp_path / "whole.gguf", "qwen3_5_moe", tensors)
    flat = {name: value[0] if "inp_shexp" in name else value for name, value in tensors.items()}
    source = write(tmp_path / "flat.gguf", "qwen3_5_moe", flat)
    ours, theirs = (load_params(each, read_architecture(each), rules_on("auto", 1)) for each in (source, whole))
    np.testing.assert_array_equal(ours["layers.0.shared_router"], theirs["layers.0.shared_router"])


@pytest.mark.parametrize(
    ("case", "extra", "message"),
    [
        ("qwen3_moe", {"expert_gating_func": 2}, r"qwen3moe\.expert_gating_func 2 is not supported; it must be 1"),
        ("qwen3_moe", {"expert_weights_norm": False}, r"expert_weights_norm False is not supported; it must be True"),
        ("qwen3_moe", {"rope__scaling__type": "yarn"}, r"qwen3moe\.rope\.scaling\.type 'yarn' is not supported"),
        ("gpt_oss", {"rope__freq_base_swa": 7.0}, r"gpt-oss\.rope\.freq_base_swa: only one rotary base"),
        ("gpt_oss", {"rope__scaling__yarn_attn_factor": 2.0}, r"yarn_attn_factor 2\.0 is not supported"),
        ("mistral", {"attention__sliding_window": 8}, r"mistral3\.attention\.sliding_window 8 is not supported"),
    ],
)
def test_what_a_file_asks_for_beyond_its_family_is_refused_by_name(case, extra, message, tmp_path):
    source = write(tmp_path / "model.gguf", case, converted(case, hf_tensors(case)), **extra)
    with pytest.raises(ModelError, match=message):
        read_architecture(source)


def test_decays_that_no_exponential_gives_are_refused(tmp_path: Path):
    tensors = converted("qwen3_5", hf_tensors("qwen3_5"))
    tensors["blk.1.ssm_a"] = -tensors["blk.1.ssm_a"]
    source = write(tmp_path / "model.gguf", "qwen3_5", tensors)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ssm_a must hold numbers below 0"):
        load_params(source, read_architecture(source), rules_on("auto", 1))
