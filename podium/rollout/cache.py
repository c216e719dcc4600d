"""Keys and values of the sequences in the slots, and the attention that reads them.

One contiguous stretch of C positions per slot for now; pages come with the fast engine. Heads come before positions. On
CPU keys lie transposed, [L, S, K, Q, C]: a decode step's attention takes 0.45 of the time that it takes over
[L, S, C, K, Q], and a whole step of SmolLM2-135M 0.86 of the time that it takes with keys as values lie. Elsewhere they
lie as values do: that is how the TPU writes one position of a slot in place and reads the rest without moving it.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from podium.models.architecture import DecoderConfig
from podium.sharding import ShardingRules

AXES = (None, "batch", "cache_heads", None, None)  # of keys and values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """What attention has seen of each slot's sequence; how much of it counts is the slot's length."""

    keys: jax.Array  # rotated; [L, S, K, Q, C] on CPU, elsewhere [L, S, K, C, Q]
    values: jax.Array  # [L, S, K, C, Q]
    key_dims: Literal["skqc", "skcq"] = dataclasses.field(metadata={"static": True})  # of a layer's keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """What the prefill of some prompts leaves for their completions; padding after a prompt's end has no meaning."""

    kv: Cache  # of R slots and T positions
    logits: jax.Array  # [R, V] float32, of each prompt's last token


def abstract_cache(decoder: DecoderConfig, *, slots: int, length: int, dtype: jnp.dtype, rules: ShardingRules) -> Cache:
    """The cache of `slots` sequences of up to `length` tokens, without making it: for the planner."""
    sizes = {"s": slots, "k": decoder.kv_heads, "q": decoder.head_dim, "c": length}
    key_dims = "skqc" if rules.on_cpu else "skcq"
    keys, values = (
        jax.ShapeDtypeStruct((decoder.layers, *(sizes[dim] for dim in dims)), dtype, sharding=rules.sharding(*AXES))
        for dims in (key_dims, "skcq")
    )
    return Cache(keys=keys, values=values, key_dims=key_dims)  # pyright: ignore[reportArgumentType]  # not made yet


def make_cache(decoder: DecoderConfig, *, slots: int, length: int, dtype: jnp.dtype, rules: ShardingRules) -> Cache:
    """The empty cache of `slots` sequences of up to `length` tokens."""
    return empty(abstract_cache(decoder, slots=slots, length=length, dtype=dtype, rules=rules))


def empty(abstract: Cache) -> Cache:
    """The cache that `abstract` describes, with nothing in it."""
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding), abstract)


@jax.named_scope("cache")
def fill(cache: Cache, layer: jax.Array, k: jax.Array, v: jax.Array) -> Cache:
    """The cache with all positions of a layer set: `k` and `v` are [S, C, K, Q]."""
    keys = cache.keys.at[layer].set(jnp.einsum(f"sckq->{cache.key_dims}", k))
    return dataclasses.replace(cache, keys=keys, values=cache.values.at[layer].set(v.swapaxes(1, 2)))


@jax.named_scope("cache")
def append(
    cache: Cache, layer: jax.Array, lengths: jax.Array, k: jax.Array, v: jax.Array, rules: ShardingRules
) -> Cache:
    """The cache with one more token in each slot, behind those that are there; in place in a loop's carry.

    Args:
        cache: of S slots.
        layer: [] int32.
        lengths: [S] int32, tokens in each slot so far.
        k: [S, K, Q].
        v: [S, K, Q].
        rules: how slots are split over devices; each writes its own, XLA alone would gather `k` and `v`.
    """

    def write(cache: Cache, layer: jax.Array, lengths: jax.Array, k: jax.Array, v: jax.Array) -> Cache:
        S, K, _ = k.shape
        where = layer, jnp.arange(S)[:, None], jnp.arange(K)[None]  # a head each: the TPU writes rows of Q in place
        ends = lengths[:, None]
        at = (*where, slice(None), ends) if cache.key_dims == "skqc" else (*where, ends)
        return dataclasses.replace(cache, keys=cache.keys.at[at].set(k), values=cache.values.at[(*where, ends)].set(v))

    split, rows, heads = rules.spec(AXES), rules.spec(("batch",)), rules.spec(AXES[1:3])
    specs = (split, PartitionSpec(), rows, heads, heads)
    local = jax.shard_map(write, mesh=rules.mesh, in_specs=specs, out_specs=split)
    return local(cache, layer, lengths, k, v)


@jax.named_scope("scores")
def attend(cache: Cache, layer: jax.Array, lengths: jax.Array, q: jax.Array) -> jax.Array:
    """What one query per slot and head sees in the slot's positions 0 to `lengths`, that one included.

    Args:
        cache: of S slots.
        layer: [] int32.
        lengths: [S] int32, position of each query.
        q: [S, H, Q], rotated.

    Returns:
        [S, H, Q]; scores and softmax are float32 inside.
    """
    S, H, Q = q.shape
    keys = jax.lax.dynamic_index_in_dim(cache.keys, layer, keepdims=False)  # `key_dims`
    values = jax.lax.dynamic_index_in_dim(cache.values, layer, keepdims=False)  # [S, K, C, Q]
    _, K, C, _ = values.shape
    grouped = q.reshape(S, K, H // K, Q)
    scores = jnp.einsum(f"skgq,{cache.key_dims}->skgc", grouped, keys, preferred_element_type=jnp.float32) * Q**-0.5
    visible = jnp.arange(C)[None] <= lengths[:, None]  # [S, C]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("skgc,skcq->skgq", weights.astype(values.dtype), values).reshape(S, H, Q)


@jax.named_scope("cache")
def insert(cache: Cache, prompts: Prompts, rows: jax.Array, rules: ShardingRules, *, crosses: bool = True) -> Cache:
    """The cache with prompts copied to the front of slots; every device copies to its own slots, and only those named.

    Where a slot may want any device's prompt, all prompts of a layer are gathered at a time: of all layers they would
    be the largest array of a large pod.

    Args:
        cache: of S slots.
        prompts: of R prompts.
        rows: [S] int32, which prompt each slot gets; -1: none, the slot stays as it is.
        rules: how slots and prompts are split over devices.
        crosses: whether a slot may want a prompt of another device; nothing is exchanged otherwise.
    """
    axes = rules.spec(("batch",))[0] if crosses and rules.num_shards("batch") > 1 else ()

    def copy(cache: Cache, prompts: Cache, rows: jax.Array) -> Cache:
        order = jnp.argsort(rows < 0, stable=True)  # slots that get a prompt come first

        def copy_layer(layer: jax.Array, cache: Cache) -> Cache:
            own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer), prompts)  # [1, R, ...]
            here = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), own) if axes else own

            def copy_one(i: jax.Array, cache: Cache) -> Cache:
                slot = order[i]

                def put(into: jax.Array, source: jax.Array) -> jax.Array:
                    row = rows[slot] % source.shape[1]  # of those that are here
                    prompt = jax.lax.dynamic_index_in_dim(source, row, axis=1)  # [1, 1, ...]
                    return jax.lax.dynamic_update_slice(into, prompt, (layer, slot, 0, 0, 0))

                return jax.tree.map(put, cache, here)

            return jax.lax.fori_loop(0, jnp.sum(rows >= 0), copy_one, cache)

        return jax.lax.fori_loop(0, len(cache.keys), copy_layer, cache)

    split = rules.spec(AXES)
    copy_to_own = jax.shard_map(copy, mesh=rules.mesh, in_specs=(split, split, rules.spec(("batch",))), out_specs=split)
    return copy_to_own(cache, prompts.kv, rows)
