"""Adaptive coefficients of the loss, for the KL and the entropy bonus: they follow measurements. Plain numbers."""

from collections.abc import Mapping

from podium.algorithms.recipes import Recipe

KL_COEF, ENTROPY_BONUS, LAST_ENTROPY = "kl_coef", "entropy_bonus", "last_entropy"
"""Names of the numbers that a run adapts and saves."""
Coefs = Mapping[str, float]
MOST_ERROR = 0.2
"""Largest relative distance from the target that a single step reacts to."""


def first_coefs(recipe: Recipe) -> dict[str, float]:
    """The numbers that a recipe adapts, at the beginning of a run; empty if it adapts none."""
    kl = {KL_COEF: recipe.kl_coef} if recipe.kl_target is not None else {}
    if recipe.entropy_target is None:
        return kl
    return {**kl, ENTROPY_BONUS: recipe.entropy_bonus, LAST_ENTROPY: float("inf")}


def loss_coefs(recipe: Recipe, coefs: Coefs) -> dict[str, float]:
    """The adapted coefficients for the next update's loss, under KL_COEF and ENTROPY_BONUS.

    The bonus acts only after an update whose entropy was at most the target: Skywork-OR1 (arXiv:2505.22312).
    """
    found = {KL_COEF: coefs[KL_COEF]} if KL_COEF in coefs and recipe.kl != "k1_reward" else {}
    if recipe.entropy_target is None:
        return found
    needed = coefs[LAST_ENTROPY] <= recipe.entropy_target
    return {**found, ENTROPY_BONUS: coefs[ENTROPY_BONUS] if needed else 0.0}


def after_update(recipe: Recipe, coefs: Coefs, *, entropy: float) -> dict[str, float]:
    """The adapted numbers after an optimizer step with this mean entropy, in nats.

    The entropy bonus rises by `entropy_step` where the entropy is at most `entropy_target`, to at most
    `entropy_bonus_max`, and falls by it otherwise, to at least 0: Skywork-OR1 (arXiv:2505.22312), as in TRL.
    """
    if recipe.entropy_target is None:
        return dict(coefs)
    up = entropy <= recipe.entropy_target
    moved = coefs[ENTROPY_BONUS] + (recipe.entropy_step if up else -recipe.entropy_step)
    return {**coefs, ENTROPY_BONUS: min(max(moved, 0.0), recipe.entropy_bonus_max), LAST_ENTROPY: entropy}


def after_step(recipe: Recipe, coefs: Coefs, *, kl: float | None) -> dict[str, float]:
    """The adapted numbers after a step with this mean KL, in nats per token; None: not measured.

    kl_coef is multiplied by 1 + kl_gain clip(kl / kl_target - 1, -0.2, 0.2) (Ziegler et al., arXiv:1909.08593).
    """
    if recipe.kl_target is None or kl is None:
        return dict(coefs)
    error = min(max(kl / recipe.kl_target - 1, -MOST_ERROR), MOST_ERROR)
    return {**coefs, KL_COEF: coefs[KL_COEF] * (1 + recipe.kl_gain * error)}
