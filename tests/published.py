"""Models of the hub under their own names: tiny random weights with the real vocabulary and the published template.

The vocabulary is the one that Qwen publishes, of wheel `dashscope`; chat templates are those in TRL's wheel. Neither
package is imported. The folders lie where huggingface_hub keeps what it has downloaded, so code that names a model runs
as it stands.
"""

import base64
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from podium.models.files.source import DEMO_VERSION, DEMO_WHEEL, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VOCABULARY = Path("resources") / "qwen.tiktoken"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen's tokenizers split text before they merge bytes."""
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
"""The control tokens of Qwen2.5 and Qwen3, from 151,643 on; the next ones are text that is one token."""
WHOLE = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
WHOLE_OF_3 = ("<tool_response>", "</tool_response>", "<think>", "</think>")
ROWS = 151_936
"""Rows of the embedding, more than there are tokens."""
FAMILIES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {  # (model_type, template, further whole tokens)
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", "qwen2_5", ()),
    "Qwen/Qwen3-0.6B": ("qwen3", "qwen3", WHOLE_OF_3),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
END = 0.4
"""About the probability with which the tiny models end an answer at each token; trained ones end theirs too, later."""


def folder_of(package: str) -> Path:
    """The folder of an installed package, which is not imported; skips the test if there is none."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed: make test")
    return Path(found.submodule_search_locations[0])


def published_template(name: str) -> str:
    """A chat template of TRL's wheel."""
    return (folder_of("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def _letters() -> dict[int, str]:
    """The character by which byte-level tokenizers write each byte."""
    alone = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [byte for byte in range(256) if byte not in alone]
    return {byte: chr(byte) for byte in alone} | {byte: chr(256 + place) for place, byte in enumerate(others)}


@functools.cache
def _ranks() -> dict[bytes, int]:
    """Qwen's tokens by rank, as bytes."""
    path = folder_of("dashscope") / VOCABULARY
    lines = (line.split() for line in path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@functools.cache
def _merges() -> tuple[tuple[bytes, bytes], ...]:
    """The pairs that make the tokens, by rank: of each token the two parts that merging with lower ranks leaves."""
    ranks = _ranks()
    return tuple(_halves(token, ranks) for token in ranks if len(token) > 1)


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    parts, limit = [bytes([each]) for each in token], ranks[token]
    while len(parts) > 2:
        pairs = [ranks.get(parts[place] + parts[place + 1], limit) for place in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[best] < limit, token
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


@functools.cache
def _byte_level() -> Tokenizer:
    """Qwen's byte-level BPE, without added tokens."""
    letters = _letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {written(token): rank for token, rank in _ranks().items()}
    rust = Tokenizer(models.BPE(vocab, [(written(a), written(b)) for a, b in _merges()]))
    first = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    rust.normalizer = normalizers.NFC()
    rust.decoder = decoders.ByteLevel()
    return rust


def published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model in FAMILIES, with its published chat template."""
    _, template, more = FAMILIES[name]
    rust = Tokenizer.from_str(_byte_level().to_str())
    rust.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    rust.add_tokens([AddedToken(text, normalized=False, special=False) for text in (*WHOLE, *more)])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        chat_template=published_template(template),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def write_published_model(cache: Path, name: str) -> Path:
    """Write a tiny random model of FAMILIES into a cache of the hub; returns its folder."""
    kind, _, _ = FAMILIES[name]
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    tokenizer = published_tokenizer(name)
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    extra = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    config: dict[str, Any] = {
        "model_type": kind,
        "tie_word_embeddings": False,
        "vocab_size": ROWS,
        "eos_token_id": end,
        **SIZES,
        **extra,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(kind, int(end)), folder / "model.safetensors")
    return folder


def _weights(kind: str, end: int) -> dict[str, np.ndarray]:
    """The weights of a tiny model by Hugging Face's names."""
    width, inner, size = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["head_dim"]
    queries, keys = size * SIZES["num_attention_heads"], size * SIZES["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (ROWS, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (ROWS, width),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        shapes |= {
            f"{attention}{each}_proj.weight": (rows, width)
            for each, rows in zip("qkv", (queries, keys, keys), strict=True)
        }
        shapes |= {f"{attention}o_proj.weight": (width, queries)}
        if kind == "qwen2":
            shapes |= {
                f"{attention}{each}_proj.bias": (rows,) for each, rows in zip("qkv", (queries, keys, keys), strict=True)
            }
        else:
            shapes |= {f"{attention}{each}_norm.weight": (size,) for each in "qk"}
        shapes |= {f"{mlp}{each}_proj.weight": (inner, width) for each in ("gate", "up")}
        shapes |= {f"{mlp}down_proj.weight": (width, inner)}
        shapes |= {f"model.layers.{layer}.{each}_layernorm.weight": (width,) for each in ("input", "post_attention")}
    weights = random_weights(shapes)
    end_answers(weights["model.embed_tokens.weight"], weights["lm_head.weight"], end)
    return weights


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Small random weights of these shapes; scales of norms are close to 1."""
    random = np.random.default_rng(0)
    return {
        name: (0.02 * random.standard_normal(shape) + float("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def end_answers(embedding: np.ndarray, head: np.ndarray, end: int) -> None:
    """Let token `end` have probability END after any other; `embedding` and `head` are [V, D], and are changed.

    The first feature becomes the same for all tokens. After the last norm it is close to the root of D, and the other
    logits are close to 0.
    """
    rows, width = head.shape
    embedding[:, 0] = 1.0
    head[end] = 0.0
    head[end, 0] = np.log(END / (1 - END) * rows) / np.sqrt(width)


def write_demo_wheel(folder: Path) -> None:
    """Install into a folder what looks like the demo's wheel, with a model of tiny random weights.

    On `sys.path` before the real one, it is what model `demo` is found in.
    """
    information = folder / f"{DEMO_WHEEL.replace('-', '_')}-{DEMO_VERSION}.dist-info"
    information.mkdir()
    write_small_demo(folder / "small.gguf")
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DEMO_WHEEL}\nVersion: {DEMO_VERSION}\n")
    (information / "RECORD").write_text("small.gguf,,\n")


def write_small_demo(path: Path) -> None:
    """Write a GGUF file like the demo's, with its vocabulary and chat template, and tiny random weights."""
    import gguf

    original = resolve("demo").header.metadata
    width, inner, heads, kept = 36, 64, 6, 2
    changed = {
        "llama.block_count": 2,
        "llama.embedding_length": width,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kept,
        "llama.rope.dimension_count": width // heads,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**original, **changed}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    rows, end = len(original["tokenizer.ggml.tokens"]), original["tokenizer.ggml.eos_token_id"]
    shapes = {"token_embd.weight": (rows, width), "output.weight": (rows, width), "output_norm.weight": (width,)}
    for layer in range(changed["llama.block_count"]):
        block, keys = f"blk.{layer}.", kept * width // heads
        shapes |= {f"{block}attn_{each}.weight": (width, width) for each in ("q", "output")}
        shapes |= {f"{block}attn_{each}.weight": (keys, width) for each in "kv"}
        shapes |= {f"{block}ffn_{each}.weight": (inner, width) for each in ("gate", "up")}
        shapes |= {f"{block}ffn_down.weight": (width, inner)}
        shapes |= {f"{block}{each}_norm.weight": (width,) for each in ("attn", "ffn")}
    weights = random_weights(shapes)
    end_answers(weights["token_embd.weight"], weights["output.weight"], end)
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
