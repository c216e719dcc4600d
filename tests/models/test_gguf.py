import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import finish
from tiny_models import (
    CASES,
    HEADS,
    KV_HEADS,
    LLAMA3_ROPE,
    LOGITS_TOLERANCE,
    error_of_scale,
    hf_config,
    hf_tensors,
    logits_of,
    make_logits,
    needs_demo,
    rules_on,
    tokens_of,
    write_model,
)

from podium.models.architecture import ModelError
from podium.models.files import gguf as podium_gguf
from podium.models.files.gguf import GgufTensors, read_header
from podium.models.files.gguf_config import read_config
from podium.models.files.hf import load_params
from podium.models.files.model_licence import base_of
from podium.models.files.source import ModelSource, read_architecture, resolve
from podium.models.text.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf", reason="the gguf library (extra demo) is not installed")
GOLDEN = Path(__file__).parents[1] / "golden" / "logits.npz"
GGUF_NAMES = {  # of llama.cpp, by Hugging Face's
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.": "ffn_",
    "_proj": "",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter makes of Llama's queries and keys: dimension i + Q/2 of a head comes after i."""
    width = weight.shape[1]
    rows = weight.reshape(heads, 2, -1, width)
    return np.stack([rows[:, 0], rows[:, 1]], axis=2).reshape(-1, width)


def gguf_tensors(case: str) -> dict[str, np.ndarray]:
    """A case's tensors as llama.cpp's converter writes them."""
    tensors = {}
    for name, value in hf_tensors(case).items():
        if CASES[case]["model_type"] == "llama" and "q_proj" in name:
            value = interleaved(value, HEADS)
        if CASES[case]["model_type"] == "llama" and "k_proj" in name:
            value = interleaved(value, KV_HEADS)
        for old, new in GGUF_NAMES.items():
            name = name.replace(old, new)
        tensors[name] = value
    return tensors


def write_gguf(
    path: Path, case: str, tensors: dict[str, np.ndarray], formats: Any = None, architecture: str = "", **extra: Any
) -> ModelSource:
    """A file of a case with these tensors; `formats` gives the block format of tensors that are raw bytes."""
    config = hf_config(case)
    rope = config.get("rope_parameters", config)
    writer = gguf.GGUFWriter(path, architecture or config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    for key, value in extra.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    return finish(writer, path, tensors, formats)


def load(source: ModelSource, mesh: str = "auto", devices: int = 1) -> dict[str, np.ndarray]:
    params = load_params(source, read_architecture(source), rules_on(mesh, devices))
    return {name: np.asarray(value) for name, value in params.items()}


@pytest.mark.parametrize("mesh", ["dp:1", "fsdp:4,tp:2"])
@pytest.mark.parametrize("case", ["llama", "llama_tied", "qwen2", "qwen3_tied"])
def test_gguf_is_the_model_it_was_converted_from(case: str, mesh: str, tmp_path: Path):
    expected = write_model(tmp_path, case)
    found = write_gguf(tmp_path / "model.gguf", case, gguf_tensors(case))
    assert read_architecture(found) == read_architecture(expected)
    params, original = load(found, mesh, 1 if mesh == "dp:1" else 8), load(expected)
    assert set(params) == set(original)
    for name, value in original.items():
        np.testing.assert_array_equal(params[name], value, err_msg=name)


def test_a_gguf_of_gemma_3_is_the_model_it_was_converted_from(tmp_path: Path):
    """Its file has scales of norms that are 1 more, and other names of norms than a llama's."""
    expected = write_model(tmp_path, "gemma3_tied", query_pre_attn_scalar=16)
    names = {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    tensors = {}
    for name, value in hf_tensors("gemma3_tied").items():
        for old, new in {**GGUF_NAMES, **names}.items():
            name = name.replace(old, new)
        tensors[name] = value + 1 if name.endswith("norm.weight") else value
    said = {"rope.freq_base_swa": 100.0, "attention.sliding_window": 8, "rope.scaling.factor": 8.0}
    said["rope.scaling.type"] = "linear"
    extra = {f"gemma3__{key}".replace(".", "__"): value for key, value in said.items()}
    found = write_gguf(tmp_path / "model.gguf", "gemma3_tied", tensors, architecture="gemma3", **extra)
    assert read_architecture(found) == read_architecture(expected)
    params = load(found)
    for name, value in load(expected).items():
        np.testing.assert_allclose(params[name], value, rtol=0, atol=2e-7, err_msg=name)


def llama3_divisors(theta: float) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1's stretching: 1 for fast pairs, the factor 8 for slow ones."""
    divisors = []
    for wavelength in 2 * np.pi * theta ** (np.arange(4) / 4):
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        divisors.append(1.0 if smooth > 1 else 8.0 if smooth < 0 else 1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(divisors, np.float32)


def test_llama_3_rope_is_known_from_its_divisors(tmp_path: Path):
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
    expected = write_model(tmp_path, "llama3", rope_scaling=rope)
    divisors = llama3_divisors(500000.0)
    assert divisors[0] == 1 < divisors[2] < divisors[3] == 8
    found = write_gguf(tmp_path / "model.gguf", "llama3", gguf_tensors("llama3") | {"rope_freqs.weight": divisors})
    assert read_architecture(found) == read_architecture(expected)
    tokens = tokens_of("llama3")
    np.testing.assert_array_equal(logits_of(found, tokens), logits_of(expected, tokens))


def test_divisors_that_are_not_llama_3_s_are_refused(tmp_path: Path):
    tensors = gguf_tensors("llama") | {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
    source = write_gguf(tmp_path / "model.gguf", "llama", tensors)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight: only Llama 3\.1's scaling"):
        load(source)


@pytest.mark.parametrize("kind", [name for name in podium_gguf.FORMATS if name != "F32"])
def test_rows_of_each_format_are_those_of_the_whole_tensor(kind: str, tmp_path: Path):
    """Random blocks: what the library makes of the whole tensor is what we read in two parts."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    values = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32)
    if kind.endswith("_K"):  # the library does not write these: any bytes are blocks
        raw = np.random.default_rng(0).integers(0, 64, (16, 512 // block * size)).astype(np.uint8)
    else:
        raw = gguf.quantize(values, number)
    tensors = gguf_tensors("llama") | {"extra": raw}
    source = write_gguf(tmp_path / "model.gguf", "llama", tensors, {"extra": number})
    header = read_header(source.path)
    reader = GgufTensors(header, read_config(header), in_pairs=True)
    assert (reader.entries["extra"].shape, reader.entries["extra"].dtype) == ((16, 512), kind)
    whole = gguf.dequantize(raw, number)
    parts = [reader.read("extra", 0, 5), reader.read("extra", 5, 16)]
    np.testing.assert_array_equal(np.concatenate(parts).astype(np.float32), whole)
    if not kind.endswith("_K"):
        assert np.abs(whole - values).max() <= (1 if kind == "MXFP4" else 0.5)  # 5 lies between 4 and 6


def test_a_header_is_parsed_once_and_again_if_the_file_changes(tmp_path: Path):
    source = write_gguf(tmp_path / "model.gguf", "llama", gguf_tensors("llama"))
    first = read_header(source.path)
    assert read_header(source.path) is first
    write_gguf(source.path, "llama", gguf_tensors("llama") | {"extra": np.ones((2, 64), np.float32)})
    assert "extra" not in first.tensors and "extra" in read_header(source.path).tensors


def test_quantized_queries_are_turned_too(tmp_path: Path):
    tensors = gguf_tensors("llama")
    name = "blk.1.attn_q.weight"
    number = gguf.GGMLQuantizationType.Q8_0
    exact = np.round(tensors[name] * 100).clip(-127, 127)
    exact[:, 0] = 127  # so that the scale is 1 and whole numbers stay exact
    tensors[name] = gguf.quantize(exact, number)
    source = write_gguf(tmp_path / "model.gguf", "llama", tensors, {name: number})
    found = load(source)["layers.q"][1]  # [D, H, Q]
    np.testing.assert_array_equal(found[:, 2, 3], exact[2 * 8 + 2 * 3])  # dimension i of the first half: row 2i
    np.testing.assert_array_equal(found[:, 2, 4 + 3], exact[2 * 8 + 2 * 3 + 1])


def test_a_model_reads_its_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_gguf(tmp_path / "model.gguf", "llama", gguf_tensors("llama"))
    read: list[Path] = []
    parse = podium_gguf._parse
    monkeypatch.setattr(podium_gguf, "_parse", lambda path, cursor: read.append(path) or parse(path, cursor))
    load(source)
    assert base_of(source).license is None and read_architecture(source).width > 0
    assert read == [source.path]


def test_header_is_what_the_library_reads(tmp_path: Path):
    source = write_gguf(
        tmp_path / "model.gguf", "qwen3", gguf_tensors("qwen3"), words=["a", "b"], flag=True, minus=-3, list=[1, 2]
    )
    header, reader = read_header(source.path), gguf.GGUFReader(source.path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert {tensor.name: tensor.data_offset for tensor in reader.tensors} == {
        name: tensor.offset for name, tensor in header.tensors.items()
    }


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama__rope__scaling__type": "yarn"}, r"llama\.rope\.scaling\.type 'yarn' is not supported"),
        ({"llama__expert_count": 8}, r"llama\.expert_count 8 is not supported"),
        ({"llama__rope__dimension_count": 4}, "only rotation of the whole head"),
        ({"llama__rope__scaling__factor": 2.0}, r"llama\.rope\.scaling\.factor 2\.0 is not supported"),
        ({"llama__rope__scale_linear": 2.0}, r"llama\.rope\.scale_linear 2\.0 is not supported"),
        ({"llama__attention__causal": False}, r"llama\.attention\.causal False is not supported; it must be True"),
        ({"llama__attention__sliding_window": 8}, r"llama\.attention\.sliding_window 8 is not supported"),
        ({"llama__attention__value_length": 4}, r"llama\.attention\.value_length 4 is not supported"),
        ({"llama__attention__scale": 0.5}, r"llama\.attention\.scale 0\.5 is not supported: Podium does not know"),
        ({"llama__logit_scale": 0.5}, r"llama\.logit_scale 0\.5 is not supported"),
        ({"llama__final_logit_softcapping": 30.0}, r"llama\.final_logit_softcapping 30\.0 is not supported"),
        ({"llama__residual_scale": 0.3}, r"llama\.residual_scale 0\.3\d* is not supported"),
        ({"general__type": "adapter"}, "general.type is 'adapter'; Podium trains models"),
        ({"split__count": 3}, "the model is split into 3 files; merge them first"),
    ],
)
def test_unsupported_feature_is_named(extra: dict[str, Any], message: str, tmp_path: Path):
    source = write_gguf(tmp_path / "model.gguf", "llama", gguf_tensors("llama"), None, **extra)
    with pytest.raises(ModelError, match=message):
        read_architecture(source)


def test_keys_that_change_nothing_change_nothing(tmp_path: Path):
    plain = write_gguf(tmp_path / "plain.gguf", "llama", gguf_tensors("llama"))
    said = {"value_length": 8, "causal": True, "layer_norm_epsilon": 1e-3, "max_alibi_bias": 0.0}
    extra: dict[str, Any] = {f"llama__attention__{key}": value for key, value in said.items()}
    extra |= {"llama__vocab_size": 64, "llama__rope__scaling__finetuned": False, "llama__rope__scaling__type": "none"}
    extra |= {"general__type": "model", "split__count": 0, "someones__note": "quantised", "qwen3__expert_count": 8}
    found = write_gguf(tmp_path / "more.gguf", "llama", gguf_tensors("llama"), None, **extra)
    assert read_architecture(found) == read_architecture(plain)


def test_a_head_beside_the_embedding_is_read(tmp_path: Path):
    """A file has output.weight only if the head is not the embedding; no key says it."""
    tensors = gguf_tensors("llama_tied")
    assert read_architecture(write_gguf(tmp_path / "tied.gguf", "llama_tied", tensors)).tied
    head = np.random.default_rng(7).standard_normal(tensors["token_embd.weight"].shape).astype(np.float32)
    source = write_gguf(tmp_path / "own.gguf", "llama_tied", tensors | {"output.weight": head})
    assert not read_architecture(source).tied
    with pytest.raises(ModelError, match="head differs from its embedding, and the decoder was read from another"):
        load_params(source, read_architecture(write_model(tmp_path / "tied", "llama_tied")), rules_on("auto", 1))
    np.testing.assert_array_equal(load(source)["head"], head)
    quantised = {"output.weight": gguf.quantize(head, gguf.GGMLQuantizationType.Q8_0)}
    formats = {"output.weight": gguf.GGMLQuantizationType.Q8_0}
    source = write_gguf(tmp_path / "q8.gguf", "llama_tied", tensors | quantised, formats)
    assert np.abs(load(source)["head"] - head).max() < 0.05


def test_the_epsilon_of_norms_is_in_every_file(tmp_path: Path):
    source = write_gguf(tmp_path / "model.gguf", "llama", gguf_tensors("llama"))
    name = b"llama.attention.layer_norm_rms_epsilon"
    whole = source.path.read_bytes()
    source.path.write_bytes(whole.replace(name, name.replace(b"llama", b"other")))
    with pytest.raises(
        ModelError, match=r"llama\.attention\.layer_norm_rms_epsilon must be a number above 0, found None"
    ):
        read_architecture(source)


def test_unknown_architecture_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'mamba' is not supported; Podium trains .*llama, mistral"):
        read_architecture(ModelSource("gguf", tmp_path / "model.gguf", "m"))


def test_unsupported_format_is_named(tmp_path: Path):
    number = gguf.GGMLQuantizationType.IQ4_NL
    tensors = gguf_tensors("llama") | {"output.weight": np.zeros((64, 18), np.uint8)}
    source = write_gguf(tmp_path / "model.gguf", "llama", tensors, {"output.weight": number})
    with pytest.raises(ModelError, match=r"tensor output\.weight has format IQ4_NL; Podium reads F32, F16"):
        load(source)


def test_missing_tensor_is_named(tmp_path: Path):
    tensors = {name: value for name, value in gguf_tensors("llama").items() if name != "blk.2.ffn_up.weight"}
    source = write_gguf(tmp_path / "model.gguf", "llama", tensors)
    with pytest.raises(ModelError, match=r"tensor blk\.2\.ffn_up\.weight is missing"):
        load(source)


def test_cut_off_data_is_named(tmp_path: Path):
    source = write_gguf(tmp_path / "model.gguf", "llama", gguf_tensors("llama"))
    whole = source.path.read_bytes()
    source.path.write_bytes(whole[:-5000])
    with pytest.raises(ModelError, match=r"truncated: tensor \S+ ends at byte [\d,]+ of a file of [\d,]+ bytes"):
        load(source)


@pytest.mark.parametrize("kept", [5, 30, 300])
def test_cut_off_header_is_named(kept: int, tmp_path: Path):
    source = write_gguf(tmp_path / "model.gguf", "llama", gguf_tensors("llama"))
    source.path.write_bytes(source.path.read_bytes()[:kept])
    with pytest.raises(ModelError, match="the GGUF header is truncated or damaged"):
        read_architecture(source)


def test_other_file_is_refused(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_architecture(resolve(str(tmp_path / "model.gguf")))


def test_missing_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_gguf(tmp_path / "model.gguf", "llama", gguf_tensors("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'podium-rl\[demo\]'"):
        load(source)


@needs_demo
def test_smollm2_gives_the_logits_recorded_from_transformers_and_answers():
    """The answer proves that heads are turned back right: the recorded logits came through our own export."""
    source, rules = resolve("demo"), rules_on("auto", 1)
    config, tokenizer = read_architecture(source), load_tokenizer(source)
    params = load_params(source, config, rules, jnp.float32)
    golden = np.load(GOLDEN)
    prompt = tokenizer.encode_chat("What is 2 + 3? Answer with only the number.", None)
    assert prompt == golden["demo_tokens"][0].tolist()
    tokens = np.full((1, len(prompt) + 12), tokenizer.pad_token, np.int32)
    tokens[0, : len(prompt)] = prompt
    compute = make_logits(config, rules)
    for position in range(len(prompt), tokens.shape[1]):
        logits = np.asarray(compute(params, tokens))
        tokens[0, position] = logits[0, position - 1].argmax()
    assert error_of_scale(logits[:, : len(prompt), ::499], golden["demo"]) <= LOGITS_TOLERANCE
    answer = tokens[0, len(prompt) :].tolist()
    assert tokenizer.decode(answer[: answer.index(tokenizer.eos_tokens[0])]) == "2 + 3 = 5"
