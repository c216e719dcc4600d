import pytest
from tiny_runs import RISE, first_and_last, learn

from podium.algorithms.recipes import RECIPES

SAMPLED = [name for name, recipe in RECIPES.items() if not recipe().demonstrations and name != "distill"]
"""Recipes that learn from rewards; tests/train/test_teacher.py has distillation."""
pytestmark = pytest.mark.usefixtures("one_device")


def test_a_random_model_begins_to_learn_one_digit_sums(tmp_path):
    first, last = first_and_last(learn("grpo", tmp_path, steps=35))
    assert first < 0.15
    assert last - first >= RISE


@pytest.mark.long
@pytest.mark.parametrize("recipe", SAMPLED)
def test_every_recipe_teaches_a_random_model_one_digit_sums(recipe, tmp_path):
    first, last = first_and_last(learn(recipe, tmp_path))
    assert first < 0.15  # it knew nothing
    assert last - first >= RISE
