"""Reads GGUF files as written by llama.cpp: the architecture, and tensors converted to our conventions.

The header is parsed here, because config checks wait for it and the `gguf` library takes 1.7 s for a vocabulary of
49,000 tokens; that library decodes the block formats. `podium.models.tokenizer` builds the tokenizer. No jax.
"""

import dataclasses
import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from podium.models.architecture import MAX_LAYERS, MAX_SIZE, DecoderConfig, ModelError, real_number, shown, whole_number
from podium.models.hf_config import FULL, SLIDING, check_family, from_hf_config
from podium.models.names import StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
F32 = 0  # llama.cpp's number of the format
MAX_DIMS = 4  # llama.cpp's GGML_MAX_DIMS
ROPE_FACTORS = "rope_freqs.weight"
ARCHITECTURES = {"gemma3": "gemma3_text"}
"""Model types of architectures that llama.cpp calls otherwise. To it Mistral is a llama."""
ONLY_ON_THE_HUB = ("qwen35", "qwen35moe", "qwen3moe", "gpt-oss", "mistral3")
"""What llama.cpp calls architectures that Podium reads from a Hugging Face folder only."""
GEMMA3_27B_LAYERS = 62
# The formats we read; those of blocks by `gguf.dequantize`.
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """The location of a tensor in the file."""

    shape: tuple[int, ...]  # rows first, as in numpy
    type: int  # llama.cpp's number for the format
    offset: int  # bytes from the start of the file


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """The header of a file: everything before the tensor data."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Cursor:
    """Reads consecutive little-endian values."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.size = len(data)
        self.position = 0

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{count}{code}")
        return values

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        (length,) = LENGTH.unpack_from(self.data, self.position)  # of a hundred thousand strings in a vocabulary
        start = self.position + LENGTH.size
        self.position = start + length
        if self.position > self.size:
            raise struct.error("string beyond the end")
        return self.data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            return list(self.scalars(SCALARS[kind], count))
        if kind == ARRAY:
            raise struct.error("an array of arrays, which no key of a decoder or a tokenizer is")
        if kind != STRING:
            raise KeyError(kind)
        return [self.string() for _ in range(count)]


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table, once for each state of the file: a vocabulary takes 0.1 s, and a plan asks often.

    Raises ModelError if the file is not GGUF, or its header is truncated.
    """
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _read(path: Path, modified_ns: int, size: int) -> GgufHeader:
    """Read the header of a file that was last changed at that time, and has that many bytes."""
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise ModelError(f"{path}: not a GGUF file (it does not begin with GGUF)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Cursor(data))
            except (struct.error, KeyError, OverflowError, MemoryError) as error:
                raise ModelError(f"{path}: the GGUF header is truncated or damaged ({error!r})") from error


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    cursor.scalars("B", 4)  # the magic
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelError(f"{path}: GGUF version {version} is not supported; versions {VERSIONS} are")
    num_tensors, num_keys = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    table = {}
    for _ in range(num_tensors):
        name = cursor.string()
        dims = cursor.scalar("I")
        if not 1 <= dims <= MAX_DIMS:
            raise ModelError(f"{path}: tensor {name} has {dims} dimensions; GGUF's have 1 to {MAX_DIMS}")
        shape = tuple(reversed(cursor.scalars("Q", dims)))
        if not all(1 <= size <= MAX_SIZE for size in shape):
            raise ModelError(f"{path}: tensor {name} has shape {list(shape)}; each size must be from 1 to {MAX_SIZE}")
        table[name] = GgufTensor(shape, cursor.scalar("I"), cursor.scalar("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise ModelError(f"{path}: general.alignment must be a multiple of 8, found {shown(alignment)}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: dataclasses.replace(tensor, offset=start + tensor.offset) for name, tensor in table.items()}
    return GgufHeader(path, metadata, tensors)


def read_config(header: GgufHeader) -> DecoderConfig:
    """Read the decoder from a GGUF header. Raises ModelError as `from_hf_config` does."""
    where, metadata = str(header.path), header.metadata
    architecture = metadata.get("general.architecture")
    model_type = ARCHITECTURES.get(str(architecture), architecture)
    if architecture in ONLY_ON_THE_HUB:
        raise ModelError(
            f"{where}: GGUF files of architecture {architecture} are not read; name the model's hub id, or a folder"
            " with its config.json and safetensors"
        )
    check_family(model_type, where)

    def number(key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        return whole_number(metadata, f"{architecture}.{key}", where, default, most=most)

    def real(key: str, default: float) -> float:
        return _shortest(real_number(metadata, f"{architecture}.{key}", where, default))

    _check_metadata(header, str(architecture))
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{where}: tensor token_embd.weight is missing")
    width, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", width // heads)
    if number("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{where}: {architecture}.rope.dimension_count: only rotation of the whole head is supported")
    raw = {
        "model_type": model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "num_hidden_layers": number("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "rope_theta": real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header),
        "rms_norm_eps": real("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    return from_hf_config(raw | (_gemma3(header, raw) if architecture == "gemma3" else {}), where)


def _check_metadata(header: GgufHeader, architecture: str) -> None:
    """Raise ModelError if a file's metadata asks for a feature that Podium does not support in this architecture."""
    accepted: dict[str, tuple[object, ...]] = {"rope.scaling.type": ("none",), "expert_count": (0,)}
    if architecture == "gemma3":
        accepted["rope.scaling.type"] = ("none", "linear")
    else:
        accepted["attention.sliding_window"] = (0,)
    for key, values in accepted.items():
        if (value := header.metadata.get(f"{architecture}.{key}", values[0])) not in values:
            wanted = " or ".join(map(repr, values))
            raise ModelError(
                f"{header.path}: {architecture}.{key} {shown(value)} is not supported; it must be {wanted}"
            )


