"""Loads weights from disk into their shards, and exports a folder that Hugging Face transformers loads.

Tensors are read in pieces of a few MiB, each written to its place before the next is read, so the host never holds a
whole model or tensor. `podium.models.files.folder` reads safetensors, `podium.models.files.gguf` the formats of GGUF,
and `podium.models.files.names` has names and layouts.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from podium.files import cause_of, disk_advice
from podium.models.architecture import DecoderConfig, ModelError
from podium.models.blocks.spec import ParamSpec
from podium.models.families import FAMILIES
from podium.models.files import mxfp4
from podium.models.files.folder import (
    FLOATS,
    INDEX,
    WEIGHTS,
    SafetensorsFolder,
    has_own_head,
    open_folder,
)
from podium.models.files.gguf import ROPE_FACTORS, GgufHeader, GgufTensors, rope_divisors
from podium.models.files.gguf_config import gguf_form
from podium.models.files.hf_config import to_hf_config
from podium.models.files.names import (
    FIRST_APART,
    INVERSE_FREQUENCIES,
    FilePart,
    file_parts,
    head_tensors,
    layout_of,
)
from podium.models.files.source import ModelSource, has_tower, own_scores
from podium.models.files.tensor_layout import FileKind, Tensors
from podium.models.params import param_specs
from podium.models.text.tokenizer import Tokenizer
from podium.sharding import Params, ShardingRules, init_params, param_shardings

logger = logging.getLogger(__name__)
PIECE_BYTES = 8 * 2**20
MAX_SHARD_BYTES = 5_000_000_000
SCORE_HEAD = ("score", "score_bias")


def load_params(
    source: ModelSource,
    config: DecoderConfig,
    rules: ShardingRules,
    dtype: DTypeLike = jnp.float32,
    *,
    only: Collection[str] | None = None,
) -> Params:
    """Load a model's weights, converted to `dtype`, each into its shards on the mesh.

    `config` is what `read_architecture` makes of the source; `only` names the weights to load (unset: all). A head of
    scores that the files do not have is drawn at random, always the same. Raises ModelError if a file is truncated, or
    a tensor is missing, unexpected, of the wrong shape, or not floating point.
    """
    specs = param_specs(config)
    kind: FileKind = source.kind
    if source.kind == "gguf":
        form, _ = gguf_form(source.header)
        tensors: Tensors = GgufTensors(source.header, config, in_pairs=form.in_pairs)
        _check_rope(source.header, config)
    else:
        tensors = open_folder(source.path)
        _leave_out(tensors, source, config)
        apart = any(map(FIRST_APART.fullmatch, tensors.entries))
        kind = "mxfp4" if tensors.packed else "apart" if apart else "folder"
    parts = _tied_parts(list(file_parts(config, kind)), tensors, config)
    new: Params = {}
    if config.scores != "none" and own_scores(source) == "none":
        parts = [part for part in parts if part.param not in SCORE_HEAD]
        drawn = init_params(0, {name: specs[name] for name in SCORE_HEAD if name in specs}, rules)
        specs = {name: spec for name, spec in specs.items() if name not in SCORE_HEAD}
        new = {name: x.astype(dtype) for name, x in drawn.items() if only is None or name in only}
    spare = _spare(tensors, source, config) - {part.tensor for part in parts}
    _check_tensors(tensors, parts, spare=spare, where=source.path)
    specs = {name: spec for name, spec in specs.items() if only is None or name in only}

    def zeros() -> Params:
        return {name: jnp.zeros(spec.shape, dtype) for name, spec in specs.items()}

    params = jax.jit(zeros, out_shardings=param_shardings(specs, rules))()
    for part in (each for each in parts if each.param in specs):
        params[part.param] = _fill(params[part.param], part, tensors, specs[part.param], rules)
    return params | new


def _tied_parts(parts: list[FilePart], tensors: Tensors, config: DecoderConfig) -> list[FilePart]:
    """The parts of a model's files; a tied embedding is read under the head's name if the files store it only there.

    transformers accepts either name too; a program that writes a shared tensor once may keep either.
    """
    embedding, head = head_tensors(config)
    if not config.tied or embedding in tensors.entries or head not in tensors.entries:
        return parts
    return [dataclasses.replace(part, tensor=head) if part.tensor == embedding else part for part in parts]


def _leave_out(tensors: SafetensorsFolder, source: ModelSource, config: DecoderConfig) -> None:
    """Warn of tensors outside the text model. Raises ModelError if the model's type has no such tensors."""
    further = FAMILIES[config.model_type].predicts_ahead
    for group, described, expected in (
        (tensors.of_tower, "tensors of its vision tower are left out: the text model is trained", has_tower(source)),
        (tensors.ahead, "tensors that predict tokens after the next (mtp) are left out", further),
    ):
        if group and not expected:
            name, entry = next(iter(group.items()))
            raise ModelError(
                f"tensor {name} in {entry.file} is unexpected, and {len(group) - 1} more: a {config.model_type} does"
                " not have this weight"
            )
        if group:
            logger.warning("%s: %d %s", source.path, len(group), described)


