"""Bugs that others have had, planted one at a time by replacing one function: the certificate names each.

`make test` plants a few, `make test-long` all. A bug is looked for by the stage that is to name it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planted_runs as runs
import pytest
from planted_runs import Plant

from podium.algorithms import advantages, controllers, losses, recipes, selection
from podium.algorithms.recipes import REFERENCE_LOGPROBS
from podium.certify import batch_variants
from podium.certify.answer_ends import ends_check
from podium.certify.batches import batch_checks
from podium.certify.check_result import Certificate, Check
from podium.certify.checks import Stage, form_checks, model_checks, scoring_checks, update_checks
from podium.certify.compared import training_checks
from podium.certify.formulas import formula_checks
from podium.certify.long_sequences import long_checks
from podium.certify.mixtures import choice_check, mixture_check
from podium.certify.rollout_devices import rollout_device_checks
from podium.certify.small_moments import moments_check
from podium.certify.small_run import LONGEST_CONVERSATION, make_subject
from podium.certify.subject import MAX_NEW_TOKENS, Subject
from podium.certify.updates import Updates
from podium.config.schema import Config
from podium.models import architecture, logprobs
from podium.models.attention.mask import Visibility
from podium.models.blocks import routing
from podium.rollout import device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import SamplingParams
from podium.rollout.sequence import Sequence
from podium.rollout.transcript import Transcript
from podium.sampling import feed, grades, groups, sampler
from podium.sampling.conversations import conversation_carry, conversations
from podium.sampling.conversations.dialogue import Dialogue
from podium.tasks import grading
from podium.train import step, trainer
from podium.train.batches import batch, prepare, samples
from podium.train.optimizer import offload
from podium.train.optimizer import transforms as optimizer

QWEN3 = "Qwen/Qwen3-0.6B"
EXPERTS = "Qwen/Qwen3-30B-A3B-Instruct-2507"
SUBJECTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": {"rank": 8, "alpha": 16}},
    "anchored": {"lora": {"rank": 8, "alpha": 16}, "algorithm": {"kl": "k3", "kl_coef": 0.1, "top_entropy": 0.5}},
    "experts": {"model": EXPERTS},
    "taught": {"algorithm": {"recipe": "distill"}, "teacher": {"model": QWEN3}},
    "whole": {"algorithm": {"recipe": "distill"}, "teacher": {"model": QWEN3, "loss": "full", "reverse": 0.7}},
    "adapted": {
        "algorithm": {"kl": "k3", "kl_coef": 0.1, "kl_target": 0.05, "entropy_bonus": 0.01, "entropy_target": 1.0}
    },
    "charged": {"algorithm": {"kl": "k1_reward", "kl_coef": 0.1, "kl_target": 0.05}},
    "moved": {"algorithm": {"kl": "k2", "kl_coef": 0.3}, "reference": {"sync_every": 10, "mixup": 0.7}},
    "valued": {"algorithm": {"recipe": "ppo"}},
    "pairs": {"algorithm": {"recipe": "dpo"}, "group_size": 2},
    "labels": {"algorithm": {"recipe": "dpo", "loss": "kto"}, "group_size": 1},
    "refilled": {"algorithm": {"recipe": "dapo"}},
    "greedy": {"algorithm": {"recipe": "remax"}},
    "penalised": {
        "algorithm": {"old_logprobs": "trainer", "correction": "truncate"},
        "rollout": {"repetition_penalty": 1.5},
    },
    "windowed": {"model": "google/gemma-3-1b-it"},
    "cut": {"rollout": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 1.2}},
    "corrected": {"algorithm": {"old_logprobs": "trainer", "correction": "truncate", "correction_high": 1.5}},
    "talk": {"tasks": [{"name": "calculator"}], "algorithm": {"credit": "turn", "gamma": 0.5}},
}
"""What the config of a subject has besides."""


def make_config(**changes) -> Config:
    return Config.model_validate({"model": QWEN3, "tasks": [{"name": "arithmetic"}], "steps": 10, **changes})


@functools.cache
def make_checked_subject(kind: str = "plain") -> Subject:
    """A subject whose completions were sampled by the engine as it is, before any bug."""
    subject = make_subject(make_config(**SUBJECTS[kind]))
    assert subject.groups
    assert len(subject.sequences.valid)
    return subject


def with_new_engine(subject: Subject) -> Subject:
    """The subject with its completions, and an engine whose programs are compiled with a bug."""
    fresh = dataclasses.replace(subject)
    fresh.__dict__["sampled"] = subject.sampled
    return fresh


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


# The model.


def off_by_one_attention() -> Plant:
    """A token sees the one behind it, which it is to predict."""
    original = Visibility.mask

    def planted(visibility):
        T = visibility.segments.shape[1]
        return original(visibility) | jnp.eye(T, k=1, dtype=bool)[None]

    return Visibility, "mask", planted


def temperature_after_softmax() -> Plant:
    original = step.token_logprobs

    def planted(hidden, head, targets, settings, *others):
        found = original(hidden, head, targets, dataclasses.replace(settings, temperature=1.0), *others)
        return found._replace(logprobs=found.logprobs / settings.temperature)

    return step, "token_logprobs", planted


def adapters_unscaled() -> Plant:
    """(xA)B is multiplied by alpha and not by alpha / rank."""
    return architecture.Lora, "scale", property(lambda lora: lora.alpha)


def adapters_of_other_matrices() -> Plant:
    """LoRA trains the attention's matrices alone, whatever `lora.targets` says."""
    original = architecture.make_lora

    def planted(config):
        made = original(config)
        return made and dataclasses.replace(made, targets=("q", "v"))

    return architecture, "make_lora", planted


