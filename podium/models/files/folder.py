"""Reads a Hugging Face folder: its JSON files, and the tensors of its safetensors files. No jax.

`podium.models.files.hf_config` reads the architecture in config.json, and `podium.models.files.hf` loads the
tensors.
"""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from podium.models.architecture import ModelError, shown
from podium.models.files import mxfp4
from podium.models.files.tensor_layout import StoredTensor

logger = logging.getLogger(__name__)
CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
FLOATS = ("F32", "F16", "BF16")
COMPARED_BYTES = 2**24
"""Bytes of each tensor in memory at a time while two tensors are compared."""


# For models with a vision tower: prefixes of tensors outside the text model, and of the text model's tensors.
VISION_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
)
# Layers that predict several tokens at once (Qwen3.5); transformers does not read them.
AHEAD_PREFIX = "mtp."
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}


def is_of_text(stored: str) -> bool:
    """Whether a tensor in a model's files belongs to the text model, not to a vision tower."""
    return not stored.startswith(VISION_PREFIXES)


def predicts_ahead(stored: str) -> bool:
    """Whether a tensor in a model's files belongs to layers that predict more than the next token."""
    return stored.startswith(AHEAD_PREFIX)


def text_name(stored: str) -> str:
    """The name that a tensor of a multimodal model's file has in a text-only model."""
    for prefix, own in TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ModelError if it does not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    except RecursionError as error:
        raise ModelError(f"{path}: cannot be read as JSON (nested hundreds of levels deep)") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class SafetensorsFolder:
    """The tensors of a Hugging Face folder: model.safetensors, or the shards that its index lists.

    A tensor in MXFP4 is one entry, with the shape of its decoded values. In a model with a vision tower, the tensors of
    its text model have the names of a text-only model.
    """

    def __init__(self, files: tuple[Path, ...]):
        """Raises ModelError if a file is truncated, or if two tensors have one name."""
        self.entries: dict[str, StoredTensor] = {}
        """The text model's tensors, by name."""
        self.of_tower: dict[str, StoredTensor] = {}
        """The tensors of a vision tower."""
        self.ahead: dict[str, StoredTensor] = {}
        """The tensors of layers that predict tokens after the next (`mtp.`)."""
        self._stored: dict[str, str] = {}  # names in the files, by those of the entries
        self._files: dict[str, Path] = {}  # by names in the files
        for path in files:
            self._read_header(path)
        self.packed = [name.removesuffix(mxfp4.BLOCKS) for name in self.entries if name.endswith(mxfp4.BLOCKS)]
        for name in self.packed:
            blocks, scales = self.entries.pop(name + mxfp4.BLOCKS), self.entries.pop(name + mxfp4.SCALES, None)
            if scales is None or blocks.shape != (*scales.shape, mxfp4.BLOCK // 2) or blocks.dtype != "U8":
                raise ModelError(f"{blocks.file}: {name}{mxfp4.BLOCKS} and {mxfp4.SCALES} are not a tensor in MXFP4")
            shape = (*scales.shape[:-1], scales.shape[-1] * mxfp4.BLOCK)
            self.entries[name] = StoredTensor(shape, mxfp4.DTYPE, blocks.file)

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                for stored in list(file.keys()):
                    part, name = file.get_slice(stored), text_name(stored)
                    group = self.entries if is_of_text(stored) else self.of_tower
                    group = self.ahead if predicts_ahead(stored) else group
                    if name in group:
                        raise ModelError(
                            f"tensor {stored} in {path}: the name is used twice, also in {group[name].file};"
                            " remove the file, or the tensor, that does not belong to the model"
                        )
                    self._stored[name], self._files[stored] = stored, path
                    group[name] = StoredTensor(tuple(part.get_shape()), part.get_dtype(), path)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path}: truncated or damaged ({error}; the file has {path.stat().st_size:,} bytes);"
                " download or copy it again"
            ) from error

    def read(self, name: str, start: int, stop: int, at: tuple[int, ...] = ()) -> np.ndarray:
        """Read rows [start, stop) of a tensor, or of its part at an index, in the file's dtype; MXFP4 as bfloat16."""
        if self.entries[name].dtype == mxfp4.DTYPE:
            return mxfp4.decoded(*(self._read(name + end, start, stop, at) for end in (mxfp4.BLOCKS, mxfp4.SCALES)))
        return self._read(name, start, stop, at)

    def _read(self, name: str, start: int, stop: int, at: tuple[int, ...]) -> np.ndarray:
        """The file is memory-mapped only during the call."""
        stored = self._stored[name]
        with safe_open(self._files[stored], framework="numpy") as file:
            return file.get_slice(stored)[(*at, slice(start, stop))]


