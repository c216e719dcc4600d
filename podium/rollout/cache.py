"""Keys and values in pages, the attention that reads them, and the states from which first tokens are drawn.

A page holds P positions of one sequence; a table lists the pages of a sequence in order. Every shard of the batch has
pages of its own, which tables number from 0; a number past the last means no page, and writes to it are dropped. Heads
come before positions. How the numbers of a head lie in its page follows from the platform and the head size
(`podium.config.attention.kv_layout`): transposed keys on CPU, rows that fill whole tiles on TPU.

Each page also stores the hidden state behind the last of its tokens that a prefill call has made. It is copied with the
page to each of a prompt's completions, whose first tokens are drawn from it without another pass.

Attention goes over blocks of pages up to the longest sequence of its rows, with a running softmax (arXiv:1805.02867):
its cost follows the tokens in the cache, not the cache's size, and a row's bits do not depend on other rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from podium.config.attention import KvLayout, cache_block_pages, kv_layout
from podium.models.architecture import DecoderConfig
from podium.models.linear import full_precision
from podium.models.visibility import seen_in_sequence
from podium.sharding import ShardingRules

AXES = (None, "batch", "cache_heads", None, None)  # of keys and values
STATE_AXES = ("batch", None)
NO_PAGE = 2**30  # in a table: no page


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """The keys and values of all pages."""

    keys: jax.Array | None  # rotated; [L, N, K, W, P] if transposed, else [L, N, K, P, W]; None: joined with the values
    values: jax.Array  # [L, N, K, P, W]; joined: the key is in a row's first Q numbers, the value in the next Q
    states: jax.Array  # [N, D]
    layout: KvLayout = dataclasses.field(metadata={"static": True})  # W is its width

    @property
    def page_tokens(self) -> int:
        """P."""
        return self.values.shape[3]

    @property
    def key_dims(self) -> str:
        """Names of the dimensions of a layer's keys, W being `q`."""
        return "nkqp" if self.layout.transposed else "nkpq"

    @property
    def stored_keys(self) -> jax.Array:
        """The array that has the keys."""
        return self.values if self.keys is None else self.keys


def abstract_cache(
    decoder: DecoderConfig, *, pages: int, page_tokens: int, dtype: jnp.dtype, rules: ShardingRules
) -> Cache:
    """An abstract cache of `pages` pages over all devices, for the planner."""
    where = cache_shardings(decoder, rules)
    layout = where.layout
    sizes = {"n": pages, "k": decoder.kv_heads, "q": layout.width, "p": page_tokens}

    def stacked(dims: str) -> tuple[int, ...]:
        return decoder.layers, *(sizes[dim] for dim in dims)

    shapes = dataclasses.replace(
        where,
        keys=None if layout.joined else stacked(where.key_dims),  # pyright: ignore[reportArgumentType]  # no arrays
        values=stacked("nkpq"),  # pyright: ignore[reportArgumentType]
        states=(pages, decoder.width),  # pyright: ignore[reportArgumentType]
    )
    make = functools.partial(jax.tree.map, is_leaf=lambda x: isinstance(x, tuple))
    return make(lambda shape, sharding: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), shapes, where)


def cache_specs(layout: KvLayout, rules: ShardingRules) -> Cache:
    """A cache with a PartitionSpec in place of each array."""
    pages, states = rules.spec(AXES), rules.spec(STATE_AXES)
    keys = None if layout.joined else pages
    return Cache(keys=keys, values=pages, states=states, layout=layout)  # pyright: ignore[reportArgumentType]  # no arrays


def cache_shardings(decoder: DecoderConfig, rules: ShardingRules) -> Cache:
    """A decoder's cache with a NamedSharding in place of each array."""
    specs = cache_specs(kv_layout(decoder.head_dim, rules.platform), rules)
    return jax.tree.map(
        lambda spec: NamedSharding(rules.mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def empty(abstract: Cache) -> Cache:
    """A cache of zeros with the shapes and shardings of `abstract`."""
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding), abstract)


def extend(
    cache: Cache,
    layer: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rules: ShardingRules,
    window: int | None = None,
) -> tuple[Cache, jax.Array]:
    """The cache with new tokens behind each row's, and the attention of the new ones; in place in a loop's carry.

    Args:
        cache: of N pages.
        layer: [] int32.
        tables: [R, W] int32, the pages of each row's sequence.
        starts: [R] int32, tokens in the cache so far.
        counts: [R] int32, how many of the T new tokens are the sequence's; decoding has T = 1.
        q: [R, T, H, Q], rotated.
        k: [R, T, K, Q], rotated.
        v: [R, T, K, Q].
        rules: how rows and pages are split over devices; each reads and writes its own.
        window: positions that a query attends to, its own included; None: all.

    Returns:
        The cache, and [R, T, H, Q]; scores and softmax are float32 inside.
    """
    pages_at_once = cache_block_pages(cache.page_tokens, rules.platform)

    def local(cache: Cache, *given: jax.Array) -> tuple[Cache, jax.Array]:
        layer, tables, starts, counts, q, k, v = given
        write = _append if q.shape[1] == 1 else _write
        cache = write(cache, layer, tables, starts, counts, k, v)
        return cache, _attend(cache, layer, tables, starts, counts, q, pages_at_once, window)

    pages, rows = cache_specs(cache.layout, rules), rules.spec(("batch",))
    heads = rules.spec(("batch", None, "cache_heads", None))
    mapped = jax.shard_map(
        local,
        mesh=rules.mesh,
        in_specs=(pages, PartitionSpec(), rows, rows, rows, heads, heads, heads),
        out_specs=(pages, heads),
        check_vma=False,  # the loop over blocks starts from constants, which all devices share
    )
    return mapped(cache, layer, tables, starts, counts, q, k, v)


