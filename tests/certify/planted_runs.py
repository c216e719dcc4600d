"""Bugs of engine, sampler, order of prompts, critic, evaluation and state, for `test_planted_bugs.py` to plant."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from podium.algorithms import losses
from podium.models import decoder
from podium.rollout import cache, device, programs, sampling
from podium.train import generate, trainer

Plant = tuple[Any, str, Any]
"""Object, attribute, and what the bug puts there."""


# The engine's cache and positions.


def keys_behind_the_first_page_in_page_0() -> Plant:
    """What decoding appends behind a sequence's first page is written to page 0."""
    original = cache._append

    def planted(kept, layer, tables, *others):
        return original(kept, layer, jnp.concatenate([tables[:, :1], 0 * tables[:, 1:]], axis=1), *others)

    return cache, "_append", planted


def rotations_repeat_after_64_positions() -> Plant:
    original = decoder.forward

    def planted(params, tokens, positions, *others, **options):
        return original(params, tokens, positions % 64, *others, **options)

    return programs, "forward", planted


# The sampler.


def neighbours_share_their_random_numbers() -> Plant:
    original = sampling._uniforms
    return sampling, "_uniforms", lambda seed, completion, position: original(seed, completion, position // 2)


def completions_share_random_numbers_at_even_positions() -> Plant:
    original = sampling._uniforms

    def planted(seed, completion, position):
        return original(seed, jnp.where(position % 2, completion, 0), position)

    return sampling, "_uniforms", planted


def one_more_than_top_k() -> Plant:
    original = device.fill_row

    def planted(rows, row, settings, **key):
        original(rows, row, dataclasses.replace(settings, top_k=settings.top_k and settings.top_k + 1), **key)

    return device, "fill_row", planted


# The order of prompts.


def newest_prompts_first() -> Plant:
    """A step takes the newest prompts that are complete, however old others become."""

    def planted(first_versions, complete, count, **_):
        ready = [index for index in reversed(range(len(complete))) if complete[index]]
        return ready[:count] if len(ready) >= count else None

    return generate, "chosen", planted


# The critic.


def critic_of_the_first_minibatch() -> Plant:
    original = trainer.update_critic

    def planted(critic, state, batches, step, **options):
        return original(critic, state, [batches[0]] * len(batches), step, **options)

    return trainer, "update_critic", planted


def critic_never_updated() -> Plant:
    original = trainer.update_critic

    def planted(critic, state, batches, step, **options):
        kept = jax.tree.map(jnp.copy, state)
        _, stats = original(critic, state, batches, step, **options)
        return kept, stats

    return trainer, "update_critic", planted


# Formulas.


def cap_squared() -> Plant:
    """A truncated correction is capped at the square of its bound."""
    original = losses.correction_weights

    def planted(recipe, *given):
        squared = dataclasses.replace(recipe, correction_high=recipe.correction_high**2)
        return original(squared if recipe.correction == "truncate" else recipe, *given)

    return losses, "correction_weights", planted
