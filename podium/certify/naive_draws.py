"""Naive form of what a run draws: the order of its prompts, and each token, from hashes and counters.

It follows the definitions in docs/certify.md, in plain numpy; Threefry alone is jax's own, and tested there. Shapes: n
draws from a vocabulary of V tokens.
"""

import hashlib
import statistics
from typing import NamedTuple

import jax
import numpy as np

BLOCK = 128
"""Tokens of a block of the vocabulary; first a block is drawn, then a token within it."""
NEAR = 1e-5
"""Distance from the end of a cut, in nats or in probability, within which rounding decides what the cut keeps."""


class Cut(NamedTuple):
    """Which tokens can be drawn: the `top_k` likeliest, of these the likeliest of probability `top_p`, and of those the
    ones of at least `min_p` times the likeliest one's.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def cuts(self) -> bool:
        """Whether there is a token that cannot be drawn."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


NO_CUT = Cut()


def request_seed(seed: int, purpose: str, index: int) -> int:
    """The seed of a request: 31 bits of the SHA-256 of the run's seed, the request's purpose and its index."""
    digest = hashlib.sha256(f"{seed} {purpose} {index}".encode()).digest()
    return int.from_bytes(digest[:4], "little") // 2


def turn_seed(seed: int, turn: int) -> int:
    """The seed of turn `turn` in a conversation whose first turn has `seed`."""
    return request_seed(seed, "turn", turn) if turn else seed


def environment_seed(seed: int, conversation: int, *, own: bool) -> int:
    """The seed of the environment of one of the conversations of a prompt with this seed.

    All conversations of the prompt share that of the first one, unless each has its `own`.
    """
    return request_seed(seed, "environment", conversation if own else 0)


@jax.jit
def _bits(seeds: jax.Array, completions: jax.Array, positions: jax.Array) -> jax.Array:
    def of_one(seed: jax.Array, completion: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, completion), position), (2,), np.uint32)

    return jax.vmap(of_one)(seeds, completions, positions)