def _gemma3(header: GgufHeader, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that only Gemma 3 has, from a GGUF header.

    Two of them are not in every file but fixed in llama.cpp's code: the rotary base of layers with a window, and the
    scale of scores of the 27B model.
    """

    def said(key: str, default: object = None) -> Any:
        return header.metadata.get(f"gemma3.{key}", default)

    def base(key: str, default: float) -> float:
        return _shortest(real_number(header.metadata, f"gemma3.{key}", str(header.path), default))

    pattern = said("attention.sliding_window_pattern", 6)
    types = [SLIDING if slides else FULL for slides in pattern] if isinstance(pattern, list) else None
    largest = raw["num_hidden_layers"] == GEMMA3_27B_LAYERS
    scaling = said("rope.scaling.type", "none")
    return {
        "layer_types": types,
        "sliding_window_pattern": None if types else pattern,
        "sliding_window": said("attention.sliding_window"),
        "rope_theta": base("rope.freq_base", 1e6),
        "rope_local_base_freq": base("rope.freq_base_swa", 1e4),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling, "factor": said("rope.scaling.factor")},
        "query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if largest else raw["head_dim"],
    }


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32; GGUF stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(header: GgufHeader) -> dict[str, Any] | None:
    """Reconstruct Llama 3's frequency scaling from the divisors [Q/2] that GGUF stores; the largest one is the factor.

    The other three parameters are the same in Llama 3.1, 3.2 and 3.3; `load_params` verifies the divisors.
    """
    if (divisors := rope_divisors(header)) is None:
        return None
    factor = float(divisors.max())
    if not (divisors.min() > 0 and factor < math.inf):
        raise ModelError(f"{header.path}: tensor {ROPE_FACTORS} must hold finite numbers above 0")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def rope_divisors(header: GgufHeader) -> np.ndarray | None:
    """Divisors of the rotary frequencies, [Q/2] float32; None if the file does not scale them."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    size = header.path.stat().st_size
    if tensor.type != F32 or len(tensor.shape) != 1 or tensor.offset + 4 * tensor.shape[0] > size:
        raise ModelError(
            f"{header.path}: tensor {ROPE_FACTORS} must be a vector of F32 within the file's {size:,} bytes"
        )
    return np.fromfile(header.path, np.float32, tensor.shape[0], offset=tensor.offset)


class GgufTensors:
    """Reads rows of a GGUF file's tensors, with head dimensions in Hugging Face's order.

    Norm scales are complete in the file; the offset that the decoder adds to them (Gemma: 1) is subtracted.
    """

    def __init__(self, header: GgufHeader, config: DecoderConfig):
        self._library = _import_library()
        self._header = header
        self._head_dim = config.head_dim
        self._norm_offset = config.norm_offset
        self._size = header.path.stat().st_size
        self.entries = {name: self._entry(name, tensor) for name, tensor in header.tensors.items()}

    def _entry(self, name: str, tensor: GgufTensor) -> StoredTensor:
        path = self._header.path
        formats = {kind.value: kind.name for kind in self._library.GGMLQuantizationType}
        found = formats.get(tensor.type, f"number {tensor.type}")
        if found not in FORMATS:
            raise ModelError(f"{path}: tensor {name} has format {found}; Podium reads {', '.join(FORMATS)}")
        block, _ = self._library.GGML_QUANT_SIZES[self._library.GGMLQuantizationType(tensor.type)]
        if tensor.shape[-1] % block:
            raise ModelError(f"{path}: tensor {name} has rows of {tensor.shape[-1]}; {found} has blocks of {block}")
        end = tensor.offset + math.prod(self._byte_shape(tensor))
        if end > self._size:
            raise ModelError(f"{path}: truncated: tensor {name} ends at byte {end:,} of a file of {self._size:,} bytes")
        return StoredTensor(tensor.shape, found, path)

    def _byte_shape(self, tensor: GgufTensor) -> tuple[int, int]:
        """Number of rows, and bytes per row; a vector is one row."""
        block, size = self._library.GGML_QUANT_SIZES[self._library.GGMLQuantizationType(tensor.type)]
        *rows, columns = tensor.shape
        return math.prod(rows), columns // block * size

    def read(self, name: str, start: int, stop: int, at: tuple[int, ...] = ()) -> np.ndarray:
        """Read rows [start, stop) of a tensor as float32, float16 or bfloat16."""
        assert not at, "no layout reads a part of a tensor in GGUF"
        tensor = self._header.tensors[name]
        rows, row_bytes = self._byte_shape(tensor)
        raw = np.memmap(self._header.path, np.uint8, "r", tensor.offset, (rows, row_bytes)).view(np.ndarray)
        if len(tensor.shape) == 1:
            vector = self._decode(raw[:], tensor)[0, start:stop]
            shifted = self._norm_offset and name.endswith("norm.weight")
            return vector - np.float32(self._norm_offset) if shifted else vector
        values = self._decode(raw[start:stop], tensor)
        if self._header.metadata["general.architecture"] == "llama" and re.search(r"attn_[qk]\.weight$", name):
            values = _halves_from_pairs(values, self._head_dim)
        return values

    def _decode(self, raw: np.ndarray, tensor: GgufTensor) -> np.ndarray:
        kind = self._library.GGMLQuantizationType(tensor.type)
        if kind.name == "F16":
            return raw.view(np.float16)
        if kind.name == "BF16":
            return raw.view(ml_dtypes.bfloat16)
        if kind.name == "F32":
            return raw.view(np.float32)
        # The library's `dequantize` cuts 16 rows at a time, which takes twice as long.
        blocks = getattr(self._library.quants, kind.name)
        return blocks.dequantize_blocks(raw.reshape(-1, blocks.type_size)).reshape(len(raw), -1)


def _halves_from_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo the permutation of Llama's queries and keys, [HQ, D], by llama.cpp's converter.

    llama.cpp rotates dimensions 2i and 2i + 1 of a head together; Hugging Face and Podium rotate i and i + Q/2.
    """
    columns = rows.shape[-1]
    return rows.reshape(-1, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(-1, columns)


def _import_library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "reading weights from a .gguf file needs the gguf library; run: pip install 'podium-rl[demo]'"
        ) from error
    return gguf
