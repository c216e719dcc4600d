from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podium.algorithms import recipes
from podium.algorithms.recipe_options import RecipeError, make_recipe
from podium.algorithms.recipes import LOSSES, OPTION_RANGES, RECIPES, Recipe
from podium.config.schema import AlgorithmConfig
from tools.algorithms_page import algorithms_page

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def make(group_size: int = 8, prompts_per_step: int = 32, **options: Any) -> Recipe:
    config = AlgorithmConfig.model_validate(options)
    return make_recipe(config, group_size=group_size, prompts_per_step=prompts_per_step)


def test_a_recipe_is_named_as_the_function_that_makes_it() -> None:
    assert all(getattr(recipes, name) is recipe for name, recipe in RECIPES.items())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_cites_its_paper_and_says_how_it_differs(name: str) -> None:
    text = getattr(recipes, name).__doc__
    assert "arXiv:" in text or "doi:" in text
    assert "Differs:" in text


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_options_is_itself(name: str) -> None:
    recipe = make(recipe=name, group_size=2 if RECIPES[name]().preferences else 8)
    expected = RECIPES[name]()
    assert recipe.advantage.func is expected.advantage.func
    assert recipe.advantage.keywords == expected.advantage.keywords
    fields = [field for field in vars(expected) if field != "advantage"]
    assert [getattr(recipe, field) for field in fields] == [getattr(expected, field) for field in fields]


@pytest.mark.parametrize(
    ("recipe", "option", "value"),
    [
        ("grpo", "mean", "token"),
        ("grpo", "clip_low", 0.1),
        ("grpo", "clip_high", 0.4),
        ("grpo", "dual_clip", 3.0),
        ("grpo", "entropy_bonus", 0.01),
        ("grpo", "top_entropy", 0.2),
        ("dapo", "mask_truncated", False),
        ("grpo", "zero_variance", "drop"),
        ("dapo", "max_refills", 5),
        ("dapo", "zero_variance_metric", "correct"),
        ("gspo", "old_logprobs", "sampler"),
        ("grpo", "old_logprobs", "trainer"),
        ("rloo", "updates_per_batch", 2),
        ("cispo", "minibatches", 4),
        ("sapo", "loss_options", {"tau_negative": 1.1}),
    ],
)
def test_an_option_replaces_the_recipes(recipe: str, option: str, value: Any) -> None:
    assert getattr(RECIPES[recipe](), option) != value
    assert getattr(make(recipe=recipe, **{option: value}), option) == value


def test_every_option_of_the_config_is_a_recipes() -> None:
    options = set(AlgorithmConfig.model_fields) - {"recipe", "advantage_options", "std", "std_ddof", "std_eps"}
    assert options <= set(vars(RECIPES["grpo"]()))


def test_options_of_the_standard_deviation_reach_the_advantage() -> None:
    rewards, lengths = np.array([[1.0, 0.0, 0.0, 0.0]]), np.ones((1, 4))
    changed = make(recipe="grpo", std_ddof=0, std_eps=0.5).advantage(rewards, lengths)
    np.testing.assert_allclose(changed, (rewards - 0.25) / (rewards.std() + 0.5), rtol=1e-6)
    plain = make(recipe="grpo", std="none").advantage(rewards, lengths)
    np.testing.assert_allclose(plain, rewards - 0.25)
    whitened = make(recipe="reinforce_pp", std_eps=0.5).advantage(rewards, lengths)
    np.testing.assert_allclose(whitened, (rewards - 0.25) / (rewards.std() + 0.5), rtol=1e-6)


def test_what_a_recipe_needs_of_the_trainer() -> None:
    assert not make(recipe="grpo").needs_reference
    assert make(recipe="grpo", kl="k1_reward", kl_coef=0.1).needs_reference
    assert make(recipe="grpo", old_logprobs="trainer", minibatches=2).scores_old_logprobs
    assert make(recipe="grpo", old_logprobs="trainer", updates_per_batch=2).scores_old_logprobs
    assert not make(recipe="grpo", old_logprobs="trainer").scores_old_logprobs
    assert not make(recipe="grpo", minibatches=2).scores_old_logprobs


