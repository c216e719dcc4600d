"""Models that are damaged, or made to do harm: each is one ModelError. `benches.strangers` draws 2,000 more."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import write_tokenizer
from tiny_models import LLAMA3_ROPE, hf_config, rules_on, write_model

from benches.strangers import trial, write_models
from podium.models.architecture import DecoderConfig, ModelError
from podium.models.files.folder import read_json
from podium.models.files.gguf import GgufTensors, read_header
from podium.models.files.gguf_config import read_config
from podium.models.files.hf import load_params
from podium.models.files.hf_config import from_hf_config
from podium.models.files.source import read_architecture
from podium.models.text.tokenizer import load_tokenizer

STRING, ARRAY, UINT32, FLOAT32, UINT64 = 8, 9, 4, 6, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LLAMA = [
    entry("general.architecture", STRING, text("llama")),
    *(
        entry(f"llama.{key}", UINT32, struct.pack("<I", value))
        for key, value in {
            "context_length": 64,
            "embedding_length": 8,
            "block_count": 1,
            "feed_forward_length": 8,
            "attention.head_count": 2,
        }.items()
    ),
    entry("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
]
EMBED = tensor("token_embd.weight", 8, 4)


def write_gguf(path: Path, keys: list[bytes], tensors: list[bytes], data: bytes = b"\0" * 4096) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    path.write_bytes(header + b"".join(keys) + b"".join(tensors) + data)
    return path


def read_gguf(path: Path) -> DecoderConfig:
    header = read_header(path)
    config = read_config(header)
    GgufTensors(header, config, in_pairs=True)
    return config


def test_the_file_of_these_tests_is_read(tmp_path: Path):
    assert read_gguf(write_gguf(tmp_path / "a.gguf", LLAMA, [EMBED])).width == 8


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ([entry("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000)], [EMBED], "an array of arrays"),
        ([entry("x", ARRAY, struct.pack("<IQ", STRING, 2**62))], [EMBED], "truncated or damaged"),
        ([entry("x", ARRAY, struct.pack("<IQ", UINT64, 2**62))], [EMBED], "truncated or damaged"),
        ([entry("x", STRING, struct.pack("<Q", 2**63))], [EMBED], "truncated or damaged"),
        ([entry("general.alignment", UINT32, struct.pack("<I", 0))], [EMBED], "alignment must be .* found 0"),
        ([entry("general.alignment", STRING, text("32"))], [EMBED], "alignment must be .* found '32'"),
        ([entry("llama.rope.freq_base", STRING, text("x"))], [EMBED], "freq_base must be a number above 0, found 'x'"),
        ([entry("llama.block_count", UINT32, struct.pack("<I", 10**9))], [EMBED], "from 1 to 10000, found 1000000000"),
        ([], [tensor("token_embd.weight")], "token_embd.weight has 0 dimensions"),
        ([], [tensor("token_embd.weight", *[1] * 500)], "token_embd.weight has 500 dimensions"),
        ([], [tensor("token_embd.weight", 2**62, 2**62)], "each size must be from 1"),
        ([], [tensor("token_embd.weight", 8, 0)], "each size must be from 1"),
        ([], [tensor("token_embd.weight", 8, 4, offset=2**62)], "truncated: tensor token_embd.weight ends at byte"),
        ([], [tensor("token_embd.weight", 8, 4, kind=8)], "rows of 8; Q8_0 has blocks of 32"),
        ([], [EMBED, tensor("rope_freqs.weight", 2, offset=2**62)], "rope_freqs.weight must be a vector"),
        ([], [EMBED, tensor("rope_freqs.weight", 2, offset=128)], "rope_freqs.weight must hold finite numbers above 0"),
    ],
)
def test_a_strange_gguf_file_is_one_error(keys: list[bytes], tensors: list[bytes], message: str, tmp_path: Path):
    pytest.importorskip("gguf", reason="the gguf library (extra demo) is not installed")
    path = write_gguf(tmp_path / "a.gguf", [*LLAMA, *keys], tensors)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["llama"]}, r"model type \['llama'\] is not supported"),
        ({"rope_theta": "x"}, "rope_theta must be a number above 0, found 'x'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number above 0, found nan"),
        ({"rope_theta": 0.5}, "base of rotary embeddings must be at least 1"),
        (
            {"rms_norm_eps": None},
            "rms_norm_eps must not be null; remove it for transformers' default of a llama, 1e-06",
        ),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number above 0, found True"),
        ({"rms_norm_eps": 3}, "the norms' epsilon is 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 10000"),
        ({"num_hidden_layers": True}, "found True"),
        ({"hidden_size": 2**62}, "hidden_size must be a whole number from 1 to 2147483647"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, found 'no'"),
        ({"layer_types": 5}, "layer_types 5: only full_attention"),
        ({"rope_scaling": 5}, "rope_scaling must be a JSON object or null, found 5"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": 0}}, "factor must be a number above 0, found 0"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": [1]}}, r"factor must be a number above 0, found \[1\]"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "must be below high_freq_factor"),
    ],
)
def test_a_strange_config_is_one_error(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=rf"^config\.json: .*{message}"):
        from_hf_config(hf_config("llama") | changes, "config.json")


def test_brackets_without_end_are_no_traceback(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["../outside/x.safetensors", "/etc/passwd", "sub/x.safetensors", 5, "..", ["a"]])
def test_a_shard_index_names_files_of_its_folder_alone(name: object, tmp_path: Path):
    source = write_model(tmp_path / "model", "llama")
    (tmp_path / "outside").mkdir()
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside" / "x.safetensors")
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index\.json: lists .*; a shard must be the name of a \.safetensors file"):
        load_params(source, read_architecture(source), rules_on("auto", 1))


def edit_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / name
        value = json.loads(path.read_text()) if path.exists() else {}
        change(value)
        path.write_text(json.dumps(value))

    return edit


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (edit_json("tokenizer.json", lambda file: file.pop("model")), "no tokenizer that transformers can load"),
        (edit_json("tokenizer.json", lambda file: file["model"]["vocab"].update(two=2**62)), "no tokenizer that"),
        (edit_json("tokenizer.json", lambda file: file["model"].update(vocab=[1])), "no tokenizer that"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"a":' * 100_000), "cannot be read as JSON"),
        (
            edit_json("tokenizer_config.json", lambda file: file.update(eos_token={"a": [1]})),
            "no tokenizer that|no end",
        ),
        (edit_json("tokenizer_config.json", lambda file: file.update(tokenizer_class=7)), "no tokenizer that"),
        (edit_json("generation_config.json", lambda file: file.update(eos_token_id=[[2]])), r"found \[2\]"),
        (edit_json("generation_config.json", lambda file: file.update(eos_token_id=2**62)), f"found {2**62}"),
        (edit_json("generation_config.json", lambda file: file.update(eos_token_id="2")), "found '2'"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ 'x' * 10000000000 }}"), "cannot be rendered"),
    ],
)
def test_a_strange_tokenizer_is_one_error(harm: Callable[[Path], object], message: str, tmp_path: Path):
    source = write_tokenizer(tmp_path)
    harm(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(source)


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template="<|im_start|> two {{ messages[-1].content }}"))
    tokenizer.check_vocab(8)
    with pytest.raises(ModelError, match="uses token 7, but the weights have 7 tokens"):
        tokenizer.check_vocab(7)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that `benches.strangers` damages."""
    pytest.importorskip("gguf", reason="the gguf library (extra demo) is not installed")
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.mark.parametrize("first", range(0, 96, 12))
def test_a_model_damaged_at_random_is_one_error_or_rightly_loaded(first: int, models: Path):
    rows = [trial(models, 10_000 + seed) for seed in range(first, first + 12)]
    assert not [row for row in rows if row["outcome"] not in ("loaded", "refused")]


def test_a_trial_finds_what_is_wrong(models: Path, monkeypatch: pytest.MonkeyPatch):
    def load(source: str) -> None:
        (Path(source).parent / "outside" / "x.json").read_text()

    monkeypatch.setattr("benches.strangers.load", load)
    assert trial(models, 0)["outcome"] == "WRONG: a file outside was opened"
    monkeypatch.setattr("benches.strangers.load", lambda source: {}["missing"])
    assert trial(models, 0)["outcome"] == "WRONG: KeyError: 'missing'"