def _spare(tensors: Tensors, source: ModelSource, config: DecoderConfig) -> set[str]:
    """The files' tensors that are not weights of this decoder and do not affect what it computes.

    Raises ModelError if the numbers of one contradict the decoder.
    """
    embedding, head = head_tensors(config)
    heads = {head, layout_of("head", config).gguf} & tensors.entries.keys()
    tied = config.tied and config.scores == "none"
    if heads and tied and (source.kind == "gguf" or has_own_head(source.path, embedding, head)):
        raise ModelError(
            f"{source.path}: its head differs from its embedding, and the decoder was read from another description, in"
            " which they are one; read the decoder from the folder itself"
        )
    spare = heads if config.tied or config.scores != "none" else set[str]()
    if heads and config.scores != "none" and (source.kind == "gguf" or embedding in tensors.entries):
        logger.warning("%s: %s is left out: the head of scores takes its place", source.path, *heads)
    if source.kind == "gguf":
        return spare | ({ROPE_FACTORS} & tensors.entries.keys())  # compared by `_check_rope`
    rotations = {name for name in tensors.entries if name.endswith(INVERSE_FREQUENCIES)}
    for name in sorted(rotations):
        _check_frequencies(tensors, name, config)
    return spare | rotations


def _check_frequencies(tensors: Tensors, name: str, config: DecoderConfig) -> None:
    """Raises ModelError if a tensor of rotary frequencies contradicts the config.

    transformers computes the frequencies from the config. It ignores these tensors, which early versions saved.
    """
    entry = tensors.entries[name]
    close = 1e-4 if entry.dtype == "F32" else 1e-2
    for rope in config.ropes:
        half = rope.dims // 2
        if entry.shape == (half,):
            found = tensors.read(name, 0, half).astype(np.float64)
            for expected in (rope.theta ** -(np.arange(half) / half), rope.frequencies()):
                if np.allclose(found, expected, rtol=close, atol=1e-6):
                    return
    raise ModelError(
        f"tensor {name} in {entry.file}: its rotary frequencies are not those of config.json; if rope_theta and"
        " rope_scaling there are right, remove the tensor"
    )


def _check_tensors(tensors: Tensors, parts: list[FilePart], *, spare: set[str], where: Path) -> None:
    """Raises ModelError if the files' tensors, but for the `spare` ones, do not match the decoder."""
    problems = []
    for part in parts:
        expected = part.tensor_shape
        entry = tensors.entries.get(part.tensor)
        if entry is None:
            embedding = next(each.tensor for each in parts if each.param == "embed")
            problems.append(_missing(part, where, may_be_tied=embedding in tensors.entries))
        elif entry.shape != expected:
            wrong = f"expected shape {list(expected)}, found {list(entry.shape)}"
            problems.append(f"tensor {part.tensor} in {entry.file}: {wrong}")
        elif isinstance(tensors, SafetensorsFolder) and entry.dtype not in (*FLOATS, mxfp4.DTYPE):
            wrong = f"expected dtype {', '.join(FLOATS)}, found {entry.dtype}"
            problems.append(f"tensor {part.tensor} in {entry.file}: {wrong}")
    known = {part.tensor for part in parts} | spare
    beyond = [
        f"tensor {name} in {entry.file} is unexpected: this decoder does not have this weight"
        for name, entry in tensors.entries.items()
        if name not in known
    ]
    if problems or beyond:
        told = problems[: max(3, 5 - len(beyond))]  # both kinds: names with a prefix are missing, and unexpected
        told += beyond[: 5 - len(told)]
        left = len(problems) + len(beyond) - len(told)
        more = [f"and {left} more"] if left else []
        raise ModelError("\n".join([f"{where}: the weights do not match its config:", *told, *more]))