CONFLICTS = [
    ("algorithm.recipe", "got 'gropo'; did you mean grpo?", {"recipe": "gropo"}),
    ("algorithm.recipe", "expected one of grpo, dr_grpo, ", {"recipe": "ppo2"}),
    ("group_size", "at least 2, got 1", {"recipe": "grpo", "group_size": 1}),
    ("group_size", "at least 2, got 1", {"recipe": "reinforce_pp_baseline", "group_size": 1}),
    ("algorithm.std", "opo has no such option", {"recipe": "opo", "std": "group"}),
    (
        "algorithm.advantage_options",
        "has no option 'k'; it has: none",
        {"recipe": "grpo", "advantage_options": {"k": 2}},
    ),
    (
        "algorithm.advantage_options",
        "k 8 must be a whole number below group_size 8: with all completions",
        {"recipe": "pass_at_k", "advantage_options": {"k": 8}},
    ),
    ("algorithm.std_ddof", "reinforce_pp has no such option", {"recipe": "reinforce_pp", "std_ddof": 1}),
    ("algorithm.std_eps", "maxrl has no such option", {"recipe": "maxrl", "std_eps": 1e-4}),
    ("algorithm.std_ddof", "std is none", {"recipe": "dr_grpo", "std_ddof": 0}),
    ("algorithm.std_eps", "std is none", {"recipe": "grpo", "std": "none", "std_eps": 1e-4}),
    ("algorithm.zero_variance", "still teaches", {"recipe": "reinforce", "zero_variance": "drop"}),
    ("algorithm.zero_variance", "still teaches", {"recipe": "reinforce_pp", "zero_variance": "refill"}),
    ("algorithm.max_refills", "zero_variance is keep", {"recipe": "grpo", "max_refills": 2}),
    ("algorithm.zero_variance_metric", "zero_variance is keep", {"recipe": "grpo", "zero_variance_metric": "correct"}),
    (
        "algorithm.zero_variance_metric",
        "turns have no parts",
        {"recipe": "dapo", "zero_variance_metric": "correct", "credit": "turn"},
    ),
    ("algorithm.zero_variance", "still teaches", {"recipe": "remax", "zero_variance": "drop"}),
    ("algorithm.credit", "does not compare a prompt's completions", {"recipe": "remax", "credit": "turn"}),
    ("algorithm.std", "no such option", {"recipe": "remax", "std": "none"}),
    ("algorithm.clip_low", "no ratio to clip", {"recipe": "reinforce", "clip_low": 0.2}),
    ("algorithm.clip_high", "no ratio to clip", {"recipe": "reinforce", "clip_high": 0.2}),
    ("algorithm.clip_low", "loss sapo has no ratio to clip", {"recipe": "sapo", "clip_low": 0.2}),
    ("algorithm.clip_high", "loss vespo has no ratio to clip", {"recipe": "grpo", "loss": "vespo", "clip_high": 0.2}),
    (
        "algorithm.loss_options",
        "no option 'tau'; it has: tau_positive,",
        {"recipe": "sapo", "loss_options": {"tau": 1.0}},
    ),
    ("algorithm.loss_options", "no option 'tau'; it has: none", {"recipe": "grpo", "loss_options": {"tau": 1.0}}),
    (
        "algorithm.correction",
        "by its ratio to the sampler already",
        {"recipe": "vespo", "correction": "truncate", "old_logprobs": "trainer"},
    ),
    ("algorithm.clip_low", "a ratio is never below 0, so 1 - clip_low must", {"recipe": "cispo", "clip_low": 1.5}),
    ("algorithm.clip_low", "a probability never falls by more than 1", {"recipe": "dppo", "clip_low": 1.5}),
    ("algorithm.clip_high", "a probability never rises by more than 1", {"recipe": "dppo", "clip_high": 1.5}),
    (
        "algorithm.advantage_options",
        "k 2.5 must be a whole number below group_size 8",
        {"recipe": "pass_at_k", "advantage_options": {"k": 2.5}},
    ),
    (
        "algorithm.loss_options",
        "tau_positive 0 must be above 0",
        {"recipe": "sapo", "loss_options": {"tau_positive": 0.0}},
    ),
    (
        "algorithm.loss_options",
        "weight_cap -1 must be above 0",
        {"recipe": "dppo", "loss_options": {"weight_cap": -1.0}},
    ),
    (
        "algorithm.loss_options",
        "k_negative -1 must be 0 or more",
        {"recipe": "vespo", "loss_options": {"k_negative": -1.0}},
    ),
    ("algorithm.dual_clip", "recipe gspo does not have", {"recipe": "gspo", "dual_clip": 3.0}),
    ("algorithm.dual_clip", "recipe cispo does not have", {"recipe": "cispo", "dual_clip": 3.0}),
    ("algorithm.dual_clip", "recipe reinforce does not have", {"recipe": "reinforce", "dual_clip": 3.0}),
    ("algorithm.kl_coef", "nothing uses the weight 0.1", {"recipe": "grpo", "kl_coef": 0.1}),
    ("algorithm.kl", "k3 needs a weight", {"recipe": "grpo", "kl": "k3"}),
    ("algorithm.kl", "k2 needs a weight", {"recipe": "grpo", "kl": "k2", "kl_coef": 0.0}),
    ("algorithm.kl", "reads the parts of rewards", {"recipe": "gdpo", "kl": "k1_reward", "kl_coef": 0.1}),
    ("algorithm.credit", "compares parts of rewards", {"recipe": "gdpo", "credit": "turn"}),
    ("algorithm.kl", "maxrl divides", {"recipe": "maxrl", "kl": "k1_reward", "kl_coef": 0.1}),
    ("algorithm.kl", "equal rewards still teaches", {"recipe": "dapo", "kl": "k1_reward", "kl_coef": 0.1}),
    ("algorithm.correction_high", "correction is none", {"recipe": "grpo", "correction_high": 2.0}),
    ("algorithm.correction_low", "correction is none", {"recipe": "grpo", "correction_low": 0.5}),
    (
        "algorithm.correction_low",
        "correction is truncate",
        {"recipe": "grpo", "old_logprobs": "trainer", "correction": "truncate", "correction_low": 0.5},
    ),
    (
        "algorithm.correction",
        "mask needs the upper end of its band: set correction_high",
        {"recipe": "grpo", "old_logprobs": "trainer", "correction": "mask", "correction_low": 0.5},
    ),
    (
        "algorithm.correction_low",
        "2.0 must be below correction_high 2.0",
        {
            "recipe": "grpo",
            "old_logprobs": "trainer",
            "correction": "mask",
            "correction_low": 2.0,
            "correction_high": 2.0,
        },
    ),
    ("algorithm.correction_level", "correction is none", {"recipe": "grpo", "correction_level": "mean"}),
    (
        "algorithm.correction_level",
        "leaves out whole sequences",
        {
            "recipe": "grpo",
            "old_logprobs": "trainer",
            "correction": "reject",
            "correction_low": 0.9,
            "correction_high": 1.1,
        },
    ),
    ("algorithm.kl_by_ratio", "weighs a KL in the loss", {"recipe": "grpo", "kl_by_ratio": True}),
    ("algorithm.correction", "nothing is left to correct", {"recipe": "grpo", "correction": "truncate"}),
    ("algorithm.updates_per_batch", "no ratio and is wrong", {"recipe": "reinforce", "updates_per_batch": 2}),
    ("algorithm.minibatches", "no ratio and is wrong", {"recipe": "reinforce", "minibatches": 2}),
    ("algorithm.old_logprobs", "nothing reads the sampler's", {"recipe": "reinforce", "old_logprobs": "sampler"}),
    ("algorithm.minibatches", "32 must be a multiple of it, got 5", {"recipe": "grpo", "minibatches": 5}),
]


