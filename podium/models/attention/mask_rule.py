"""The rule for attention between tokens of packed rows, for numpy and jax arrays alike. No jax.

A token attends to itself and to earlier tokens of its own segment and of its prompt's segment, and never to padding;
with a window, only to those fewer than `window` positions back. The window counts positions in the sequence rather than
places in the row, because several completions share one prompt in a row.

The kernels hold these numbers in different shapes (rows, columns, register blocks, bounds in scalar memory), so `seen`
and `meets` accept anything that broadcasts. `podium.models.attention.mask` applies them to whole rows, the planner to
numpy arrays.
"""

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import jax

NEVER = np.iinfo(np.int32).max
Array: TypeAlias = "jax.Array | np.ndarray"


class Queries(NamedTuple):
    """Attending tokens, in a shape that broadcasts against the keys'."""

    places: Array  # index in the row
    segments: Array  # 0 is padding
    prompts: Array
    positions: "Array | None" = None  # in the sequence; needed only with a window


class Keys(NamedTuple):
    """Attended tokens, in a shape that broadcasts against the queries'."""

    places: Array
    segments: Array
    positions: "Array | None" = None


class Bounds(NamedTuple):
    """The minimum and maximum of a number over each block; for a block of padding, `least` is `NEVER`."""

    least: Array
    greatest: Array


class Block(NamedTuple):
    """The inputs of `meets` for blocks of a row."""

    number: Array  # index in the row
    segments: Bounds
    prompts: Bounds
    positions: Bounds | None = None


def seen(q: Queries, k: Keys, window: int | None = None) -> Array:
    """Whether each query attends to each key: bool, in the broadcast shape."""
    related = (k.places <= q.places) & (k.segments > 0) & ((k.segments == q.segments) | (k.segments == q.prompts))
    if window is None:
        return related
    assert q.positions is not None and k.positions is not None
    return related & (q.positions - k.positions < window)


def meets(q: Block, k: Block, window: int | None = None) -> Array:
    """Whether any query of block `q` may attend to any key of block `k`; False is exact, True is an upper bound."""
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
    """Which pairs of a row's blocks may hold a visible pair of tokens: [n, n] bool, query by key.

    Args:
        segments: [n, t], segment of each token, by block.
        prompts: [n, t], segment of each token's prompt.
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
