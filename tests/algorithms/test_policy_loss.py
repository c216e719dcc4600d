"""A recipe as a whole: its loss, its corrections and KL, what has a gradient, and when rounding alone would clip."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import Batch, drawn, packed

from podium.algorithms.losses import Tokens, entropy_loss, make_loss, narrow_clip_warning, policy_loss
from podium.algorithms.recipe_options import make_recipe
from podium.algorithms.recipes import RECIPES, Recipe, Teaching
from podium.config.schema import AlgorithmConfig

SINGLE = [name for name, recipe in RECIPES.items() if not recipe().preferences]
"""Recipes whose loss is of single completions; those of pairs are in tests/train/test_dpo.py."""


def recipe_of(**options: Any) -> Recipe:
    config = AlgorithmConfig.model_validate(options)
    return make_recipe(config, group_size=8, prompts_per_step=4)


def inputs(seed: int = 0) -> Batch:
    batch = packed(seed)
    noise = np.random.default_rng(seed + 100).normal(size=(2, *batch["mask"].shape)).astype(np.float32)
    old = batch.pop("old_logprobs")
    scores = {"old_logprobs": old, "reference_logprobs": batch["logprobs"] + 0.5 * noise[1]}
    return batch | {"sampled_logprobs": old + 0.5 * noise[0], "scores": scores}


@pytest.mark.parametrize("name", SINGLE)
def test_each_recipe_is_its_loss_and_reports_it(name: str) -> None:
    batch = inputs()
    old, names = batch["scores"]["old_logprobs"], ("advantages", "segments", "mask")
    expected = make_loss(RECIPES[name]())(Tokens(batch["logprobs"], old, *(batch[key] for key in names)))
    values, stats = jax.jit(partial(policy_loss, RECIPES[name]()))(drawn(batch))
    np.testing.assert_allclose(values, expected.values, rtol=1e-6)
    np.testing.assert_array_equal(stats["clip_low"], expected.clipped_low)
    np.testing.assert_array_equal(stats["clip_high"], expected.clipped_high)
    log_ratio = batch["logprobs"] - batch["sampled_logprobs"]
    np.testing.assert_allclose(stats["kl_sampled"], np.exp(log_ratio) - log_ratio - 1, rtol=1e-4, atol=1e-6)
    assert set(stats) == {"clip_low", "clip_high", "kl_sampled", *expected.stats}


def test_the_divergence_to_another_model_is_added_with_its_weight() -> None:
    batch = inputs()
    old = batch["scores"]["old_logprobs"]
    recipe = dataclasses.replace(recipe_of(recipe="grpo"), teaching=Teaching(weight=0.5, loss="full"))
    divergence = np.abs(batch["logprobs"] - old)
    values, stats = policy_loss(recipe, drawn(batch)._replace(divergence=jnp.asarray(divergence)))
    ratio = np.exp(batch["logprobs"] - old)
    term = -np.minimum(ratio * batch["advantages"], np.clip(ratio, 0.8, 1.2) * batch["advantages"])
    np.testing.assert_allclose(values, term + 0.5 * divergence, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(stats["kl_teacher"], divergence)
    assert "kl_teacher" not in policy_loss(recipe, drawn(batch))[1]


def test_correction_weighs_the_policy_term_and_not_the_kl() -> None:
    batch = inputs()
    options = {"recipe": "grpo", "old_logprobs": "trainer", "kl": "k2", "kl_coef": 0.1}
    recipe = recipe_of(correction="truncate", correction_high=1.5, **options)
    values, stats = policy_loss(recipe, drawn(batch))
    weight = np.minimum(np.exp(batch["scores"]["old_logprobs"] - batch["sampled_logprobs"]), 1.5)
    np.testing.assert_allclose(stats["correction_weight"], weight, rtol=1e-5)
    ratio = np.exp(batch["logprobs"] - batch["scores"]["old_logprobs"])
    term = -np.minimum(ratio * batch["advantages"], np.clip(ratio, 0.8, 1.2) * batch["advantages"])
    k2 = (batch["logprobs"] - batch["scores"]["reference_logprobs"]) ** 2 / 2
    np.testing.assert_allclose(values, weight * term + 0.1 * k2, rtol=1e-4, atol=1e-5)


def test_the_loss_of_prime_rl() -> None:
    """Its default_loss_fn, -keep A ratio + kl_tau log_ratio^2; the gradient is -keep A ratio + 2 kl_tau log_ratio."""
    batch = inputs()
    options = {"clip_low": 0.02, "clip_high": 0.03, "loss_options": {"weight_cap": 1e9}, "drift_coef": 1e-3}
    recipe = recipe_of(recipe="dppo", mean="token", **options)
    lp, mu, A = (np.asarray(batch[key], np.float64) for key in ("logprobs", "sampled_logprobs", "advantages"))
    moved = np.exp(lp) - np.exp(mu)
    keep = ~np.where(A > 0, moved > 0.03, moved < -0.02)
    assert keep[batch["mask"]].any() and not keep[batch["mask"]].all()
    del batch["scores"]["old_logprobs"]
    gradient = jax.grad(lambda lp: jnp.sum(policy_loss(recipe, drawn({**batch, "logprobs": lp}))[0]))(batch["logprobs"])
    expected = -A * keep * np.exp(lp - mu) + 2e-3 * (lp - mu)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("anchor", ["sampler", "trainer"])
def test_without_old_logprobs_the_ratio_is_to_the_recipes_anchor(anchor: str) -> None:
    batch = inputs()
    del batch["scores"]["old_logprobs"]
    values, _ = policy_loss(recipe_of(recipe="grpo", old_logprobs=anchor, clip_low=1.0, clip_high=100.0), drawn(batch))
    to_sampler = np.exp(batch["logprobs"] - batch["sampled_logprobs"])
    ratio = to_sampler if anchor == "sampler" else np.ones_like(to_sampler)
    np.testing.assert_allclose(values, -ratio * batch["advantages"], rtol=1e-5)


def test_own_logprobs_as_the_anchor_have_a_gradient() -> None:
    batch = inputs()
    del batch["scores"]["old_logprobs"]
    recipe = recipe_of(recipe="grpo", old_logprobs="trainer")
    gradient = jax.grad(lambda lp: jnp.sum(policy_loss(recipe, drawn({**batch, "logprobs": lp}))[0]))(batch["logprobs"])
    np.testing.assert_allclose(gradient, -batch["advantages"], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"old_logprobs": "trainer", "correction": "truncate"}])
def test_nothing_but_the_policy_gets_a_gradient(options: dict[str, str]) -> None:
    batch = inputs()
    recipe = recipe_of(recipe="grpo", kl="k3+", kl_coef=0.1, **options)
    frozen = {name: batch.pop(name) for name in ("sampled_logprobs", "scores")}
    gradients = jax.grad(lambda frozen: jnp.sum(policy_loss(recipe, drawn(batch | frozen))[0]))(frozen)
    for gradient in jax.tree.leaves(gradients):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_statistics_have_no_gradient() -> None:
    batch = inputs()
    recipe = recipe_of(recipe="grpo", old_logprobs="trainer", correction="truncate")

    def total(lp: jax.Array) -> jax.Array:
        _, stats = policy_loss(recipe, drawn({**batch, "logprobs": lp}))
        return sum(jax.tree.map(jnp.sum, list(stats.values())), jnp.zeros(()))

    np.testing.assert_array_equal(jax.grad(total)(batch["logprobs"]), np.zeros_like(batch["logprobs"]))


def test_a_missing_reference_is_named() -> None:
    batch = inputs()
    del batch["scores"]["reference_logprobs"]
    with pytest.raises(AssertionError, match="needs reference_logprobs"):
        policy_loss(recipe_of(recipe="grpo", kl="k2", kl_coef=0.1), drawn(batch))


def test_the_entropy_bonus_by_hand_and_in_parts() -> None:
    entropy = jnp.array([[1.0, 3.0, 100.0], [2.0, 100.0, 100.0]])
    mask = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    whole = entropy_loss(entropy, mask, num_tokens=jnp.float32(3), entropy_bonus=0.1)
    assert float(whole) == pytest.approx(-0.1 * 2.0)
    parts = [
        entropy_loss(entropy[n : n + 1], mask[n : n + 1], num_tokens=jnp.float32(3), entropy_bonus=0.1) for n in (0, 1)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole))


# What a bfloat16 sampler's rounding does to a clip.


def first_update(name: str, **options: Any) -> tuple[float, float]:
    """The first update on 64 sequences of a bfloat16 sampler: the tokens without gradient, and the gap, in nat."""
    random = np.random.default_rng(0)
    shape = (64, 20)
    logprobs = jnp.asarray(-random.exponential(1.0, shape), jnp.float32)
    sampled = logprobs.astype(jnp.bfloat16).astype(jnp.float32)
    batch: Batch = {
        "sampled_logprobs": sampled,
        "advantages": jnp.broadcast_to(jnp.asarray(random.normal(size=(64, 1)), jnp.float32), shape),
        "segments": jnp.ones(shape, jnp.int32),
        "mask": jnp.ones(shape, bool),
    }
    recipe = recipe_of(recipe=name, **options)
    gradient = jax.grad(lambda lp: jnp.sum(policy_loss(recipe, drawn({**batch, "logprobs": lp}))[0]))(logprobs)
    return float(jnp.mean(gradient == 0)), float(jnp.mean(jnp.abs(logprobs - sampled)))


@pytest.mark.parametrize("name", SINGLE)
def test_rounding_alone_stops_no_gradient_in_the_first_update(name: str) -> None:
    stopped, gap = first_update(name)
    assert stopped == 0
    assert narrow_clip_warning(RECIPES[name](), gap) is None


def test_a_clip_narrower_than_the_rounding_stops_gradients_and_says_so() -> None:
    stopped, gap = first_update("gspo", old_logprobs="sampler")
    assert stopped > 0.1
    warning = narrow_clip_warning(recipe_of(recipe="gspo", old_logprobs="sampler"), gap)
    assert warning is not None
    for part in ("algorithm.clip_low is 0.0003", f"by {gap:.2g} on average", "set algorithm.old_logprobs to trainer"):
        assert part in warning


@pytest.mark.parametrize(
    ("options", "gap", "option"),
    [
        ({"recipe": "grpo"}, 0.19, None),
        ({"recipe": "grpo"}, 0.21, "algorithm.clip_low is 0.2"),
        ({"recipe": "grpo", "clip_high": 0.1}, 0.15, "algorithm.clip_high is 0.1"),
        ({"recipe": "grpo", "old_logprobs": "trainer"}, 0.5, None),
        ({"recipe": "reinforce"}, 0.5, None),
    ],
)
def test_the_warning_compares_the_narrower_side_of_the_clip(
    options: dict[str, Any], gap: float, option: str | None
) -> None:
    warning = narrow_clip_warning(recipe_of(**options), gap)
    assert (warning is None) if option is None else (warning is not None and option in warning)