def random_numbers(seeds: np.ndarray, completions: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The two numbers of each draw, [n, 2], multiples of 2^-24 from 0 up to 1: for its block, and for its token.

    Args:
        seeds: [n], of the requests.
        completions: [n], indices of the completions among those of their request.
        positions: [n], where in its sequence the drawn token stands, counted from 0.
    """
    halves = np.stack([seeds >> 32, seeds & 0xFFFFFFFF], axis=1).astype(np.uint32)
    size = -len(seeds) % 256  # programs are compiled for few sizes
    padded = (np.pad(x, [(0, size)] + [(0, 0)] * (x.ndim - 1)) for x in (halves, completions, positions))
    found = np.asarray(_bits(*(x.astype(np.uint32) for x in padded)))[: len(seeds)]
    return np.floor(found / 256) / 2**24


def after_cut(table: np.ndarray, cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [n, V] after a cut, renormalised, and where the cut is clear, [n] bool.

    Log-probabilities are -inf for tokens that are cut off. Tokens as likely as the last one that is kept are kept too.
    A cut is not clear if a token is so near to the cut's end that rounding decides whether it is kept.
    """
    clear = np.ones(len(table), bool)
    if 0 < cut.top_k < table.shape[1]:
        likeliest = -np.sort(-table, axis=1)
        last, next_one = likeliest[:, cut.top_k - 1, None], likeliest[:, cut.top_k, None]
        clear &= ~np.any((last > next_one) & (last < next_one + NEAR), axis=1)
        table = _renormalised(np.where(table >= last, table, -np.inf))
    if cut.top_p < 1:
        likeliest = -np.sort(-table, axis=1)
        reached = np.cumsum(np.exp(likeliest), axis=1)
        clear &= ~np.any(np.abs(reached - cut.top_p) < NEAR, axis=1)
        place = np.argmax(reached >= min(cut.top_p, 1 - 1e-12), axis=1)
        table = _renormalised(np.where(table >= likeliest[np.arange(len(table)), place, None], table, -np.inf))
    if cut.min_p:
        least = np.max(table, axis=1, keepdims=True) + np.log(cut.min_p)
        clear &= ~np.any(np.abs(table - least) < NEAR, axis=1)
        table = np.where(table >= least, table, -np.inf)
    return _renormalised(table), clear


def _renormalised(table: np.ndarray) -> np.ndarray:
    highest = np.max(table, axis=1, keepdims=True)
    return table - highest - np.log(np.sum(np.exp(table - highest), axis=1, keepdims=True))


class DrawErrors(NamedTuple):
    """How far draws are from those of the naive form, [n] each."""

    logprobs: np.ndarray
    """Error of the recorded log-probability, in nats."""
    tokens: np.ndarray
    """How far a random number lies outside the range of numbers that draw the token, as a probability."""


def draw_errors(
    table: np.ndarray, cut: Cut, tokens: np.ndarray, logprobs: np.ndarray, numbers: np.ndarray
) -> DrawErrors:
    """Compare draws with the naive ones; 0 where rounding decides what a cut keeps.

    Args:
        table: [n, V], log-probabilities before the cut, after penalty and temperature.
        cut: which tokens can be drawn.
        tokens: [n], the drawn tokens.
        logprobs: [n], their recorded log-probabilities under the distribution drawn from.
        numbers: [n, 2], random numbers.
    """
    own, clear = after_cut(table, cut)
    expected = np.take_along_axis(own, tokens[:, None], axis=1)[:, 0]
    return DrawErrors(
        np.where(clear, np.abs(logprobs - expected), 0.0), np.where(clear, outside(own, tokens, numbers), 0.0)
    )


def outside(table: np.ndarray, tokens: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """How far the numbers [n, 2] of tokens [n] lie outside the ranges that draw them from distributions [n, V]; 1 for
    tokens that cannot be drawn.
    """
    n, V = table.shape
    blocks = np.exp(np.pad(table, ((0, 0), (0, -V % BLOCK)), constant_values=-np.inf)).reshape(n, -1, BLOCK)
    block, within = np.divmod(tokens, BLOCK)
    own = np.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    errors = np.maximum(_outside(blocks.sum(axis=2), block, numbers[:, 0]), _outside(own, within, numbers[:, 1]))
    return np.where(table[np.arange(n), tokens] == -np.inf, 1.0, errors)


def _outside(weights: np.ndarray, which: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    total = np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    ends = np.cumsum(weights / total, axis=1)
    end = np.take_along_axis(ends, which[:, None], axis=1)[:, 0]
    begin = end - np.take_along_axis(weights / total, which[:, None], axis=1)[:, 0]
    return np.maximum(np.maximum(begin - numbers, numbers - end), 0.0)


def normal_scores(table: np.ndarray, tokens: np.ndarray, evenly: np.ndarray) -> np.ndarray:
    """Where tokens [n] lie in the distributions [n, V] that they were drawn from, as normal numbers [n].

    If they were drawn independently, these are independent and standard normal, whatever the distributions are.
    `evenly` [n], from 0 up to 1, says where within its own probability a token lies.
    """
    shares = np.exp(table)
    ends = np.cumsum(shares, axis=1)
    rows = np.arange(len(table))
    places = ends[rows, tokens] - shares[rows, tokens] * (1 - evenly)
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf(min(max(place, 1e-9), 1 - 1e-9)) for place in places.tolist()])


def prompt_index(seed: int, number: int, count: int, task: int = 0) -> int:
    """The index of the prompt, out of a task's `count`, that the task draws at its `number`-th draw, counted from 0.

    All are drawn once before one is drawn again. Each round has its own order, by a hash of seed, task and round.
    """
    epoch, place = divmod(number, count)
    key = hash_of(seed, "order", task, epoch)
    return sorted(range(count), key=lambda index: (_mixed(_mixed(index) ^ key), index))[place]


def hash_of(*values: int | str) -> int:
    """64 bits of the SHA-256 of Python's text of these values."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")


def _mixed(value: int) -> int:
    """SplitMix64 (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)
