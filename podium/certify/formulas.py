"""Checks of formulas, without a model: losses and gradients on random log-probabilities, and the learning rate."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.algorithms.losses import policy_loss
from podium.algorithms.recipes import OLD_LOGPROBS, REFERENCE_LOGPROBS, Recipe
from podium.certify.naive import Sequences, in_float64, kl_losses, policy_losses
from podium.certify.result import Check
from podium.certify.updates import Updates, relative
from podium.config.optimizer import OptimizerConfig
from podium.run.sizes import optimizer_steps
from podium.train.optimizer import learning_rate

S, LENGTH = 24, 16
LOW, HIGH = 0.1, 0.3
"""Widths of a clip that is not the same on both sides."""


def formula_checks(updates: Updates) -> Iterator[Check]:
    """The policy terms, the KL terms, and the schedule."""
    subject = updates.subject
    own = dataclasses.replace(subject.recipe, kl="none", kl_coef=0.0)
    uneven = {"clip_low": LOW, "clip_high": HIGH}
    plain = {"correction": "none", "dual_clip": None, "old_logprobs": "sampler"}
    made: list[Any] = [{"loss": loss, **uneven, **plain} for loss in ("clipped", "gspo", "cispo")]
    made += [{"loss": "clipped", **uneven, **plain, "dual_clip": 2.0}]
    yield Check(
        name="clip",
        claim="policy terms and their gradients are the papers', clipped on the right side",
        difference=max(_loss_error(each) for each in (own, *(dataclasses.replace(own, **change) for change in made))),
    )
    kinds: list[Any] = ["k2", "k3", "k3+"]
    terms = [dataclasses.replace(subject.recipe, kl=kind, kl_coef=1.0) for kind in kinds]
    yield Check(
        name="kl",
        claim="KL terms k2, k3 and k3+ and their gradients are those of their formulas",
        difference=max(_loss_error(each, only_kl=True) for each in terms),
    )
    optimizer, steps = subject.user.train.optimizer, optimizer_steps(subject.user)
    shaped: list[Any] = [{"schedule": "linear", "warmup_steps": 3}, {"schedule": "cosine", "warmup_steps": 0}]
    cases = [(optimizer, steps), *((optimizer.model_copy(update=each), 12) for each in shaped)]
    yield Check(
        name="schedule",
        claim="the learning rate of every step is the schedule's",
        difference=max(_schedule_error(config, total) for config, total in cases),
    )


def scheduled_rate(config: OptimizerConfig, total: int, step: int) -> float:
    """The learning rate of optimizer step `step`, from 0, of `total`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = min((step - config.warmup_steps) / max(1, total - 1 - config.warmup_steps), 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + np.cos(np.pi * done)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * left)


def _schedule_error(config: OptimizerConfig, total: int) -> float:
    """Of every step, or of a thousand over a long run."""
    steps = np.unique(np.linspace(0, total - 1, min(total, 1000)).astype(int))
    rates = np.asarray(jax.vmap(learning_rate(config, total))(jnp.asarray(steps)) + jnp.zeros(len(steps)))
    return relative(rates, [scheduled_rate(config, total, int(step)) for step in steps])


def _loss_error(recipe: Recipe, *, only_kl: bool = False) -> float:
    """Of the token losses and of their gradient; with `only_kl` advantages are 0, so that nothing else is left."""
    random = np.random.default_rng(0)
    logprobs = random.normal(-3.0, 1.0, (S, LENGTH)).astype(np.float32)
    sampled, old, reference = ((logprobs + random.normal(0.0, 0.3, (S, LENGTH))).astype(np.float32) for _ in range(3))
    valid = np.arange(LENGTH)[None] < random.integers(1, LENGTH + 1, S)[:, None]
    advantages = np.zeros(S) if only_kl else random.normal(0.0, 1.0, S).astype(np.float32)
    weights = (valid * random.uniform(0.5, 1.5, valid.shape)).astype(np.float32)

    given = {REFERENCE_LOGPROBS: jnp.asarray(reference)}
    if recipe.old_logprobs == "trainer":
        given[OLD_LOGPROBS] = jnp.asarray(old)

    def ours(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, _ = policy_loss(
            recipe,
            logprobs,
            sampled_logprobs=jnp.asarray(sampled),
            advantages=jnp.broadcast_to(jnp.asarray(advantages, jnp.float32)[:, None], (S, LENGTH)),
            segments=jnp.ones((S, LENGTH), jnp.int32),
            mask=jnp.asarray(valid, jnp.float32),
            scores=given,
        )
        return jnp.sum(losses * weights), losses * weights

    (_, losses), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(jnp.asarray(logprobs))
    with in_float64():
        wide: Any = {"sampled_logprobs": sampled, "old_logprobs": old, "reference_logprobs": reference}
        known: Any = {"tokens": None, "starts": None, "valid": valid, "advantages": advantages} | wide
        sequences = Sequences(**known)

        def naive(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
            both = policy_losses(recipe, logprobs, sequences) + kl_losses(recipe, logprobs, sequences)
            return jnp.sum(both * weights), both * weights

        (_, expected), slope = jax.jit(jax.value_and_grad(naive, has_aux=True))(jnp.asarray(logprobs, jnp.float64))
        return max(relative(losses, np.asarray(expected)), relative(gradient, np.asarray(slope)))
