"""How many rows a step's completions fill, packed as the trainer packs them. No jax."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from podium.config.attention_blocks import KERNELS, Backend, cut
from podium.models.attention.mask_rule import block_pairs
from podium.plan.request.workload import SequenceLengths, content
from podium.run.run_spec import BatchSizes
from podium.train.batches.balance import Lengths
from podium.train.batches.packing import Chunk
from podium.train.batches.shapes import pack


class PackedRows(NamedTuple):
    """A step's completions packed into rows."""

    rows: tuple[int, ...]
    """Rows of each optimizer step."""
    seen: int
    """Pairs of blocks that attention kernels compute in these rows; they skip pairs of blocks without visible
    tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Packing:
    """The settings that determine how a step's completions are packed."""

    content: Hashable
    lengths: SequenceLengths = dataclasses.field(compare=False)
    sizes: BatchSizes
    minibatches: int
    blocks: tuple[int, int]
    """Blocks of a row in attention kernels, and tokens of each."""


def packed_rows(lengths: SequenceLengths, sizes: BatchSizes, *, minibatches: int, attention: Backend) -> PackedRows:
    """Pack a step's completions as the trainer does."""
    return _packed(
        _Packing(
            content=content(lengths),
            lengths=lengths,
            sizes=sizes,
            minibatches=minibatches,
            blocks=cut(attention, sizes.row_tokens),
        )
    )


@functools.lru_cache(maxsize=64)
def _packed(given: _Packing) -> PackedRows:
    lengths = given.lengths
    rows: list[int] = []
    seen = 0
    mixed_in = lengths.demonstrations if lengths.demonstrations is not None else np.zeros((0, 2), int)
    imitated = np.array_split(np.arange(len(mixed_in)), given.minibatches)
    for part, own in zip(np.array_split(np.arange(len(lengths.prompts)), given.minibatches), imitated, strict=True):
        samples = [
            Lengths(group=int(group), shown=int(lengths.prompts[group]) - 1, own=int(tokens))
            for group in part
            for tokens in lengths.completions[group]
        ]
        samples += [
            Lengths(group=len(lengths.prompts) + row, shown=int(mixed_in[row, 0]) - 1, own=int(mixed_in[row, 1]))
            for row in own.tolist()
        ]
        found = pack(samples, given.sizes).rows
        rows.append(len(found))
        seen += sum(_seen_blocks(row, samples, *given.blocks) for row in found)
    return PackedRows(tuple(rows), seen)


def packed(lengths: SequenceLengths, sizes: BatchSizes, *, minibatches: int, attention: Backend) -> tuple[int, float]:
    """Pack a step's completions as the trainer does.

    Returns:
        The number of micro-batches, and the share of blocks on or below the diagonal that attention kernels compute
        (they skip blocks without a visible pair); 1 without a kernel.
    """
    found = packed_rows(lengths, sizes, minibatches=minibatches, attention=attention)
    count = sum(-(-rows // sizes.rows) for rows in found.rows)
    n, _ = cut(attention, sizes.row_tokens)
    return count, found.seen / (count * sizes.rows * n * (n + 1) / 2) if attention in KERNELS.values() else 1.0


def _seen_blocks(row: Sequence[Chunk], samples: Sequence[Lengths], n: int, t: int) -> int:
    """Number of block pairs in a row of n blocks of t tokens that the kernels do not skip."""
    segments = np.zeros(n * t, np.int32)
    prompts = np.zeros(n * t, np.int32)
    last = end = 0
    for chunk in row:
        parts = [samples[chunk[0]].shown, *(samples[index].own for index in chunk)]
        start, end = end, end + sum(parts)
        prompts[start:end] = last + 1
        segments[start:end] = last + 1 + np.repeat(np.arange(len(parts)), parts)
        last += len(parts)
    return int(block_pairs(segments.reshape(n, t), prompts.reshape(n, t)).sum())
