"""The compiled programs of the rollout engine, one factory each: sync, extend, copy, decode.

The engine calls them, the planner lowers them on abstract arrays, the bench times them. All have fixed shapes: R rows
of a chunk's length, S slots (or fewer, as work runs out), k steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.config.schema import RolloutConfig
from podium.config.sizes import cache_pages, check_split, steps_at_once, table_pages
from podium.models.architecture import DecoderConfig
from podium.models.attention import causal_attention
from podium.models.decoder import forward, head_weights
from podium.models.linear import activation_dtype, of_bits
from podium.models.logprobs import logits_at
from podium.models.params import LAYERS
from podium.models.visibility import Visibility
from podium.rollout import cache as caches
from podium.rollout.cache import Cache
from podium.rollout.sampling import SamplingRows, idle_rows, sample_split
from podium.rollout.sequence import MAX_STOP_TOKENS
from podium.rollout.weights import make_sync
from podium.sharding import Params, ShardingRules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """New tokens of some sequences, to be prefilled behind those that stay; each row has a sequence's."""

    tokens: jax.Array  # [R, T] int32
    starts: jax.Array  # [R] int32, tokens in the cache
    counts: jax.Array  # [R] int32, how many of the T are the sequence's; 0: the row has none
    tables: jax.Array  # [R, W] int32, the sequence's pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
    """Where the sequence of each slot stands; a decode call leaves it for the next."""

    lengths: jax.Array  # [S] int32, tokens in the cache
    tokens: jax.Array  # [S] int32, the last one drawn, not in the cache yet
    live: jax.Array  # [S] bool
    any_live: jax.Array  # [] bool, over all devices: they ask each other once a call, not once a step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """What the host says of each slot."""

    sampling: SamplingRows
    stop_tokens: jax.Array  # [S, 8] int32, padded with -1
    last: jax.Array  # [S] int32, position of the last token that may be drawn
    tables: jax.Array  # [S, W] int32, the pages of the slot's sequence
    taken: jax.Array  # [S] bool, whether a sequence is there
    fresh: jax.Array  # [S] bool, whether it stands where `where` says, and not where the call before has left it
    first: jax.Array  # [S] bool, of those, whether all its tokens are in the cache, and the state behind the last
    any_first: jax.Array  # [] bool, over all devices
    where: Where


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """The tokens that a decode call drew for each slot: one of those that are `first`, then one in each of k steps."""

    tokens: jax.Array  # [S, 1 + k] int32
    logprobs: jax.Array  # [S, 1 + k] float32, under the distribution that they were drawn from
    full_logprobs: jax.Array  # [S, 1 + k] float32, before top-k, top-p and min-p
    counts: jax.Array  # [S] int32, how many are drawn
    finite: jax.Array  # [S] bool, whether all logits were numbers; a slot stops where they are not


def nowhere(num_slots: int) -> Any:
    """`Where` of numpy arrays in which nothing is live."""
    made: Any = {name: np.zeros(num_slots, np.int32) for name in ("lengths", "tokens")}
    return Where(**made, live=np.zeros(num_slots, np.bool_), any_live=np.zeros((), np.bool_))  # pyright: ignore[reportArgumentType]  # numpy's


def idle_slots(num_slots: int, table: int) -> Any:
    """`Slots` of numpy arrays in which no sequence is, for the host to write into; `table` is W."""
    made: Any = {name: np.zeros(num_slots, np.bool_) for name in ("taken", "fresh", "first")}
    made["any_first"] = np.zeros((), np.bool_)
    made["stop_tokens"] = np.full((num_slots, MAX_STOP_TOKENS), -1, np.int32)
    made["tables"] = np.full((num_slots, table), caches.NO_PAGE, np.int32)
    last = np.zeros(num_slots, np.int32)
    return Slots(sampling=idle_rows(num_slots), where=nowhere(num_slots), **made, last=last)  # pyright: ignore[reportArgumentType]