def _missing(part: FilePart, where: Path, *, may_be_tied: bool) -> str:
    """Describe a tensor that the files do not have."""
    found = f"tensor {part.tensor} is missing from {where}; expected shape {list(part.tensor_shape)}"
    if part.param == "head" and may_be_tied:
        return f"{found}; if the head is the embedding, set tie_word_embeddings to true in config.json"
    return found


def _check_rope(header: GgufHeader, config: DecoderConfig) -> None:
    """Raises ModelError if the file's frequencies differ from those of the assumed Llama 3 scaling."""
    divisors = rope_divisors(header)
    if divisors is None:
        return
    for rope in config.ropes:
        half = rope.dims // 2
        ours = rope.theta ** -(np.arange(half) / half) / rope.frequencies()
        if divisors.shape == ours.shape and np.allclose(divisors, ours, rtol=1e-4):
            continue
        raise ModelError(f"{header.path}: tensor rope_freqs.weight: only Llama 3.1's scaling is supported")


def _fill(target: jax.Array, part: FilePart, tensors: Tensors, spec: ParamSpec, rules: ShardingRules) -> jax.Array:
    """Write one file tensor into `target`, piece by piece; returns the new array. `target` is donated.

    A piece is some rows of every shard, with the file's order of dimensions. The devices transpose and convert it, and
    write it in place.
    """
    layout = part.layout
    shape, laned = layout.split_shape(part.shape), layout.laned_shape(part.shape)  # in the file's order
    axes = dict(zip(layout.ours, spec.axes[-len(layout.ours) :], strict=True))
    partition = rules.spec([axes[letter] for letter in layout.letters])
    sharding = jax.sharding.NamedSharding(rules.mesh, partition)
    rows = sharding.shard_shape(shape)[0]  # per shard
    shards = shape[0] // rows
    width = layout.file_shape(part.shape)[0] // shape[0]  # file rows per row of ours
    bytes_per_row = shards * int(np.prod(shape[1:], dtype=np.int64)) * 4
    count = max(1, min(rows, PIECE_BYTES // bytes_per_row))
    write = _make_write(rules.mesh, rules.spec(spec.axes), partition, layout.from_file_order())
    for first in range(0, rows, count):
        start = min(first, rows - count)  # the last piece overlaps the previous one, so that all have the same shape
        read = functools.cache(functools.partial(tensors.read, part.tensor))

        def piece(index: Any, start: int = start, read: Any = read) -> np.ndarray:
            row = (index[0].start or 0) // count * rows + start
            block = read(part.first + row * width, part.first + (row + count) * width, part.at)
            block = block.reshape(count, *laned[1:])
            if part.lane is not None:
                block = block.take(part.lane, axis=layout.lane_dim)
            return block[(slice(None), *index[1:])]

        values = jax.make_array_from_callback((count * shards, *shape[1:]), sharding, piece)
        target = write(target, values, part.index, start)
        target.block_until_ready()  # so that pieces do not pile up
    return target


@functools.cache
def _make_write(mesh: Mesh, target: PartitionSpec, piece: PartitionSpec, order: tuple[int, ...]):
    """The jitted `(target, piece, index, start) -> target`: writes a piece into each shard in place.

    `index` selects the stacked dimensions; `start` is the first row within each shard. Where a stacked dimension is
    split, as experts are, the other shards stay as they are.
    """

    def write(target: jax.Array, piece: jax.Array, index: tuple[jax.Array, ...], start: jax.Array) -> jax.Array:
        values = piece.transpose(order).astype(target.dtype)
        values = jnp.expand_dims(values, range(len(index)))
        here = [
            each if names is None else each - size * jax.lax.axis_index(names)
            for each, size, names in zip(index, target.shape, partition, strict=False)
        ]
        begin = [*here, *(start if dim == 0 else 0 for dim in order)]
        if any(names is not None for names in partition[: len(index)]):
            held = functools.reduce(
                jnp.logical_and, ((each >= 0) & (each < size) for each, size in zip(here, target.shape, strict=False))
            )
            values = jnp.where(held, values, jax.lax.dynamic_slice(target, begin, values.shape))
        return jax.lax.dynamic_update_slice(target, values, begin)

    partition, everywhere = target, PartitionSpec()
    specs = (target, piece, everywhere, everywhere)
    return jax.jit(jax.shard_map(write, mesh=mesh, in_specs=specs, out_specs=target), donate_argnums=0)


def save_model(
    params: Params,
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    folder: Path | str,
    *,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Export a folder that transformers loads: config, tokenizer (if any), safetensors. It appears only once complete.

    Weights are written in `dtype`, and split into shards with an index if one file would exceed `max_shard_bytes`.
    Raises ModelError if the folder exists and is not empty.
    """
    with new_folder(Path(folder)) as unfinished:
        _save_config(config, tokenizer, unfinished, dtype)
        _save_weights(params, config, unfinished, dtype, max_shard_bytes)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` if the block succeeds and removed otherwise.

    Raises ModelError if the folder exists and is not empty, or if it cannot be written.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ModelError(f"{folder}: exists and is not an empty folder; export to another, or remove it first")
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        yield unfinished
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = f"{cause_of(error)}; {disk_advice(error, folder.parent, elsewhere='or export to another folder')}"
        raise ModelError(f"{folder}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _save_config(config: DecoderConfig, tokenizer: Tokenizer | None, folder: Path, dtype: str) -> None:
    tokens = {}
    if tokenizer is not None:
        tokenizer.save(folder)
        tokens = {"eos_token_id": list(tokenizer.eos_tokens), "pad_token_id": tokenizer.pad_token}
        if tokenizer.bos_token is not None:
            tokens["bos_token_id"] = tokenizer.bos_token
        write_json(folder / "generation_config.json", tokens)
    write_json(folder / "config.json", to_hf_config(config) | tokens | {"dtype": dtype})


def _save_weights(params: Params, config: DecoderConfig, folder: Path, dtype: str, max_shard_bytes: int) -> None:
    by_tensor: dict[str, list[FilePart]] = {}
    for part in file_parts(config, "folder"):
        by_tensor.setdefault(part.tensor, []).append(part)
    shards: list[list[str]] = [[]]
    size, total = 0, 0
    for tensor, parts in by_tensor.items():
        tensor_bytes = math.prod(parts[0].tensor_shape) * jnp.dtype(dtype).itemsize
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size, total = size + tensor_bytes, total + tensor_bytes
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS]
    for name, shard in zip(names, shards, strict=True):
        tensors = {tensor: _file_tensor(params, by_tensor[tensor], dtype) for tensor in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod((folder / "config.json").stat().st_mode)  # safetensors makes it private to its owner
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _file_tensor(params: Params, parts: list[FilePart], dtype: str) -> np.ndarray:
    """Assemble a tensor in the file's layout from its parts."""
    made = np.empty(parts[0].tensor_shape, jnp.dtype(dtype))
    for part in parts:
        layout = part.layout
        ours = np.asarray(params[part.param][part.index].astype(dtype)).transpose(layout.to_file_order())
        rows = made[part.at][part.first : part.first + layout.file_shape(part.shape)[0]]
        split = rows.reshape(layout.laned_shape(part.shape))  # a view, as whole rows lie side by side
        if part.lane is None:
            split[...] = ours
        else:
            np.moveaxis(split, layout.lane_dim, 0)[part.lane] = ours
    return made


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
