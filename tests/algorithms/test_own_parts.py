"""A recipe, a loss and an optimizer of the user's, named in a config by import path."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podium.algorithms.advantages import group_advantages
from podium.algorithms.losses import Tokens, make_loss
from podium.algorithms.recipe_options import make_recipe
from podium.algorithms.recipes import RECIPES, Recipe
from podium.config.errors import ConfigError
from podium.config.show import file_schema
from podium.models.blocks.spec import ParamSpec
from podium.settings import IMPORTABLE, NAMES, load_settings
from podium.train.optimizer.transforms import make_optimizer

RUN = ("model=nobody/nothing", "tasks=[{name: arithmetic}]")


def mine() -> Recipe:
    return Recipe(advantage=partial(group_advantages, std="none", std_ddof=1, std_eps=1e-6), mean="token")


constant = mine()


def likelihood(tokens, *, clip_high):
    return -tokens.advantages * tokens.logprobs * clip_high


def of_fields(logprobs, old_logprobs, advantages, segments, mask, *, clip_high, scores):
    return -advantages * logprobs * clip_high + scores["none"]


def summed(tokens):
    return jnp.sum(tokens.logprobs)


def half(config):
    return optax.scale(0.5)


def nothing(config):
    return 0.5


def load(*settings: str):
    return load_settings([], [*RUN, *settings], {}).config


@pytest.mark.parametrize("name", ["mine", "constant"])
def test_a_recipe_is_a_recipe_or_a_function_that_makes_one(name):
    config = load(f"algorithm={{recipe: test_own_parts:{name}, clip_high: 0.4, std: batch}}")
    recipe = make_recipe(config.algorithm, group_size=4, prompts_per_step=2)
    assert (recipe.mean, recipe.clip_high, recipe.advantage.keywords["std"]) == ("token", 0.4, "batch")


@pytest.mark.parametrize("name", ["likelihood", "of_fields"])
def test_a_loss_has_the_clip_options_that_it_names(name):
    config = load(f"algorithm.loss=test_own_parts:{name}", "algorithm.clip_high=3.0")
    loss = make_loss(make_recipe(config.algorithm, group_size=4, prompts_per_step=2))
    ones = jnp.ones((1, 3))
    found = loss(Tokens(-2 * ones, ones, 0.5 * ones, ones.astype(int), ones, {"none": 0 * ones}))
    np.testing.assert_allclose(found.values, 3.0 * ones)
    assert not found.clipped_low.any()


def test_a_loss_that_averages_is_refused():
    loss = make_loss(
        make_recipe(load("algorithm.loss=test_own_parts:summed").algorithm, group_size=4, prompts_per_step=2)
    )
    ones = jnp.ones((1, 3))
    with pytest.raises(ValueError, match=r"gives \[\] for log-probabilities of \[1, 3\]"):
        loss(Tokens(ones, ones, ones, ones.astype(int), ones))


def test_a_named_loss_replaces_the_recipes():
    config = load("algorithm={recipe: grpo, loss: reinforce}")
    recipe = make_recipe(config.algorithm, group_size=4, prompts_per_step=2)
    assert (recipe.loss, recipe.old_logprobs, RECIPES["grpo"]().loss) == ("reinforce", "trainer", "clipped")


def test_an_optimizer_is_a_direction_and_the_rest_is_ours():
    config = load("train.optimizer={name: 'test_own_parts:half', learning_rate: 0.1, clip_norm: 0.0}")
    specs = {"embed": ParamSpec((2, 2), ("vocab", "width"), 0.02)}
    optimizer = make_optimizer(config.train.optimizer, 10, specs)
    params = {"embed": jnp.ones((2, 2))}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["embed"], -0.05 * np.ones((2, 2)), rtol=1e-6)
    bad = load("train.optimizer.name=test_own_parts:nothing").train.optimizer
    with pytest.raises(ValueError, match="returns float; it must return an optax transformation"):
        make_optimizer(bad, 10, specs)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.recipe=test_own_parts:min", "has no 'min'"),
        ("algorithm.recipe=test_own_parts:RUN", "must be a podium.Recipe"),
        ("algorithm.recipe=grop", "did you mean grpo"),
        ("algorithm.loss=cliped", "did you mean clipped"),
        ("algorithm.loss=nowhere:loss", "no module 'nowhere' found"),
        ("train.optimizer.name=adam", "did you mean adamw"),
        ("train.optimizer.name=test_own_parts:halve", "did you mean 'half'"),
    ],
)
def test_a_wrong_name_is_an_error_of_the_config(setting, message):
    with pytest.raises(ConfigError, match=message):
        load(setting)


def test_the_schema_allows_import_paths():
    schema = file_schema(NAMES, IMPORTABLE)["$defs"]
    assert {"type": "string", "pattern": ":"} in schema["AlgorithmConfig"]["properties"]["recipe"]["anyOf"]
    assert {"type": "null"} in schema["AlgorithmConfig"]["properties"]["loss"]["anyOf"]
    assert "adamw" in schema["OptimizerConfig"]["properties"]["name"]["anyOf"][0]["enum"]
