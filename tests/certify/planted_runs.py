"""Bugs of a run for `test_planted_bugs.py` to plant: hand-over, critic, reference, environments, evaluation, state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.algorithms import controllers, losses
from podium.certify import training, updates
from podium.certify.small_run import LONGEST_CONVERSATION
from podium.certify.subject import MAX_NEW_TOKENS
from podium.rollout import cache_layout, engine, scheduler
from podium.rollout.engine import RolloutEngine
from podium.rollout.sequence import Sequence
from podium.rollout.transcript import Transcript
from podium.sampling import feed, grades, sampler
from podium.sampling.conversations import carry, conversation_carry, conversations, environment_client, episode, turns
from podium.sampling.conversations.dialogue import Dialogue
from podium.tasks import grading, mixture, rewards
from podium.tasks.conversations import program
from podium.tasks.games import mastermind
from podium.tasks.math_answers import formula_values
from podium.train import evaluate, first_state, recorder, step, trainer
from podium.train import open as run_opening
from podium.train.batches import prepare
from podium.train.checkpoints import checkpoint
from podium.train.optimizer import offload

Plant = tuple[Any, str, Any]
"""Object, attribute, and what the bug puts there."""


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


# The critic.


def critic_of_the_first_minibatch() -> Plant:
    original = trainer.update_learner

    def planted(critic, state, batches, step, **options):
        return original(critic, state, [batches[0]] * len(batches), step, **options)

    return trainer, "update_learner", planted


def critic_never_updated() -> Plant:
    original = trainer.update_learner

    def planted(critic, state, batches, step, **options):
        kept = jax.tree.map(jnp.copy, state)
        _, stats = original(critic, state, batches, step, **options)
        return kept, stats

    return trainer, "update_learner", planted


def policy_learns_during_the_critic_s_warmup() -> Plant:
    """The policy learns while the critic warms up."""
    original = trainer.Trainer._update_policy

    def planted(own, *given):
        kept, own.learners = own.learners, {}
        try:
            return original(own, *given)
        finally:
            own.learners = kept

    return trainer.Trainer, "_update_policy", planted


def critic_s_rate_of_the_policy() -> Plant:
    original = first_state.make_run_optimizer

    def planted(optimizer, decoder):
        if decoder.scores != "none":
            rate = {"learning_rate": 2 * optimizer.settings.learning_rate}
            optimizer = dataclasses.replace(optimizer, settings=optimizer.settings.model_copy(update=rate))
        return original(optimizer, decoder)

    return first_state, "make_run_optimizer", planted


def values_after_the_update() -> Plant:
    """Returns are estimated with a critic that has moved since."""
    original = trainer.Trainer._scorers

    def planted(own, state):
        return tuple(
            dataclasses.replace(each, params={n: 1.01 * x for n, x in each.params.items()})
            if each.role == "critic"
            else each
            for each in original(own, state)
        )

    return trainer.Trainer, "_scorers", planted


# The hand-over.


def first_layer_stale() -> Plant:
    """The rollout keeps the first layer of the weights before."""
    original, given = engine.RolloutEngine.load, []

    def planted(own, params, version=0):
        given.append(jax.tree.map(jnp.copy, params))
        before = given[max(0, len(given) - 2)]
        mixed = {n: x.at[0].set(before[n][0]) if n.startswith("layers.") else x for n, x in params.items()}
        original(own, mixed, version)

    return engine.RolloutEngine, "load", planted


def adapters_of_half_the_size_in_the_rollout() -> Plant:
    original = engine.RolloutEngine.load

    def planted(own, params, version=0):
        original(own, {n: x / 2 if n.endswith("lora_b") else x for n, x in params.items()}, version)

    return engine.RolloutEngine, "load", planted


# The reference.


def reference_moves_one_step_early() -> Plant:
    original = trainer.Trainer.update

    def planted(own, state, batches, step, **options):
        kept = own.followers
        if step == 0:
            own.followers = {name: each.model_copy(update={"sync_every": 1}) for name, each in kept.items()}
        try:
            return original(own, state, batches, step, **options)
        finally:
            own.followers = kept

    return trainer.Trainer, "update", planted


def teacher_s_weight_squared() -> Plant:
    original = prepare.taught_advantages
    return prepare, "taught_advantages", lambda *given, weight: original(*given, weight=weight**2)


# Checkpoints.


def moments_not_restored() -> Plant:
    original = checkpoint.restore_state

    def planted(*given, **options):
        state, saved = original(*given, **options)
        gradient, *links, schedule = state.opt_state
        fresh = jax.tree.map(jnp.zeros_like, tuple(links))
        return dataclasses.replace(state, opt_state=(gradient, *fresh, schedule)), saved

    return checkpoint, "restore_state", planted


def prompts_in_flight_not_restored() -> Plant:
    original = carry.Position.read.__func__
    read = lambda cls, record, feed: dataclasses.replace(original(cls, record, feed), pending=())  # noqa: E731
    return carry.Position, "read", classmethod(read)


def step_of_the_state_not_restored() -> Plant:
    original = checkpoint.restore_state

    def planted(*given, **options):
        state, saved = original(*given, **options)
        return dataclasses.replace(state, step=jnp.zeros_like(state.step)), saved

    return checkpoint, "restore_state", planted


# Evaluation.


def evaluated_at_temperature_1() -> Plant:
    original = evaluate.evaluation_sampling

    def planted(*given, greedy):
        made = original(*given, greedy=greedy)
        return made if greedy else dataclasses.replace(made, temperature=1.0)

    return evaluate, "evaluation_sampling", planted


def cut_answers_left_out_of_the_accuracy() -> Plant:
    original = evaluate.task_scores

    def planted(greedy, sampled, *, questions):
        made = original(greedy, sampled, questions=questions)
        return dataclasses.replace(made, accuracy=made.completed_accuracy)

    return evaluate, "task_scores", planted


def training_questions_evaluated() -> Plant:
    original = mixture.TaskMixture.eval_prompts

    def planted(own, limit=None):
        ((label, _),) = original(own, limit).items()
        return {label: own.train_prompts()[label][:limit]}

    return mixture.TaskMixture, "eval_prompts", planted


def evaluation_seeds_alike() -> Plant:
    original = evaluate.request_seed
    return evaluate, "request_seed", lambda seed, purpose, index: original(seed, purpose, 0)


# Environments, the next prompts, and a KL in rewards.


def environments_of_all_prompts_alike() -> Plant:
    """The seed of an environment does not depend on its prompt."""
    original = environment_client.request_seed
    return environment_client, "request_seed", lambda seed, purpose, index: original(0, purpose, index)


def every_conversation_in_its_own_environment() -> Plant:
    """The environments of a prompt's conversations have different seeds, where they are to share one."""
    original = environment_client.EnvironmentClient.open

    def planted(own, live, prompt, *, here):
        kept, own._own_seeds = own._own_seeds, True
        original(own, live, prompt, here=here)
        own._own_seeds = kept

    return environment_client.EnvironmentClient, "open", planted


