"""Samples the next token from logits; returns its log-probability before and after truncation.

Pure functions of arrays. Each row has its own settings, so all kinds of requests share one program. The engine decides
which rows are live and which tokens end a completion.
"""

import dataclasses
from collections.abc import Sequence
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.models.params import VOCAB_BLOCK, MeshAxes, mesh_axis_names
from podium.rollout.request import SamplingParams
from podium.sharding import A, ShardingRules

BLOCK = VOCAB_BLOCK  # tokens of the vocabulary per entry of the sampler's upper level
WORD = 32  # tokens of the vocabulary per number of a set of tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRows(Generic[A]):
    """Sampling settings of each row, and the keys of its random numbers."""

    seeds: A  # [S, 2] uint32, high and low half of the request's seed
    completions: A  # [S] int32, index of the completion in its request
    temperature: A  # [S] float32; 0: greedy
    top_k: A  # [S] int32; 0: all tokens
    top_p: A  # [S] float32
    min_p: A  # [S] float32
    repetition_penalty: A  # [S] float32; 1: none


class Sampled(NamedTuple):
    """One token per row, and its log-probabilities."""

    tokens: jax.Array  # [S] int32
    logprobs: jax.Array  # [S] float32, under the distribution that the token was sampled from
    full_logprobs: jax.Array  # [S] float32, before penalty, top-k, top-p and min-p; bitwise the same without these
    finite: jax.Array  # [S] bool; if False, logits were NaN or infinite, and the other fields are meaningless


