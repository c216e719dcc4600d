"""An engine with small pages beside a naive model, past 256 positions: log-probabilities, and each draw."""

import jax.numpy as jnp
import numpy as np
from tiny_decoder import tiny
from tiny_engine import Letters, mesh_of

from podium.certify.naive import distributions, in_float64
from podium.certify.naive_draws import NO_CUT, draw_errors, random_numbers
from podium.certify.tiny import random_weights
from podium.config.schema import RolloutConfig
from podium.models.params import ROLLOUT_AXES
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Request, SamplingParams
from podium.sharding import ShardingRules

DECODER = tiny(max_positions=512)
NEW, LENGTHS = 12, (58, 250)
CONFIG = RolloutConfig(
    max_prompt_tokens=250,
    max_new_tokens=NEW,
    slots=4,
    refill_steps=3,
    prefill_rows=2,
    page_tokens=8,
    reproducible=True,  # prompts enter in chunks of 128 tokens
)


def naive_table(weights: dict[str, np.ndarray], prompt: tuple[int, ...], drawn: np.ndarray) -> np.ndarray:
    """Log-probabilities [n, V] of all tokens at the place of each drawn one, in float64."""
    tokens = np.zeros((1, max(LENGTHS) + NEW), np.int32)
    tokens[0, : len(prompt) + len(drawn)] = (*prompt, *drawn.tolist())
    with in_float64():
        wide = {name: jnp.asarray(np.asarray(value, np.float64)) for name, value in weights.items()}
        starts = jnp.asarray([len(prompt)])
        return np.asarray(distributions(wide, jnp.asarray(tokens), starts, DECODER, 1.0, 1.0, NEW))[0, : len(drawn)]


def test_sequences_over_many_pages_and_past_256_positions_are_drawn_from_the_naive_model():
    weights = random_weights(DECODER, seed=3)
    engine = RolloutEngine(
        Device(CONFIG, DECODER, ShardingRules(mesh_of(1), ROLLOUT_AXES), dtype=jnp.float32), Letters()
    )
    engine.load({name: jnp.asarray(value) for name, value in weights.items()})
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(0, 300, length).tolist()) for length in LENGTHS]
    sampling = SamplingParams(max_new_tokens=NEW)
    requests = [Request(prompt=prompt, sampling=sampling, seed=5, completions=2) for prompt in prompts]
    answers, _ = engine.generate(requests)
    for prompt, completions in zip(prompts, answers, strict=True):
        for index, each in enumerate(completions):
            assert_drawn(each, naive_table(weights, prompt, each.tokens), index, len(prompt))


def assert_drawn(completion: Completion, table: np.ndarray, index: int, start: int) -> None:
    count = len(completion.tokens)
    expected = table[np.arange(count), completion.tokens]
    np.testing.assert_allclose(completion.full_logprobs, expected, rtol=0, atol=2e-4)
    numbers = random_numbers(np.full(count, 5), np.full(count, index), start + np.arange(count))
    errors = draw_errors(table, NO_CUT, completion.tokens, completion.sampled_logprobs, numbers)
    assert errors.tokens.max() < 1e-4
