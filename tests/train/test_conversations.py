"""A conversation is trained on what the model drew: a sample of three drawn spans with replies between them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_runs import make_config, make_params, make_train_settings, recipe_of, rules_of, sizes

from podium.rollout.transcript import Transcript
from podium.train.batches.batch import Batch, make_batch
from podium.train.batches.samples import Sample, transcript_sample, with_advantage, with_weight
from podium.train.state import init_state
from podium.train.step import make_train_step, shard_batch

TERMS = {"kl": "k3", "kl_coef": 0.1, "entropy_bonus": 0.01, "correction": "truncate", "old_logprobs": "trainer"}
NAMES = ("advantages", "sampled_logprobs")
KEEPING = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params=None: (grads, grads)
)  # its state is the gradient


def conversation(random: np.random.Generator, prompt: tuple[int, ...], group: int) -> Sample:
    """Three drawn spans and two replies; the drawn tokens of a turn share an advantage."""
    episode = Transcript().add_prompt(prompt)
    for turn, (drawn, reply) in enumerate(((4, 3), (2, 5), (3, 2))):
        noise, tokens = random.normal(-5, 1, drawn), random.integers(0, 300, drawn)
        arrays = {"sampled_logprobs": noise, "full_logprobs": noise - 1, "versions": np.full(drawn, turn)}
        episode = episode.add_drawn(tokens, **arrays, finish_reason="stop")
        episode = episode.add_environment(tuple(random.integers(0, 300, reply)))
    sample = transcript_sample(episode, group=group, version=2)
    assert (len(sample.tokens), sample.num_drawn) == (17, 9)  # what follows the last drawn token is left out
    assert sample.ages[sample.mask].tolist() == [2, 2, 2, 2, 1, 1, 0, 0, 0]
    return with_weight(with_advantage(sample, random.normal(size=17)), 1 / 81)


@pytest.mark.parametrize("recipe", ["grpo", "gspo", pytest.param("cispo", marks=pytest.mark.long)])
def test_masked_tokens_change_no_bit_of_the_gradient(recipe):
    random, rules = np.random.default_rng(0), rules_of()
    settings = make_train_settings(rules)
    step = make_train_step(settings, recipe_of(make_config(algorithm={"recipe": recipe, **TERMS})), KEEPING)
    samples = [conversation(random, (5, 6, 7), group) for group in range(3) for _ in range(3)]

    def gradient(batch: Batch) -> dict[str, np.ndarray]:
        placed = shard_batch(batch, settings.computing)
        state, _ = step(init_state(make_params(rules), KEEPING), placed)
        return jax.device_get(state.opt_state)

    for packing in ("none", "sequences", "shared_prompts"):
        batch, _ = make_batch(samples, sizes(row_tokens=64, rows=9, max_rows=9, packing=packing))
        noise = random.normal(-5, 1, (4, *batch.tokens.shape)).astype(np.float32)
        batch = dataclasses.replace(batch, scores={"old_logprobs": noise[0], "reference_logprobs": noise[1]})
        other = {name: np.where(batch.mask, x, noise[2]) for name, x in batch.scores.items()}
        garbled = {name: np.where(batch.mask, getattr(batch, name), noise[3]) for name in NAMES}
        garbled["targets"] = np.where(batch.mask, batch.targets, random.integers(0, 300, batch.targets.shape))
        expected, found = gradient(batch), gradient(dataclasses.replace(batch, **garbled, scores=other))
        assert all(x.any() and np.array_equal(found[name], x) for name, x in expected.items()), packing