def half_of_the_answers_not_learned() -> Plant:
    """Curricula and retirement are told of the first half of a step's prompts alone."""
    original = sampler.Sampler._learn
    return sampler.Sampler, "_learn", lambda own, groups: original(own, groups[: len(groups) // 2])


def rewards_charged_with_the_first_coefficient() -> Plant:
    """The KL in rewards keeps the weight that it had in the first step."""
    original, first = trainer.prepare_step, []

    def planted(groups, recipe, *others, **options):
        first.append(recipe.kl_coef)
        return original(groups, dataclasses.replace(recipe, kl_coef=first[0]), *others, **options)

    return trainer, "prepare_step", planted


def one_token_too_many() -> Plant:
    """An answer that no stop token ends has a token more than it may."""
    return Sequence, "limit", property(lambda own: len(own.context) + own.sampling.max_new_tokens + 1)


def reference_with_the_policy_s_adapters() -> Plant:
    """The frozen base model scores with the adapters that are trained."""
    original = updates.with_scores

    def planted(batch, scorers, policy):
        worn = [
            each if each.params is None else dataclasses.replace(each, params={**policy, **each.params})
            for each in scorers
        ]
        return original(batch, worn, policy)

    return updates, "with_scores", planted


def ages_from_the_last_token() -> Plant:
    """A prompt is as old as the weights that drew the last token of one of its answers."""

    def planted(own):
        return min((int(each.versions[-1]) for each in own.completions if len(each.versions)), default=None)

    return carry.Pending, "first_version", property(planted)


# Sizes, ends, and what is left out.


def rings_without_room_for_new_tokens() -> Plant:
    """The ring of pages of a windowed layer holds a window, and not what enters at once beside it."""
    return cache_layout, "ring_pages", lambda window, rollout: window and -(-window // rollout.page_tokens)


def last_token_of_a_turn_called_cached() -> Plant:
    """What a turn ends with, whose keys the next decode step would have written, is not written by the next turn."""
    original = scheduler.Scheduler.advance

    def planted(own, sequence, *, most):
        original(own, sequence, most=most)
        sequence.filled = sequence.length

    return scheduler.Scheduler, "advance", planted


def length_before_stop() -> Plant:
    """A stop token in the last place is taken for a cut."""
    original = Sequence.append

    def planted(own, *given, **options):
        original(own, *given, **options)
        if len(own.drawn) >= own.sampling.max_new_tokens and own.drawn[-1] in (own.stops or ()):
            own.finish_reason = "length"

    return Sequence, "append", planted


def rates_of_missing_minibatches_not_passed_over() -> Plant:
    """A step with fewer minibatches uses the first learning rates of its share, not the last ones."""
    original = trainer.at_schedule_step
    made = trainer.Trainer._update_policy

    def planted(own, state, batches, step, coefs):
        late = own.recipe.updates_per_batch * (own.recipe.minibatches - len(batches))
        trainer.at_schedule_step = lambda state, position: original(state, max(0, position - late))
        try:
            return made(own, state, batches, step, coefs)
        finally:
            trainer.at_schedule_step = original

    return trainer.Trainer, "_update_policy", planted


def levels_of_prompts_in_flight_not_restored() -> Plant:
    """Where a run is resumed, a prompt in flight is one of the level that is due then."""
    original = feed.Feed.at
    return feed.Feed, "at", lambda own, number, level=None: original(own, number)


def answers_cut_by_other_limits_trained() -> Plant:
    """`mask_truncated` leaves out only what the maximum length cut."""
    original = prepare.group_samples

    def planted(group, index, recipe):
        ended = [
            each if each.finish_reason == "length" else dataclasses.replace(each, finish_reason="stop")
            for each in group.transcripts
        ]
        return original(dataclasses.replace(group, transcripts=ended), index, recipe)

    return prepare, "group_samples", planted


def questions_too_long_not_counted() -> Plant:
    """An accuracy is that of the questions that were asked."""
    original = evaluate.task_scores

    def planted(greedy, sampled, *, questions):
        made = original(greedy, sampled, questions=questions)
        return dataclasses.replace(made, accuracy=made.accuracy * questions / len(greedy or sampled))

    return evaluate, "task_scores", planted


def weights_of_a_resumed_run_called_the_first() -> Plant:
    """A resumed run counts the versions of its weights from 0."""
    original = run_opening.go_on_sampling

    def planted(*given, done):
        original(*given, done=0)

    return training, "go_on_sampling", planted


def groups_of_equal_rewards_not_replaced() -> Plant:
    """Refills have no effect."""
    return sampler.Refill, "again", lambda own: False


def a_token_more_than_a_conversation_may_draw() -> Plant:
    original = turns.Turns._most

    def planted(own, live, tokens):
        kept = own.limits
        own.limits = kept.model_copy(update={"max_drawn_tokens": kept.max_drawn_tokens + 1})
        try:
            return original(own, live, tokens)
        finally:
            own.limits = kept

    return turns.Turns, "_most", planted


def critic_learns_rewards_without_their_kl() -> Plant:
    original = prepare._value_targets
    return prepare, "_value_targets", lambda packed, recipe, scored, kl: original(packed, recipe, scored, None)


# Conversations, answers and rewards.


def messages_in_reverse() -> Plant:
    """A reply is recorded before what it answers."""

    def planted(own, messages):
        said = (*messages, *own.transcript.messages)
        return dataclasses.replace(own, transcript=dataclasses.replace(own.transcript, messages=said))

    return episode.Episode, "saying", planted


def a_call_more_than_allowed() -> Plant:
    original = episode.Episode.calls.fget
    return episode.Episode, "calls", property(lambda own: original(own) - 1)


def long_replies_not_cut() -> Plant:
    return turns.Turns, "fitting", lambda own, dialogue, messages: list(messages)


def programs_unpaid_where_a_limit_ended_them() -> Plant:
    original = program.Led.grade
    return program.Led, "grade", lambda own: original(own) if own._ended else 0.0


def logarithms_upside_down() -> Plant:
    original = formula_values._logarithm
    return formula_values, "_logarithm", lambda value, base: original(base, value)


def digits_marked_twice() -> Plant:
    """A guessed digit is marked as often as it is guessed."""
    original = mastermind.marks

    def planted(code, guess):
        found = original(code, guess)
        return found._replace(elsewhere=sum(digit in code for digit in guess) - found.placed)

    return mastermind, "marks", planted


def repetition_rewarded() -> Plant:
    known = rewards.TEXT_REWARDS
    return rewards, "TEXT_REWARDS", {**known, "repetition": lambda *given: -known["repetition"](*given)}


def logprobs_after_the_penalty_saved() -> Plant:
    """A checkpoint has the log-probabilities that tokens were drawn with, in place of the policy's."""
    original = carry.completion_record

    def planted(completion):
        return original(dataclasses.replace(completion, full_logprobs=completion.sampled_logprobs))

    return carry, "completion_record", planted


def staleness_reported_one_too_high() -> Plant:
    original = recorder.carry_stats

    def planted(*given):
        made = original(*given)
        return made and dataclasses.replace(made, staleness=made.staleness + 1)

    return recorder, "carry_stats", planted
