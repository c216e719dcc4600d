"""Reads GGUF files as written by llama.cpp: the header, and tensors converted to our conventions.

The header is parsed here, because config checks wait for it and the `gguf` library takes 1.7 s for a vocabulary of
49,000 tokens; that library decodes the block formats. `podium.models.files.gguf_config` reads the architecture, and
`podium.models.text.tokenizer` builds the tokenizer. No jax.
"""

import dataclasses
import functools
import logging
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

from podium.models.architecture import MAX_SIZE, DecoderConfig, ModelError, shown
from podium.models.blocks.delta import DeltaNet
from podium.models.files import mxfp4
from podium.models.files.tensor_layout import StoredTensor

logger = logging.getLogger(__name__)
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
F32 = 0  # llama.cpp's number of the format
MAX_DIMS = 4  # llama.cpp's GGML_MAX_DIMS
ROPE_FACTORS = "rope_freqs.weight"
IN_BLOCK = re.compile(r"^blk\.(\d+)\.")
AHEAD = ".nextn."
"""Part of the names of tensors that only blocks for multi-token prediction have."""
BEHIND_KEYS = ("attn_qkv.weight", "ssm_conv1d.weight")
"""Tensors of a delta net in which the values' rows follow those of queries and keys."""
DECAYS, OUT = "ssm_a", "ssm_out.weight"
PER_HEAD = (DECAYS, "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight")
"""Tensors of a delta net with a row for each value head."""
# The formats we read; those of blocks by `gguf.dequantize`, except MXFP4.
_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", mxfp4.DTYPE)
FORMATS = ("F32", "F16", "BF16", *_BLOCKS)


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
    """Read metadata and tensor table, once for each state of the file: reading a vocabulary takes 0.1 s, and a plan
    reads the header often.

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
    """Reads rows of a GGUF file's tensors, with heads and their dimensions in Hugging Face's order.

    llama.cpp's converter adds the decoder's offset to norm scales (Gemma, Qwen3.5: 1), so it is subtracted; and it
    stores the decays of delta nets as minus their exponential. Blocks for multi-token prediction, which follow the
    decoder's layers, are left out.
    """

    def __init__(self, header: GgufHeader, config: DecoderConfig, *, in_pairs: bool):
        """Raises ModelError if a tensor has an unknown format, or is truncated; `in_pairs` as in `GgufForm`."""
        self._library = _import_library()
        self._path = header.path
        self._in_pairs = in_pairs
        self._head_dim = config.head_dim
        self._norm_offset = config.norm_offset
        self._net = next((block.mixer for block in config.blocks if isinstance(block.mixer, DeltaNet)), None)
        self._size = header.path.stat().st_size
        blocks = _blocks_ahead(header, config) if self._net else set[int]()
        ahead = {name for name in header.tensors if _block_number(name) in blocks}
        if ahead:
            logger.warning("%s: %d tensors that predict tokens after the next are left out", header.path, len(ahead))
        self._tensors = {name: _as_matrix(name, each) for name, each in header.tensors.items() if name not in ahead}
        self.entries = {name: self._entry(name, tensor) for name, tensor in self._tensors.items()}

    def _entry(self, name: str, tensor: GgufTensor) -> StoredTensor:
        formats = {kind.value: kind.name for kind in self._library.GGMLQuantizationType}
        found = formats.get(tensor.type, f"number {tensor.type}")
        if found not in FORMATS:
            raise ModelError(f"{self._path}: tensor {name} has format {found}; Podium reads {', '.join(FORMATS)}")
        block, size = self._library.GGML_QUANT_SIZES[self._library.GGMLQuantizationType(tensor.type)]
        if tensor.shape[-1] % block:
            raise ModelError(
                f"{self._path}: tensor {name} has rows of {tensor.shape[-1]}; {found} has blocks of {block}"
            )
        if (end := tensor.offset + math.prod(tensor.shape) // block * size) > self._size:
            raise ModelError(
                f"{self._path}: truncated: tensor {name} ends at byte {end:,} of a file of {self._size:,} bytes"
            )
        return StoredTensor(tensor.shape, found, self._path)

    def read(self, name: str, start: int, stop: int, at: tuple[int, ...] = ()) -> np.ndarray:
        """Read rows [start, stop) of a tensor, or of its part at an index, as float32, float16 or bfloat16."""
        tensor = self._tensors[name]
        block, size = self._library.GGML_QUANT_SIZES[self._library.GGMLQuantizationType(tensor.type)]
        *lead, columns = tensor.shape
        shape = (*lead, columns // block * size)
        raw = np.memmap(self._path, np.uint8, "r", tensor.offset, shape).view(np.ndarray)[at]  # [rows, bytes]
        kind = IN_BLOCK.sub("", name)
        places = None if self._net is None else _value_places(self._net, kind)
        if raw.ndim == 1:
            vector = self._own_vector(name, kind, self._decode(raw[None], tensor)[0])
            return (vector if places is None else vector[places])[start:stop]
        if places is not None and kind != OUT:
            return self._decode(raw[places[start:stop]], tensor)
        values = self._decode(raw[start:stop], tensor)
        if self._in_pairs and kind in ("attn_q.weight", "attn_k.weight"):
            values = _halves_from_pairs(values, self._head_dim)
        return values if places is None else values[:, places]

    def _own_vector(self, name: str, kind: str, vector: np.ndarray) -> np.ndarray:
        """A vector converted to Hugging Face's convention."""
        if kind == DECAYS:
            if not np.all(vector < 0):
                raise ModelError(f"{self._path}: tensor {name} must hold numbers below 0")
            return np.log(-vector.astype(np.float64)).astype(np.float32)
        shifted = self._norm_offset and kind.endswith("norm.weight") and kind != "ssm_norm.weight"
        return vector - np.float32(self._norm_offset) if shifted else vector

    def _decode(self, raw: np.ndarray, tensor: GgufTensor) -> np.ndarray:
        kind = self._library.GGMLQuantizationType(tensor.type)
        if kind.name == "F16":
            return raw.view(np.float16)
        if kind.name == "BF16":
            return raw.view(ml_dtypes.bfloat16)
        if kind.name == "F32":
            return raw.view(np.float32)
        if kind.name == mxfp4.DTYPE:
            return mxfp4.decoded_halves(raw.reshape(len(raw), -1, mxfp4.BLOCK // 2 + 1))
        # The library's `dequantize` cuts 16 rows at a time, which takes twice as long.
        blocks = getattr(self._library.quants, kind.name)
        return blocks.dequantize_blocks(raw.reshape(-1, blocks.type_size)).reshape(len(raw), -1)


def _as_matrix(name: str, tensor: GgufTensor) -> GgufTensor:
    """The gate of a shared expert, [1, D], as a matrix: llama.cpp's quantiser drops the dimension of one row."""
    vector = name.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1
    return dataclasses.replace(tensor, shape=(1, *tensor.shape)) if vector else tensor


def _blocks_ahead(header: GgufHeader, config: DecoderConfig) -> set[int]:
    """The blocks for multi-token prediction after the decoder's layers, recognised by tensors that only they have."""
    found = {_block_number(name) for name in header.tensors if AHEAD in name}
    return {number for number in found if number >= config.layers}


def _block_number(name: str) -> int:
    """The number of a tensor's block; -1 outside blocks."""
    found = IN_BLOCK.match(name)
    return int(found[1]) if found else -1


def _value_places(net: DeltaNet, kind: str) -> np.ndarray | None:
    """The index in the file of each row (for OUT, each column) of a tensor in Hugging Face's order; None if both orders
    are the same.

    Hugging Face's tensors have all value heads of the first key head first, then those of the second. llama.cpp's
    converter puts the first value head of every key head first, then the second ones.
    """
    if kind not in (*BEHIND_KEYS, *PER_HEAD, "attn_gate.weight", OUT):
        return None
    before = 2 * net.key_heads * net.key_dim if kind in BEHIND_KEYS else 0
    size = 1 if kind in PER_HEAD else net.value_dim
    heads = np.arange(net.value_heads).reshape(-1, net.key_heads).T.reshape(-1, 1)
    return np.concatenate([np.arange(before), before + (heads * size + np.arange(size)).reshape(-1)])


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