def gates_of_all_experts() -> Plant:
    """The gates of the chosen experts are not divided by their sum."""
    original = routing.route
    return routing, "route", lambda *given, **options: original(*given, **{**options, "normalized": False})


def experts_of_another_token() -> Plant:
    """Tokens go to the experts that the sampler chose for the token after them."""
    original = samples._choices

    def planted(spans):
        found = original(spans)
        return None if found is None else np.roll(found, -1, axis=0)

    return samples, "_choices", planted


# An update, and its forms.


def bfloat16_sum() -> Plant:
    """The gradient of the head is summed in bfloat16."""
    original = step.head_weights

    @jax.custom_vjp
    def rounded(x):
        return x

    def backward(_, dx):
        return (dx.astype(jnp.bfloat16).astype(dx.dtype),)

    rounded.defvjp(lambda x: (x, None), backward)
    return step, "head_weights", lambda *given, **options: rounded(original(*given, **options))


def tied_head_without_gradient() -> Plant:
    original = step.head_weights
    return step, "head_weights", lambda *given, **options: jax.lax.stop_gradient(original(*given, **options))


def mean_of_means() -> Plant:
    """Each micro-batch is averaged over its own tokens, and then the averages over the micro-batches."""
    original = step._micro_batch

    def planted(whole, index):
        own = original(whole, index)
        share = whole.num_tokens / (whole.num_micro_batches * jnp.maximum(jnp.sum(own.mask), 1.0))
        return dataclasses.replace(own, weights=own.weights * share)

    return step, "_micro_batch", planted


def leaked_segment() -> Plant:
    """A token of a packed row sees all that stands before it."""
    original = step.row_attention

    def planted(backend, visibility, rules):
        one = (visibility.segments > 0).astype("int32")
        return original(backend, Visibility(one, one), rules)

    return step, "row_attention", planted


def prompts_unseen_over_split_rows() -> Plant:
    """Where devices split the tokens of rows, completions do not see their prompt's segment."""
    original = step.row_attention

    def planted(backend, visibility, rules):
        split = rules.num_shards("tokens") > 1
        own = dataclasses.replace(visibility, prompts=visibility.segments) if split else visibility
        return original(backend, own, rules)

    return step, "row_attention", planted


# A run.


def second_hand_over_ignored() -> Plant:
    """The engine keeps the first weights that it was given."""
    original, given = RolloutEngine.load, []

    def planted(engine, params, version=0):
        given.append(jax.tree.map(jnp.copy, params))
        original(engine, given[0], version)

    return RolloutEngine, "load", planted