@pytest.mark.parametrize(("key", "rule", "options"), CONFLICTS)
def test_what_cannot_be_combined_is_one_error_that_names_its_key(key: str, rule: str, options: dict[str, Any]) -> None:
    options = dict(options)
    group_size = options.pop("group_size", 8)
    config = AlgorithmConfig.model_validate(options)
    with pytest.raises(RecipeError, match=key) as error:
        make_recipe(config, group_size=group_size, prompts_per_step=32)
    found = error.value.found
    assert [entry[0] for entry in found] == [key]
    assert rule in found[0][1]


@pytest.mark.parametrize("options", [{"recipe": "gmpo"}, {"recipe": "dppo", "loss": "dppo_kl"}])
def test_bounds_of_a_log_ratio_and_of_a_kl_may_be_above_1(options: dict[str, Any]) -> None:
    assert make(clip_low=1.5, **options).clip_low == 1.5


def test_every_option_of_a_loss_has_a_range_that_holds_its_default() -> None:
    for kind in LOSSES.values():
        for option, value in kind.options.items():
            assert not OPTION_RANGES[option].problem(value)


def test_several_conflicts_are_reported_at_once() -> None:
    config = AlgorithmConfig(recipe="opo", std="group", kl_coef=0.1, correction_low=0.5)
    with pytest.raises(RecipeError) as error:
        make_recipe(config, group_size=1, prompts_per_step=32)
    assert [key for key, _ in error.value.found] == [
        "algorithm.std",
        "group_size",
        "algorithm.kl_coef",
        "algorithm.correction_low",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "reinforce", "group_size": 1, "correction": "truncate"},
        {"recipe": "reinforce_pp", "group_size": 1, "kl": "k1_reward", "kl_coef": 0.01},
        {"recipe": "grpo", "std": "batch", "std_ddof": 0, "kl": "k3+", "kl_coef": 1e-3, "updates_per_batch": 2},
        {
            "recipe": "gspo",
            "old_logprobs": "trainer",
            "correction": "mask",
            "correction_low": 0.5,
            "correction_high": 2.0,
        },
        {"recipe": "cispo", "minibatches": 4, "zero_variance": "refill", "max_refills": 1},
    ],
)
def test_what_can_be_combined_is_accepted(options: dict[str, Any]) -> None:
    recipe, options = make(**options), {key: value for key, value in options.items() if key in vars(RECIPES["grpo"]())}
    assert {key: getattr(recipe, key) for key in options} == options


def test_the_recipes_in_the_docs_are_those_of_the_code() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert algorithms_page(text) == text, "python -m tools.algorithms_page"
