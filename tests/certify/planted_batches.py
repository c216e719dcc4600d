"""Bugs of what batches say: masks, weights, advantages and scores, for `test_planted_bugs.py` to plant."""

import dataclasses
import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from planted_runs import Plant

from podium.algorithms import advantages, recipes, selection
from podium.algorithms.recipes import REFERENCE_LOGPROBS
from podium.certify import batch_variants
from podium.models import logprobs
from podium.rollout.transcript import Transcript
from podium.train import step, trainer
from podium.train.batches import batch, prepare, samples

# What batches say.


def off_by_one_mask() -> Plant:
    """The mask and the weights stand one token too late."""
    original = prepare.make_batch

    def planted(samples, sizes):
        made, spans = original(samples, sizes)
        late = {name: np.roll(getattr(made, name), 1, axis=2) for name in ("mask", "weights")}
        return dataclasses.replace(made, **late), spans

    return prepare, "make_batch", planted


def teacher_one_token_late() -> Plant:
    """A token is taught by the teacher's log-probability of the token before it."""
    original = prepare.taught_advantages

    def planted(advantages, teacher_logprobs, *others, **options):
        return original(advantages, np.roll(teacher_logprobs, 1, axis=2), *others, **options)

    return prepare, "taught_advantages", planted


def teacher_normalised() -> Plant:
    """The teacher's part of advantages is centred over the batch."""
    original = prepare.taught_advantages

    def planted(advantages, teacher_logprobs, logprobs, mask, **options):
        centre = np.mean((teacher_logprobs - logprobs)[mask])
        return original(advantages, teacher_logprobs - centre, logprobs, mask, **options)

    return prepare, "taught_advantages", planted


def privileged_scores_one_token_late() -> Plant:
    """A completion behind the teacher's own prompt gets the scores of the tokens before."""
    original = prepare.behind_own_prompts
    return prepare, "behind_own_prompts", lambda *given: [np.roll(each, 1) for each in original(*given)]


def privileged_prompts_of_other_rows() -> Plant:
    original = prepare.behind_own_prompts

    def planted(scorer, own, prompts, rules):
        return original(scorer, own, [*prompts[-1:], *prompts[:-1]], rules)

    return prepare, "behind_own_prompts", planted


def plain_prompts_for_a_privileged_teacher() -> Plant:
    original = prepare.behind_own_prompts

    def planted(scorer, own, prompts, rules):
        plain = iter(own)
        reads = dataclasses.replace(scorer.own_prompts, of=lambda prompt: next(plain).prompt)
        return original(dataclasses.replace(scorer, own_prompts=reads), own, prompts, rules)

    return prepare, "behind_own_prompts", planted


def teacher_s_states_one_token_late() -> Plant:
    """A token's distribution is compared with the teacher's for the token before it."""
    original = prepare.with_scores

    def planted(*given):
        made = original(*given)
        late = {name: jnp.roll(x, 1, axis=2) for name, x in made.scores.items() if name == recipes.TAUGHT_HIDDEN}
        return dataclasses.replace(made, scores={**made.scores, **late})

    return prepare, "with_scores", planted


def values_one_token_late() -> Plant:
    """The critic learns what belongs to the token before."""
    original = prepare.value_returns

    def planted(rewards, tokens, **options):
        return np.roll(original(rewards, tokens, **options), 1, axis=2)

    return prepare, "value_returns", planted


def replies_are_steps() -> Plant:
    """What an environment wrote counts as drawn when advantages are estimated."""
    original = advantages.gae

    def planted(rewards, values, mask, **options):
        last = np.cumsum(mask[..., ::-1], axis=-1)[..., ::-1] > 0
        return original(rewards, values, last, **options)

    return advantages, "gae", planted


def unclipped_values() -> Plant:
    """The critic's loss has no clip."""
    original = step.value_loss

    def planted(values, old_values, returns, *, clip):
        return original(values, old_values, returns, clip=None)

    return step, "value_loss", planted


def divergence_reversed() -> Plant:
    """The shares of KL(policy || teacher) and KL(teacher || policy) are swapped."""
    original = logprobs._divergence
    return logprobs, "_divergence", lambda reverse, mine, theirs: original(1 - reverse, mine, theirs)


def dropped_tail() -> Plant:
    """The last micro-batch, which may not be full, is left out."""
    original = prepare.make_batch

    def planted(samples, sizes):
        made, spans = original(samples, sizes)
        return dataclasses.replace(made, num_micro_batches=np.maximum(made.num_micro_batches - 1, 1)), spans

    return prepare, "make_batch", planted