@jax.named_scope("cache")
def _append(
    cache: Cache, layer: jax.Array, tables: jax.Array, starts: jax.Array, counts: jax.Array, k: jax.Array, v: jax.Array
) -> Cache:
    """One token of each row: the TPU writes a head each, a row of W, in place."""
    page = jnp.take_along_axis(tables, (starts // cache.page_tokens)[:, None], axis=1, mode="clip")  # [R, 1]
    page = jnp.where(counts[:, None] > 0, page, cache.values.shape[1])
    K, offsets = k.shape[2], (starts % cache.page_tokens)[:, None]
    where = layer, page, jnp.arange(K)[None]
    at = (*where, slice(None), offsets) if cache.layout.transposed else (*where, offsets)
    keys, values = _rows(cache, k[:, 0], v[:, 0])
    return dataclasses.replace(
        cache,
        keys=None if cache.keys is None else cache.keys.at[at].set(keys, mode="drop"),
        values=cache.values.at[(*where, offsets)].set(values, mode="drop"),
    )


def _rows(cache: Cache, k: jax.Array, v: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """Keys and values [..., Q] as rows [..., W] of the cache's arrays."""
    if cache.layout.joined:
        return None, _widened(jnp.concatenate([k, v], axis=-1), cache.layout.width)
    return _widened(k, cache.layout.width), _widened(v, cache.layout.width)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """The array with zeros behind its last dimension, which gets `width` numbers."""
    missing = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


@jax.named_scope("cache")
def _write(
    cache: Cache, layer: jax.Array, tables: jax.Array, starts: jax.Array, counts: jax.Array, k: jax.Array, v: jax.Array
) -> Cache:
    """T tokens of each row, by whole pages; tokens already in them are kept."""
    (R, T, K, _), W, P = k.shape, cache.layout.width, cache.page_tokens
    n = (T + P - 2) // P + 1  # pages that T tokens can touch
    first = starts // P
    column = first[:, None] + jnp.arange(n)[None]  # [R, n]
    pages = jnp.take_along_axis(tables, column, axis=1, mode="clip")
    touched = (column * P < (starts + counts)[:, None]) & (column < tables.shape[1])
    pages = jnp.where(touched, pages, cache.values.shape[1])
    token = jnp.arange(n * P)[None] - (starts % P)[:, None]  # [R, n P], which of the new ones comes to each position
    new = ((token >= 0) & (token < counts[:, None])).reshape(R, n, 1, P, 1)

    def put(into: jax.Array, x: jax.Array, dims: str) -> jax.Array:
        moved = jnp.take_along_axis(x, token[:, :, None, None], axis=1, mode="clip").reshape(R, n, P, K, W)
        pattern = f"rnkpq->r{dims}"
        there = into.at[layer, pages].get(mode="clip")
        chosen = jnp.where(jnp.einsum(pattern, new), jnp.einsum("rnpkq->r" + dims, moved), there)
        return into.at[layer, pages].set(chosen, mode="drop")

    keys, values = _rows(cache, k, v)
    return dataclasses.replace(
        cache,
        keys=None if cache.keys is None or keys is None else put(cache.keys, keys, cache.key_dims),
        values=put(cache.values, values, "nkpq"),
    )


@jax.named_scope("scores")
def _attend(
    cache: Cache,
    layer: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    q: jax.Array,
    pages_at_once: int,
    window: int | None,
) -> jax.Array:
    """[R, T, H, Q]; a query attends to its own position and the ones before it, as far as the window reaches."""
    R, T, H, Q = q.shape
    K, P = cache.values.shape[2], cache.page_tokens
    block = pages_at_once * P
    columns = -(-tables.shape[1] // pages_at_once) * pages_at_once
    tables = jnp.pad(tables, ((0, 0), (0, columns - tables.shape[1])))
    queries = q.reshape(R, T, K, H // K, Q).transpose(0, 2, 3, 1, 4).reshape(R, K, -1, Q)  # [R, K, G T, Q]
    queries = _widened(queries, cache.layout.width)  # [R, K, G T, W]; a product with a row is one with its key
    last = jnp.tile(starts[:, None] + jnp.arange(T)[None], (1, H // K))[:, None, :, None]  # [R, 1, G T, 1]
    product = functools.partial(jnp.einsum, precision=full_precision(q.dtype), preferred_element_type=jnp.float32)

    def attend(i: jax.Array, seen: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, weighted = seen
        pages = [
            jax.lax.dynamic_index_in_dim(tables, i * pages_at_once + j, axis=1, keepdims=False)
            for j in range(pages_at_once)
        ]
        keys, values = (
            [x.at[layer, page].get(mode="clip") for page in pages] for x in (cache.stored_keys, cache.values)
        )
        pattern = f"nkgq,{cache.key_dims}->nkgp"
        scores = [product(pattern, queries, each) for each in keys]
        position = i * block + jnp.arange(block)
        visible = seen_in_sequence(last, position[None, None, None], window)  # [R, 1, G T, block]
        scores = jnp.where(visible, jnp.concatenate(scores, axis=-1) * Q**-0.5, -jnp.inf)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - higher), jnp.exp(highest - higher)
        parts = jnp.split(weights.astype(q.dtype), pages_at_once, axis=-1)
        sums = [product("nkgp,nkpq->nkgq", part, value) for part, value in zip(parts, values, strict=True)]
        total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        return higher, total, weighted * rescale + sum(sums[1:], sums[0])

    first = 0 if window is None else _first_block(starts, counts, window, block)
    nothing = jnp.full((*queries.shape[:3], 1), jnp.finfo(jnp.float32).min), jnp.zeros((*queries.shape[:3], 1))
    blocks = (jnp.max(starts + counts) + block - 1) // block
    _, total, weighted = jax.lax.fori_loop(first, blocks, attend, (*nothing, jnp.zeros(queries.shape, jnp.float32)))
    first_value = Q if cache.layout.joined else 0
    weighted = weighted[..., first_value : first_value + Q]
    found = (weighted / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)).astype(q.dtype)
    return found.reshape(R, K, H // K, T, Q).transpose(0, 3, 1, 2, 4).reshape(R, T, H, Q)


def _first_block(starts: jax.Array, counts: jax.Array, window: int, block: int) -> jax.Array:
    """[] int32: the first block that any query's window reaches."""
    oldest = jnp.where(counts > 0, starts - window + 1, jnp.iinfo(jnp.int32).max)
    return jnp.maximum(jnp.min(oldest), 0) // block


@jax.named_scope("cache")
def keep_states(
    cache: Cache, tables: jax.Array, lengths: jax.Array, counts: jax.Array, states: jax.Array, rules: ShardingRules
) -> Cache:
    """The cache with the states [R, D] behind the last tokens of rows, of sequences that are now `lengths` [R] long.

    Rows without new tokens, by `counts` [R], have none.
    """

    def keep(kept: jax.Array, tables: jax.Array, lengths: jax.Array, counts: jax.Array, states: jax.Array) -> jax.Array:
        page = jnp.where(counts > 0, _last_page(tables, lengths, cache.page_tokens), len(kept))
        return kept.at[page].set(states, mode="drop")

    pages, rows = rules.spec(STATE_AXES), rules.spec(("batch",))
    mapped = jax.shard_map(keep, mesh=rules.mesh, in_specs=(pages, rows, rows, rows, rows), out_specs=pages)
    return dataclasses.replace(cache, states=mapped(cache.states, tables, lengths, counts, states))


@jax.named_scope("cache")
def kept_states(cache: Cache, tables: jax.Array, lengths: jax.Array, rules: ShardingRules) -> jax.Array:
    """The states [S, D] that `keep_states` has put with the last pages of sequences that are `lengths` [S] long."""

    def read(kept: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        return kept.at[_last_page(tables, lengths, cache.page_tokens)].get(mode="clip")

    pages, rows = rules.spec(STATE_AXES), rules.spec(("batch",))
    return jax.shard_map(read, mesh=rules.mesh, in_specs=(pages, rows, rows), out_specs=rows)(
        cache.states, tables, lengths
    )


def _last_page(tables: jax.Array, lengths: jax.Array, page_tokens: int) -> jax.Array:
    """[R]."""
    column = (jnp.maximum(lengths, 1) - 1) // page_tokens
    return jnp.take_along_axis(tables, column[:, None], axis=1, mode="clip")[:, 0]


@jax.named_scope("cache")
def copy_pages(cache: Cache, sources: jax.Array, targets: jax.Array, rules: ShardingRules) -> Cache:
    """The cache with pages copied, each shard its own; a target past the last page ends a shard's list.

    `sources` and `targets` are [S] int32, as many for each shard.
    """

    def copy(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
        def put(x: jax.Array, i: jax.Array) -> jax.Array:
            axis = 1 if x.ndim == len(AXES) else 0  # of pages
            page = jax.lax.dynamic_index_in_dim(x, sources[i], axis=axis)
            return jax.lax.dynamic_update_index_in_dim(x, page, targets[i], axis=axis)

        count = jnp.sum(targets < cache.values.shape[1])
        return jax.lax.fori_loop(0, count, lambda i, cache: jax.tree.map(lambda x: put(x, i), cache), cache)

    pages, rows = cache_specs(cache.layout, rules), rules.spec(("batch",))
    return jax.shard_map(copy, mesh=rules.mesh, in_specs=(pages, rows, rows), out_specs=pages)(cache, sources, targets)
