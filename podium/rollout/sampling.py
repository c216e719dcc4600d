"""How the next token is drawn from logits, and its log-probability before and after the distribution is truncated.

Pure functions of arrays; each row has its own settings, so requests of any kind share one program. The engine decides
which rows are live and what a drawn token ends.
"""

import dataclasses
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from podium.models.params import VOCAB_BLOCK, MeshAxes, mesh_axis_names
from podium.rollout.request import SamplingParams
from podium.sharding import ShardingRules

BLOCK = VOCAB_BLOCK  # tokens of the vocabulary that one entry of the upper level of the draw stands for
A = TypeVar("A", jax.Array, np.ndarray)
"""Arrays on the devices, or numpy arrays that the host fills in place and copies there."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRows(Generic[A]):
    """How each row draws: the settings of its request and what its random numbers follow from."""

    seeds: A  # [S, 2] uint32, high and low half of the request's seed
    completions: A  # [S] int32, index of the completion in its request
    temperature: A  # [S] float32; 0: greedy
    top_k: A  # [S] int32; 0: all tokens
    top_p: A  # [S] float32
    min_p: A  # [S] float32


class Sampled(NamedTuple):
    """One token of each row, and its log-probabilities."""

    tokens: jax.Array  # [S] int32
    logprobs: jax.Array  # [S] float32, under the distribution that the token was drawn from
    full_logprobs: jax.Array  # [S] float32, before top-k, top-p, min-p; the same bits where none is set
    finite: jax.Array  # [S] bool; where logits were not numbers, the rest has no meaning


def idle_rows(num_rows: int) -> SamplingRows[np.ndarray]:
    """Rows for the host to fill."""
    return SamplingRows(
        seeds=np.zeros((num_rows, 2), np.uint32),
        completions=np.zeros(num_rows, np.int32),
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.zeros(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
    )


def fill_row(rows: SamplingRows[np.ndarray], row: int, settings: SamplingParams, *, seed: int, completion: int) -> None:
    """Write the settings and the seed of a completion into a row."""
    seed %= 2**64
    rows.seeds[row] = seed >> 32, seed & 0xFFFFFFFF
    rows.completions[row] = completion
    rows.temperature[row] = settings.temperature
    rows.top_k[row] = settings.top_k
    rows.top_p[row] = settings.top_p
    rows.min_p[row] = settings.min_p


def sample_split(
    logits: jax.Array, rows: SamplingRows[jax.Array], positions: jax.Array, live: jax.Array, rules: ShardingRules
) -> Sampled:
    """`sample` on each device for its own rows, in its part of the vocabulary.

    Devices that share a row's vocabulary exchange a few numbers; others exchange nothing.
    """
    vocab, split = rules.axes.get("logits"), rules.spec(("rows",))

    def draw(logits: jax.Array, rows: SamplingRows[jax.Array], positions: jax.Array, live: jax.Array) -> Sampled:
        return sample(logits, rows, positions, live, vocab)

    here = (rules.spec(("rows", "logits")), split, split, split)
    return jax.shard_map(draw, mesh=rules.mesh, in_specs=here, out_specs=split, check_vma=False)(
        logits, rows, positions, live
    )


@jax.named_scope("sample")
def sample(
    logits: jax.Array, rows: SamplingRows[jax.Array], positions: jax.Array, live: jax.Array, split: MeshAxes = None
) -> Sampled:
    """One token of each row.

    A row's distribution is its softmax at the temperature, cut to top-k, then top-p of what is left, then min-p, and
    normalised again; tokens that tie with the last one kept are kept too. At temperature 0 the token is the likeliest
    (the first of equals), and both its log-probabilities are those of the full softmax at temperature 1. Random numbers
    follow from the row's seed, completion and position alone, so that a row's draw does not depend on the others'.

    Args:
        logits: [S, V] float32.
        rows: how each row draws.
        positions: [S] int32, where in its sequence each token will stand.
        live: [S] bool; tokens of other rows mean nothing, and cost no search for top-k and top-p.
        split: mesh axes over which the logits are split into parts of V tokens, whole blocks, inside a shard_map.
    """
    S, V = logits.shape
    shards = _Shards(mesh_axis_names(split))
    greedy = rows.temperature == 0
    highest = shards.max(jnp.max(logits, axis=1))  # [S]
    temperature = jnp.where(greedy, 1.0, rows.temperature)

    def scale(x: jax.Array) -> jax.Array:  # [S, ...]
        return _scale(x, highest, temperature)

    # Cuts are values of logits, which are compared as they came: what was rounded might differ between two uses.
    lowest = jnp.maximum(
        _lowest_kept(logits, highest, temperature, rows, live & ~greedy, shards),
        jnp.where(greedy, highest, highest + temperature * jnp.log(rows.min_p)),
    )  # [S]

    def weigh(x: jax.Array) -> jax.Array:  # [S, ...]
        return jnp.where(x >= _beside(lowest, x), jnp.exp(scale(x)), 0.0)

    blocks = jnp.pad(logits, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf).reshape(S, -1, BLOCK)
    block_weights = jnp.sum(weigh(blocks), axis=2)  # [S, V / BLOCK]
    # A greedy row keeps its maxima alone, and the uniform 0 takes the first of them.
    uniforms = jax.vmap(_uniforms)(rows.seeds, rows.completions, positions) * ~greedy[:, None]  # [S, 2]
    everything = jnp.sum(jnp.exp(scale(logits)), axis=1)
    totals = shards.gather(jnp.stack([jnp.sum(block_weights, axis=1), everything]))  # [shards, 2, S]
    kept, everything = jnp.sum(totals, axis=0)  # [S]
    before = jnp.sum(totals[:, 0] * (jnp.arange(len(totals)) < shards.index())[:, None], axis=0)  # [S]
    block, reached, possible = _invert(block_weights, uniforms[:, 0], before, kept)  # [S]
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, BLOCK]
    weights = weigh(inside)
    token, _, _ = _invert(weights, uniforms[:, 1], jnp.zeros(S), jnp.sum(weights, axis=1))  # [S]
    chosen = scale(jnp.take_along_axis(inside, token[:, None], axis=1)[:, 0])
    token = jnp.minimum(shards.index() * V + block * BLOCK + token, len(totals) * V - 1)
    token, chosen = shards.take(reached, possible, token, chosen)
    cut = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)  # elsewhere the two are equal but for their rounding
    return Sampled(
        tokens=token,
        logprobs=chosen - jnp.log(jnp.where(greedy, everything, kept)),
        full_logprobs=chosen - jnp.log(jnp.where(greedy | cut, everything, kept)),
        finite=jnp.isfinite(highest),
    )


def _scale(x: jax.Array, highest: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits [S, ...], shifted, then divided: finite ones cannot overflow upwards."""
    return (x - _beside(highest, x)) / _beside(temperature, x)


