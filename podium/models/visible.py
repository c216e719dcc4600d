"""The rule by which tokens of packed rows attend to each other, over numpy and jax arrays alike; no jax here.

A token attends to itself and to the tokens before it, of its own segment and of its prompt's, and never to padding;
with a window, only to those fewer than `window` positions back. The window counts positions in a sequence, not places
in a row: a prompt lies once before many completions.

The kernels hold the same numbers in different shapes (rows, columns, blocks in registers, bounds in scalar memory), so
the rule, `seen` and `meets`, is written over anything that broadcasts. `podium.models.visibility` applies it to whole
rows, the planner to numpy arrays.
"""

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import jax

NEVER = np.iinfo(np.int32).max
Array: TypeAlias = "jax.Array | np.ndarray"


class Queries(NamedTuple):
    """Tokens that attend, in a shape that broadcasts against the keys'."""

    places: Array  # in the row
    segments: Array  # 0 is padding
    prompts: Array
    positions: "Array | None" = None  # in the sequence; only a window needs them


class Keys(NamedTuple):
    """Tokens that are attended to, in a shape that broadcasts against the queries'."""

    places: Array
    segments: Array
    positions: "Array | None" = None


class Bounds(NamedTuple):
    """The least and the greatest number of each block; in a block of padding the least is `NEVER`."""

    least: Array
    greatest: Array


class Block(NamedTuple):
    """What `meets` needs to know about blocks of a row."""

    number: Array  # in the row
    segments: Bounds
    prompts: Bounds
    positions: Bounds | None = None


def seen(q: Queries, k: Keys, window: int | None = None) -> Array:
    """Whether each query attends to each key, bool, in the shape to which the two broadcast."""
    related = (k.places <= q.places) & (k.segments > 0) & ((k.segments == q.segments) | (k.segments == q.prompts))
    if window is None:
        return related
    assert q.positions is not None and k.positions is not None
    return related & (q.positions - k.positions < window)


def meets(q: Block, k: Block, window: int | None = None) -> Array:
    """Whether any query of block `q` may attend to any key of block `k`; false only where none does."""
    own = _overlap(k.segments, q.segments)
    prompt = _overlap(k.segments, q.prompts)
    related = (k.number <= q.number) & (own | prompt)
    if window is None:
        return related
    assert q.positions is not None and k.positions is not None
    return related & (q.positions.least - k.positions.greatest < window)


def _overlap(x: Bounds, y: Bounds) -> Array:
    return (x.least <= y.greatest) & (y.least <= x.greatest)


def block_pairs(segments: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Which pairs of a row's blocks may hold a visible pair of tokens, [n, n] bool, query by key.

    Args:
        segments: [n, t], the segment of each token, by block.
        prompts: [n, t], the segment of its prompt.
    """
    live = segments > 0
    number = np.arange(len(segments))
    least, greatest = np.where(live, segments, NEVER).min(axis=-1), segments.max(axis=-1)
    prompt_least, prompt_greatest = np.where(live, prompts, NEVER).min(axis=-1), prompts.max(axis=-1)
    queries = Block(
        number[:, None],
        Bounds(least[:, None], greatest[:, None]),
        Bounds(prompt_least[:, None], prompt_greatest[:, None]),
    )
    keys = Block(number, Bounds(least, greatest), Bounds(prompt_least, prompt_greatest))
    return np.asarray(meets(queries, keys))
