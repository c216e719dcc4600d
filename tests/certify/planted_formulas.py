"""Bugs of losses, learning rates and update rules, for `test_planted_bugs.py` to plant."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from planted_runs import Plant

from podium.algorithms import losses
from podium.certify import formulas
from podium.models import quantised
from podium.train import trainer
from podium.train.optimizer import transforms
from podium.train.optimizer import transforms as optimizer

# Formulas.


def swapped_clip_sides() -> Plant:
    original = losses._clipped

    def planted(ratio, advantages, *, clip_low, clip_high):
        return original(ratio, advantages, clip_low=clip_high, clip_high=clip_low)

    return losses, "_clipped", planted


def gspo_s_sum() -> Plant:
    """The sequence's ratio is the product of its tokens', not their geometric mean."""
    original = losses.segment_means

    def planted(x, segments, mask):
        return original(x, segments, mask) * jnp.sum(mask, axis=1, keepdims=True)

    return losses, "segment_means", planted


def kl_k1_as_loss() -> Plant:
    return losses, "kl_loss", lambda kl, logprobs, reference: logprobs - jax.lax.stop_gradient(reference)


def inverted_correction() -> Plant:
    original = losses.correction_weights
    return losses, "correction_weights", lambda recipe, old, new, *rows: original(recipe, new, old, *rows)


def schedule_off_by_one() -> Plant:
    original = optimizer.learning_rate

    def planted(config, total_steps):
        rate = original(config, total_steps)
        return lambda count: rate(count + 1)

    return optimizer, "learning_rate", planted


def swapped_betas() -> Plant:
    original = optimizer.optax.scale_by_adam
    return optimizer.optax, "scale_by_adam", lambda b1, b2, eps: original(b2, b1, eps)


def eps_under_the_root() -> Plant:
    original = optimizer.optax.scale_by_adam
    return optimizer.optax, "scale_by_adam", lambda b1, b2, eps: original(b1, b2, eps=0.0, eps_root=eps)


def decay_of_norms_and_biases() -> Plant:
    original = optimizer.optax.add_decayed_weights
    return optimizer.optax, "add_decayed_weights", lambda decay, mask: original(decay)


def clipped_by_tensor() -> Plant:
    """Each parameter's gradient is clipped by its own norm."""

    def clip(limit: float) -> optax.GradientTransformation:
        def update(updates, state, params=None):
            norms = jax.tree.map(lambda x: jnp.linalg.norm(jnp.ravel(x)), updates)
            return jax.tree.map(lambda x, norm: x * jnp.minimum(1.0, limit / norm), updates, norms), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    return optimizer, "clip_by_norm", clip


def cap_squared() -> Plant:
    """A truncated correction is capped at the square of its bound."""
    original = losses.correction_weights

    def planted(recipe, *given):
        squared = dataclasses.replace(recipe, correction_high=recipe.correction_high**2)
        return original(squared if recipe.correction == "truncate" else recipe, *given)

    return losses, "correction_weights", planted


def dual_clip_of_good_tokens_too() -> Plant:
    original = losses.clipped_policy_loss

    def planted(*given, dual_clip=None, **options):
        made = original(*given, dual_clip=None, **options)
        values = made.values if dual_clip is None else jnp.clip(made.values, -dual_clip, dual_clip)
        return (
            dataclasses.replace(made, values=values) if dataclasses.is_dataclass(made) else made._replace(values=values)
        )

    return losses, "POLICY_LOSSES", {**losses.POLICY_LOSSES, "clipped": functools.wraps(original)(planted)}


def k3_the_other_way() -> Plant:
    original = losses.k3_estimate
    return losses, "k3_estimate", lambda logprobs, other: original(other, logprobs)


def kl_without_the_ratio() -> Plant:
    original = losses.policy_loss
    return (
        formulas,
        "policy_loss",
        lambda recipe, *given, **options: original(dataclasses.replace(recipe, kl_by_ratio=False), *given, **options),
    )


