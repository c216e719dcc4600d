"""The compiled programs of the rollout engine, one factory each: sync, prefill, insert, decode.

The engine calls them, the planner lowers them on abstract arrays, the bench times them. All have fixed shapes: R
prompts of a bucket's length, S slots, k steps.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.config.attention import Backend
from podium.config.schema import RolloutConfig
from podium.config.sizes import check_split
from podium.models.architecture import DecoderConfig
from podium.models.attention import row_attention
from podium.models.decoder import forward, head_weights
from podium.models.linear import activation_dtype
from podium.models.logprobs import logits_at
from podium.models.params import LAYERS, TRAIN_AXES, ParamSpecs, param_specs, rollout_specs
from podium.rollout import cache as caches
from podium.rollout.cache import Cache, Prompts
from podium.rollout.sampling import SamplingRows, idle_rows, sample, sample_split
from podium.sharding import Params, ShardingRules, param_shardings

MAX_STOP_TOKENS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """What a program needs to know of each slot."""

    sampling: SamplingRows
    stop_tokens: jax.Array  # [S, 8] int32, padded with -1
    lengths: jax.Array  # [S] int32, tokens in the cache
    tokens: jax.Array  # [S] int32, the last one drawn, not in the cache yet
    last: jax.Array  # [S] int32, position of the last token that may be drawn
    live: jax.Array  # [S] bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """The tokens that a program drew for each slot."""

    tokens: jax.Array  # [S, k] int32
    logprobs: jax.Array  # [S, k] float32, under the distribution that they were drawn from
    full_logprobs: jax.Array  # [S, k] float32, before top-k, top-p and min-p
    counts: jax.Array  # [S] int32, how many of the k are drawn
    live: jax.Array  # [S] bool, whether the slot's sequence goes on


def idle_slots(num_slots: int) -> Any:
    """`Slots` of numpy arrays in which nothing runs, for the host to write into."""
    integers = {name: np.zeros(num_slots, np.int32) for name in ("lengths", "tokens", "last")}
    live, stop_tokens = np.zeros(num_slots, np.bool_), np.zeros((num_slots, MAX_STOP_TOKENS), np.int32)
    made: Any = {"sampling": idle_rows(num_slots), "stop_tokens": stop_tokens, "live": live, **integers}
    return Slots(**made)


class EnginePrograms(NamedTuple):
    """The compiled programs of an engine."""

    sync: Any
    prefill: Any
    insert: Any
    insert_across: Any
    """`insert` where a slot may want another device's prompt."""
    decode: Any


def make_engine_programs(
    config: RolloutConfig, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype, attention: Backend = "blocks"
) -> EnginePrograms:
    """The programs of the engine that a config describes; the engine runs them and the planner compiles them.

    `attention` is that of prefill.

    Raises ValueError where slots or prefill rows do not divide over the devices that split them.
    """
    check_split(config, rules.num_shards("batch"))
    return EnginePrograms(
        sync=make_sync(decoder, rules, dtype),
        prefill=make_prefill(decoder, rules, dtype, attention=attention, all_logits=config.layout == "legacy"),
        insert=make_insert(rules, crosses=False),
        insert_across=make_insert(rules, crosses=True),
        decode=make_decode(decoder, rules, dtype, steps=config.refill_steps),
    )