def rounded_in_the_hand_over() -> Plant:
    original = RolloutEngine.load

    def planted(engine, params, version=0):
        original(engine, {name: jax.lax.reduce_precision(x, 8, 7) for name, x in params.items()}, version)

    return RolloutEngine, "load", planted


def hand_over_one_step_late() -> Plant:
    original, given = sampler.Sampler.load, []

    def planted(rollouts, params, frozen=None, *, version=0):
        given.append(jax.tree.map(jnp.copy, params))
        return original(rollouts, given[max(0, len(given) - 2)], frozen, version=version)

    return sampler.Sampler, "load", planted


def carried_tokens_called_new() -> Plant:
    """A token that older weights drew is said to be of the newest."""
    original = Sequence.completion

    def planted(sequence, tokenizer):
        made = original(sequence, tokenizer)
        return dataclasses.replace(made, versions=np.full_like(made.versions, max(made.versions, default=0)))

    return Sequence, "completion", planted


def carried_turns_called_new() -> Plant:
    """A turn that older weights drew is said to be of the newest, in a conversation that goes on."""
    original = conversation_carry.Carry._go_on

    def planted(carry, live):
        transcript = live.episode.transcript
        spans = [
            dataclasses.replace(span, versions=span.versions + 1) if span.drawn else span for span in transcript.spans
        ]
        newer = dataclasses.replace(transcript, spans=tuple(spans))
        live.episode = dataclasses.replace(live.episode, transcript=newer)
        original(carry, live)

    return conversation_carry.Carry, "_go_on", planted


def logprobs_of_the_turn_before() -> Plant:
    """A turn's tokens have the log-probabilities of those of the turn before it."""
    original = Transcript.add_completion

    def planted(transcript, completion):
        if before := transcript.drawn:
            size = len(completion.tokens)
            names = ("sampled_logprobs", "full_logprobs")
            completion = dataclasses.replace(
                completion, **{name: np.resize(getattr(before[-1], name), size) for name in names}
            )
        return original(transcript, completion)

    return Transcript, "add_completion", planted


def reply_encoded_anew() -> Plant:
    """What is trained of a reply is not what the engine was given: its last token is another one."""
    original = Transcript.add_environment

    def planted(transcript, tokens, *, text=""):
        return original(transcript, (*tokens[:-1], tokens[-1] - 1), text=text)

    return Transcript, "add_environment", planted


def last_token_before_an_update_lost() -> Plant:
    """What a step leaves of a turn in progress goes on one token earlier in the next."""
    original = RolloutEngine.withdraw

    def planted(engine, keys):
        left = {}
        for key, each in original(engine, keys).items():
            end = len(each.tokens) - (each.finish_reason is None)
            names = ("tokens", "sampled_logprobs", "full_logprobs", "versions")
            left[key] = dataclasses.replace(each, **{name: getattr(each, name)[:end] for name in names})
        return left

    return RolloutEngine, "withdraw", planted


def reply_given_twice_after_an_update() -> Plant:
    """A reply that comes after an update is given to the engine twice, and trained once."""
    original = conversations.Conversations.submit_turn

    def planted(talks, live, tokens):
        again = live.episode.transcript.spans[-1].tokens.tolist()
        fits = len(tokens) + len(again) <= LONGEST_CONVERSATION - MAX_NEW_TOKENS
        return original(talks, live, (*tokens, *again) if fits else tokens)

    return conversations.Conversations, "submit_turn", planted


def answers_ended_twice() -> Plant:
    """An answer that ended by itself gets another end before the reply."""
    original = Dialogue.reply

    def planted(dialogue, messages, *, history, drawn_end):
        return original(dialogue, messages, history=history, drawn_end=None)

    return Dialogue, "reply", planted


def turns_paid_in_reverse() -> Plant:
    original = grades.with_turns
    return grades, "with_turns", lambda reward, turns, weight: original(reward, turns[::-1], weight)


