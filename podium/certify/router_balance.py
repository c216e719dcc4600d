"""Checks the balance loss of a mixture's routers in an update: its value and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from podium.certify.batches import OF_BATCH
from podium.certify.check_result import Check, largest
from podium.certify.naive import Weights, in_float64, router_shares, wide
from podium.certify.updates import PLAIN, Form, Updates, relative
from podium.models.params import trained_specs

RECORDING = Form(packing="none", train={**PLAIN, "replay_routing": False})
"""The simplest form with the experts that the sampler chose, as a run's batches have them."""
COEFFICIENT = 50.0
"""Weight of the balance loss in the check: as large as the rest of the loss, from which it is a difference."""
BAR = 1e-4
"""The difference of two losses, and of two gradients, in float32."""


def balance_check(updates: Updates) -> Check:
    """Compare what the balance loss adds to an update's loss and gradient with the formula's."""
    recipe = dataclasses.replace(updates.recipe, router_loss_coef=COEFFICIENT)
    (found,), plain = Updates(updates.subject, recipe).run(RECORDING), updates.unpacked[0]
    value, gradient = _naive(updates)
    errors = [abs((found.loss - plain.loss) / COEFFICIENT - value) / value]
    for name in trained_specs(updates.subject.decoder):
        if np.linalg.norm(gradient[name]) > 0:
            errors.append(relative((found.gradient[name] - plain.gradient[name]) / COEFFICIENT, gradient[name]))
    return Check(
        name="balance of routers",
        claim="router_loss_coef weighs the mean over layers of E sum f P: shares of choices times mean probabilities",
        difference=largest(errors),
        bar=BAR,
        after=(*OF_BATCH, "log-probabilities", "loss", "gradient"),
    )


def _naive(updates: Updates) -> tuple[float, dict[str, np.ndarray]]:
    """The balance loss (arXiv:2101.03961) of one micro-batch with all sequences, and its gradient, in float64."""
    subject = updates.subject
    step, decoder = subject.sequences, subject.decoder
    top = decoder.routed[0][1].top
    ends = step.starts + np.array([np.flatnonzero(own)[-1] if own.any() else -1 for own in step.valid])
    read = np.arange(step.tokens.shape[1])[None] < ends[:, None]  # [S, T], all tokens but the last

    def loss(weights: Weights) -> jax.Array:
        shares = jax.vmap(lambda own: router_shares(weights, own, decoder))(jnp.asarray(step.tokens))  # [S, T, K, E]
        chosen = shares >= jnp.sort(shares, axis=-1)[..., -top, None]
        counted = jnp.asarray(read)[..., None, None]
        choices, probabilities = (jnp.sum(x * counted, axis=(0, 1)) for x in (chosen, shares))  # [K, E]
        f = jax.lax.stop_gradient(choices / jnp.sum(choices, axis=-1, keepdims=True))
        P = probabilities / jnp.sum(probabilities, axis=-1, keepdims=True)
        return jnp.mean(shares.shape[-1] * jnp.sum(f * P, axis=-1))

    with in_float64():
        value, gradient = jax.jit(jax.value_and_grad(loss))(wide(subject.weights))
        return float(value), {name: np.asarray(x) for name, x in gradient.items()}
