"""Coefficients that follow the KL and the entropy, by the formulas of the papers."""

from typing import Any

import numpy as np
import pytest

from podium.algorithms.controllers import after_step, after_update, first_coefs, loss_coefs
from podium.algorithms.recipe_options import RecipeError, make_recipe
from podium.algorithms.recipes import Recipe
from podium.config.schema import AlgorithmConfig


def recipe_of(**options: Any) -> Recipe:
    return make_recipe(AlgorithmConfig.model_validate(options), group_size=4, prompts_per_step=4)


def test_the_weight_of_the_kl_is_ziegler_s() -> None:
    """e = clip((KL - target) / target, -0.2, 0.2) and beta' = beta (1 + K e), over random KLs."""
    recipe = recipe_of(kl="k3", kl_coef=0.05, kl_target=0.1, kl_gain=0.3)
    found, expected = first_coefs(recipe), 0.05
    assert found == {"kl_coef": 0.05}
    for kl in np.random.default_rng(0).uniform(0.0, 0.2, 200).tolist():
        found = after_step(recipe, found, kl=kl)
        expected *= 1 + 0.3 * float(np.clip((kl - 0.1) / 0.1, -0.2, 0.2))
        assert found["kl_coef"] == pytest.approx(expected, rel=1e-12)
    assert after_step(recipe, found, kl=None) == found
    assert loss_coefs(recipe, found) == found
    assert loss_coefs(recipe_of(kl="k1_reward", kl_coef=0.05, kl_target=0.1), found) == {}


def test_the_entropy_bonus_is_skywork_s() -> None:
    """Moved after each update, held between 0 and the largest, and off after an update of more entropy than wished."""
    recipe = recipe_of(entropy_bonus=0.01, entropy_target=0.5, entropy_step=0.004, entropy_bonus_max=0.02)
    found = first_coefs(recipe)
    assert loss_coefs(recipe, found) == {"entropy_bonus": 0.0}  # nothing is known of the entropy yet
    coef, seen = 0.01, []
    for entropy in [0.6, 0.6, 0.6, 0.6, 0.5, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.7]:
        found = after_update(recipe, found, entropy=entropy)
        coef = float(np.clip(coef + (0.004 if entropy <= 0.5 else -0.004), 0.0, 0.02))
        assert found == {"entropy_bonus": pytest.approx(coef, abs=1e-15), "last_entropy": entropy}
        (applied,) = loss_coefs(recipe, found).values()
        assert applied == (found["entropy_bonus"] if entropy <= 0.5 else 0.0)
        seen.append(found["entropy_bonus"])
    assert (min(seen), max(seen)) == (0.0, 0.02)


def test_a_recipe_without_targets_adapts_nothing() -> None:
    recipe = recipe_of(kl="k2", kl_coef=0.1, entropy_bonus=0.01)
    assert first_coefs(recipe) == loss_coefs(recipe, {}) == after_update(recipe, {}, entropy=1.0) == {}
    assert after_step(recipe, {}, kl=1.0) == {}


@pytest.mark.parametrize(
    ("key", "message", "options"),
    [
        ("entropy_step", "nothing reads it; set entropy_target", {"entropy_step": 0.1}),
        ("entropy_bonus_max", "nothing reads it; set entropy_target", {"entropy_bonus_max": 0.1}),
        ("entropy_bonus", "it starts at 2, and entropy_bonus_max is 1", {"entropy_bonus": 2.0, "entropy_target": 0.3}),
        ("kl_gain", "nothing reads it; set algorithm.kl_target", {"kl_gain": 0.2}),
        ("kl_target", "it needs a KL term to adapt", {"kl_target": 0.2}),
    ],
)
def test_what_nothing_would_read_is_refused(key: str, message: str, options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as error:
        make_recipe(AlgorithmConfig.model_validate(options), group_size=4, prompts_per_step=4)
    assert message in dict(error.value.found)[f"algorithm.{key}"]


@pytest.mark.parametrize("option", ["kl_target", "kl_gain", "entropy_target", "entropy_step", "entropy_bonus_max"])
def test_targets_and_steps_are_above_0(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        AlgorithmConfig.model_validate({option: 0.0})