def reward_weights_ignored() -> Plant:
    original = grading.make_reward

    def planted(task, *given, **options):
        return original(task.model_copy(update={"rewards": dict.fromkeys(task.rewards, 1.0)}), *given, **options)

    return grading, "make_reward", planted


def seeds_reused() -> Plant:
    return feed, "request_seed", lambda seed, purpose, index: 7


def schedule_counts_twice() -> Plant:
    original = trainer.at_schedule_step
    return trainer, "at_schedule_step", lambda state, position: original(state, 2 * position)


def last_minibatch_skipped() -> Plant:
    original = trainer.Trainer.update

    def planted(own, state, batches, step, **options):
        return original(own, state, batches[:1], step, **options)

    return trainer.Trainer, "update", planted


def half_of_the_adapters_frozen() -> Plant:
    """The second factors of adapters do not change."""
    original = offload._update

    def planted(optimizer, grads, opt_state, params, **norm):
        updates, new, opt_state = original(optimizer, grads, opt_state, params, **norm)
        return updates, {name: params[name] if name.endswith("lora_b") else x for name, x in new.items()}, opt_state

    return offload, "_update", planted


def old_logprobs_scored_anew() -> Plant:
    """Ratios are to the policy before each update, not before the step's first."""
    original = losses.policy_loss

    def planted(recipe, drawn, **options):
        scores = dict(drawn.scores)
        if "old_logprobs" in scores:
            scores["old_logprobs"] = jax.lax.stop_gradient(drawn.logprobs)
        return original(recipe, drawn._replace(scores=scores), **options)

    return step, "policy_loss", planted


def entropy_by_micro_batch() -> Plant:
    """The bonus is a mean over each micro-batch's own tokens."""
    original = losses.entropy_loss

    def planted(entropy, mask, *, num_tokens, entropy_bonus):
        return original(entropy, mask, num_tokens=jnp.sum(mask), entropy_bonus=entropy_bonus)

    return step, "entropy_loss", planted


def kl_driven_from_its_target() -> Plant:
    """The KL's coefficient falls where the KL is too large."""
    original = trainer.after_step

    def planted(recipe, coefs, *, kl):
        return original(recipe, coefs, kl=None if recipe.kl_target is None else 2 * recipe.kl_target - kl)

    return trainer, "after_step", planted


def bonus_above_the_target() -> Plant:
    """The entropy bonus acts whatever the entropy is."""
    original = trainer.loss_coefs

    def planted(recipe, coefs):
        return original(recipe, {**coefs, controllers.LAST_ENTROPY: 0.0})

    return trainer, "loss_coefs", planted


def bonus_without_bound() -> Plant:
    original = trainer.after_update

    def planted(recipe, coefs, *, entropy):
        return original(dataclasses.replace(recipe, entropy_bonus_max=1e9), coefs, entropy=entropy)

    return trainer, "after_update", planted


def shares_of_a_mixture_swapped() -> Plant:
    original = trainer.mixed
    return trainer, "mixed", lambda follower, policy, mixup: original(follower, policy, 1 - mixup)


def first_reference_kept() -> Plant:
    """The reference moves, and the KL is still to the first model."""
    original, first = trainer.Trainer._scorers, []

    def planted(own, state):
        first.append(jax.tree.map(jnp.copy, state.models))
        return original(own, dataclasses.replace(state, models=first[0]))

    return trainer.Trainer, "_scorers", planted


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


def engine_checks(updates: Updates) -> Iterator[Check]:
    """All checks of what the engine draws, on several devices and on one."""
    yield from rollout_device_checks(updates)
    yield from training_checks(updates)


class Named(NamedTuple):
    """The check that is to name a bug, and its stage."""

    stage: Stage
    check: str
    subject: str = "plain"


