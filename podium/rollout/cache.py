"""The engine's cache: keys and values in pages, recurrent states, and the hidden states that first tokens need.

A page holds P positions of one sequence; a table lists a sequence's pages in order. Each batch shard has its own pages,
numbered from 0 in tables; a number beyond the last page means no page, and writes there are dropped. The head dimension
comes before positions. How a head is stored in a page depends on the platform and the head size
(`podium.config.attention_blocks.kv_layout`): transposed keys on CPU, rows that fill whole tiles on TPU.

Each page also stores the hidden state of the last of its tokens that prefill computed. This state is copied with the
page to each of a prompt's completions, so that their first tokens are sampled without another forward pass.

Data of a fixed size per sequence is stored in its cell (`podium.rollout.cache_layout`), numbered per shard like pages:
the states of recurrent layers, and rings. A ring holds the pages of a windowed layer: page c of the sequence is the
ring's page c modulo the ring's length, and overwrites positions that the window no longer reaches.

Attention loops over blocks of pages up to the longest sequence of its rows, with a running softmax (arXiv:1805.02867):
its cost depends on the tokens in the cache, not on the cache's size, and a row's bits do not depend on other rows. With
a window, each row's blocks begin at the page of the oldest token that it sees, so that a layer reads only the pages of
a window, however long the rows are. Decoding has a kernel for GPUs (`podium.kernels.gpu_decode`).
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from podium.config.attention_blocks import (
    KvLayout,
    cache_block_pages,
    gpu_kernel_decodes,
    kv_layout,
    window_blocks,
    window_scope,
)
from podium.config.recurrence import whole_tiles
from podium.config.schema import RolloutConfig
from podium.config.sizes import cache_pages, ring_piece, touched_pages
from podium.kernels import gpu_decode
from podium.kernels.tpu_delta import delta_step
from podium.models.architecture import DecoderConfig
from podium.models.attention.mask import seen_in_sequence
from podium.models.blocks.kind import Advance, At, DeltaToken, States, StateSpec, Stepping, StoredState, Work
from podium.models.linear import full_precision
from podium.rollout.cache_layout import Kept, kept_places, kv_pages, num_cells
from podium.sharding import ShardingRules

AXES = (None, "batch", "cache_heads", None, None)  # of keys and values
STATE_AXES = ("batch", None)
CPU_ROWS = 16
"""Number of rows whose pages a CPU reads at once in decoding (LOG.md)."""
CPU_ROWS_LEAST = 8
"""Smallest number of rows that a CPU reads at once: products with fewer rows round differently."""
NO_PAGE = 2**30  # table entry that means no page
Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KvPages:
    """Keys and values of the layers at one place (`decoder.places`)."""

    keys: jax.Array | None  # rotated; [L, N, K, W, P] if transposed, else [L, N, K, P, W]; None: joined with the values
    values: jax.Array  # [L, N, K, P, W]; joined: the key is in a row's first Q numbers, the value in the next Q
    layout: KvLayout = dataclasses.field(metadata={"static": True})  # its width is W
    ring: int | None = dataclasses.field(default=None, metadata={"static": True})  # pages per cell; None: no ring

    @property
    def page_tokens(self) -> int:
        """Positions per page, P."""
        return self.values.shape[3]

    @property
    def key_dims(self) -> str:
        """Einsum names of the dimensions of a layer's keys; `q` stands for the row width W."""
        return "nkqp" if self.layout.transposed else "nkpq"

    @property
    def stored_keys(self) -> jax.Array:
        """The array in which keys are stored: `values` if they are joined."""
        return self.values if self.keys is None else self.keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceCache:
    """The cached arrays of the layers at one place (`decoder.places`)."""

    kv: KvPages | None
    states: tuple[jax.Array, ...]  # [L, M, ...] for M cells
    axes: tuple[tuple[str | None, ...], ...] = dataclasses.field(metadata={"static": True})  # logical axes of states


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hidden:
    """For each page, the hidden state of the last of its tokens that prefill computed."""

    states: jax.Array  # [N, D]
    page_tokens: int = dataclasses.field(metadata={"static": True})  # P


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """The cached arrays of all sequences."""

    places: tuple[PlaceCache, ...]  # one for each of the decoder's places
    hidden: Hidden


