"""The rollout engine's compiled programs, one factory each: sync, extend (prefill), copy, decode.

The engine calls the programs, the planner lowers them with abstract arrays, and the benchmarks time them. All have
fixed shapes: R rows of one chunk length, S slots (fewer as work runs out), k steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from podium.compile_ahead import Call
from podium.compiler import engine_options
from podium.config.schema import RolloutConfig
from podium.config.sizes import check_split, prompt_buckets, slot_sizes, steps_at_once, table_pages
from podium.models.architecture import DecoderConfig
from podium.models.attention.mask import Visibility
from podium.models.attention.packed_attention import causal_attention
from podium.models.blocks.choices import unknown_choice
from podium.models.blocks.kind import Advance, At, States
from podium.models.decoder import PassSettings, forward, head_weights
from podium.models.linear import activation_dtype, of_bits
from podium.models.logprobs import logits_at
from podium.models.recorded_experts import joined_choices
from podium.rollout import cache as caches
from podium.rollout.cache import Cache, Rows
from podium.rollout.engine_weights import (
    Program,
    SyncProgram,
    abstract_weights,
    engine_decoder,
    engine_specs,
    make_sync,
)
from podium.rollout.sampling import A, SamplingRows, idle_rows, num_words, sample_split, with_tokens
from podium.rollout.sequence import MAX_STOP_TOKENS
from podium.sharding import AbstractParams, Params, ShardingRules

Tree = TypeVar("Tree")
SCORED_TOKENS = 256
"""Largest number of prompt tokens whose logits exist at a time."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk(Generic[A]):
    """New tokens to prefill after the cached ones; each row is one sequence."""

    tokens: A  # [R, T] int32
    starts: A  # [R] int32, tokens in the cache
    counts: A  # [R] int32, number of new tokens of each row, at most T; 0: unused row
    tables: A  # [R, W] int32, pages of each row's sequence
    cells: A  # [R] int32, cell of each row's sequence


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Where(Generic[A]):
    """The decoding state of each slot, passed from one decode call to the next."""

    lengths: A  # [S] int32, tokens in the cache
    tokens: A  # [S] int32, last token drawn, not in the cache yet
    live: A  # [S] bool, whether the slot draws tokens
    any_live: A  # [] bool, over all devices; reduced once per call instead of per step
    seen: A | None = None
    """The set of tokens of each slot's sequence, [S, W] uint32 (`sampling.words_of`); None if no slot has a repetition
    penalty."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots(Generic[A]):
    """The host's input to a decode call, for each slot."""

    sampling: SamplingRows[A]
    stop_tokens: A  # [S, 8] int32, padded with -1
    last: A  # [S] int32, position of the last token that may be drawn
    tables: A  # [S, W] int32, pages of the slot's sequence
    cells: A  # [S] int32, cell of the slot's sequence
    taken: A  # [S] bool, whether the slot holds a sequence
    fresh: A  # [S] bool, whether to take the slot's state from `where` instead of the previous call
    first: A  # [S] bool, whether a fresh slot draws its first token from the kept hidden state
    any_first: A  # [] bool, over all devices
    where: Where[A]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """The tokens that a decode call drew in each slot: a first token where `first`, then one per step for k steps."""

    tokens: jax.Array  # [S, 1 + k] int32
    logprobs: jax.Array  # [S, 1 + k] float32, under the distribution that was sampled
    full_logprobs: jax.Array  # [S, 1 + k] float32, under the softmax before penalty, top-k, top-p and min-p
    counts: jax.Array  # [S] int32, number of tokens drawn
    finite: jax.Array  # [S] bool, whether all logits were finite; a slot stops at the first that is not
    choices: jax.Array | None = None
    """Experts of the tokens preceding the sampled ones, [S, 1 + k, C] (`Completion.choices`)."""


def nowhere(num_slots: int, words: int = 0) -> Where[np.ndarray]:
    """The decoding state of empty slots; `words` is W, or 0 if sequences' tokens are not tracked."""
    return Where(
        lengths=np.zeros(num_slots, np.int32),
        tokens=np.zeros(num_slots, np.int32),
        live=np.zeros(num_slots, np.bool_),
        any_live=np.zeros((), np.bool_),
        seen=np.zeros((num_slots, words), np.uint32) if words else None,
    )


