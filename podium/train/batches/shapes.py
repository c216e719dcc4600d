"""Chooses the shapes of a run's micro-batches, and for each optimizer step the one that takes least time. No jax.

Every shape is a compiled program, so a run has a few. They are chosen once, from the lengths of its first step, and
kept with it (`podium.train.batches.run_shapes`). Then the lengths of each optimizer step, which every host knows,
choose one of them. Time is counted in tokens of a device: the places of all micro-batches, padding included, and
`RowRules.micro_batch_cost` for each micro-batch.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from podium.run.run_spec import BatchSizes, RowRules, RowShape
from podium.train.batches.balance import Lengths
from podium.train.batches.packing import Chunk, divide_rows, pack_rows

OTHERS = 3
"""Most shapes besides the config's own."""
LENGTHS = 16
"""Row lengths that are tried, up to the config's own."""
DRAWS = 64
"""Optimizer steps that are drawn from a step's groups to judge shapes by."""
LATER = 8
"""Steps between the choice of shapes and their first use, if their programs are compiled beside rollouts."""
LEAST_GAIN = 0.01
"""Share of the time that a further shape must save."""


class Packed(NamedTuple):
    """The rows of an optimizer step, in micro-batches of the shape that takes least time."""

    sizes: BatchSizes
    rows: list[list[Chunk]]

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that are not empty."""
        return -(-len(self.rows) // self.sizes.rows)

    @property
    def time(self) -> float:
        """Planned time of all micro-batches, in tokens of a device."""
        return self.micro_batches * _time(self.sizes, self.sizes.shape)


def pack(samples: Sequence[Lengths], sizes: BatchSizes) -> Packed:
    """Pack the samples of an optimizer step in the shape that takes least time; of equals, in the first.

    Raises:
        ValueError: a prompt with its completion is longer than a row of the config's shape.
    """
    own = sizes.of_shape(sizes.shape)
    best = Packed(own, _rows(samples, own))
    longest, tokens = _longest(samples, sizes), _tokens(samples, sizes)
    for shape in sizes.rules.shapes:
        least = -(-tokens // (shape.rows * shape.row_tokens)) * _time(sizes, shape)
        if shape.row_tokens >= longest and least < best.time:
            other = sizes.of_shape(shape)
            best = min(best, Packed(other, _rows(samples, other)), key=lambda packed: packed.time)
    # A shape is no larger than the config's own, so that of least time has no more places in all than that one, and
    # its micro-batches fit in arrays of the same size.
    return best


def choose_shapes(groups: Sequence[Sequence[Lengths]], sizes: BatchSizes, *, per_step: int) -> tuple[RowShape, ...]:
    """Choose the shapes that save most time in optimizer steps like this one, the most useful first.

    Steps are drawn from the groups of one. To the config's own shape, which is not among those returned, the shape is
    added that saves most, again and again, until it is too little.

    Args:
        groups: lengths of what each group of a step trains on; empty for groups that were dropped.
        sizes: the config's own shape, and rules for others.
        per_step: groups of an optimizer step.
    """
    if not any(groups):
        return ()
    alike = dataclasses.replace(sizes, rows=1, max_rows=1, devices=1, rules=RowRules(tile=sizes.rules.tile))
    rows = _rows_of_draws(tuple(map(tuple, groups)), alike, per_step)
    table: dict[RowShape, np.ndarray] = {}  # the time of each step, infinite if it does not fit
    for shape in (sizes.shape, *_candidates(sizes)):
        table[shape] = np.ceil(rows[shape.row_tokens] / shape.rows) * _time(sizes, shape)
    now, chosen = table.pop(sizes.shape), list[RowShape]()
    while len(chosen) < OTHERS and table:
        best = min(table, key=lambda shape: np.minimum(now, table[shape]).sum())
        after = np.minimum(now, table.pop(best))
        if after.sum() > (1 - LEAST_GAIN) * now.sum():
            break
        now = after
        chosen.append(best)
    return tuple(chosen)


def with_shapes(sizes: BatchSizes, shapes: Sequence[RowShape]) -> BatchSizes:
    """The sizes of batches that may also have these shapes."""
    return dataclasses.replace(sizes, rules=dataclasses.replace(sizes.rules, shapes=tuple(shapes)))


@functools.lru_cache(maxsize=8)
def _rows_of_draws(groups: tuple[tuple[Lengths, ...], ...], sizes: BatchSizes, per_step: int) -> dict[int, np.ndarray]:
    """Rows that optimizer steps like this one fill, [DRAWS] by row length; does not depend on rows or their cost.

    A plan of many settings asks for the same ones again and again.
    """
    steps = _draws(groups, sizes, per_step)
    return {
        row_tokens: np.array([_fewest_rows(step, sizes, row_tokens) for step in steps])
        for row_tokens in {sizes.row_tokens, *_row_lengths(sizes)}
    }


def _draws(groups: Sequence[Sequence[Lengths]], sizes: BatchSizes, per_step: int) -> list[list[Lengths]]:
    """Optimizer steps of `per_step` groups, each drawn from all of them.

    The groups are themselves a sample, whose mean length is off from that of the run by about its standard error. So
    the completions of a drawn step are longer or shorter by a factor that they share, spread by that error.
    """
    random = np.random.default_rng(0)
    drawn = random.integers(0, len(groups), (DRAWS, per_step)).tolist()
    error = _standard_error([float(np.mean([sample.own for sample in group])) for group in groups if group])
    factors = [math.exp(error * NormalDist().inv_cdf((n + 0.5) / DRAWS)) for n in range(DRAWS)]
    return [
        [_scaled(sample, number, factor, sizes) for number, group in enumerate(step) for sample in groups[group]]
        for step, factor in zip(drawn, factors, strict=True)
    ]


def _standard_error(lengths: Sequence[float]) -> float:
    """Standard error of the mean logarithm of lengths; 0 for a single one, which says nothing about others."""
    return float(np.std(np.log(lengths), ddof=1)) / math.sqrt(len(lengths)) if len(lengths) > 1 else 0.0


def _scaled(sample: Lengths, group: int, factor: float, sizes: BatchSizes) -> Lengths:
    """The lengths of a sample of another group, scaled; at most the longest completion, in a row with its prompt."""
    most = max(sample.own, min(sizes.max_new_tokens, sizes.row_tokens - sample.shown))
    return Lengths(group=group, shown=sample.shown, own=min(max(1, round(factor * sample.own)), most))


def _candidates(sizes: BatchSizes) -> Iterator[RowShape]:
    """Shapes within the memory of the config's own: its tokens on each device, in rows that are no longer."""
    rules, memory = sizes.rules, sizes.rows * sizes.row_tokens
    for row_tokens in _row_lengths(sizes):
        for rows in range(rules.row_step, memory // row_tokens + 1, rules.row_step):
            if (rows, row_tokens) != sizes.shape:
                yield RowShape(rows, row_tokens)


def _row_lengths(sizes: BatchSizes) -> list[int]:
    """The row lengths that other shapes may have."""
    tile = sizes.rules.tile
    lengths = {-(-sizes.row_tokens * part // (LENGTHS * tile)) * tile for part in range(1, LENGTHS + 1)}
    return sorted(length for length in lengths if length <= sizes.row_tokens)


def _time(sizes: BatchSizes, shape: RowShape) -> float:
    """Planned time of a micro-batch, in tokens of a device."""
    return shape.rows * shape.row_tokens / sizes.devices + sizes.rules.micro_batch_cost


def _longest(samples: Sequence[Lengths], sizes: BatchSizes) -> int:
    """Tokens of the longest piece that a row must hold: a pair, or a prompt with a completion."""
    if not sizes.pairs:
        return max((sample.shown + sample.own for sample in samples), default=0)
    groups: dict[int, int] = {}
    for sample in samples:
        groups[sample.group] = groups.get(sample.group, sample.shown) + sample.own
    return max(groups.values(), default=0)


def _tokens(samples: Sequence[Lengths], sizes: BatchSizes) -> int:
    """Fewest tokens that samples fill in rows."""
    own = sum(sample.own for sample in samples)
    if sizes.packing != "shared_prompts":
        return own + sum(sample.shown for sample in samples)
    return own + sum({sample.group: sample.shown for sample in samples}.values())


def _rows(samples: Sequence[Lengths], sizes: BatchSizes) -> list[list[Chunk]]:
    """Pack samples into rows; groups are divided only if that saves a micro-batch."""
    whole = pack_rows(samples, row_tokens=sizes.row_tokens, packing=sizes.packing)
    if sizes.packing != "shared_prompts" or sizes.pairs:
        return whole
    micro_batches = -(-len(whole) // sizes.rows)
    if micro_batches == -(-_tokens(samples, sizes) // (sizes.rows * sizes.row_tokens)):
        return whole
    divided = divide_rows(samples, row_tokens=sizes.row_tokens)
    return divided if -(-len(divided) // sizes.rows) < micro_batches else whole


def _fewest_rows(samples: Sequence[Lengths], sizes: BatchSizes, row_tokens: int) -> float:
    """Rows of this length that samples fill, with groups divided if that saves a row; infinite if one is too long."""
    if _longest(samples, sizes) > row_tokens:
        return np.inf
    whole = len(pack_rows(samples, row_tokens=row_tokens, packing=sizes.packing))
    if sizes.packing != "shared_prompts" or sizes.pairs:
        return whole
    return min(whole, len(divide_rows(samples, row_tokens=row_tokens)))