def dropped_last_sequence() -> Plant:
    """The last sequence of a batch is packed and not trained."""
    original = prepare.make_batch

    def planted(samples, sizes):
        made, spans = original(samples, sizes)
        for name in ("mask", "weights"):
            batch.put(getattr(made, name), spans[-1:], [np.zeros(each.length, np.float32) for each in spans[-1:]])
        return made, spans

    return prepare, "make_batch", planted


def last_token_untrained() -> Plant:
    """The token that ends an episode is left out."""
    original = samples.transcript_sample

    def planted(*given, **options):
        made = original(*given, **options)
        mask = made.mask.copy()
        mask[-1:] = False
        return dataclasses.replace(made, mask=mask)

    return prepare, "transcript_sample", planted


def prompt_trained() -> Plant:
    original = batch._write

    def planted(chunk, samples, row, start, segment) -> Iterator:
        sample = samples[chunk[0]]
        spans = list(original(chunk, samples, row, start, segment))
        shown = slice(start, start + len(sample.prompt) - 1)
        row["targets"][shown] = sample.prompt[1:]
        row["mask"][shown] = 1.0
        row["weights"][shown] = sample.weights[0]
        row["advantages"][shown] = sample.advantages[0]
        yield from spans

    return batch, "_write", planted


def environment_trained() -> Plant:
    """What an environment replied is trained like what the model drew."""
    original = samples.transcript_sample

    def planted(*given, **options):
        made = original(*given, **options)
        return dataclasses.replace(made, mask=np.ones_like(made.mask))

    return prepare, "transcript_sample", planted


def positions_behind_shared_prompts() -> Plant:
    """All but the first completion of a prompt begin where the one before them ended."""
    original = batch._write

    def planted(chunk, samples, row, start, segment) -> Iterator:
        spans = list(original(chunk, samples, row, start, segment))
        for (begin, length), _ in spans[1:]:
            row["positions"][begin : begin + length] += 1
        yield from spans

    return batch, "_write", planted


def mean_of_completion_means() -> Plant:
    """The mean by token where one by sequence is asked for."""
    original = prepare.token_weights
    return prepare, "token_weights", lambda mean, lengths, **sizes: original("token", lengths, **sizes)


def denominators_of_the_whole_batch() -> Plant:
    """A minibatch's tokens are divided by what all the step's minibatches hold."""
    original = prepare.token_weights

    def planted(mean, lengths, *, num_sequences, max_new_tokens):
        share = np.float32(min(1.0, num_sequences / 16))
        return share * original(mean, lengths, num_sequences=num_sequences, max_new_tokens=max_new_tokens)

    return prepare, "token_weights", planted


def constant_of_the_longest_completion() -> Plant:
    original = prepare.token_weights

    def planted(mean, lengths, *, num_sequences, max_new_tokens):
        return original(mean, lengths, num_sequences=num_sequences, max_new_tokens=int(max(lengths, default=1)))

    return prepare, "token_weights", planted


def baseline_of_the_batch() -> Plant:
    return advantages, "_centred_by_group", lambda rewards: np.nan_to_num(rewards - np.nanmean(rewards))


def covariance_without_means() -> Plant:
    return selection, "covariances", lambda logprobs, advantages: logprobs * advantages


def certain_tokens_instead_of_uncertain_ones() -> Plant:
    original = selection.top_entropy_tokens
    return prepare, "top_entropy_tokens", lambda entropy, *, share: original(-entropy, share=share)


def mask_shifted_where_a_turn_starts() -> Plant:
    """All turns but the first are trained one token too early."""
    original = samples.transcript_sample

    def planted(*given, **options):
        made = original(*given, **options)
        mask = np.where(made.turns > 0, np.roll(made.mask & (made.turns > 0), -1), made.mask)
        mask[:-1] |= (made.mask & (made.turns > 0))[1:]
        return dataclasses.replace(made, mask=mask)

    return prepare, "transcript_sample", planted


def credited_to_the_next_turn() -> Plant:
    original = prepare.turn_advantages
    return prepare, "turn_advantages", lambda *given: np.roll(original(*given), 1, axis=2)


def turns_not_discounted() -> Plant:
    original = prepare.turn_returns
    return prepare, "turn_returns", lambda rewards, gamma: original(rewards, 1.0)


