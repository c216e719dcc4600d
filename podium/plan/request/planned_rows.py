"""How many rows a step's completions fill, packed as the trainer packs them. No jax."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from podium.config.attention_blocks import KERNELS, Backend, cut
from podium.models.attention.mask_rule import block_pairs
from podium.plan.request.workload import SequenceLengths
from podium.run.run_spec import BatchSizes, RowShape
from podium.train.batches.balance import Lengths
from podium.train.batches.packing import Chunk
from podium.train.batches.shapes import Packed, choose_shapes, pack, with_shapes

JUDGED = 16
"""Steps that a plan's packing is averaged over."""


class ShapeShare(NamedTuple):
    """The part of a step's micro-batches that have one shape."""

    shape: RowShape
    updates: float = 1.0
    """Share of the optimizer steps that take this shape."""
    micro_batches: float = 1.0
    """Share of the micro-batches."""
    attended: float = 1.0
    """Share of the blocks on or below the diagonal that attention kernels compute; 1 without a kernel."""


class PackedStep(NamedTuple):
    """A step's completions packed into rows, on average over steps like it."""

    shapes: tuple[ShapeShare, ...]
    """The config's own shape, then those that the run chooses."""
    micro_batches: float
    """Micro-batches of a step, of all shapes."""
    places: float
    """Token places of these, padding included."""
    own_places: float
    """Token places if all micro-batches had the config's own shape."""
    needed: float
    """Tokens that a step trains on, and each group's prompt once."""


@functools.lru_cache(maxsize=64)
def packed_step(
    lengths: SequenceLengths, sizes: BatchSizes, *, minibatches: int, attention: Backend, chooses: bool = True
) -> PackedStep:
    """Pack the completions of this step and of others that are drawn from its groups, as the trainer does.

    The shapes are those that a run chooses whose first step this is; unless it `chooses`, the config's own alone.
    """
    own = sizes
    sizes = chosen_sizes(lengths, own, minibatches) if chooses else own
    steps = [lengths, *(_resampled(lengths, seed) for seed in range(1, JUDGED))]
    batches = [samples for step in steps for samples in optimizer_steps(step, minibatches)]
    counts = {shape: np.zeros(4) for shape in (own.shape, *sizes.rules.shapes)}  # updates, micro-batches, blocks
    own_places = 0
    for samples in batches:
        found = pack(samples, sizes)
        counts[found.sizes.shape] += (1, found.micro_batches, *attended_blocks(found, samples, attention))
        alone = found if found.sizes.shape == own.shape else pack(samples, own)
        own_places += alone.micro_batches * own.rows * own.row_tokens
    micro_batches = float(sum(count[1] for count in counts.values()))
    shares: list[ShapeShare] = []
    for shape, count in counts.items():
        updates, number, seen, blocks = count.tolist()
        attended = seen / blocks if blocks and attention in KERNELS.values() else 1.0
        shares.append(ShapeShare(shape, updates / len(batches), number / max(micro_batches, 1.0), attended))
    return PackedStep(
        shapes=tuple(shares),
        micro_batches=micro_batches / len(steps),
        places=sum(float(count[1]) * shape.rows * shape.row_tokens for shape, count in counts.items()) / len(steps),
        own_places=own_places / len(steps),
        needed=sum(_needed(samples) for samples in batches) / len(steps),
    )


def attended_blocks(packed: Packed, samples: Sequence[Lengths], attention: Backend) -> tuple[int, float]:
    """Pairs of blocks of these rows that attention kernels compute, which skip those without a visible pair; and all
    pairs on or below the diagonal of their micro-batches.
    """
    n, t = cut(attention, packed.sizes.row_tokens)
    seen = sum(_seen_blocks(row, samples, n, t) for row in packed.rows)
    return seen, packed.micro_batches * packed.sizes.rows * n * (n + 1) / 2


def chosen_sizes(lengths: SequenceLengths, sizes: BatchSizes, minibatches: int) -> BatchSizes:
    """The sizes of batches with the shapes that a run chooses whose first step has these lengths."""
    groups = [list(group) for _, group in itertools.groupby(_samples(lengths), lambda sample: sample.group)]
    return with_shapes(sizes, choose_shapes(groups, sizes, per_step=-(-len(groups) // minibatches)))


def optimizer_steps(lengths: SequenceLengths, minibatches: int) -> list[list[Lengths]]:
    """The lengths of the samples of each optimizer step, with a step's demonstrations shared out over them."""
    samples, prompts = _samples(lengths), len(lengths.prompts)
    parts = [*np.array_split(np.arange(prompts), minibatches)]
    mixed_in = np.array_split(np.arange(prompts, 1 + max(sample.group for sample in samples)), minibatches)
    members = [{*part.tolist(), *own.tolist()} for part, own in zip(parts, mixed_in, strict=True)]
    return [[sample for sample in samples if sample.group in own] for own in members]


def _samples(lengths: SequenceLengths) -> list[Lengths]:
    """The lengths of a step's samples, by group; each demonstration is a group of its own, after the others."""
    mixed_in = lengths.demonstrations if lengths.demonstrations is not None else np.zeros((0, 2), int)
    found = [
        Lengths(group=group, shown=prompt - 1, own=tokens)
        for group, (prompt, own) in enumerate(zip(lengths.prompts.tolist(), lengths.completions.tolist(), strict=True))
        for tokens in own
    ]
    first = len(lengths.prompts)
    return found + [
        Lengths(group=n, shown=shown - 1, own=own) for n, (shown, own) in enumerate(mixed_in.tolist(), first)
    ]


def _resampled(lengths: SequenceLengths, seed: int) -> SequenceLengths:
    """The lengths of another step, whose groups are drawn from those of this one."""
    rng, mixed_in = np.random.default_rng(seed), lengths.demonstrations
    drawn = rng.integers(0, len(lengths.prompts), len(lengths.prompts))
    return dataclasses.replace(
        lengths,
        prompts=lengths.prompts[drawn],
        completions=lengths.completions[drawn],
        demonstrations=None if mixed_in is None else mixed_in[rng.integers(0, len(mixed_in), len(mixed_in))],
    )


def _needed(samples: Sequence[Lengths]) -> int:
    """Tokens of samples, and of each group's prompt once."""
    return sum(sample.own for sample in samples) + sum({sample.group: sample.shown for sample in samples}.values())


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