def idle_slots(num_slots: int, table: int, words: int = 0) -> Slots[np.ndarray]:
    """Empty slots for the host to fill, with `table` pages each; `words` is as for `nowhere`."""
    return Slots(
        sampling=idle_rows(num_slots),
        stop_tokens=np.full((num_slots, MAX_STOP_TOKENS), -1, np.int32),
        last=np.zeros(num_slots, np.int32),
        tables=np.full((num_slots, table), caches.NO_PAGE, np.int32),
        cells=np.zeros(num_slots, np.int32),
        taken=np.zeros(num_slots, np.bool_),
        fresh=np.zeros(num_slots, np.bool_),
        first=np.zeros(num_slots, np.bool_),
        any_first=np.zeros((), np.bool_),
        where=nowhere(num_slots, words),
    )


def idle_chunk(rows: int, length: int, table: int) -> Chunk[np.ndarray]:
    """A chunk without sequences, for the host to fill; `table` is W."""
    return Chunk(
        tokens=np.zeros((rows, length), np.int32),
        starts=np.zeros(rows, np.int32),
        counts=np.zeros(rows, np.int32),
        tables=np.full((rows, table), caches.NO_PAGE, np.int32),
        cells=np.zeros(rows, np.int32),
    )


_Carry = tuple[Cache, Where[jax.Array], Drawn, jax.Array]


class ExtendProgram(Program, Protocol):
    """The prefill program (`make_extend`)."""

    def __call__(self, params: Params, cache: Cache, chunk: Chunk[jax.Array], /) -> tuple[Cache, jax.Array | None]:
        """Return the cache with a chunk's tokens added, and their experts [R, T, C] if any."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of given tokens, and the likeliest token at each position, under the softmax at temperature
    1.
    """

    logprobs: jax.Array  # [R, T] float32
    best_tokens: jax.Array  # [R, T] int32, the lowest index on ties
    best_logprobs: jax.Array  # [R, T] float32


class ScoredExtendProgram(Program, Protocol):
    """The prefill program that scores the tokens it reads (`make_scored_extend`)."""

    def __call__(
        self, params: Params, cache: Cache, chunk: Chunk[jax.Array], targets: jax.Array, /
    ) -> tuple[Cache, jax.Array | None, Scores]:
        """Like `ExtendProgram`; also returns the scores of `targets` [R, T], the token after each token of the
        chunk.
        """
        ...


class CopyProgram(Program, Protocol):
    """A program that copies pages (`make_copy`) or cells (`make_copy_cells`)."""

    def __call__(self, cache: Cache, sources: jax.Array, targets: jax.Array, /) -> Cache:
        """Return the cache with `sources` copied to `targets`."""
        ...


class DecodeProgram(Program, Protocol):
    """The decode program (`make_decode`)."""

    def __call__(
        self, params: Params, cache: Cache, where: Where[jax.Array], slots: Slots[jax.Array], /
    ) -> tuple[Cache, Where[jax.Array], Drawn, jax.Array]:
        """Run decode steps; returns the cache, the slots' state, the drawn tokens, and the number of steps []."""
        ...


class EnginePrograms(NamedTuple):
    """The compiled programs of an engine."""

    sync: SyncProgram
    place: SyncProgram
    """`sync` for the frozen weights; called once."""
    extend: ExtendProgram
    scored_extend: ScoredExtendProgram
    """The prefill program for prompts that are scored (`Request.score_prompt`)."""
    copy: CopyProgram
    copy_cells: CopyProgram
    """Used if layers store data of a fixed size (`podium.rollout.cache_layout`)."""
    decode: DecodeProgram