def idle_rows(num_rows: int) -> SamplingRows[np.ndarray]:
    """Empty rows for the host to fill."""
    return SamplingRows(
        seeds=np.zeros((num_rows, 2), np.uint32),
        completions=np.zeros(num_rows, np.int32),
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.zeros(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        repetition_penalty=np.ones(num_rows, np.float32),
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
    rows.repetition_penalty[row] = settings.repetition_penalty


def num_words(vocab: int) -> int:
    """Number W of integers that hold a set of tokens of a vocabulary, one bit per token."""
    return -(-vocab // WORD)


def words_of(tokens: Sequence[int], words: int) -> np.ndarray:
    """The set of these tokens as bits, [W] uint32."""
    found = np.zeros(words, np.uint32)
    own = np.unique(np.asarray(tokens, np.uint32))
    np.bitwise_or.at(found, own // WORD, np.uint32(1) << own % WORD)
    return found


def with_tokens(seen: jax.Array, tokens: jax.Array, where: jax.Array) -> jax.Array:
    """Add a token [S] to the sets of tokens `seen` [S, W], in the rows selected by `where` [S]."""
    bits = jnp.uint32(1) << (tokens % WORD).astype(jnp.uint32)
    own = (jnp.arange(seen.shape[1])[None] == (tokens // WORD)[:, None]) & where[:, None]
    return seen | jnp.where(own, bits[:, None], 0)


def sample_split(
    logits: jax.Array,
    rows: SamplingRows[jax.Array],
    positions: jax.Array,
    live: jax.Array,
    rules: ShardingRules,
    seen: jax.Array | None = None,
) -> Sampled:
    """Run `sample` on each device for its own rows and its part of the vocabulary.

    Devices that share a row's vocabulary exchange a few scalars per row; others exchange nothing.
    """
    vocab, split = rules.axes.get("logits"), rules.spec(("rows",))

    def draw(
        logits: jax.Array,
        rows: SamplingRows[jax.Array],
        positions: jax.Array,
        live: jax.Array,
        seen: jax.Array | None,
    ) -> Sampled:
        return sample(logits, rows, positions=positions, live=live, split=vocab, seen=seen)

    of_vocab = rules.spec(("rows", "logits"))
    here = (of_vocab, split, split, split, of_vocab)
    return jax.shard_map(draw, mesh=rules.mesh, in_specs=here, out_specs=split, check_vma=False)(
        logits, rows, positions, live, seen
    )


@jax.named_scope("sample")
def sample(
    logits: jax.Array,
    rows: SamplingRows[jax.Array],
    positions: jax.Array,
    live: jax.Array,
    split: MeshAxes = None,
    seen: jax.Array | None = None,
) -> Sampled:
    """Sample one token per row.

    A row's distribution is the softmax at the row's temperature, after the repetition penalty, cut to top-k, then to
    top-p of the rest, then by min-p, and renormalised; tokens tied with the last kept token are kept too. At
    temperature 0 the token is the likeliest (the lowest index on ties), and log-probabilities are those of the full
    softmax at temperature 1, after and before the penalty. Random numbers derive only from the row's seed, completion
    and position, so a row's draw does not depend on other rows.

    Args:
        logits: [S, V] float32.
        rows: sampling settings of each row.
        positions: [S] int32, position of the new token in each sequence.
        live: [S] bool; tokens of other rows are meaningless, and cost no search for top-k and top-p.
        split: mesh axes over which the vocabulary is split into parts of V tokens (whole blocks), inside a shard_map.
        seen: [S, W] uint32, the set of tokens in each row's sequence, for this part of the vocabulary (`words_of`);
            None if no row has a repetition penalty.
    """
    S, V = logits.shape
    plain = logits
    if seen is not None:
        logits = penalised(logits, seen, rows.repetition_penalty)
    shards = _Shards(mesh_axis_names(split))
    greedy = rows.temperature == 0
    softmax = _cut_softmax(logits, rows, greedy=greedy, live=live, shards=shards)
    blocks = jnp.pad(logits, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf).reshape(S, -1, BLOCK)
    block_weights = jnp.sum(softmax.weights(blocks), axis=2)  # [S, V / BLOCK]
    # A greedy row keeps only its maxima; the uniform 0 then selects the first of them.
    uniforms = jax.vmap(_uniforms)(rows.seeds, rows.completions, positions) * ~greedy[:, None]  # [S, 2]
    everything = jnp.sum(jnp.exp(softmax.scaled(logits)), axis=1)
    totals = shards.gather(jnp.stack([jnp.sum(block_weights, axis=1), everything]))  # [shards, 2, S]
    kept, everything = jnp.sum(totals, axis=0)  # [S]
    before = jnp.sum(totals[:, 0] * (jnp.arange(len(totals)) < shards.index())[:, None], axis=0)  # [S]
    block, reached, possible = _invert(block_weights, uniforms[:, 0], before, kept)  # [S]
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, BLOCK]
    weights = softmax.weights(inside)
    token, _, _ = _invert(weights, uniforms[:, 1], jnp.zeros(S), jnp.sum(weights, axis=1))  # [S]
    chosen = softmax.scaled(jnp.take_along_axis(inside, token[:, None], axis=1)[:, 0])
    token = jnp.minimum(shards.index() * V + block * BLOCK + token, len(totals) * V - 1)
    token, chosen = shards.take(reached, possible, token, chosen)
    cut = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)  # for other rows both are equal up to rounding
    full_logprobs = chosen - jnp.log(jnp.where(greedy | cut, everything, kept))
    if seen is not None:
        unpenalised = _logprobs_of(token, plain, softmax.temperature, shards)
        full_logprobs = jnp.where(rows.repetition_penalty == 1, full_logprobs, unpenalised)
    return Sampled(
        tokens=token,
        logprobs=chosen - jnp.log(jnp.where(greedy, everything, kept)),
        full_logprobs=full_logprobs,
        finite=jnp.isfinite(softmax.highest),
    )


class _CutSoftmax(NamedTuple):
    """Each row's distribution: the softmax of its kept logits at its temperature."""

    highest: jax.Array  # [S], the largest logit
    temperature: jax.Array  # [S]; 1 for greedy rows
    lowest: jax.Array  # [S], the smallest logit that is kept

    def scaled(self, x: jax.Array) -> jax.Array:
        """The logarithm of the weights of logits [S, ...], cut or not."""
        return _scale(x, self.highest, self.temperature)

    def weights(self, x: jax.Array) -> jax.Array:
        """Weights of logits [S, ...], not normalised; 0 where logits are cut."""
        return jnp.where(x >= _beside(self.lowest, x), jnp.exp(self.scaled(x)), 0.0)


def _cut_softmax(
    logits: jax.Array, rows: SamplingRows[jax.Array], *, greedy: jax.Array, live: jax.Array, shards: "_Shards"
) -> _CutSoftmax:
    """Each row's distribution over logits [S, V]; a row that is `greedy` [S] keeps only its maxima."""
    highest = shards.max(jnp.max(logits, axis=1))  # [S]
    temperature = jnp.where(greedy, 1.0, rows.temperature)
    # Cuts compare the logits as received: rounded values might differ between two uses.
    lowest = jnp.maximum(
        _lowest_kept(logits, highest, temperature=temperature, rows=rows, live=live & ~greedy, shards=shards),
        jnp.where(greedy, highest, highest + temperature * jnp.log(rows.min_p)),
    )
    return _CutSoftmax(highest, temperature, lowest)


def penalised(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Logits [S, V] after a repetition penalty [S] on the tokens `seen` [S, W] (arXiv:1909.05858).

    Positive logits are divided by the penalty and negative ones multiplied, as in transformers; the paper divides both.
    """
    S, V = logits.shape
    bits = (seen[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None]) & 1  # [S, W, WORD]
    held = bits.reshape(S, -1)[:, :V] > 0
    own = penalty[:, None]
    return jnp.where(held, jnp.where(logits < 0, logits * own, logits / own), logits)


def _logprobs_of(tokens: jax.Array, logits: jax.Array, temperature: jax.Array, shards: "_Shards") -> jax.Array:
    """Log-probabilities [S] of tokens [S] under the softmax of logits [S, V] at a temperature [S]."""
    V = logits.shape[1]
    scaled = _scale(logits, shards.max(jnp.max(logits, axis=1)), temperature)
    weight = jnp.sum(shards.gather(jnp.sum(jnp.exp(scaled), axis=1)), axis=0)
    place = tokens - shards.index() * V
    here = jnp.take_along_axis(scaled, jnp.clip(place, 0, V - 1)[:, None], axis=1)[:, 0]
    own = jnp.sum(shards.gather(jnp.where((place >= 0) & (place < V), here, 0.0)), axis=0)
    return own - jnp.log(weight)


def _scale(x: jax.Array, highest: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits [S, ...] minus the row's maximum, divided by the temperature; finite logits cannot overflow."""
    return (x - _beside(highest, x)) / _beside(temperature, x)


def _beside(rows: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape per-row values [S] so that they broadcast with `x` [S, ...]."""
    return jnp.expand_dims(rows, range(1, x.ndim))


def _uniforms(seed: jax.Array, completion: jax.Array, position: jax.Array) -> jax.Array:
    """Draw two uniform numbers in [0, 1), multiples of 2^-24: one selects the block, one the token within the block.
    `seed` is [2], the others [].
    """
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, completion), position)
    return (jax.random.bits(key, (2,), jnp.uint32) >> 8).astype(jnp.float32) * 2.0**-24


def _invert(
    weights: jax.Array, uniforms: jax.Array, before: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Invert each row's distribution function: returns indices [S] int32, of non-zero weight even if sums are rounded.

    `weights` are [S, N], non-negative, not normalised; `uniforms` [S] in [0, 1); `before` [S] is the weight on earlier
    shards, and `total` [S] that on all shards. Also returns, [S] bool each, whether the index was reached on this shard
    and whether any of its weights is above 0.
    """
    cumulative = before[:, None] + jnp.cumsum(weights, axis=1)
    possible = weights > 0
    reached = possible & (cumulative > (uniforms * total)[:, None])
    last = weights.shape[1] - 1 - jnp.argmax(possible[:, ::-1], axis=1)
    found = jnp.any(reached, axis=1)
    return jnp.where(found, jnp.argmax(reached, axis=1), last).astype(jnp.int32), found, jnp.any(possible, axis=1)


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Communication between the devices that share the vocabulary of their rows; without axes, a single device."""

    axes: tuple[str, ...]

    def index(self) -> jax.Array | int:
        """Index of the current device's part of the vocabulary."""
        return jax.lax.axis_index(self.axes) if self.axes else 0

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over the devices."""
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def gather(self, x: jax.Array) -> jax.Array:
        """All devices' values along a new first dimension, in the order of the vocabulary."""
        return jax.lax.all_gather(x, self.axes) if self.axes else x[None]

    def whole_rows(self, logits: jax.Array, *settings: jax.Array) -> tuple[jax.Array, ...]:
        """Exchange logits so that each device has an equal share of whole rows, with their settings."""
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
        """The inverse of `whole_rows` for per-row values: gather the values of all rows, [S]."""
        return jax.lax.all_gather(x, self.axes, tiled=True)[:count]

    def take(
        self, reached: jax.Array, possible: jax.Array, token: jax.Array, chosen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Token and value of the first shard that reached the draw; if none did because of rounding, of the last
        possible shard.
        """
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
    """The lowest logit that top-k and top-p keep in each row, [S]; skips the search if they cut no live row.

    If devices share the vocabulary, each gathers complete logits for some of the rows and searches these; a search over
    split rows would need a reduction for every bit of the threshold.
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
    """The smallest logit that each row [S, V] keeps: top-k applies first, and top-p to the tokens that remain."""
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
    """The largest value in each row such that the entries at or above it have at least the wanted weight; found by a
    search over bits.

    Values and non-negative weights are [S, V] float32, `wanted` is [S]. Returns [S], each one of the row's values; -inf
    if all weights together are less than wanted.
    """
    sign = jnp.uint32(0x80000000)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)  # [S, V], ordered like the floats

    def narrow(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (sign >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(ordered >= candidate[:, None], weights, 0.0), axis=1)
        return jnp.where(weight >= wanted, candidate, found)

    found = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(len(values), jnp.uint32))
    least = jnp.uint32(0x007FFFFF)  # -inf in this order; below it are the NaNs
    found = jnp.maximum(found, least)
    return jax.lax.bitcast_convert_type(jnp.where(found >= sign, found ^ sign, ~found), jnp.float32)