def abstract_cache(decoder: DecoderConfig, config: RolloutConfig, *, dtype: jnp.dtype, rules: ShardingRules) -> Cache:
    """An engine's cache with abstract arrays, for the planner."""
    shards = rules.num_shards("batch")
    cells = num_cells(decoder, config)

    def array(shape: Sequence[int], axes: Sequence[str | None], format: jnp.dtype = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), format, sharding=rules.sharding(*axes))

    def place(kept: Kept) -> PlaceCache:
        axes = _state_axes(kept.states)
        states = tuple(
            array((kept.layers, cells, *each.shape), own, jnp.dtype(each.dtype or dtype))
            for each, own in zip(kept.states, axes, strict=True)
        )
        layout = kv_layout(kept.head_dim, rules.platform)
        pages = kv_pages(kept, decoder, config, shards)
        rows = kept.layers, pages, kept.kv_heads, config.page_tokens, layout.width
        columns = *rows[:3], layout.width, config.page_tokens
        kv = KvPages(
            keys=None if layout.joined else array(columns if layout.transposed else rows, AXES),  # pyright: ignore[reportArgumentType]  # abstract
            values=array(rows, AXES),  # pyright: ignore[reportArgumentType]
            layout=layout,
            ring=kept.ring,
        )
        return PlaceCache(kv=kv if kept.kv_heads else None, states=states, axes=axes)  # pyright: ignore[reportArgumentType]

    return Cache(
        places=tuple(place(kept) for kept in kept_places(decoder, config)),
        hidden=Hidden(
            states=array((cache_pages(config, shards), decoder.width), STATE_AXES),  # pyright: ignore[reportArgumentType]
            page_tokens=config.page_tokens,
        ),
    )


def cache_shardings(decoder: DecoderConfig, rules: ShardingRules) -> Cache:
    """The shardings of a decoder's cache, as a tree prefix."""

    def place(work: Work) -> PlaceCache:
        axes = _state_axes(work.states)
        return PlaceCache(
            kv=rules.sharding(*AXES) if work.kv_heads else None,  # pyright: ignore[reportArgumentType]  # no arrays
            states=tuple(rules.sharding(*each) for each in axes),  # pyright: ignore[reportArgumentType]
            axes=axes,
        )

    places = tuple(place(each.block.work(decoder.width)) for each in decoder.places)
    return Cache(places=places, hidden=rules.sharding(*STATE_AXES))  # pyright: ignore[reportArgumentType]


def _state_axes(states: Sequence[StateSpec]) -> tuple[tuple[str | None, ...], ...]:
    """The logical axes of the stacked states [L, M, ...]."""
    return tuple((None, "batch", *each.axes) for each in states)