QUICK: dict[Callable[[], Plant], Named] = {
    off_by_one_mask: Named(batch_checks, "mask"),
    denominators_of_the_whole_batch: Named(batch_checks, "denominators"),
    baseline_of_the_batch: Named(batch_checks, "advantages"),
    misaligned_behind_dropped_groups: Named(batch_checks, "advantages"),
    k1_of_the_wrong_sign: Named(batch_checks, "advantages"),
    mask_shifted_where_a_turn_starts: Named(batch_checks, "mask"),
    credited_to_the_next_turn: Named(batch_checks, "advantages"),
    temperature_after_softmax: Named(model_checks, "temperature"),
    runs.answers_cut_by_other_limits_trained: Named(batch_checks, "prompts untrained"),
}
"""Planted by `make test` too."""
SLOW: dict[Callable[[], Plant], Named] = {
    dropped_tail: Named(batch_checks, "every token once"),
    dropped_last_sequence: Named(batch_checks, "every token once"),
    last_token_untrained: Named(batch_checks, "every token once"),
    positions_behind_shared_prompts: Named(batch_checks, "positions"),
    prompt_trained: Named(batch_checks, "prompts untrained"),
    environment_trained: Named(batch_checks, "prompts untrained"),
    mean_of_completion_means: Named(batch_checks, "denominators"),
    constant_of_the_longest_completion: Named(batch_checks, "denominators"),
    turns_not_discounted: Named(batch_checks, "advantages"),
    covariance_without_means: Named(batch_checks, "chosen by covariance"),
    certain_tokens_instead_of_uncertain_ones: Named(batch_checks, "scores"),
    unreached_turns_count_as_zero: Named(batch_checks, "advantages"),
    failures_count_as_zero: Named(batch_checks, "advantages"),
    population_deviation: Named(batch_checks, "advantages"),
    whitened_over_episodes: Named(batch_checks, "advantages"),
    reference_follows_the_policy: Named(batch_checks, "scores"),
    swapped_clip_sides: Named(formula_checks, "clip"),
    gspo_s_sum: Named(formula_checks, "clip"),
    kl_k1_as_loss: Named(formula_checks, "kl"),
    inverted_correction: Named(formula_checks, "correction"),
    schedule_off_by_one: Named(formula_checks, "optimizer adamw"),
    swapped_betas: Named(formula_checks, "optimizer adamw"),
    eps_under_the_root: Named(formula_checks, "optimizer adamw"),
    decay_of_norms_and_biases: Named(formula_checks, "optimizer adamw"),
    clipped_by_tensor: Named(formula_checks, "optimizer adamw"),
    off_by_one_attention: Named(model_checks, "log-probabilities"),
    adapters_unscaled: Named(model_checks, "adapters", "lora"),
    adapters_of_other_matrices: Named(model_checks, "adapters", "lora"),
    gates_of_all_experts: Named(model_checks, "log-probabilities", "experts"),
    experts_of_another_token: Named(form_checks, "replayed experts", "experts"),
    teacher_one_token_late: Named(batch_checks, "advantages"),
    teacher_normalised: Named(batch_checks, "advantages"),
    privileged_scores_one_token_late: Named(batch_checks, "advantages"),
    privileged_prompts_of_other_rows: Named(batch_checks, "advantages"),
    plain_prompts_for_a_privileged_teacher: Named(batch_checks, "advantages"),
    teacher_s_states_one_token_late: Named(batch_checks, "scores"),
    values_one_token_late: Named(batch_checks, "advantages"),
    replies_are_steps: Named(batch_checks, "advantages"),
    unclipped_values: Named(update_checks, "value update", "valued"),
    divergence_reversed: Named(update_checks, "loss", "whole"),
    bfloat16_sum: Named(update_checks, "gradient"),
    tied_head_without_gradient: Named(update_checks, "gradient"),
    mean_of_means: Named(form_checks, "micro-batches"),
    leaked_segment: Named(form_checks, "packing"),
    prompts_unseen_over_split_rows: Named(form_checks, "devices fsdp:2,sp:4"),
    second_hand_over_ignored: Named(training_checks, "hand-over"),
    rounded_in_the_hand_over: Named(training_checks, "hand-over"),
    hand_over_one_step_late: Named(training_checks, "hand-over"),
    carried_tokens_called_new: Named(training_checks, "hand-over"),
    carried_turns_called_new: Named(training_checks, "hand-over", "talk"),
    logprobs_of_the_turn_before: Named(training_checks, "hand-over", "talk"),
    reply_encoded_anew: Named(training_checks, "conversations", "talk"),
    last_token_before_an_update_lost: Named(training_checks, "conversations", "talk"),
    reply_given_twice_after_an_update: Named(training_checks, "conversations", "talk"),
    answers_ended_twice: Named(training_checks, "episodes", "talk"),
    turns_paid_in_reverse: Named(training_checks, "episodes", "talk"),
    reward_weights_ignored: Named(training_checks, "episodes"),
    seeds_reused: Named(training_checks, "draws"),
    schedule_counts_twice: Named(training_checks, "new weights"),
    last_minibatch_skipped: Named(training_checks, "optimizer steps"),
    half_of_the_adapters_frozen: Named(training_checks, "new weights", "lora"),
    old_logprobs_scored_anew: Named(training_checks, "other options"),
    entropy_by_micro_batch: Named(training_checks, "other options"),
    kl_driven_from_its_target: Named(training_checks, "coefficients", "adapted"),
    bonus_above_the_target: Named(training_checks, "coefficients", "adapted"),
    bonus_without_bound: Named(training_checks, "coefficients", "adapted"),
    shares_of_a_mixture_swapped: Named(training_checks, "moving reference", "moved"),
    first_reference_kept: Named(training_checks, "training", "moved"),
    chosen_and_rejected_swapped: Named(formula_checks, "preferences", "pairs"),
    ipo_s_sum: Named(formula_checks, "preferences", "pairs"),
    pairs_of_a_row_mixed: Named(update_checks, "loss", "pairs"),
    weights_of_labels_swapped: Named(formula_checks, "preferences", "labels"),
    reference_point_of_own_prompts: Named(batch_checks, "reference point", "labels"),
    baselines_of_another_prompt: Named(batch_checks, "advantages"),
    greedy_completions_sampled: Named(training_checks, "greedy completions", "greedy"),
    penalty_forgets_the_prompt: Named(training_checks, "repetition penalty", "penalised"),
    correction_without_the_penalty: Named(formula_checks, "correction"),
    groups_judged_by_their_totals: Named(batch_checks, "every token once"),
    runs.keys_behind_the_first_page_in_page_0: Named(long_checks, "long completions"),
    runs.rotations_repeat_after_64_positions: Named(long_checks, "long completions"),
    runs.neighbours_share_their_random_numbers: Named(training_checks, "draws"),
    runs.completions_share_random_numbers_at_even_positions: Named(training_checks, "draws"),
    runs.one_more_than_top_k: Named(training_checks, "cuts", "cut"),
    runs.newest_prompts_first: Named(training_checks, "order of prompts"),
    runs.critic_of_the_first_minibatch: Named(training_checks, "critic", "valued"),
    runs.critic_never_updated: Named(training_checks, "critic", "valued"),
    runs.cap_squared: Named(formula_checks, "correction", "corrected"),
    runs.partial_pages_not_copied: Named(long_checks, "long completions"),
    runs.stops_between_tokens_missed: Named(training_checks, "episodes"),
    runs.one_token_too_many: Named(training_checks, "episodes"),
    runs.one_token_too_few: Named(training_checks, "episodes"),
    runs.drawn_tokens_not_penalised: Named(engine_checks, "repetition penalty", "penalised"),
    runs.window_one_longer: Named(long_checks, "long completions", "windowed"),
    runs.recorded_at_temperature_1: Named(formula_checks, "sampling"),
    runs.every_device_is_the_first: Named(rollout_device_checks, "rollout devices"),
    runs.seeds_of_16_bits: Named(training_checks, "draws"),
    runs.one_stream_for_a_group: Named(training_checks, "draws"),
    runs.turns_share_a_seed: Named(training_checks, "draws", "talk"),
    runs.epochs_in_one_order: Named(formula_checks, "mixture of tasks"),
    runs.levels_evenly_drawn: Named(formula_checks, "mixture of tasks"),
    runs.last_groups_not_restored: Named(formula_checks, "mixture of tasks"),
    runs.unshuffled: Named(formula_checks, "mixture of tasks"),
    runs.staleness_ignored: Named(training_checks, "order of prompts"),
    runs.any_complete_prompts_taken: Named(formula_checks, "choice of prompts"),
    runs.ages_from_the_last_token: Named(formula_checks, "choice of prompts"),
    runs.one_step_staler: Named(training_checks, "order of prompts"),
    runs.solved_prompts_not_retired: Named(formula_checks, "mixture of tasks"),
    runs.seed_ignored: Named(training_checks, "draws"),
    runs.unfinished_prompts_dropped: Named(training_checks, "order of prompts"),
    runs.nothing_in_flight: Named(training_checks, "order of prompts"),
    runs.a_prompt_skipped_each_step: Named(training_checks, "order of prompts"),
    runs.every_segment_is_the_first: Named(batch_checks, "advantages"),
    runs.last_segments_alone: Named(batch_checks, "every token once"),
    runs.truncated_episodes_trained: Named(batch_checks, "prompts untrained"),
    runs.rewards_of_the_group_before: Named(batch_checks, "advantages"),
    runs.leave_one_out_by_the_whole_group: Named(batch_checks, "advantages"),
    runs.lambda_of_1: Named(batch_checks, "advantages"),
    runs.second_pass_in_reverse: Named(training_checks, "training"),
    runs.dual_clip_of_good_tokens_too: Named(formula_checks, "clip"),
    runs.k3_the_other_way: Named(formula_checks, "kl"),
    runs.kl_without_the_ratio: Named(formula_checks, "kl"),
    runs.mean_correction_of_sums: Named(formula_checks, "correction"),
    runs.threshold_of_good_sequences_too: Named(formula_checks, "drift"),
    runs.embeddings_not_decayed: Named(formula_checks, "optimizer adamw"),
    runs.no_bias_correction: Named(formula_checks, "optimizer adamw"),
    runs.moments_rounded_to_nearest: Named(formula_checks, "moments in bfloat16"),
    runs.moments_begin_anew_every_step: Named(training_checks, "new weights"),
    runs.warm_up_one_step_late: Named(formula_checks, "schedule"),
    runs.final_fraction_ignored: Named(formula_checks, "schedule"),
    runs.first_layer_stale: Named(training_checks, "hand-over"),
    runs.adapters_of_half_the_size_in_the_rollout: Named(training_checks, "hand-over", "lora"),
    runs.critic_waits_for_nobody: Named(training_checks, "optimizer steps", "valued"),
    runs.critic_s_rate_of_the_policy: Named(training_checks, "new weights of the critic", "valued"),
    runs.values_after_the_update: Named(training_checks, "critic", "valued"),
    runs.reference_moves_one_step_early: Named(training_checks, "moving reference", "moved"),
    runs.teacher_s_weight_squared: Named(batch_checks, "advantages"),
    runs.moments_not_restored: Named(training_checks, "resume"),
    runs.prompts_in_flight_not_restored: Named(training_checks, "resume"),
    runs.step_of_the_state_not_restored: Named(training_checks, "resume"),
    runs.evaluated_at_temperature_1: Named(training_checks, "evaluation"),
    runs.cut_answers_left_out_of_the_accuracy: Named(training_checks, "evaluation"),
    runs.training_questions_evaluated: Named(training_checks, "evaluation"),
    runs.evaluation_seeds_alike: Named(training_checks, "evaluation"),
    runs.reference_with_the_policy_s_adapters: Named(scoring_checks, "scoring models", "anchored"),
    runs.rounded_alike_in_every_update: Named(formula_checks, "moments in bfloat16"),
    runs.rounded_alike_in_all_arrays: Named(formula_checks, "moments in bfloat16"),
    runs.environments_of_all_prompts_alike: Named(training_checks, "episodes", "talk"),
    runs.every_conversation_in_its_own_environment: Named(training_checks, "episodes", "talk"),
    runs.half_of_the_answers_not_learned: Named(training_checks, "shares of right answers"),
    runs.rewards_charged_with_the_first_coefficient: Named(training_checks, "coefficients", "charged"),
    runs.rings_without_room_for_new_tokens: Named(long_checks, "long completions", "windowed"),
    runs.last_token_of_a_turn_called_cached: Named(long_checks, "later turns"),
    runs.length_before_stop: Named(formula_checks, "ends of answers"),
    runs.rates_of_missing_minibatches_not_passed_over: Named(training_checks, "other options"),
    runs.levels_of_prompts_in_flight_not_restored: Named(formula_checks, "mixture of tasks"),
    runs.questions_too_long_not_counted: Named(training_checks, "evaluation"),
    runs.weights_of_a_resumed_run_called_the_first: Named(training_checks, "resume"),
    runs.a_token_more_than_a_conversation_may_draw: Named(training_checks, "episodes", "talk"),
    runs.critic_learns_rewards_without_their_kl: Named(batch_checks, "advantages"),
    runs.groups_of_equal_rewards_not_replaced: Named(training_checks, "order of prompts", "refilled"),
}
README = Path(__file__).parents[2] / "README.md"
BUGS = {**QUICK, **SLOW}


