"""A new algorithm is a function and its line in RECIPES: config, rules, advantages, loss and update follow from it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.algorithms.advantages import group_advantages, token_weights
from podium.algorithms.losses import Tokens, policy_loss
from podium.algorithms.recipe_options import make_recipe
from podium.algorithms.recipes import RECIPES, Recipe
from podium.config.errors import ConfigError
from podium.config.schema import AlgorithmConfig
from podium.settings import load_settings


def clipped_cispo() -> Recipe:
    """CISPO's loss with Dr. GRPO's advantage: what somebody might write."""
    return Recipe(
        advantage=partial(group_advantages, std="none", std_ddof=1, std_eps=1e-6),
        loss="cispo",
        mean="token",
        clip_low=1.0,
        clip_high=2.0,
    )


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "clipped_cispo", clipped_cispo)


@pytest.mark.usefixtures("added")
def test_a_config_names_it_and_changes_its_options() -> None:
    recipe = make_recipe(
        AlgorithmConfig(recipe="clipped_cispo", clip_high=1.0, std="group"), group_size=4, prompts_per_step=2
    )
    assert (recipe.loss, recipe.mean, recipe.clip_high) == ("cispo", "token", 1.0)
    advantages = recipe.advantage(np.array([[1.0, 0.0, 0.0, 0.0]]), np.ones((1, 4)))
    np.testing.assert_allclose(advantages, [[1.5, -0.5, -0.5, -0.5]], rtol=1e-5)


@pytest.mark.usefixtures("added")
def test_its_conflicts_are_found() -> None:
    with pytest.raises(ValueError, match="group_size: recipe clipped_cispo compares completions"):
        make_recipe(AlgorithmConfig(recipe="clipped_cispo"), group_size=1, prompts_per_step=2)


@pytest.mark.usefixtures("added")
def test_settings_know_its_name() -> None:
    overrides = ["name=test", "model=none", 'tasks=[{"name": "arithmetic"}]']
    loaded = load_settings([], [*overrides, "algorithm.recipe=clipped_cispo"], {})
    assert loaded.config.algorithm.recipe == "clipped_cispo"
    with pytest.raises(ConfigError, match="did you mean clipped_cispo"):
        load_settings([], [*overrides, "algorithm.recipe=cliped_cispo"], {})


@pytest.mark.usefixtures("added")
def test_it_teaches_a_policy_of_one_token() -> None:
    recipe = make_recipe(AlgorithmConfig(recipe="clipped_cispo"), group_size=16, prompts_per_step=1)
    ones = np.ones((1, 16), np.int32)
    weights = token_weights(recipe.mean, ones[0], num_sequences=16, max_new_tokens=1)[None]  # [1, 16]

    @jax.jit
    def gradient(logits: jax.Array, tokens: jax.Array, advantages: jax.Array) -> jax.Array:
        def loss(logits: jax.Array) -> jax.Array:
            logprobs = jax.nn.log_softmax(logits)[tokens]  # [1, 16]
            sampled = jax.lax.stop_gradient(logprobs)
            batch = {"advantages": advantages, "segments": jnp.asarray(ones), "mask": jnp.ones((1, 16), bool)}
            return jnp.sum(weights * policy_loss(recipe, Tokens(logprobs, sampled, **batch))[0])

        return jax.grad(loss)(logits)

    random, logits = np.random.default_rng(0), jnp.zeros(5)
    for _ in range(60):
        tokens = random.choice(5, (1, 16), p=np.asarray(jax.nn.softmax(logits)))
        rewards = (tokens == 3).astype(np.float32)
        logits = logits - gradient(logits, jnp.asarray(tokens), jnp.asarray(recipe.advantage(rewards, ones)))
    assert float(jax.nn.softmax(logits)[3]) > 0.9