def make_empty(abstract: Cache) -> Callable[[], Cache]:
    """The compiled program that makes a cache of zeros with the shapes and shardings of `abstract`.

    It is one program because making an array for each layer separately would keep the host busy for tens of
    milliseconds.
    """
    shardings = jax.tree.map(lambda array: array.sharding, abstract)
    return jax.jit(
        lambda: jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), abstract), out_shardings=shardings
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a call: each is a sequence with new tokens, whose cached data layers access through this."""

    tables: jax.Array  # [R, W] int32, pages of each row's sequence
    cells: jax.Array  # [R] int32, cell of each row's sequence
    starts: jax.Array  # [R] int32, tokens in the cache so far
    counts: jax.Array  # [R] int32, number of new tokens; the rest of a row is padding
    rules: ShardingRules
    single: bool = False
    """Whether each row has at most one new token, which follows tokens that are cached already."""

    def attend(
        self, kept: PlaceCache, at: At, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[PlaceCache, jax.Array]:
        """Write the new keys and values; returns the updated cache and the attention's output [R, T, H, Q]."""
        assert kept.kv is not None, "a layer with attention declares its heads in Work"
        tables = self.tables
        if (ring := kept.kv.ring) is not None:
            tables = self.cells[:, None] * ring + jnp.arange(tables.shape[1])[None] % ring
        spans = Spans(tables, self.starts, self.counts)
        kv, found = extend(kept.kv, at.layer, spans, Heads(q, k, v), self.rules, window=at.window, sinks=at.sinks)
        return dataclasses.replace(kept, kv=kv), found

    def recur(self, kept: PlaceCache, at: At, initial: States, advance: Advance) -> tuple[PlaceCache, jax.Array]:
        """Advance the rows' states by the new tokens; returns the updated cache and the output y of `advance`."""
        if self.single and isinstance(advance, Stepping) and _in_place(self.rules, kept.states[-1].shape[2:]):
            before = self._read(kept.states[:-1], kept.axes, at, initial[:-1])
            state = StateInCells(kept.states[-1], kept.axes[-1], at.layer, self)
            new, state, y = advance.step(before, state, self.counts)
            assert isinstance(state, StateInCells)
            states = (*self._write(kept.states[:-1], kept.axes, at, new), state.stored)
        else:
            new, y = advance.append(self._read(kept.states, kept.axes, at, initial), self.counts)
            states = self._write(kept.states, kept.axes, at, new)
        return dataclasses.replace(kept, states=states), y

    @jax.named_scope("cache")
    def _read(self, stored: States, axes: Sequence[tuple[str | None, ...]], at: At, initial: States) -> States:
        """Read the rows' states from their cells; sequences without previous tokens get `initial`."""
        begun, axes = self.starts > 0, axes[: len(stored)]

        def read(stored: States, layer: jax.Array, cells: jax.Array) -> States:
            return tuple(x.at[layer, cells].get(mode="clip") for x in stored)

        found = jax.shard_map(
            read,
            mesh=self.rules.mesh,
            in_specs=(tuple(map(self.rules.spec, axes)), PartitionSpec(), self.rules.spec(("batch",))),
            out_specs=tuple(self.rules.spec(own[1:]) for own in axes),
        )(stored, at.layer, self.cells)
        return tuple(
            jnp.where(jnp.expand_dims(begun, range(1, x.ndim)), x, first)
            for x, first in zip(found, initial, strict=True)
        )

    @jax.named_scope("cache")
    def _write(self, stored: States, axes: Sequence[tuple[str | None, ...]], at: At, new: States) -> States:
        """Store the new states of rows that have new tokens."""
        axes = axes[: len(stored)]

        def write(stored: States, layer: jax.Array, cells: jax.Array, counts: jax.Array, new: States) -> States:
            pairs = zip(stored, new, strict=True)
            return tuple(
                x.at[layer, _or_beyond(counts > 0, cells, x.shape[1])].set(
                    y.astype(x.dtype), mode="drop", unique_indices=True
                )
                for x, y in pairs
            )

        specs, rows = tuple(map(self.rules.spec, axes)), self.rules.spec(("batch",))
        of_rows = tuple(self.rules.spec(own[1:]) for own in axes)
        return jax.shard_map(
            write, mesh=self.rules.mesh, in_specs=(specs, PartitionSpec(), rows, rows, of_rows), out_specs=specs
        )(stored, at.layer, self.cells, self.counts, new)


def _in_place(rules: ShardingRules, state: tuple[int, ...]) -> bool:
    """Whether a decode step updates states of these sizes where they are stored: on a TPU, in whole tiles."""
    return rules.platform == "tpu" and whole_tiles(state)


@dataclasses.dataclass(frozen=True)
class StateInCells:
    """Implements `podium.models.blocks.kind.StoredState`: the last state of a recurrent layer."""

    stored: jax.Array  # [L, M, V, N, P]
    axes: tuple[str | None, ...]  # logical axes of `stored`
    layer: jax.Array  # [] int32
    rows: Rows

    @jax.named_scope("delta_step")
    def delta_step(self, token: DeltaToken, /) -> tuple[StoredState, jax.Array]:
        """Advance the cells of the rows that have a new token."""
        rules = self.rows.rules
        cells, of_rows = rules.spec(self.axes), rules.spec(("batch",))
        by_head, vectors = rules.spec(("batch", self.axes[2])), rules.spec(("batch", self.axes[2], None))
        of_token = jax.tree.map(lambda x: vectors if x.ndim == 3 else by_head, token)
        stored, y = jax.shard_map(
            functools.partial(delta_step, interpret=rules.platform != "tpu"),
            mesh=rules.mesh,
            in_specs=(cells, PartitionSpec(), of_rows, of_rows, of_token),
            out_specs=(cells, vectors),
            check_vma=False,
        )(self.stored, self.layer, self.rows.cells, self.rows.counts > 0, token)
        return dataclasses.replace(self, stored=stored), y


