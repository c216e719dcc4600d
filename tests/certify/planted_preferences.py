"""Bugs of preferences, greedy completions and a repetition penalty, for `test_planted_bugs.py` to plant."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from planted_runs import Plant

from podium.algorithms import losses, recipes
from podium.rollout import device
from podium.rollout.request import SamplingParams
from podium.sampling import groups
from podium.train import held_out
from podium.train.batches import prepare

# What preferences say.


def chosen_and_rejected_swapped() -> Plant:
    """The rejected completion of a pair is made likelier."""
    original = losses.pair_margins

    def planted(*args, **options):
        chosen, rejected = original(*args, **options)
        return rejected, chosen

    return losses, "pair_margins", planted


def ipo_s_sum() -> Plant:
    """IPO's log-ratios are sums over tokens, not means."""
    original = losses.pair_margins
    return losses, "pair_margins", lambda *args, by_token: original(*args, by_token=False)


def pairs_of_a_row_mixed() -> Plant:
    """A completion is compared with all others of its row, whatever they answer."""
    original = losses.pair_margins

    def planted(tokens, **options):
        return original(tokens._replace(prompts=jnp.minimum(tokens.prompts, 1)), **options)

    return losses, "pair_margins", planted


def weights_of_labels_swapped() -> Plant:
    """Undesirable completions have the weight of the desirable ones."""
    original = losses.kto_loss

    @functools.wraps(original)
    def planted(*args, desirable_weight, undesirable_weight, **options):
        return original(*args, desirable_weight=undesirable_weight, undesirable_weight=desirable_weight, **options)

    return losses, "POLICY_LOSSES", {**losses.POLICY_LOSSES, "kto": planted}


def reference_point_of_own_prompts() -> Plant:
    """KTO's KL is estimated with the completions of the prompts themselves."""
    original = prepare.reference_point

    def planted(samples, *others):
        before = [samples[-1], *samples[:-1]]  # a prompt meets the completion of the row before
        own = [dataclasses.replace(each, prompt=other.prompt) for each, other in zip(samples, before, strict=True)]
        return original(own, *others)

    return prepare, "reference_point", planted


# Greedy completions, a repetition penalty, groups left out by a part of the reward.


def baselines_of_another_prompt() -> Plant:
    original = prepare._baselines
    return prepare, "_baselines", lambda groups: np.roll(original(groups), 1)


def greedy_completions_sampled() -> Plant:
    return SamplingParams, "of", lambda sampling, completion: dataclasses.replace(sampling, greedy_completion=None)


def penalty_forgets_the_prompt() -> Plant:
    """A sequence that enters a slot is penalised for its last token alone."""
    original = device.words_of
    return device, "words_of", lambda tokens, words: original(tokens[-1:], words)


def correction_without_the_penalty() -> Plant:
    return recipes.Recipe, "corrects_penalty", property(lambda recipe: False)


def groups_judged_by_their_totals() -> Plant:
    original = groups.Group.judged
    return groups.Group, "judged", lambda group, part: original(group, None)


def held_out_rewards_without_beta() -> Plant:
    original = held_out.preference_stats

    def planted(recipe, groups, ratios):
        return original(dataclasses.replace(recipe, loss_options={**recipe.loss_options, "beta": 1.0}), groups, ratios)

    return held_out, "preference_stats", planted
