"""A scorer of the user's: named by a recipe, its scores arrive in the advantages and in the loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import DECODER
from tiny_runs import changed, groups_of, make_trainer

from podium.algorithms.recipes import Recipe
from podium.train.scorers import Scorer, make_scorers


def parity(settings) -> Scorer:
    """1 for targets that are odd numbers, 0 for even ones, by a decoder and weights of its own."""
    program = jax.jit(lambda params, batch: params["scale"] * (batch.targets % 2))
    return Scorer(name="", decoder=DECODER, params={"scale": jnp.ones(())}, program=program)


def odd_tokens(rewards, lengths, *, tokens):
    """An advantage of 1 for each odd token, and a third of its score less."""
    assert tokens.mask.sum() == lengths.sum()
    return tokens.scores["parity"] - tokens.scores["parity"] / 3


def likelihood(logprobs, old_logprobs, advantages, segments, mask, *, scores):
    return -advantages * logprobs * scores["parity"] * 1.5


def recipe() -> Recipe:
    names = {"loss": "test_scorers:likelihood", "needs": ("test_scorers:parity",)}
    return Recipe(advantage=partial(odd_tokens), mean="token", **names)


def test_scores_reach_advantages_and_loss():
    trainer, state = make_trainer(algorithm={"recipe": "test_scorers:recipe"})
    groups = groups_of()
    (batch,), stats = trainer.prepare(state, groups)
    odd = np.asarray(batch.targets) % 2 * np.asarray(batch.mask)
    np.testing.assert_array_equal(batch.scores["parity"] * batch.mask, odd)
    np.testing.assert_allclose(batch.advantages, odd * 2 / 3, rtol=1e-6)
    assert stats.advantages.shape == (16,)
    logprobs = np.asarray(trainer.score(state.params, batch))
    moved, metrics = changed(trainer, state, groups)
    assert metrics["train-other/loss"] == pytest.approx(float(-np.sum(odd * logprobs) / batch.num_tokens), rel=1e-4)
    assert all(np.abs(x).max() > 0 for x in moved.values())


def test_what_is_no_scorer_is_refused():
    trainer, _ = make_trainer()
    recipe = Recipe(advantage=partial(odd_tokens), mean="token", needs=("test_scorers:not_one",))
    with pytest.raises(ValueError, match="returned 7; it must be a function of TrainSettings that returns a Scorer"):
        make_scorers(recipe, trainer.settings, trainer.score)


def not_one(settings) -> int:
    return 7