def causes(updates: Updates, named: Named) -> list[str]:
    """The red checks of a stage, up to the one that is to name a bug and those it explains."""
    about = {"config": "run", "subject": "", "device": "", "seconds": 0.0}
    checks = []
    for check in named.stage(updates):
        checks.append(check)
        if named.stage is form_checks and check.name == named.check:
            break  # the other forms are many programs
    assert named.check in [check.name for check in checks], [check.name for check in checks]
    return [check.name for check in Certificate(checks=tuple(checks), skipped=(), **about).causes]


def assert_named(bug: Callable[[], Plant], named: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = with_new_engine(make_checked_subject(named.subject))
    monkeypatch.setattr(*bug())
    assert causes(Updates(subject), named) == [named.check]


@pytest.mark.parametrize(("bug", "named"), QUICK.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_bug_is_named(bug, named, monkeypatch):
    assert_named(bug, named, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("bug", "named"), SLOW.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_bug_is_named_by_its_check_and_explains_all_others_of_its_stage(bug, named, monkeypatch):
    assert_named(bug, named, monkeypatch)


def test_batches_formulas_and_draws_are_right():
    updates = Updates(make_checked_subject())
    checks = [check for stage in (batch_checks, formula_checks) for check in stage(updates)]
    assert [(check.name, check.difference) for check in checks if not check.ok] == []


def plain_mixture_check() -> Check:
    return mixture_check(make_subject(make_config()).rollouts.spec)


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (runs.rounded_alike_in_every_update, moments_check),
        (runs.rounded_alike_in_all_arrays, moments_check),
        (runs.ages_from_the_last_token, choice_check),
        (runs.length_before_stop, ends_check),
        (runs.levels_of_prompts_in_flight_not_restored, plain_mixture_check),
    ],
)
def test_a_check_without_a_model_is_red_with_its_bug_alone(bug, check, monkeypatch):
    assert check().ok
    monkeypatch.setattr(*bug())
    assert not check().ok


@pytest.mark.long
@pytest.mark.parametrize("kind", SUBJECTS)
def test_nothing_is_red_where_no_bug_is_planted(kind):
    updates = Updates(make_checked_subject(kind))
    for stage in {named.stage for named in BUGS.values()} - {
        form_checks,
        engine_checks,
    }:  # many programs; twice the same
        assert [(check.name, check.difference) for check in stage(updates) if not check.ok] == []


@pytest.mark.long
def test_a_model_of_fewer_positions_than_the_long_sequences_is_checked_too():
    subject = make_checked_subject("plain")
    few = dataclasses.replace(subject, decoder=dataclasses.replace(subject.decoder, max_positions=64))
    assert all(check.ok for check in long_checks(Updates(with_new_engine(few))))


def test_the_readme_says_how_many_bugs_are_planted():
    assert f"each of the {len(BUGS)} bugs that its tests plant" in README.read_text("utf-8")