def mean_correction_of_sums() -> Plant:
    original = losses.correction_weights

    def planted(recipe, *given):
        level = "sequence" if recipe.correction_level == "mean" else recipe.correction_level
        return original(dataclasses.replace(recipe, correction_level=level), *given)

    return losses, "correction_weights", planted


def threshold_of_good_sequences_too() -> Plant:
    original = losses.off_policy_mask

    def planted(tokens, *, threshold):
        return original(tokens._replace(advantages=-jnp.abs(tokens.advantages)), threshold=threshold)

    return losses, "off_policy_mask", planted


# The optimizer.


def embeddings_not_decayed() -> Plant:
    original = transforms.is_matrix
    return transforms, "is_matrix", lambda spec: original(spec) and "vocab" not in spec.axes


def no_bias_correction() -> Plant:
    def planted(b1, b2, eps):
        def init(params):
            return optax.ScaleByAdamState(
                jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
            )

        def update(updates, state, params=None):
            mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
            nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
            changes = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
            return changes, optax.ScaleByAdamState(state.count + 1, mu, nu)

        return optax.GradientTransformation(init, update)

    return transforms.optax, "scale_by_adam", planted


def moments_rounded_to_nearest() -> Plant:
    return transforms, "round_at_random", lambda x, key: x.astype(jnp.bfloat16)


def rounded_alike_in_every_update() -> Plant:
    """Moments are rounded by the same random numbers in every update."""
    original = transforms.small_moments

    def planted(rule):
        made = original(rule)
        begun = lambda state: state._replace(made=jnp.zeros_like(state.made))  # noqa: E731
        update = lambda updates, state, params=None: made.update(updates, begun(state), params)  # noqa: E731
        return optax.GradientTransformation(made.init, update)

    return transforms, "small_moments", planted


def rounded_alike_in_all_arrays() -> Plant:
    """All moments of an update are rounded by the same random numbers."""
    original = transforms.round_at_random
    return transforms, "round_at_random", lambda x, key: original(x, jax.random.key(0))


def moments_begin_anew_every_step() -> Plant:
    original = trainer.Trainer._update_policy

    def planted(own, state, *others):
        gradient, *links, schedule = state.opt_state
        fresh = jax.tree.map(jnp.zeros_like, tuple(links))
        return original(own, dataclasses.replace(state, opt_state=(gradient, *fresh, schedule)), *others)

    return trainer.Trainer, "_update_policy", planted


def warm_up_one_step_late() -> Plant:
    original = transforms.learning_rate

    def planted(config, total):
        rate = original(config, total)
        return lambda count: rate(jnp.maximum(count - 1, 0)) if config.warmup_steps else rate(count)

    return formulas, "learning_rate", planted


def final_fraction_ignored() -> Plant:
    original = transforms.learning_rate
    return (
        formulas,
        "learning_rate",
        lambda config, total: original(config.model_copy(update={"final_fraction": 0.0}), total),
    )


def muon_of_other_axes() -> Plant:
    """Muon orthogonalises a stack's first two dimensions."""
    original = transforms.muon_dimensions
    return transforms, "muon_dimensions", lambda spec: original(spec) and optax.contrib.MuonDimensionNumbers()


def momentum_of_nesterov() -> Plant:
    original = transforms.optax.trace
    return transforms.optax, "trace", lambda decay: original(decay, nesterov=True)


def gradient_of_k3_for_k3_plus() -> Plant:
    original = losses.kl_loss

    def planted(kl, logprobs, reference_logprobs):
        if kl != "k3+":
            return original(kl, logprobs, reference_logprobs)
        return jnp.minimum(original("k3", logprobs, reference_logprobs), losses.K3_PLUS_BOUND)

    return losses, "kl_loss", planted


def steps_of_an_eighth_bit() -> Plant:
    """The largest absolute value of an output is code 128, which int8 does not have."""
    return quantised, "step_of", lambda largest: largest / 128