def abstract_engine_cache(
    config: RolloutConfig, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> Cache:
    """The cache of all slots of an engine, each with room for the longest prompt and completion."""
    return caches.abstract_cache(
        decoder,
        slots=config.slots,
        length=config.max_prompt_tokens + config.max_new_tokens,
        dtype=activation_dtype(rules, dtype),
        rules=rules,
    )


def abstract_prompts(
    config: RolloutConfig, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype, *, bucket: int
) -> Prompts:
    """What a prefill of prompts of a bucket's length leaves."""
    rows = config.prefill_rows
    kv = caches.abstract_cache(decoder, slots=rows, length=bucket, dtype=activation_dtype(rules, dtype), rules=rules)
    sharding = rules.sharding("batch", None)
    logits: Any = jax.ShapeDtypeStruct((rows, decoder.vocab), jnp.float32, sharding=sharding)
    return Prompts(kv=kv, logits=logits)


def engine_specs(decoder: DecoderConfig, rules: ShardingRules) -> ParamSpecs:
    """The weights that an engine with these rules has."""
    return rollout_specs(decoder, rules.num_shards("logits"))


def make_sync(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> Any:
    """The jitted `training params -> rollout params`: cast and laid out for decoding, in buffers of their own.

    The copy is what lets the trainer donate its parameters to the next update. Where weights are gathered, layers go
    one after the other: all at once, the TPU gathers them all before it puts any in its place, in twice their memory.
    """
    specs = engine_specs(decoder, rules)
    stored = param_shardings(param_specs(decoder), ShardingRules(rules.mesh, TRAIN_AXES))
    wanted = param_shardings(specs, rules)
    in_place = all(stored[name].is_equivalent_to(wanted[name], len(spec.shape)) for name, spec in specs.items())

    def move(name: str, value: jax.Array) -> jax.Array:
        shape, axes, *_ = specs[name]
        missing = [(0, size - found) for size, found in zip(shape[-value.ndim :], value.shape, strict=True)]
        value = jnp.pad(value.astype(dtype), missing)
        return jnp.copy(rules.constrain(value, *axes[len(axes) - value.ndim :]))

    def move_layer(carry: None, layer: Params) -> tuple[None, Params]:
        return carry, {name: move(name, value) for name, value in layer.items()}

    def sync(params: Params) -> Params:
        layers = {name: value for name, value in params.items() if name.startswith(LAYERS) and not in_place}
        moved = {name: move(name, value) for name, value in params.items() if name not in layers}
        return moved | (jax.lax.scan(move_layer, None, layers)[1] if layers else {})

    return jax.jit(sync, out_shardings=wanted)


def make_prefill(
    decoder: DecoderConfig,
    rules: ShardingRules,
    dtype: jnp.dtype,
    *,
    attention: Backend = "blocks",
    all_logits: bool = False,
) -> Any:
    """The jitted `(params, tokens [R, T], lengths [R]) -> Prompts`: one compiled variant per bucket T.

    `all_logits` makes those of every prompt token, [R, T, V], and keeps the last: the seed ran out of memory with
    them, and only its layout asks for them.
    """

    def prefill(params: Params, tokens: jax.Array, lengths: jax.Array) -> Prompts:
        R, T = tokens.shape
        empty = caches.make_cache(decoder, slots=R, length=T, dtype=activation_dtype(rules, dtype), rules=rules)
        segments = (jnp.arange(T)[None] < lengths[:, None]).astype(jnp.int32)  # [R, T], 1 in the prompt, 0 behind it
        attended = row_attention(attention, segments, segments, rules)

        def attend(kv: Cache, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Cache, jax.Array]:
            return caches.fill(kv, layer, k, v), attended(q, k, v)

        positions = jnp.broadcast_to(jnp.arange(T), (R, T))
        hidden, kv = forward(params, tokens, positions, attend, empty, config=decoder, rules=rules, dtype=dtype)
        head = head_weights(params, rules, dtype)
        if all_logits:
            logits = _last(logits_at(hidden, head, 1.0), lengths)
        else:
            logits = logits_at(_last(hidden, lengths), head, 1.0)
        logits = rules.constrain(rules.constrain(logits, "rows", "logits"), "batch", None)
        return Prompts(kv=kv, logits=logits[:, : decoder.vocab])

    return jax.jit(prefill)


def _last(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """What belongs to each row's last token: [R, T, n] to [R, n]."""
    return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]


def make_insert(rules: ShardingRules, *, crosses: bool) -> Any:
    """The jitted `(cache, prompts, rows [S], slots) -> (cache, Drawn)`: prompts into slots, and their first tokens.

    `rows` names the prompt of each slot, -1 for slots that stay as they are. The cache is donated. Without `crosses`
    each slot's prompt is on the slot's own device, and nothing is sent.
    """
    split = rules.spec(("batch",))

    def pick(logits: jax.Array, rows: jax.Array) -> jax.Array:
        return logits[jnp.maximum(rows, 0) % len(logits)]

    pick_own = jax.shard_map(pick, mesh=rules.mesh, in_specs=(split, split), out_specs=split)

    def insert(cache: Cache, prompts: Prompts, rows: jax.Array, slots: Slots) -> tuple[Cache, Drawn]:
        placed = rows >= 0
        if crosses:
            logits = rules.constrain(pick(rules.constrain(prompts.logits, None, None), rows), "batch", None)  # [S, V]
        else:
            logits = pick_own(prompts.logits, rows)
        sampled = sample(logits, slots.sampling, slots.lengths, placed)
        return caches.insert(cache, prompts, rows, rules, crosses=crosses), Drawn(
            tokens=sampled.tokens[:, None],
            logprobs=sampled.logprobs[:, None],
            full_logprobs=sampled.full_logprobs[:, None],
            counts=placed.astype(jnp.int32),
            live=placed & ~_ends(slots, sampled.tokens, slots.lengths),
        )

    return jax.jit(insert, donate_argnums=0, out_shardings=(rules.sharding(*caches.AXES), rules.sharding("batch")))


def make_decode(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype, *, steps: int) -> Any:
    """The jitted `(params, cache, slots) -> (cache, Drawn, steps [])`: up to `steps` tokens in each live slot.

    It leaves early when no slot is live any more, and says how many steps it ran. The cache is donated.
    """

    def decode(params: Params, cache: Cache, slots: Slots) -> tuple[Cache, Drawn, jax.Array]:
        S = len(slots.tokens)

        def step(carry: tuple[Cache, Slots, Drawn, jax.Array]) -> tuple[Cache, Slots, Drawn, jax.Array]:
            cache, slots, drawn, i = carry
            logits, cache = _next_logits(params, cache, slots, decoder=decoder, rules=rules, dtype=dtype)
            lengths = slots.lengths + slots.live
            sampled = sample_split(logits, slots.sampling, lengths, slots.live, rules)
            drawn = Drawn(
                tokens=drawn.tokens.at[:, i].set(sampled.tokens),
                logprobs=drawn.logprobs.at[:, i].set(sampled.logprobs),
                full_logprobs=drawn.full_logprobs.at[:, i].set(sampled.full_logprobs),
                counts=drawn.counts + slots.live,
                live=slots.live & ~_ends(slots, sampled.tokens, lengths),
            )
            slots = dataclasses.replace(slots, lengths=lengths, tokens=sampled.tokens, live=drawn.live)
            return cache, slots, drawn, i + 1

        def unfinished(carry: tuple[Cache, Slots, Drawn, jax.Array]) -> jax.Array:
            _, _, drawn, i = carry
            return (i < steps) & jnp.any(drawn.live)

        nothing = Drawn(
            tokens=jnp.zeros((S, steps), jnp.int32),
            logprobs=jnp.zeros((S, steps), jnp.float32),
            full_logprobs=jnp.zeros((S, steps), jnp.float32),
            counts=jnp.zeros(S, jnp.int32),
            live=slots.live,
        )
        cache, _, drawn, ran = jax.lax.while_loop(unfinished, step, (cache, slots, nothing, jnp.int32(0)))
        return cache, drawn, ran

    shardings = rules.sharding(*caches.AXES), rules.sharding("batch"), rules.sharding()
    return jax.jit(decode, donate_argnums=1, out_shardings=shardings)


def _next_logits(
    params: Params, cache: Cache, slots: Slots, *, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype
) -> tuple[jax.Array, Cache]:
    """Logits [S, V] float32 behind each slot's last token, which enters the cache."""
    lengths = slots.lengths

    def attend(cache: Cache, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Cache, jax.Array]:
        cache = caches.append(cache, layer, lengths, k[:, 0], v[:, 0], rules)
        return cache, caches.attend(cache, layer, lengths, q[:, 0])[:, None]

    hidden, cache = forward(
        params, slots.tokens[:, None], lengths[:, None], attend, cache, config=decoder, rules=rules, dtype=dtype
    )
    logits = rules.constrain(logits_at(hidden[:, 0], head_weights(params, rules, dtype), 1.0), "rows", "logits")
    if logits.shape[1] > decoder.vocab:  # padded
        logits = jnp.where(jnp.arange(logits.shape[1])[None] < decoder.vocab, logits, -jnp.inf)
    return logits, cache


def _ends(slots: Slots, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Whether a token drawn for a position [S] is its sequence's last, [S]."""
    return jnp.any(tokens[:, None] == slots.stop_tokens, axis=1) | (positions >= slots.last)