def _beside(rows: jax.Array, x: jax.Array) -> jax.Array:
    """Numbers of rows, [S], in a shape that broadcasts with `x`, [S, ...]."""
    return jnp.expand_dims(rows, range(1, x.ndim))


def _uniforms(seed: jax.Array, completion: jax.Array, position: jax.Array) -> jax.Array:
    """Two numbers in [0, 1), multiples of 2^-24: one for the block, one inside it. `seed` is [2], the others []."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, completion), position)
    return (jax.random.bits(key, (2,), jnp.uint32) >> 8).astype(jnp.float32) * 2.0**-24


def _invert(
    weights: jax.Array, uniforms: jax.Array, before: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The inverse of each row's distribution function, [S] int32: an index of weight above 0, whatever sums round to.

    `weights` are [S, N], at least 0, not normalised; `uniforms` [S] in [0, 1); `before` [S] is the weight on earlier
    shards, `total` [S] that of all. Also whether the index was reached, and whether any weight is above 0, [S].
    """
    cumulative = before[:, None] + jnp.cumsum(weights, axis=1)
    possible = weights > 0
    reached = possible & (cumulative > (uniforms * total)[:, None])
    last = weights.shape[1] - 1 - jnp.argmax(possible[:, ::-1], axis=1)
    found = jnp.any(reached, axis=1)
    return jnp.where(found, jnp.argmax(reached, axis=1), last).astype(jnp.int32), found, jnp.any(possible, axis=1)


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Exchanges between devices that share the vocabulary of their rows; without axes there is one device."""

    axes: tuple[str, ...]

    def index(self) -> jax.Array | int:
        """Index of this device's part of the vocabulary."""
        return jax.lax.axis_index(self.axes) if self.axes else 0

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over the devices."""
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def gather(self, x: jax.Array) -> jax.Array:
        """The values of all devices on a new first dimension, in the vocabulary's order."""
        return jax.lax.all_gather(x, self.axes) if self.axes else x[None]

    def whole_rows(self, logits: jax.Array, *settings: jax.Array) -> tuple[jax.Array, ...]:
        """Share of the rows [S, V] of this device, with the whole vocabulary, and their settings."""
        size = jax.lax.axis_size(self.axes)
        padded = jnp.pad(logits, ((0, -len(logits) % size), (0, 0)))
        own = len(padded) // size
        start = self.index() * own
        padded_settings = (jnp.pad(x, (0, -len(logits) % size)) for x in settings)
        return (
            jax.lax.all_to_all(padded, self.axes, split_axis=0, concat_axis=1, tiled=True),
            *(jax.lax.dynamic_slice_in_dim(x, start, own) for x in padded_settings),
        )

    def all_rows(self, x: jax.Array, count: int) -> jax.Array:
        """Values of all rows, [S], from those of each device's rows of `whole_rows`."""
        return jax.lax.all_gather(x, self.axes, tiled=True)[:count]

    def take(
        self, reached: jax.Array, possible: jax.Array, token: jax.Array, chosen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Token and number of the first shard that reached the draw; if sums round so that none did, of the last."""
        if not self.axes:
            return token, chosen
        found = jnp.stack([reached, possible, token, jax.lax.bitcast_convert_type(chosen, jnp.int32)])  # [4, S]
        reached, possible, token, chosen = jnp.moveaxis(self.gather(found), 0, 1)  # [shards, S]
        last = len(reached) - 1 - jnp.argmax(possible[::-1], axis=0)
        where = jnp.where(jnp.any(reached > 0, axis=0), jnp.argmax(reached, axis=0), last)[None]
        token, chosen = (jnp.take_along_axis(x, where, axis=0)[0] for x in (token, chosen))
        return token, jax.lax.bitcast_convert_type(chosen, jnp.float32)


def _lowest_kept(
    logits: jax.Array,
    highest: jax.Array,
    temperature: jax.Array,
    rows: SamplingRows[jax.Array],
    live: jax.Array,
    shards: _Shards,
) -> jax.Array:
    """The least logit of [S, V] that top-k and top-p keep, [S]; no search where no live row is cut by it.

    Devices that share a vocabulary search whole rows, some each: otherwise they would exchange sums for every bit.
    """
    top_k, top_p = jnp.where(live, rows.top_k, 0), jnp.where(live, rows.top_p, 1.0)
    if not shards.axes:
        return _search(logits, highest, temperature, top_k, top_p)

    def search() -> jax.Array:
        whole, *settings = shards.whole_rows(logits, highest, temperature, top_k, top_p)
        return shards.all_rows(_search(whole, *settings), len(logits))

    cut = jnp.any((top_k > 0) | (top_p < 1))
    return jax.lax.cond(cut, search, lambda: jnp.full(len(logits), -jnp.inf))


def _search(
    logits: jax.Array, highest: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """`_lowest_kept` of whole rows, [S, V]; top-k comes first, and top-p is of what it leaves."""
    S, V = logits.shape
    everything = jnp.full((S,), -jnp.inf, jnp.float32)

    def by_count() -> jax.Array:
        wanted = jnp.where(top_k > 0, jnp.minimum(top_k, V), V).astype(jnp.float32)
        return _threshold(logits, jnp.ones_like(logits), wanted)

    kept = jax.lax.cond(jnp.any(top_k > 0), by_count, lambda: everything)

    def by_weight() -> jax.Array:
        weights = jnp.where(logits >= kept[:, None], jnp.exp(_scale(logits, highest, temperature)), 0.0)
        found = _threshold(logits, weights, top_p * jnp.sum(weights, axis=1))
        return jnp.where(top_p < 1, jnp.maximum(found, kept), kept)

    return jax.lax.cond(jnp.any(top_p < 1), by_weight, lambda: kept)


def _threshold(values: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest number with at least the wanted weight on values not below it: a search over bits, no sort.

    Values and weights (at least 0) are [S, V] float32, `wanted` is [S]. Gives [S], one of each row's values; -inf where
    all weights together do not reach what is wanted.
    """
    sign = jnp.uint32(0x80000000)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)  # [S, V], in the order of the floats

    def narrow(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (sign >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(ordered >= candidate[:, None], weights, 0.0), axis=1)
        return jnp.where(weight >= wanted, candidate, found)

    found = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(len(values), jnp.uint32))
    least = jnp.uint32(0x007FFFFF)  # -inf in this order; below it are the NaNs
    found = jnp.maximum(found, least)
    return jax.lax.bitcast_convert_type(jnp.where(found >= sign, found ^ sign, ~found), jnp.float32)
