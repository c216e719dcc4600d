"""Checks the sampler without a model: tokens and log-probabilities of random logits, with all of its settings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from podium.certify.check_result import Check, largest
from podium.certify.drawn import DRAW_BAR
from podium.certify.naive_draws import Cut, draw_errors, random_numbers
from podium.models.params import GROUP_AXES, ROLLOUT_AXES
from podium.rollout.request import SamplingParams
from podium.rollout.sampling import fill_row, idle_rows, num_words, sample_split, words_of
from podium.sharding import ShardingRules, make_mesh

VOCAB, PADDED = 320, 512
"""Number of tokens that have logits, and of tokens in the arrays, which two devices can share in whole blocks."""
ROWS_EACH = 24
SPREAD = 2.0  # of logits
SAID = 40  # tokens of a sequence with a repetition penalty
SETTINGS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.3},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8, "top_p": 0.9, "temperature": 0.7},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draws:
    """Rows of logits, with what is drawn from each."""

    logits: np.ndarray  # [S, PADDED] float32; -inf past the vocabulary
    settings: list[SamplingParams]
    said: list[np.ndarray]  # tokens of each row's sequence
    seeds: np.ndarray  # [S]
    completions: np.ndarray  # [S]
    positions: np.ndarray  # [S]


def sampling_check() -> Check:
    """Compare draws on one device, and on two that share the vocabulary if there are two, with the naive ones."""
    draws = _make_draws()
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    layouts = [ShardingRules(make_mesh("auto", jax.devices()[:1]), ROLLOUT_AXES)]
    if len(devices) > 1:
        layouts.append(ShardingRules(make_mesh("tp:2", devices[:2]), GROUP_AXES))
    return Check(
        name="sampling",
        claim="tokens and log-probabilities are those of temperature, penalty, top-k, top-p, min-p and random numbers",
        difference=largest(_error(draws, rules) for rules in layouts),
        bar=DRAW_BAR,
    )


def _make_draws() -> _Draws:
    random = np.random.default_rng(0)
    settings = [SamplingParams(max_new_tokens=1, **each) for each in SETTINGS for _ in range(ROWS_EACH)]  # pyright: ignore[reportArgumentType]  # numbers by name
    S = len(settings)
    logits = np.full((S, PADDED), -np.inf, np.float32)
    logits[:, :VOCAB] = random.normal(0.0, SPREAD, (S, VOCAB))
    return _Draws(
        logits=logits,
        settings=settings,
        said=[random.integers(0, VOCAB, SAID) for _ in range(S)],
        seeds=random.integers(0, 2**63, S) // np.repeat([1, 2**32], [S // 2, S - S // 2]),
        completions=random.integers(0, 9, S),
        positions=random.integers(1, 4096, S),
    )


def _error(draws: _Draws, rules: ShardingRules) -> float:
    """The largest error of a draw, or of a log-probability in nats."""
    S = len(draws.settings)
    rows = idle_rows(S)
    for row, each in enumerate(draws.settings):
        fill_row(rows, row, each, seed=int(draws.seeds[row]), completion=int(draws.completions[row]))
    seen = np.stack([words_of(said.tolist(), num_words(PADDED)) for said in draws.said])
    logits = jax.device_put(draws.logits, rules.sharding("rows", "logits"))
    sample = jax.jit(functools.partial(sample_split, rules=rules))
    positions = jnp.asarray(draws.positions, jnp.int32)
    found = jax.device_get(sample(logits, rows, positions, jnp.ones(S, bool), seen=jnp.asarray(seen)))
    numbers = random_numbers(draws.seeds, draws.completions, draws.positions)
    errors = [0.0 if bool(np.all(found.finite)) else np.inf]
    for row, each in enumerate(draws.settings):
        own = draws.logits[row, :VOCAB].astype(np.float64)
        token, greedy = int(found.tokens[row]), each.temperature == 0
        said = np.isin(np.arange(VOCAB), draws.said[row])
        penalty = each.repetition_penalty
        after = np.where(said, np.where(own > 0, own / penalty, own * penalty), own)
        full, table = (_log_softmax(x / (each.temperature or 1.0)) for x in (own, after))
        errors.append(abs(found.full_logprobs[row] - full[token]))
        if greedy:
            errors += [abs(found.logprobs[row] - table[token]), float(token != np.argmax(after))]
            continue
        cut = Cut(each.top_k, each.top_p, each.min_p)
        given = np.array([token]), np.array([found.logprobs[row]]), numbers[row : row + 1]
        of_row = draw_errors(table[None], cut, *given)
        errors += [float(of_row.logprobs[0]), float(of_row.tokens[0])]
    return largest(errors)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - np.log(np.sum(np.exp(x - x.max())))