def idle_chunk(rows: int, length: int, table: int) -> Any:
    """`Chunk` of numpy arrays without any sequence, for the host to write into."""
    made: Any = {name: np.zeros(rows, np.int32) for name in ("starts", "counts")}
    tables = np.full((rows, table), caches.NO_PAGE, np.int32)
    return Chunk(tokens=np.zeros((rows, length), np.int32), tables=tables, **made)  # pyright: ignore[reportArgumentType]


class EnginePrograms(NamedTuple):
    """The compiled programs of an engine."""

    sync: Any
    place: Any
    """`sync` of the weights that no update changes, once."""
    extend: Any
    copy: Any
    decode: Any


def make_engine_programs(
    config: RolloutConfig, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> EnginePrograms:
    """The programs of the engine that a config describes; the engine runs them and the planner compiles them.

    Raises ValueError where slots or prefill rows do not divide over the devices that split them.
    """
    check_split(config, rules.num_shards("batch"))
    return EnginePrograms(
        sync=make_sync(decoder, rules, dtype),
        place=make_sync(decoder, rules, dtype, frozen=True),
        extend=make_extend(decoder, rules, dtype),
        copy=make_copy(rules),
        decode=make_decode(decoder, rules, dtype, steps=config.refill_steps),
    )


def abstract_engine_cache(
    config: RolloutConfig, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> Cache:
    """The cache of an engine."""
    return caches.abstract_cache(
        decoder,
        pages=cache_pages(config, rules.num_shards("batch")),
        page_tokens=config.page_tokens,
        dtype=activation_dtype(rules, dtype),
        rules=rules,
    )


def abstract_slots(config: RolloutConfig, size: int, rules: ShardingRules) -> tuple[Where, Slots]:
    """What a decode call of so many slots is given beside parameters and cache."""
    return _abstract((nowhere(size), idle_slots(size, table_pages(config))), rules)


def abstract_chunk(config: RolloutConfig, length: int, rules: ShardingRules) -> Chunk:
    """What a prefill call of chunks of a length is given."""
    return _abstract(idle_chunk(config.prefill_rows, length, table_pages(config)), rules)


def _abstract(tree: Any, rules: ShardingRules) -> Any:
    shardings = row_shardings(tree, rules)
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)


def row_shardings(tree: Any, rules: ShardingRules) -> Any:
    """Where the host puts arrays of rows: with all devices that share their weights; numbers alone are everywhere."""
    return jax.tree.map(lambda x: rules.sharding("rows") if x.ndim else rules.sharding(), tree)


def make_extend(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> Any:
    """The jitted `(params, cache, chunk) -> cache`: new tokens behind a cache that stays; a variant per chunk length.

    Prompts, their parts, the next turns of a conversation and what new weights or want of pages make necessary again
    all come in this way. No logits are made: `decode` draws what follows the last token, whose state is kept. The cache
    is donated.
    """

    def extend(params: Params, cache: Cache, chunk: Chunk) -> Cache:
        return prefill(params, cache, chunk, decoder=decoder, rules=rules, dtype=dtype)[1]

    return jax.jit(extend, donate_argnums=1, out_shardings=caches.cache_shardings(rules))


def prefill(
    params: Params, cache: Cache, chunk: Chunk, *, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> tuple[jax.Array, Cache]:
    """Hidden states [R, T, D] of a chunk's tokens, and the cache with them."""
    T = chunk.tokens.shape[1]

    def attend(cache: Cache, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Cache, jax.Array]:
        return caches.extend(cache, layer, chunk.tables, chunk.starts, chunk.counts, q, k, v, rules)

    positions = chunk.starts[:, None] + jnp.arange(T)[None]
    hidden, cache = forward(params, chunk.tokens, positions, attend, cache, config=decoder, rules=rules, dtype=dtype)
    last = jnp.take_along_axis(hidden, (chunk.counts - 1)[:, None, None], axis=1, mode="clip")[:, 0]
    lengths = chunk.starts + chunk.counts
    return hidden, caches.keep_states(cache, chunk.tables, lengths, chunk.counts, last, rules)


def nonfinite_layer(
    params: Params, tokens: Sequence[int], decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> str:
    """Where a pass over these tokens first meets what is no number: a weight, or a layer. Compiles; slow."""
    whole = rules.sharding()  # also where other hosts have a part

    def finite(value: jax.Array) -> jax.Array:
        return jnp.isfinite(of_bits(value)).reshape(len(value), -1).all(axis=1)

    for name, value in params.items():
        wrong = ~np.asarray(jax.jit(finite, out_shardings=whole)(value))
        if wrong.any():
            layer = f" of layer {int(np.argmax(wrong))}" if name.startswith(LAYERS) else ""
            return f"weight {name}{layer} is not finite itself"

    one_sequence = jnp.ones((1, len(tokens)), jnp.int32)

    def attend(bad: jax.Array, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        found = ~(jnp.isfinite(q).all() & jnp.isfinite(k).all() & jnp.isfinite(v).all())
        return bad.at[layer].set(found), causal_attention(q, k, v, Visibility(one_sequence, one_sequence).mask())

    def meet(params: Params) -> jax.Array:
        positions, bad = jnp.arange(len(tokens))[None], jnp.zeros(decoder.layers, bool)
        return forward(params, jnp.array([tokens]), positions, attend, bad, config=decoder, rules=rules, dtype=dtype)[1]

    wrong = np.flatnonzero(np.asarray(jax.jit(meet, out_shardings=whole)(params)))
    if len(wrong):
        return f"what enters layer {int(wrong[0])} is not finite, and all weights are"
    return f"they overflow behind layer {decoder.layers - 1}; all weights are finite"


def make_copy(rules: ShardingRules) -> Any:
    """The jitted `(cache, sources [S], targets [S]) -> cache`: pages of prompts for their completions (`copy_pages`).

    The cache is donated.
    """

    def copy(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
        return caches.copy_pages(cache, sources, targets, rules)

    return jax.jit(copy, donate_argnums=0, out_shardings=caches.cache_shardings(rules))


def make_decode(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype, *, steps: int) -> Any:
    """The jitted `(params, cache, where, slots) -> (cache, where, Drawn, steps [])`: up to `steps` tokens in each slot.

    Slots that are `first` draw one before the steps. A variant per number of slots. It leaves early when no slot is
    live any more, and says how many steps it ran. The cache is donated.
    """
    at_once = steps_at_once(steps, rules.num_shards("batch"))

    def decode(params: Params, cache: Cache, left: Where, slots: Slots) -> tuple[Cache, Where, Drawn, jax.Array]:
        def first(where: Where, drawn: Drawn) -> tuple[Where, Drawn]:
            states = caches.kept_states(cache, slots.tables, where.lengths, rules)
            logits = _logits(states, params, decoder=decoder, rules=rules, dtype=dtype)
            where, drawn = _draw(logits, slots, slots.first, where, drawn, 0, rules)
            return dataclasses.replace(where, any_live=jnp.any(where.live)), drawn

        def step(carry: tuple[Cache, Where, Drawn, jax.Array]) -> tuple[Cache, Where, Drawn, jax.Array]:
            cache, where, drawn, i = carry
            logits, cache = _next_logits(params, cache, where, slots, decoder=decoder, rules=rules, dtype=dtype)
            where = dataclasses.replace(where, lengths=where.lengths + where.live)
            where, drawn = _draw(logits, slots, where.live, where, drawn, i + 1, rules)
            return cache, where, drawn, i + 1

        def some_steps(carry: tuple[Cache, Where, Drawn, jax.Array]) -> tuple[Cache, Where, Drawn, jax.Array]:
            carry = step(carry) if at_once == 1 else jax.lax.fori_loop(0, at_once, lambda _, carry: step(carry), carry)
            cache, where, drawn, i = carry
            return cache, dataclasses.replace(where, any_live=jnp.any(where.live)), drawn, i

        def unfinished(carry: tuple[Cache, Where, Drawn, jax.Array]) -> jax.Array:
            _, where, _, i = carry
            return (i < steps) & where.any_live

        begun = _begin(left, slots), _nothing_drawn(len(left.tokens), steps)
        where, drawn = jax.lax.cond(slots.any_first, first, lambda *begun: begun, *begun)
        return jax.lax.while_loop(unfinished, some_steps, (cache, where, drawn, jnp.int32(0)))

    rows, pages = rules.sharding("rows"), caches.cache_shardings(rules)
    shardings = pages, row_shardings(nowhere(1), rules), rows, rules.sharding()
    return jax.jit(decode, donate_argnums=1, out_shardings=shardings)


def _begin(left: Where, slots: Slots) -> Where:
    """Where the slots of a call stand: where the call before has left them, or where the host says."""
    given = slots.where
    return Where(
        lengths=jnp.where(slots.fresh, given.lengths, left.lengths),
        tokens=jnp.where(slots.fresh, given.tokens, left.tokens),
        live=jnp.where(slots.fresh, given.live, left.live) & slots.taken,
        any_live=given.any_live | left.any_live,
    )


def _nothing_drawn(S: int, steps: int) -> Drawn:
    return Drawn(
        tokens=jnp.zeros((S, 1 + steps), jnp.int32),
        logprobs=jnp.zeros((S, 1 + steps), jnp.float32),
        full_logprobs=jnp.zeros((S, 1 + steps), jnp.float32),
        counts=jnp.zeros(S, jnp.int32),
        finite=jnp.ones(S, bool),
    )


def _draw(
    logits: jax.Array,
    slots: Slots,
    drawing: jax.Array,
    where: Where,
    drawn: Drawn,
    column: jax.Array | int,
    rules: ShardingRules,
) -> tuple[Where, Drawn]:
    """A token of each slot that is `drawing`, [S], from logits [S, V], and whether it goes on behind it."""
    sampled = sample_split(logits, slots.sampling, where.lengths, drawing, rules)
    drawn = Drawn(
        tokens=drawn.tokens.at[:, column].set(sampled.tokens),
        logprobs=drawn.logprobs.at[:, column].set(sampled.logprobs),
        full_logprobs=drawn.full_logprobs.at[:, column].set(sampled.full_logprobs),
        counts=drawn.counts + drawing,
        finite=drawn.finite & (sampled.finite | ~drawing),
    )
    ends = jnp.any(sampled.tokens[:, None] == slots.stop_tokens, axis=1) | (where.lengths >= slots.last)
    live = where.live & ~(drawing & (ends | ~sampled.finite))
    tokens = jnp.where(drawing, sampled.tokens, where.tokens)
    return dataclasses.replace(where, tokens=tokens, live=live), drawn


def _next_logits(
    params: Params,
    cache: Cache,
    where: Where,
    slots: Slots,
    *,
    decoder: DecoderConfig,
    rules: ShardingRules,
    dtype: jnp.dtype,
) -> tuple[jax.Array, Cache]:
    """Logits [S, V] float32 behind each slot's last token, which enters the cache."""
    starts, counts = where.lengths * where.live, where.live.astype(jnp.int32)  # what is not live sees nothing

    def attend(cache: Cache, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Cache, jax.Array]:
        return caches.extend(cache, layer, slots.tables, starts, counts, q, k, v, rules)

    hidden, cache = forward(
        params, where.tokens[:, None], starts[:, None], attend, cache, config=decoder, rules=rules, dtype=dtype
    )
    return _logits(hidden[:, 0], params, decoder=decoder, rules=rules, dtype=dtype), cache


def _logits(
    hidden: jax.Array, params: Params, *, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> jax.Array:
    """Logits [S, V] float32 behind states [S, D]."""
    hidden = rules.constrain(hidden, "rows", None)
    logits = rules.constrain(logits_at(hidden, head_weights(params, rules, dtype), 1.0), "rows", "logits")
    if logits.shape[1] > decoder.vocab:  # padded
        logits = jnp.where(jnp.arange(logits.shape[1])[None] < decoder.vocab, logits, -jnp.inf)
    return logits