def open_folder(folder: Path) -> SafetensorsFolder:
    """The tensors of a folder; the headers are read once for each state of the files.

    Raises ModelError if the folder has no safetensors files, or if one is missing or truncated.
    """
    return _opened(folder, tuple(map(_state, _weight_files(folder))))


def has_own_head(folder: Path, embedding: str, head: str) -> bool:
    """Whether a folder's files hold a head whose numbers differ from the embedding's, so that it cannot be tied to it.

    False if they hold no head, or if not all of the files are there, as where only config.json was downloaded. The
    tensors are compared once for each state of the files, up to the first difference.
    """
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        return False
    files = _listed_files(folder)
    return all(path.is_file() for path in files) and _has_own_head(folder, tuple(map(_state, files)), embedding, head)


class _FileState(tuple[Path, int, int]):
    """A file's path, time of its last change in ns, and size in bytes."""


def _state(path: Path) -> _FileState:
    found = path.stat()
    return _FileState((path, found.st_mtime_ns, found.st_size))


@functools.lru_cache(maxsize=4)
def _opened(folder: Path, files: tuple[_FileState, ...]) -> SafetensorsFolder:
    if (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        logger.warning("%s: has both %s and %s; only the first is read", folder, WEIGHTS, INDEX)
    return SafetensorsFolder(tuple(path for path, *_ in files))


@functools.lru_cache(maxsize=16)
def _has_own_head(folder: Path, files: tuple[_FileState, ...], embedding: str, head: str) -> bool:
    tensors = _opened(folder, files)
    if not {embedding, head} <= tensors.entries.keys() or _are_equal(tensors, head, embedding):
        return False
    logger.warning(
        "%s: %s differs from %s, so the head is loaded and trained separately, although tie_word_embeddings in"
        " config.json is true",
        *(folder, head, embedding),
    )
    return True


def _are_equal(tensors: SafetensorsFolder, one: str, other: str) -> bool:
    """Whether two matrices have the same shape and the same numbers."""
    first, second = tensors.entries[one], tensors.entries[other]
    if first.shape != second.shape or len(first.shape) != 2 or not {first.dtype, second.dtype} <= set(FLOATS):
        return False
    rows, columns = first.shape
    step = max(1, COMPARED_BYTES // (4 * columns))
    return all(
        np.array_equal(_rows(tensors, one, start, start + step), _rows(tensors, other, start, start + step))
        for start in range(0, rows, step)
    )


def _rows(tensors: SafetensorsFolder, name: str, start: int, stop: int) -> np.ndarray:
    """Rows of a matrix in float32, which has every number of FLOATS."""
    return tensors.read(name, start, min(stop, tensors.entries[name].shape[0])).astype(np.float32)


def _weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights. Raises ModelError if one is missing."""
    files = _listed_files(folder)
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelError(f"{folder / INDEX}: lists {', '.join(missing)}, which the folder does not have")
    return files


def _listed_files(folder: Path) -> list[Path]:
    """The names of the files with a folder's weights: those that its index lists, or its only file."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}; Podium reads safetensors only")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX}: has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ModelError(
                f"{folder / INDEX}: lists {shown(name)}; a shard must be the name of a .safetensors file in this folder"
            )
    return sorted(folder / file for file in set(weight_map.values()))