def unreached_turns_count_as_zero() -> Plant:
    """A turn is compared with conversations that had ended before it, too."""
    original = prepare.turn_advantages

    def planted(advantage, returns, lengths):
        return original(lambda own, counts: advantage(np.nan_to_num(own), counts), returns, lengths)

    return prepare, "turn_advantages", planted


def failures_count_as_zero() -> Plant:
    """A conversation that failed for no fault of the model has reward 0 in its group's mean."""
    original = prepare.step_advantages

    def planted(packed, recipe, scored):
        return original(dataclasses.replace(packed, rewards=np.nan_to_num(packed.rewards)), recipe, scored)

    return prepare, "step_advantages", planted


def population_deviation() -> Plant:
    """GRPO's standard deviation divides by n."""
    grpo = recipes.RECIPES["grpo"]()
    own = dataclasses.replace(grpo, advantage=functools.partial(grpo.advantage, std_ddof=0))
    return batch_variants, "RECIPES", {**recipes.RECIPES, "grpo": lambda: own}


def whitened_over_episodes() -> Plant:
    """Every episode counts once, however many tokens it has."""
    original = advantages._checked

    def planted(rewards, lengths, *, least_group):
        rewards, lengths = original(rewards, lengths, least_group=least_group)
        return rewards, np.minimum(lengths, 1.0)

    return advantages, "_checked", planted


def k1_of_the_wrong_sign() -> Plant:
    original = prepare.penalised_rewards
    return prepare, "penalised_rewards", lambda rewards, sums, coef: original(rewards, sums, -coef)


def misaligned_behind_dropped_groups() -> Plant:
    """Kept groups get the advantages of as many first ones; credit of turns would notice it by their number."""
    original = prepare.step_advantages

    def planted(packed, recipe, scored):
        if packed.returns is not None:
            return original(packed, recipe, scored)
        return original(dataclasses.replace(packed, kept=np.arange(len(packed.kept))), recipe, scored)

    return prepare, "step_advantages", planted


def reference_follows_the_policy() -> Plant:
    original = prepare.with_scores

    def planted(batch, scorers, policy):
        kept = [each for each in scorers if each.name != REFERENCE_LOGPROBS]
        wrong = [dataclasses.replace(each, params=None) for each in scorers if each not in kept]
        return original(batch, [*kept, *wrong], policy)

    return prepare, "with_scores", planted


# What a step prepares.


def truncated_episodes_trained() -> Plant:
    """`mask_truncated` has no effect."""
    original = prepare.transcript_sample

    def planted(segment, *, masked=False, **options):
        return original(segment, masked=masked and segment.finish_reason == "failed", **options)

    return prepare, "transcript_sample", planted


def rewards_of_the_group_before() -> Plant:
    original = prepare.step_advantages

    def planted(packed, *others):
        rewards = packed.rewards if np.isnan(packed.rewards).any() else np.roll(packed.rewards, 1, axis=0)
        return original(dataclasses.replace(packed, rewards=rewards), *others)

    return prepare, "step_advantages", planted


def leave_one_out_by_the_whole_group() -> Plant:
    rloo = recipes.RECIPES["rloo"]()

    def of_all(rewards, lengths):
        graded = np.maximum(1, np.sum(~np.isnan(rewards), axis=1, keepdims=True))
        return rewards - np.nansum(rewards, axis=1, keepdims=True) / graded

    own = dataclasses.replace(rloo, advantage=of_all)
    return batch_variants, "RECIPES", {**recipes.RECIPES, "rloo": lambda: own}


def lambda_of_1() -> Plant:
    original = advantages.gae
    return advantages, "gae", lambda *given, gamma, lam: original(*given, gamma=gamma, lam=1.0)


def second_pass_in_reverse() -> Plant:
    """The last pass over the minibatches is in reverse."""
    original = trainer.Trainer._update_policy

    def planted(own, state, batches, *others):
        return original(own, state, _Reversed(batches), *others)

    return trainer.Trainer, "_update_policy", planted


class _Reversed(list):
    """A list that is in reverse the second time."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__() if self.passes % 2 else iter(list(super().__iter__())[::-1])


# Conversations of several segments.


def every_segment_is_the_first() -> Plant:
    """What is known of a later segment's tokens is looked up where the first one's are."""
    original = prepare.transcript_sample
    return prepare, "transcript_sample", lambda *given, start=0, **options: original(*given, start=0, **options)


def last_segments_alone() -> Plant:
    """A conversation is trained from its last prompt on."""
    original = Transcript.segments.fget
    return Transcript, "segments", property(lambda own: original(own)[-1:])