class Spans(NamedTuple):
    """Where new tokens go in the cache: each row is a part of a sequence."""

    tables: jax.Array  # [R, W] int32, pages of each row's sequence; in a ring, the same pages repeat
    starts: jax.Array  # [R] int32, tokens in the cache so far
    counts: jax.Array  # [R] int32, number of new tokens of each row, at most T; decoding has T = 1


class Heads(NamedTuple):
    """The new tokens' queries, keys and values."""

    q: jax.Array  # [R, T, H, Q], rotated
    k: jax.Array  # [R, T, K, Q], rotated
    v: jax.Array  # [R, T, K, Q]


Extend = Callable[[KvPages, jax.Array, Spans, jax.Array | None, Heads], tuple[KvPages, jax.Array]]
"""`extend` on one device: `(cache, layer, spans, sinks, heads) -> (cache, output)`."""


def extend(
    cache: KvPages,
    layer: jax.Array,
    spans: Spans,
    heads: Heads,
    rules: ShardingRules,
    *,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> tuple[KvPages, jax.Array]:
    """Append new tokens' keys and values to each row, and attend from them; updates a loop's carry in place.

    Args:
        cache: N pages per layer.
        layer: [] int32, index of the layer.
        spans: where the tokens go.
        heads: the tokens' queries, keys and values.
        rules: how rows and pages are split over devices; each device reads and writes only its own rows and pages.
        window: number of positions that a query attends to, including its own; None: all.
        sinks: [H], score of each head with a key that has no value (`At.sinks`); None: no such key.

    Returns:
        The updated cache, and the output [R, T, H, Q]; scores and softmax are computed in float32.
    """
    block_pages = cache_block_pages(cache.page_tokens, rules.platform)

    def local(
        cache: KvPages, layer: jax.Array, spans: Spans, sinks: jax.Array | None, heads: Heads
    ) -> tuple[KvPages, jax.Array]:
        at, T = At(layer, window, sinks), heads.q.shape[1]
        reach = _reach(window, T, cache.page_tokens, spans.tables.shape[1])
        scope = contextlib.nullcontext() if reach is None else jax.named_scope(window_scope(reach))
        if T == 1 and rules.kernels == "gpu" and gpu_kernel_decodes(cache.page_tokens, heads.q.shape[-1]):
            return _by_kernel(cache, at, spans, heads, scope)
        cache = (_append if T == 1 else _write)(cache, layer, spans, heads.k, heads.v)

        def attend(spans: Spans, q: jax.Array) -> jax.Array:
            return _attend(cache, at, _pages_read(spans, window, reach, block_pages, cache.page_tokens), spans, q)

        with scope:
            by_length = rules.on_cpu and T == 1
            return cache, _by_length(attend, spans, heads.q) if by_length else attend(spans, heads.q)

    on_device: Extend = local
    if cache.ring is not None:
        assert window is not None, "layers whose pages are a ring have a window"
        on_device = _in_pieces(local, ring_piece(window, cache.page_tokens))
    pages, rows = jax.tree.map(lambda _: rules.spec(AXES), cache), rules.spec(("batch",))
    of_heads = rules.spec(("batch", None, "cache_heads", None))
    mapped = jax.shard_map(
        on_device,
        mesh=rules.mesh,
        in_specs=(pages, PartitionSpec(), rows, rules.spec(("cache_heads",)), of_heads),
        out_specs=(pages, of_heads),
        check_vma=False,  # the loop over blocks starts from constants, which are equal on all devices
    )
    return mapped(cache, layer, spans, sinks, heads)


def _in_pieces(local: Extend, piece: int) -> Extend:
    """Apply `local` to chunks of any length, `piece` tokens at a time, because a ring holds only the window plus one
    piece.
    """

    def whole(
        cache: KvPages, layer: jax.Array, spans: Spans, sinks: jax.Array | None, heads: Heads
    ) -> tuple[KvPages, jax.Array]:
        R, T = heads.q.shape[:2]
        if piece >= T:
            return local(cache, layer, spans, sinks, heads)
        n = -(-T // piece)
        padded = [jnp.pad(x, ((0, 0), (0, n * piece - T), (0, 0), (0, 0))) for x in heads]
        cut = Heads(*(jnp.moveaxis(x.reshape(R, n, piece, *x.shape[2:]), 1, 0) for x in padded))

        def enter(cache: KvPages, xs: tuple[jax.Array, Heads]) -> tuple[KvPages, jax.Array]:
            i, heads = xs
            done = jnp.minimum(i * piece, spans.counts)
            own = Spans(spans.tables, spans.starts + done, jnp.minimum(spans.counts - done, piece))
            return local(cache, layer, own, sinks, heads)

        cache, found = jax.lax.scan(enter, cache, (jnp.arange(n), cut))  # [n, R, piece, H, Q]
        return cache, jnp.moveaxis(found, 0, 1).reshape(R, n * piece, *found.shape[3:])[:, :T]

    return whole


@jax.named_scope("cache")
def _append(cache: KvPages, layer: jax.Array, spans: Spans, k: jax.Array, v: jax.Array) -> KvPages:
    """Write one token per row, in place; a TPU writes a row of W elements per head."""
    tables, starts, counts = spans
    page = jnp.take_along_axis(tables, (starts // cache.page_tokens)[:, None], axis=1, mode="clip")  # [R, 1]
    page = _or_beyond(counts[:, None] > 0, page, cache.values.shape[1])
    K, offsets = k.shape[2], (starts % cache.page_tokens)[:, None]
    where = layer, page, jnp.arange(K)[None]
    at = (*where, slice(None), offsets) if cache.layout.transposed else (*where, offsets)
    keys, values = _rows(cache, k[:, 0], v[:, 0])
    return dataclasses.replace(
        cache,
        keys=None if cache.keys is None else cache.keys.at[at].set(keys, mode="drop", unique_indices=True),
        values=cache.values.at[(*where, offsets)].set(values, mode="drop", unique_indices=True),
    )


def _or_beyond(wanted: jax.Array, places: jax.Array, count: int) -> jax.Array:
    """Keep `places` where `wanted`; replace the others by distinct indices beyond `count`, to which nothing is written.

    Because all indices differ, the order of writes does not matter; otherwise a GPU with deterministic programs would
    sort the writes first.
    """
    return jnp.where(wanted, places, count + jnp.arange(places.size).reshape(places.shape))


def _rows(cache: KvPages, k: jax.Array, v: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """Convert keys and values [..., Q] to stored rows [..., W]."""
    if cache.layout.joined:
        return None, _widened(jnp.concatenate([k, v], axis=-1), cache.layout.width)
    return _widened(k, cache.layout.width), _widened(v, cache.layout.width)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """Pad the last dimension with zeros to `width` elements."""
    missing = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


@jax.named_scope("cache")
def _write(cache: KvPages, layer: jax.Array, spans: Spans, k: jax.Array, v: jax.Array) -> KvPages:
    """Write T tokens per row in whole pages; tokens already in these pages are kept."""
    tables, starts, counts = spans
    (R, T, K, _), W, P = k.shape, cache.layout.width, cache.page_tokens
    n = (T + P - 2) // P + 1  # pages that T tokens can touch
    first = starts // P
    column = first[:, None] + jnp.arange(n)[None]  # [R, n]
    pages = jnp.take_along_axis(tables, column, axis=1, mode="clip")
    touched = (column * P < (starts + counts)[:, None]) & (column < tables.shape[1])
    pages = _or_beyond(touched, pages, cache.values.shape[1])
    token = jnp.arange(n * P)[None] - (starts % P)[:, None]  # which new token goes to each position
    new = ((token >= 0) & (token < counts[:, None])).reshape(R, n, 1, P, 1)

    def put(into: jax.Array, x: jax.Array, dims: str) -> jax.Array:
        moved = jnp.take_along_axis(x, token[:, :, None, None], axis=1, mode="clip").reshape(R, n, P, K, W)
        pattern = f"rnkpq->r{dims}"
        there = into.at[layer, pages].get(mode="clip")
        chosen = jnp.where(jnp.einsum(pattern, new), jnp.einsum("rnpkq->r" + dims, moved), there)
        return into.at[layer, pages].set(chosen, mode="drop", unique_indices=True)

    keys, values = _rows(cache, k, v)
    return dataclasses.replace(
        cache,
        keys=None if cache.keys is None or keys is None else put(cache.keys, keys, cache.key_dims),
        values=put(cache.values, values, "nkpq"),
    )


def _reach(window: int | None, new: int, page_tokens: int, columns: int) -> int | None:
    """Largest number of pages, of up to `columns`, that `new` queries of a sequence attend to; None: possibly all."""
    if window is None:
        return None
    pages = touched_pages(window - 1 + new, page_tokens)
    return pages if pages < columns else None


def _by_kernel(
    cache: KvPages, at: At, spans: Spans, heads: Heads, scope: contextlib.AbstractContextManager[object]
) -> tuple[KvPages, jax.Array]:
    """Write one token per row and attend from it, with the GPU kernel."""
    lengths = jnp.where(spans.counts > 0, spans.starts + 1, 0)
    pages = gpu_decode.Pages(cache.stored_keys, cache.values, at.layer, spans.tables, lengths)
    token = gpu_decode.Token(*(x[:, 0] for x in heads))
    with scope:
        found, keys, values = gpu_decode.paged_attention(token, pages, window=at.window, sinks=at.sinks)
    return dataclasses.replace(cache, keys=keys, values=values), found[:, None]


@jax.named_scope("scores")
def _by_length(attend: Callable[[Spans, jax.Array], jax.Array], spans: Spans, q: jax.Array) -> jax.Array:
    """Attend [R, T, H, Q] in groups of rows of similar length; each group reads as many blocks as its longest row
    needs.

    Results are bitwise the same. A group's pages also stay in a CPU's cache between their copy and the product.
    """
    R = len(spans.starts)
    size = math.gcd(R, CPU_ROWS)
    if size == R or size < CPU_ROWS_LEAST:
        return attend(spans, q)
    order = jnp.argsort(-spans.starts - spans.counts)
    groups = jax.tree.map(lambda x: x[order].reshape(R // size, size, *x.shape[1:]), (spans, q))
    found = jax.lax.map(lambda group: attend(*group), groups)
    return jnp.zeros_like(q).at[order].set(found.reshape(q.shape), unique_indices=True)


class _PagesRead(NamedTuple):
    """The pages that attention reads for each row, in blocks of `at_once`."""

    tables: jax.Array  # [R, C] int32, C a multiple of `at_once`
    begins: jax.Array | None  # [R] int32, position of the first page's first token; None: 0
    at_once: int


@jax.named_scope("scores")
def _pages_read(spans: Spans, window: int | None, reach: int | None, at_once: int, page_tokens: int) -> _PagesRead:
    """The pages to read, in blocks of at most `at_once`.

    With `reach`, at most that many pages per row, starting with the page of the oldest token that any query of the row
    sees.
    """
    tables, begins = spans.tables, None
    if reach is not None:
        assert window is not None, "without a window, queries see all pages"
        at_once = window_blocks(reach, at_once).pages
        first = jnp.maximum(spans.starts - window + 1, 0) // page_tokens  # [R]
        tables = jnp.take_along_axis(tables, first[:, None] + jnp.arange(reach)[None], axis=1, mode="clip")
        begins = first * page_tokens
    columns = -(-tables.shape[1] // at_once) * at_once
    return _PagesRead(jnp.pad(tables, ((0, 0), (0, columns - tables.shape[1]))), begins, at_once)


@jax.named_scope("scores")
def _attend(cache: KvPages, at: At, read: _PagesRead, spans: Spans, q: jax.Array) -> jax.Array:
    """Attention output [R, T, H, Q]; a query attends to its own and earlier positions within the window."""
    R, T, H, Q = q.shape
    K, block = cache.values.shape[2], read.at_once * cache.page_tokens
    queries = q.reshape(R, T, K, H // K, Q).transpose(0, 2, 3, 1, 4).reshape(R, K, -1, Q)  # [R, K, G T, Q]
    queries = _widened(queries, cache.layout.width)  # [R, K, G T, W]; the padding does not change products with rows
    last = jnp.tile(spans.starts[:, None] + jnp.arange(T)[None], (1, H // K))[:, None, :, None]  # [R, 1, G T, 1]
    product = functools.partial(jnp.einsum, precision=full_precision(q.dtype), preferred_element_type=jnp.float32)

    def attend(i: jax.Array, seen: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, weighted = seen
        pages = [
            jax.lax.dynamic_index_in_dim(read.tables, i * read.at_once + j, axis=1, keepdims=False)
            for j in range(read.at_once)
        ]
        keys, values = (
            [x.at[at.layer, page].get(mode="clip") for page in pages] for x in (cache.stored_keys, cache.values)
        )
        pattern = f"nkgq,{cache.key_dims}->nkgp"
        scores = [product(pattern, queries, each) for each in keys]
        position = (i * block + jnp.arange(block))[None, None, None]
        if read.begins is not None:
            position = read.begins[:, None, None, None] + position  # [R, 1, 1, block]
        visible = seen_in_sequence(last, position, at.window)  # [R, 1, G T, block]
        scores = jnp.where(visible, jnp.concatenate(scores, axis=-1) * Q**-0.5, -jnp.inf)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - higher), jnp.exp(highest - higher)
        parts = jnp.split(weights.astype(q.dtype), read.at_once, axis=-1)
        sums = [product("nkgp,nkpq->nkgq", part, value) for part, value in zip(parts, values, strict=True)]
        total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        return higher, total, weighted * rescale + sum(sums[1:], sums[0])

    nothing = jnp.full((*queries.shape[:3], 1), jnp.finfo(jnp.float32).min), jnp.zeros((*queries.shape[:3], 1))
    if at.sinks is not None:  # a sink is the first key; it has no value
        of_queries = jnp.repeat(at.sinks.astype(jnp.float32).reshape(K, H // K), T, axis=1)[None, ..., None]
        nothing = jnp.broadcast_to(of_queries, nothing[0].shape), jnp.ones_like(nothing[1])
    ends = spans.starts + spans.counts
    ends = ends if read.begins is None else ends - read.begins
    blocks = (jnp.max(ends) + block - 1) // block
    _, total, weighted = jax.lax.fori_loop(0, blocks, attend, (*nothing, jnp.zeros(queries.shape, jnp.float32)))
    first_value = Q if cache.layout.joined else 0
    weighted = weighted[..., first_value : first_value + Q]
    found = (weighted / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)).astype(q.dtype)
    return found.reshape(R, K, H // K, T, Q).transpose(0, 3, 1, 2, 4).reshape(R, T, H, Q)


@jax.named_scope("cache")
def keep_states(cache: Cache, rows: Rows, states: jax.Array) -> Cache:
    """Store the hidden states [R, D] of each row's last new token with the token's page; skip rows without new
    tokens.
    """
    rules, lengths = rows.rules, rows.starts + rows.counts

    def keep(kept: jax.Array, tables: jax.Array, lengths: jax.Array, counts: jax.Array, states: jax.Array) -> jax.Array:
        page = _or_beyond(counts > 0, _last_page(tables, lengths, cache.hidden.page_tokens), len(kept))
        return kept.at[page].set(states, mode="drop", unique_indices=True)

    pages, split = rules.spec(STATE_AXES), rules.spec(("batch",))
    mapped = jax.shard_map(keep, mesh=rules.mesh, in_specs=(pages, split, split, split, split), out_specs=pages)
    kept = mapped(cache.hidden.states, rows.tables, lengths, rows.counts, states)
    return dataclasses.replace(cache, hidden=dataclasses.replace(cache.hidden, states=kept))


@jax.named_scope("cache")
def kept_states(cache: Cache, tables: jax.Array, lengths: jax.Array, rules: ShardingRules) -> jax.Array:
    """The hidden states [S, D] that `keep_states` stored for the last tokens of sequences of `lengths` [S]."""

    def read(kept: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        return kept.at[_last_page(tables, lengths, cache.hidden.page_tokens)].get(mode="clip")

    pages, rows = rules.spec(STATE_AXES), rules.spec(("batch",))
    return jax.shard_map(read, mesh=rules.mesh, in_specs=(pages, rows, rows), out_specs=rows)(
        cache.hidden.states, tables, lengths
    )


def _last_page(tables: jax.Array, lengths: jax.Array, page_tokens: int) -> jax.Array:
    """The page of each sequence's last token, [R] int32."""
    column = (jnp.maximum(lengths, 1) - 1) // page_tokens
    return jnp.take_along_axis(tables, column[:, None], axis=1, mode="clip")[:, 0]


@jax.named_scope("cache")
def copy_pages(cache: Cache, sources: jax.Array, targets: jax.Array, rules: ShardingRules) -> Cache:
    """Copy pages within each shard; a target beyond the last page ends a shard's list.

    `sources` and `targets` are [S] int32, with the same number for each shard.
    """
    copied = functools.partial(_copied, sources=sources, targets=targets, rules=rules)

    def place(kept: PlaceCache) -> PlaceCache:
        whole = kept.kv is not None and kept.kv.ring is None
        return dataclasses.replace(kept, kv=copied(kept.kv, AXES)) if whole else kept

    hidden = dataclasses.replace(cache.hidden, states=copied(cache.hidden.states[None], (None, *STATE_AXES))[0])
    return Cache(places=tuple(place(kept) for kept in cache.places), hidden=hidden)


@jax.named_scope("cache")
def copy_cells(cache: Cache, sources: jax.Array, targets: jax.Array, rules: ShardingRules) -> Cache:
    """Copy cells; `sources` and `targets` are as for `copy_pages`."""
    copied = functools.partial(_copied, sources=sources, targets=targets, rules=rules)

    def place(kept: PlaceCache) -> PlaceCache:
        ring = None if kept.kv is None else kept.kv.ring
        states = tuple(copied(x, axes) for x, axes in zip(kept.states, kept.axes, strict=True))
        return dataclasses.replace(kept, states=states, kv=copied(kept.kv, AXES, ring) if ring else kept.kv)

    return dataclasses.replace(cache, places=tuple(place(kept) for kept in cache.places))


def _copied(
    arrays: Tree,
    axes: Sequence[str | None],
    each: int = 1,
    *,
    sources: jax.Array,
    targets: jax.Array,
    rules: ShardingRules,
) -> Tree:
    """Copy runs of `each` entries along N within arrays [L, N, ...] with these logical axes.

    Runs are copied one after another, in place; on a GPU, all at once, because each iteration of a loop there waits for
    the host.
    """

    def copy_at_once(arrays: Tree, sources: jax.Array, targets: jax.Array) -> Tree:
        def put(x: jax.Array) -> jax.Array:
            runs = x.shape[1] // each
            places = lambda of: (of[:, None] * each + jnp.arange(each)[None]).ravel()  # noqa: E731
            rows = x.at[:, places(sources)].get(mode="clip")
            there = places(_or_beyond(targets < runs, targets, runs))
            return x.at[:, there].set(rows, mode="drop", unique_indices=True)

        return jax.tree.map(put, arrays)

    def copy(arrays: Tree, sources: jax.Array, targets: jax.Array) -> Tree:
        def put(x: jax.Array, i: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(x, sources[i] * each, each, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, rows, targets[i] * each, axis=1)

        count = jnp.sum(targets < jax.tree.leaves(arrays)[0].shape[1] // each)
        return jax.lax.fori_loop(0, count, lambda i, arrays: jax.tree.map(lambda x: put(x, i), arrays), arrays)

    own, rows = jax.tree.map(lambda _: rules.spec(axes), arrays), rules.spec(("batch",))
    local = copy_at_once if rules.platform == "gpu" else copy
    return jax.shard_map(local, mesh=rules.mesh, in_specs=(own, rows, rows), out_specs=own)(arrays, sources, targets)