class EngineForm(NamedTuple):
    """What an engine's programs are compiled for."""

    config: RolloutConfig
    decoder: DecoderConfig
    rules: ShardingRules
    """A layout of ROLLOUT_LAYOUTS on a mesh."""
    dtype: jnp.dtype
    """Number format of the weights; activations and cache follow it (`podium.models.linear`)."""

    @property
    def words(self) -> int:
        """The result of `seen_words`."""
        return seen_words(self.decoder, self.rules)

    def weights(self) -> AbstractParams:
        """The engine's weights with abstract arrays."""
        return abstract_weights(self.decoder, self.rules, self.dtype)

    def cache(self) -> Cache:
        """The engine's cache with abstract arrays."""
        return abstract_engine_cache(*self)


def make_engine_programs(
    config: RolloutConfig, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> EnginePrograms:
    """Make the programs of an engine with this config; the engine runs them and the planner compiles them.

    Raises ValueError if slots or prefill rows are not divisible by the number of devices that split them.
    """
    check_split(config, rules.num_shards("batch"))
    computed = engine_decoder(decoder, rules)
    return EnginePrograms(
        sync=make_sync(decoder, rules, dtype),
        place=make_sync(decoder, rules, dtype, frozen=True),
        extend=make_extend(computed, rules, dtype),
        scored_extend=make_scored_extend(computed, rules, dtype),
        copy=make_copy(computed, rules),
        copy_cells=make_copy_cells(computed, rules),
        decode=make_decode(computed, rules, dtype, steps=config.refill_steps),
    )


def abstract_engine_cache(
    config: RolloutConfig, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> Cache:
    """An engine's cache with abstract arrays."""
    computed = engine_decoder(decoder, rules)
    return caches.abstract_cache(computed, config, dtype=activation_dtype(rules, dtype), rules=rules)


def seen_words(decoder: DecoderConfig, rules: ShardingRules) -> int:
    """Number W of integers that hold the set of tokens in a slot's sequence, with one bit per token of the padded
    vocabulary.
    """
    return num_words(engine_specs(decoder, rules)["embed" if decoder.tied else "head"].shape[0])


def abstract_slots(
    config: RolloutConfig, decoder: DecoderConfig, size: int, rules: ShardingRules, *, penalised: bool
) -> tuple[Where[jax.Array], Slots[jax.Array]]:
    """Abstract arguments of a decode call with `size` slots, except parameters and cache.

    `penalised`: whether a sequence has a repetition penalty.
    """
    words = seen_words(decoder, rules) if penalised else 0
    where, slots = _abstract((nowhere(size, words), idle_slots(size, table_pages(config), words)), rules)
    return cast(Where[jax.Array], where), cast(Slots[jax.Array], slots)


def abstract_chunk(config: RolloutConfig, length: int, rules: ShardingRules) -> Chunk[jax.Array]:
    """The abstract chunk of a prefill call with rows of `length` tokens."""
    return cast(Chunk[jax.Array], _abstract(idle_chunk(config.prefill_rows, length, table_pages(config)), rules))


def engine_calls(programs: EnginePrograms, form: EngineForm) -> dict[str, Call]:
    """The calls of a rollout that need the engine's weights or cache, with abstract arguments, in order of first use.

    Names: prefill:T by chunk length, copy, and decode:S by slots.
    """
    config, decoder, rules, _ = form
    penalised = config.repetition_penalty != 1
    weights, cache = form.weights(), form.cache()
    found: dict[str, Call] = {}
    for length in prompt_buckets(config):
        chunk = abstract_chunk(config, length, rules)
        found[f"prefill:{length}"] = Call(programs.extend, (weights, cache, chunk))
    listed = jax.ShapeDtypeStruct((config.slots,), jnp.int32, sharding=rules.sharding("rows"))
    found["copy"] = Call(programs.copy, (cache, listed, listed))
    for size in slot_sizes(config, rules.num_shards("batch")):
        found[f"decode:{size}"] = Call(
            programs.decode, (weights, cache, *abstract_slots(config, decoder, size, rules, penalised=penalised))
        )
    return found


def penalised_calls(programs: EnginePrograms, form: EngineForm) -> dict[str, Call]:
    """The decode calls, with abstract arguments, for sequences with a repetition penalty if the config has none."""
    config, decoder, rules, _ = form
    if config.repetition_penalty != 1:
        return {}
    given = form.weights(), form.cache()
    slots = {
        size: abstract_slots(config, decoder, size, rules, penalised=True)
        for size in slot_sizes(config, rules.num_shards("batch"))
    }
    return {f"penalised:{size}": Call(programs.decode, (*given, *each)) for size, each in slots.items()}


def scored_calls(programs: EnginePrograms, form: EngineForm) -> dict[str, Call]:
    """The prefill calls, with abstract arguments, for prompts that are scored (`Request.score_prompt`)."""
    config, rules = form.config, form.rules
    given = form.weights(), form.cache()
    found: dict[str, Call] = {}
    for length in prompt_buckets(config):
        chunk = abstract_chunk(config, length, rules)
        targets = cast(jax.Array, _abstract(np.zeros((config.prefill_rows, length), np.int32), rules))
        found[f"scored:{length}"] = Call(programs.scored_extend, (*given, chunk, targets))
    return found


def _abstract(tree: Tree, rules: ShardingRules) -> Tree:
    shardings = row_shardings(tree, rules)
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)


def row_shardings(tree: Tree, rules: ShardingRules) -> Tree:
    """Shardings for arrays of rows: split over the row devices; scalars are replicated."""
    return jax.tree.map(lambda x: rules.sharding("rows") if x.ndim else rules.sharding(), tree)


def make_extend(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> ExtendProgram:
    """The jitted `(params, cache, chunk) -> (cache, choices)`: adds new tokens; one variant per chunk length.

    It processes prompts, parts of prompts, later turns of a conversation, and tokens recomputed after an eviction or
    with new weights. It computes no logits: `decode` samples from the kept hidden state of the last token. `choices`
    are the tokens' experts [R, T, C]; None without experts. The cache is donated.
    """

    def extend(params: Params, cache: Cache, chunk: Chunk[jax.Array]) -> tuple[Cache, jax.Array | None]:
        return prefill(params, cache, chunk, decoder=decoder, rules=rules, dtype=dtype)[1:]

    shardings = caches.cache_shardings(decoder, rules), rules.sharding("rows")
    options = engine_options(rules.platform, rules.device_kind)
    return cast(ExtendProgram, jax.jit(extend, donate_argnums=1, out_shardings=shardings, compiler_options=options))


def make_scored_extend(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> ScoredExtendProgram:
    """The jitted `(params, cache, chunk, targets) -> (cache, choices, Scores)`: `make_extend`, with scores [R, T].

    Logits are computed for at most SCORED_TOKENS tokens at a time. One variant per chunk length. The cache is donated.
    """

    def extend(
        params: Params, cache: Cache, chunk: Chunk[jax.Array], targets: jax.Array
    ) -> tuple[Cache, jax.Array | None, Scores]:
        hidden, cache, choices = prefill(params, cache, chunk, decoder=decoder, rules=rules, dtype=dtype)
        R, T, _ = hidden.shape
        columns = max(1, min(T, SCORED_TOKENS // R))
        parts = -(-T // columns)

        def cut(x: jax.Array) -> jax.Array:  # [R, T, ...] -> [parts, R * columns, ...]
            padded = jnp.pad(x, ((0, 0), (0, parts * columns - T), *((0, 0) for _ in x.shape[2:])))
            return jnp.moveaxis(padded.reshape(R, parts, columns, *x.shape[2:]), 1, 0).reshape(parts, -1, *x.shape[2:])

        def score(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            states, wanted = part
            logits = _logits(states, params, decoder=decoder, rules=rules, dtype=dtype)
            sums = jax.nn.logsumexp(logits, axis=-1)
            own = jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
            return own - sums, jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.max(logits, axis=-1) - sums

        def joined(x: jax.Array) -> jax.Array:  # [parts, R * columns] -> [R, T]
            return jnp.moveaxis(x.reshape(parts, R, columns), 0, 1).reshape(R, -1)[:, :T]

        logprobs, best_tokens, best_logprobs = map(joined, jax.lax.map(score, (cut(hidden), cut(targets))))
        return cache, choices, Scores(logprobs=logprobs, best_tokens=best_tokens, best_logprobs=best_logprobs)

    rows = rules.sharding("rows")
    shardings = caches.cache_shardings(decoder, rules), rows, rows
    options = engine_options(rules.platform, rules.device_kind)
    made = jax.jit(extend, donate_argnums=1, out_shardings=shardings, compiler_options=options)
    return cast(ScoredExtendProgram, made)


def prefill(
    params: Params,
    cache: Cache,
    chunk: Chunk[jax.Array],
    *,
    decoder: DecoderConfig,
    rules: ShardingRules,
    dtype: jnp.dtype,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Prefill a chunk; returns the tokens' hidden states [R, T, D], the cache with the tokens added, and their experts
    [R, T, C] if any.
    """
    rows = Rows(tables=chunk.tables, cells=chunk.cells, starts=chunk.starts, counts=chunk.counts, rules=rules)
    hidden, cache, choices = _enter(params, cache, chunk.tokens, rows, decoder=decoder, dtype=dtype)
    last = jnp.take_along_axis(hidden, (chunk.counts - 1)[:, None, None], axis=1, mode="clip")[:, 0]
    return hidden, caches.keep_states(cache, rows, last), choices


def _enter(
    params: Params, cache: Cache, tokens: jax.Array, rows: Rows, *, decoder: DecoderConfig, dtype: jnp.dtype
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Process new tokens [R, T]; returns their hidden states [R, T, D], the cache with the tokens added, and their
    experts [R, T, C] if any.
    """
    positions = rows.starts[:, None] + jnp.arange(tokens.shape[1])[None]
    settings = PassSettings(config=decoder, rules=rows.rules, dtype=dtype, from_stacks=True)
    hidden, places, told = forward(
        params, tokens, positions, rows.attend, cache.places, recur=rows.recur, settings=settings
    )
    return hidden, dataclasses.replace(cache, places=places), joined_choices(told, decoder) if decoder.routed else None


def nonfinite_layer(
    params: Params, tokens: Sequence[int], decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> str:
    """Describe the first non-finite weight or layer of a forward pass over these tokens. Compiles a program; slow."""
    decoder = engine_decoder(decoder, rules)
    whole = rules.sharding()  # replicated, so that every host can read it

    def finite(value: jax.Array) -> jax.Array:
        return jnp.isfinite(of_bits(value)).reshape(len(value), -1).all(axis=1)

    for name, value in params.items():
        wrong = ~np.asarray(jax.jit(finite, out_shardings=whole)(value))
        if wrong.any():
            of_place = [place.layers for place in decoder.places if name.startswith(place.prefix)]
            layer = f" of layer {of_place[0][int(np.argmax(wrong))]}" if of_place else ""
            return f"weight {name}{layer} is not finite"

    one_sequence = jnp.ones((1, len(tokens)), jnp.int32)

    def attend(bad: jax.Array, at: At, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = ~(jnp.isfinite(q).all() & jnp.isfinite(k).all() & jnp.isfinite(v).all())
        mask = Visibility(one_sequence, one_sequence).mask()
        return bad.at[at.layer].set(found), causal_attention(q, k, v, mask, at.sinks)

    def recur(bad: jax.Array, at: At, initial: States, advance: Advance) -> tuple[jax.Array, jax.Array]:
        _, y = advance.append(initial, jnp.array([len(tokens)]))
        return bad.at[at.layer].set(~jnp.isfinite(y).all()), y

    def meet(params: Params) -> tuple[jax.Array, ...]:
        positions = jnp.arange(len(tokens))[None]
        good = [jnp.zeros(len(place.layers), bool) for place in decoder.places]
        settings = PassSettings(config=decoder, rules=rules, dtype=dtype)
        return forward(params, jnp.array([tokens]), positions, attend, good, recur=recur, settings=settings)[1]

    wrong = _layers_of(decoder, jax.jit(meet, out_shardings=whole)(params))
    if wrong:
        return f"the input of layer {wrong[0]} is not finite, although all weights are"
    return f"the hidden states overflow after layer {decoder.layers - 1}; all weights are finite"


def _layers_of(decoder: DecoderConfig, marked: Sequence[jax.Array]) -> list[int]:
    """The layers marked in their places' arrays, in order."""
    pairs = zip(decoder.places, marked, strict=True)
    return sorted(place.layers[index] for place, marks in pairs for index in np.flatnonzero(np.asarray(marks)))


def make_copy(decoder: DecoderConfig, rules: ShardingRules) -> CopyProgram:
    """The jitted `(cache, sources [S], targets [S]) -> cache`: copies prompts' pages to completions (`copy_pages`).

    The cache is donated.
    """

    def copy(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
        return caches.copy_pages(cache, sources, targets, rules)

    return cast(CopyProgram, jax.jit(copy, donate_argnums=0, out_shardings=caches.cache_shardings(decoder, rules)))


def make_copy_cells(decoder: DecoderConfig, rules: ShardingRules) -> CopyProgram:
    """The jitted `(cache, sources [S], targets [S]) -> cache` for cells (`copy_cells`). The cache is donated."""

    def copy_cells(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
        return caches.copy_cells(cache, sources, targets, rules)

    shardings = caches.cache_shardings(decoder, rules)
    return cast(CopyProgram, jax.jit(copy_cells, donate_argnums=0, out_shardings=shardings))


def make_decode(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype, *, steps: int) -> DecodeProgram:
    """The jitted `(params, cache, where, slots) -> (cache, where, Drawn, steps [])`: up to `steps` tokens per slot.

    Slots marked `first` draw one token before the steps. One variant per number of slots. Ends early when no slot is
    live; `steps` is the number of steps run. The cache is donated.
    """
    at_once = steps_at_once(steps, rules.num_shards("batch"))

    def decode(params: Params, cache: Cache, left: Where[jax.Array], slots: Slots[jax.Array]) -> _Carry:
        def first(where: Where[jax.Array], drawn: Drawn) -> tuple[Where[jax.Array], Drawn]:
            states = caches.kept_states(cache, slots.tables, where.lengths, rules)
            logits = _logits(states, params, decoder=decoder, rules=rules, dtype=dtype)
            where, drawn = _draw(
                logits, None, slots=slots, drawing=slots.first, where=where, drawn=drawn, column=0, rules=rules
            )
            return dataclasses.replace(where, any_live=jnp.any(where.live)), drawn

        def step(carry: _Carry) -> _Carry:
            cache, where, drawn, i = carry
            logits, cache, choices = _next_logits(
                params, cache, where, slots, decoder=decoder, rules=rules, dtype=dtype
            )
            where = dataclasses.replace(where, lengths=where.lengths + where.live)
            where, drawn = _draw(
                logits, choices, slots=slots, drawing=where.live, where=where, drawn=drawn, column=i + 1, rules=rules
            )
            return cache, where, drawn, i + 1

        def some_steps(carry: _Carry) -> _Carry:
            carry = step(carry) if at_once == 1 else jax.lax.fori_loop(0, at_once, lambda _, carry: step(carry), carry)
            cache, where, drawn, i = carry
            return cache, dataclasses.replace(where, any_live=jnp.any(where.live)), drawn, i

        def unfinished(carry: _Carry) -> jax.Array:
            _, where, _, i = carry
            return (i < steps) & where.any_live

        begun = _begin(left, slots), _nothing_drawn(len(left.tokens), steps, decoder)
        where, drawn = jax.lax.cond(slots.any_first, first, lambda *begun: begun, *begun)
        return jax.lax.while_loop(unfinished, some_steps, (cache, where, drawn, jnp.int32(0)))

    rows, pages = rules.sharding("rows"), caches.cache_shardings(decoder, rules)
    shardings = pages, row_shardings(nowhere(1, words=1), rules), rows, rules.sharding()
    options = engine_options(rules.platform, rules.device_kind)
    return cast(DecodeProgram, jax.jit(decode, donate_argnums=1, out_shardings=shardings, compiler_options=options))


def _begin(left: Where[jax.Array], slots: Slots[jax.Array]) -> Where[jax.Array]:
    """The slots' state at the start of a call: from the previous call, or from the host for fresh slots."""
    given = slots.where
    return Where(
        lengths=jnp.where(slots.fresh, given.lengths, left.lengths),
        tokens=jnp.where(slots.fresh, given.tokens, left.tokens),
        live=jnp.where(slots.fresh, given.live, left.live) & slots.taken,
        any_live=given.any_live | left.any_live,
        seen=None
        if given.seen is None or left.seen is None
        else jnp.where(slots.fresh[:, None], given.seen, left.seen),
    )


def _nothing_drawn(S: int, steps: int, decoder: DecoderConfig) -> Drawn:
    own = decoder.choice_format
    nothing = jnp.full((S, 1 + steps, decoder.choices), unknown_choice(own), own)
    return Drawn(
        tokens=jnp.zeros((S, 1 + steps), jnp.int32),
        logprobs=jnp.zeros((S, 1 + steps), jnp.float32),
        full_logprobs=jnp.zeros((S, 1 + steps), jnp.float32),
        counts=jnp.zeros(S, jnp.int32),
        finite=jnp.ones(S, bool),
        choices=nothing if decoder.choices else None,
    )


def _draw(
    logits: jax.Array,
    choices: jax.Array | None,
    slots: Slots[jax.Array],
    drawing: jax.Array,
    where: Where[jax.Array],
    drawn: Drawn,
    column: jax.Array | int,
    rules: ShardingRules,
) -> tuple[Where[jax.Array], Drawn]:
    """Draw a token from logits [S, V] in each slot where `drawing` [S], and end the slots that are complete.

    `choices` [S, C] are the experts of the preceding tokens; None if unknown.
    """
    sampled = sample_split(logits, slots.sampling, positions=where.lengths, live=drawing, rules=rules, seen=where.seen)
    drawn = Drawn(
        tokens=drawn.tokens.at[:, column].set(sampled.tokens),
        logprobs=drawn.logprobs.at[:, column].set(sampled.logprobs),
        full_logprobs=drawn.full_logprobs.at[:, column].set(sampled.full_logprobs),
        counts=drawn.counts + drawing,
        finite=drawn.finite & (sampled.finite | ~drawing),
        choices=drawn.choices if choices is None or drawn.choices is None else drawn.choices.at[:, column].set(choices),
    )
    ends = jnp.any(sampled.tokens[:, None] == slots.stop_tokens, axis=1) | (where.lengths >= slots.last)
    live = where.live & ~(drawing & (ends | ~sampled.finite))
    tokens = jnp.where(drawing, sampled.tokens, where.tokens)
    seen = None if where.seen is None else with_tokens(where.seen, sampled.tokens, drawing)
    return dataclasses.replace(where, tokens=tokens, live=live, seen=seen), drawn


def _next_logits(
    params: Params,
    cache: Cache,
    where: Where[jax.Array],
    slots: Slots[jax.Array],
    *,
    decoder: DecoderConfig,
    rules: ShardingRules,
    dtype: jnp.dtype,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Add each slot's last token to the cache.

    Returns the logits [S, V] float32 for the next token, the cache, and the last token's experts [S, C] if any.
    """
    starts = where.lengths * where.live  # slots that are not live attend to nothing
    counts = where.live.astype(jnp.int32)
    rows = Rows(tables=slots.tables, cells=slots.cells, starts=starts, counts=counts, rules=rules, single=True)
    hidden, cache, choices = _enter(params, cache, where.tokens[:, None], rows, decoder=decoder, dtype=dtype)
    logits = _logits(hidden[:, 0], params, decoder=decoder, rules=rules, dtype=dtype)
    return logits, cache, None if choices is None else choices[:, 0]


def _logits(
    hidden: jax.Array, params: Params, *, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> jax.Array:
    """Logits [S, V] float32 from hidden states [S, D]."""
    hidden = rules.constrain(hidden, "rows", None)
    logits = rules.constrain(logits_at(hidden, head_weights(params, rules, dtype), 1.0), "rows", "logits")
    if logits.shape[1] > decoder.vocab:  # the head is padded
        logits = jnp.where(jnp.arange(logits.shape[1])[None] < decoder.vocab, logits, -jnp.inf)
    return logits
