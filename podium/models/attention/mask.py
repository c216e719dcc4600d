"""Applies the attention rule of `podium.models.attention.mask_rule` to packed rows and their blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from podium.models.attention.mask_rule import NEVER, Block, Bounds, Keys, Queries, meets, seen
from podium.models.blocks.kind import Packed

Array = jax.Array | np.ndarray


def seen_in_sequence(q_positions: jax.Array, k_positions: jax.Array, window: int | None = None) -> jax.Array:
    """`seen` for queries and keys of one sequence, given their positions."""
    earlier = k_positions <= q_positions
    return earlier if window is None else earlier & (q_positions - k_positions < window)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which tokens of packed rows attend to which.

    Raises:
        ValueError: a window is given without positions.
    """

    segments: Array  # [B, T] int32, segment of each token; 0 is padding
    prompts: Array  # [B, T] int32, segment of each token's prompt; its own segment if it has no separate prompt
    positions: Array | None = None  # [B, T] int32, position in the sequence; needed only with a window
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.window is not None and self.positions is None:
            raise ValueError(
                f"a window of {self.window} positions needs each token's position in its sequence; pass positions=, or"
                " window=None to attend to all earlier tokens"
            )

    def mask(self) -> jax.Array:
        """[B, T, T] bool: whether each query attends to each key."""
        places = jnp.arange(self.segments.shape[1])[None]
        columns = jax.tree.map(lambda x: x[:, :, None], self)
        rows = jax.tree.map(lambda x: x[:, None], self)
        return _seen(columns, places[:, :, None], rows, places[:, None])

    def cut(self, n: int, t: int) -> "Visibility":
        """The same tokens, padded and cut into n blocks of t: [B, n, t]."""
        return jax.tree.map(lambda x: pad_to(x, n * t).reshape(-1, n, t), self)

    def block_pairs(self) -> Array:
        """[..., n, n] bool: which pairs of blocks, query by key, may hold visible pairs. Needs cut rows [..., n, t]."""
        blocks = self.blocks()
        queries = jax.tree.map(lambda x: x[..., :, None], blocks)
        keys = jax.tree.map(lambda x: x[..., None, :], blocks)
        return meets(queries, keys, self.window)

    def blocks(self) -> Block:
        """The inputs of `meets` for each block, [..., n]. Needs cut rows [..., n, t]."""
        live = self.segments > 0
        segments, prompts = _bounds(self.segments, live), _bounds(self.prompts, live)
        positions = None if self.positions is None else _bounds(self.positions, live)
        number = np.broadcast_to(np.arange(self.segments.shape[-2]), self.segments.shape[:-1])
        return Block(number, segments, prompts, positions)

    def pair(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """[t, t] bool: whether block i's queries attend to block j's keys. Requires one cut row [n, t]."""
        t = self.segments.shape[-1]
        places = jnp.arange(t)
        columns = jax.tree.map(lambda x: x[i][:, None], self)
        rows = jax.tree.map(lambda x: x[j][None], self)
        return _seen(columns, i * t + places[:, None], rows, j * t + places[None])


def packed_rows(segments: jax.Array, prompts: jax.Array) -> Packed:
    """The sequences of packed rows; `segments` and `prompts` [B, T] are as in `Packed`."""
    T = segments.shape[1]
    places = jnp.broadcast_to(jnp.arange(T)[None], segments.shape)
    continues = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (1, 0)))
    behind = jax.lax.cummax(jnp.where(segments == prompts, places, -1), axis=1)  # latest token outside completions
    first = jnp.where(prompts != segments, behind, T)
    return Packed(segments, prompts, jnp.where(continues, places - 1, first))


def _seen(q: Visibility, q_places: jax.Array, k: Visibility, k_places: jax.Array) -> jax.Array:
    queries = Queries(q_places, q.segments, q.prompts, q.positions)
    return jnp.asarray(seen(queries, Keys(k_places, k.segments, k.positions), q.window))


def pad_to(x: jax.Array, length: int) -> jax.Array:
    """Pad [B, T, ...] with zeros to `length` tokens."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _bounds(x: Array, live: Array) -> Bounds:
    """The bounds of each block of [..., n, t]. Values at padding may raise `greatest`, which only costs time."""
    if isinstance(x, np.ndarray):
        return Bounds(np.where(live, x, NEVER).min(axis=-1), x.max(axis=-1))
    return Bounds(jnp.min(jnp.where(live, x, NEVER), axis=-1), jnp.max(x, axis=-1))
