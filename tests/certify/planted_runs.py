"""Bugs of engine, sampler, order of prompts, critic, evaluation and state, for `test_planted_bugs.py` to plant."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podium.algorithms import advantages, losses, recipes
from podium.certify import batch_variants, formulas, mixtures, training, updates
from podium.models import decoder
from podium.rollout import cache, cache_layout, device, engine, programs, sampling, scheduler
from podium.rollout.sequence import Sequence
from podium.rollout.transcript import Transcript
from podium.sampling import feed, partial_rollouts, sampler
from podium.sampling.conversations import carry, environment_client, turns
from podium.tasks import curriculum, mixture
from podium.train import evaluate, first_state, trainer
from podium.train import open as run_opening
from podium.train.batches import prepare
from podium.train.checkpoints import checkpoint
from podium.train.optimizer import transforms

Plant = tuple[Any, str, Any]
"""Object, attribute, and what the bug puts there."""


# The engine's cache and positions.


def keys_behind_the_first_page_in_page_0() -> Plant:
    """What decoding appends behind a sequence's first page is written to page 0."""
    original = cache._append

    def planted(kept, layer, spans, *others):
        tables = jnp.concatenate([spans.tables[:, :1], 0 * spans.tables[:, 1:]], axis=1)
        return original(kept, layer, spans._replace(tables=tables), *others)

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

    return partial_rollouts, "chosen", planted


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


# Formulas.


def cap_squared() -> Plant:
    """A truncated correction is capped at the square of its bound."""
    original = losses.correction_weights

    def planted(recipe, *given):
        squared = dataclasses.replace(recipe, correction_high=recipe.correction_high**2)
        return original(squared if recipe.correction == "truncate" else recipe, *given)

    return losses, "correction_weights", planted


# More of the engine.


def partial_pages_not_copied() -> Plant:
    """A prompt's last page, which is not full, is not copied to its completions."""
    return device.Device, "copy", lambda own, copies: None


def stops_between_tokens_missed() -> Plant:
    """A stop string is looked for within the tokens of one decode call."""
    original = Sequence._stop_at_string

    def planted(own, before, tokenizer):
        whole, own.drawn = own.drawn, own.drawn[before:]
        names = ("logprobs", "full_logprobs", "versions")
        kept = {name: getattr(own, name) for name in names}
        for name in names:
            setattr(own, name, kept[name][before:])
        original(own, 0, tokenizer)
        own.drawn = whole[:before] + own.drawn
        for name in names:
            setattr(own, name, kept[name][:before] + getattr(own, name))

    return Sequence, "_stop_at_string", planted


def one_token_too_few() -> Plant:
    """An answer that no stop token ends has a token less than it may."""
    original = engine.sequences_of

    def planted(request, number, **options):
        shorter = dataclasses.replace(request.sampling, max_new_tokens=max(1, request.sampling.max_new_tokens - 1))
        return original(dataclasses.replace(request, sampling=shorter), number, **options)

    return engine, "sequences_of", planted


def drawn_tokens_not_penalised() -> Plant:
    """A token that is drawn while its sequence keeps its slot is not penalised."""
    return programs, "with_tokens", lambda seen, tokens, where: seen


def window_one_longer() -> Plant:
    original = cache.seen_in_sequence
    return cache, "seen_in_sequence", lambda last, at, window: original(last, at, window and window + 1)


def recorded_at_temperature_1() -> Plant:
    """Tokens are drawn at the temperature, and recorded as if it were 1."""
    original = sampling.sample

    def planted(logits, rows, **others):
        made = original(logits, rows, **others)
        plain = jax.nn.log_softmax(logits, axis=1)
        own = jnp.take_along_axis(plain, made.tokens[:, None], axis=1)[:, 0]
        return made._replace(logprobs=own, full_logprobs=own)

    return sampling, "sample", planted


def every_device_is_the_first() -> Plant:
    """Devices that share the vocabulary all take their part for the first one."""
    return sampling._Shards, "index", lambda own: 0


def seeds_of_16_bits() -> Plant:
    original = device.fill_row
    return (
        device,
        "fill_row",
        lambda rows, row, settings, *, seed, completion: original(
            rows, row, settings, seed=seed % 2**16, completion=completion
        ),
    )


def one_stream_for_a_group() -> Plant:
    original = device.fill_row
    return (
        device,
        "fill_row",
        lambda rows, row, settings, *, seed, completion: original(rows, row, settings, seed=seed, completion=0),
    )


def turns_share_a_seed() -> Plant:
    return turns.Turns, "seed", lambda own, live: own.prompts[live.index].seed


# More of the order of prompts.


def epochs_in_one_order() -> Plant:
    original = mixture._hash
    return (
        mixture,
        "_hash",
        lambda seed, purpose, *others: original(seed, purpose, *((others[0], 0) if purpose == "order" else others)),
    )


def unshuffled() -> Plant:
    def planted(own, cursor, level=None):
        prompts = own.data.read(0, "train")
        return own.data.asked(0, prompts[cursor % len(prompts)])

    return mixture.TaskMixture, "prompt_at", planted


def levels_evenly_drawn() -> Plant:
    """A curriculum has no effect."""
    return curriculum.Curriculum, "chances", lambda own: [1 / len(own._last)] * len(own._last)


def last_groups_not_restored() -> Plant:
    """A curriculum begins again where a run is resumed."""
    original = mixture.TaskMixture.means
    return mixture.TaskMixture, "means", property(original.fget, lambda own, means: None)


def solved_prompts_not_retired() -> Plant:
    return mixture.TaskMixture, "is_retired", lambda own, prompt: False


def seed_ignored() -> Plant:
    """Completions of every run are drawn as with seed 0."""
    original = feed.request_seed
    return feed, "request_seed", lambda seed, purpose, index: original(0, purpose, index)


def staleness_ignored() -> Plant:
    """The oldest complete prompts are taken, and none is waited for."""
    original = partial_rollouts.chosen

    def planted(first, complete, count, *, per_step, version, max_staleness):
        return original(first, complete, count, per_step=per_step, version=version, max_staleness=10**6)

    return partial_rollouts, "chosen", planted


def one_step_staler() -> Plant:
    original = partial_rollouts.chosen

    def planted(first, complete, count, *, per_step, version, max_staleness):
        return original(first, complete, count, per_step=per_step, version=version, max_staleness=max_staleness + 1)

    return partial_rollouts, "chosen", planted


def any_complete_prompts_taken() -> Plant:
    """The oldest complete prompts are taken, and none is waited for, where choices are checked by themselves."""
    _, _, planted = staleness_ignored()
    return mixtures, "chosen", planted


def unfinished_prompts_dropped() -> Plant:
    """What a step leaves is not gone on with."""
    original = sampler.Sampler.answer

    def planted(own, prompts, settings=None):
        made = original(own, prompts, settings)
        own.partial.pending = ()
        return made

    return sampler.Sampler, "answer", planted


def nothing_in_flight() -> Plant:
    original = sampler.Sampler.answer

    def planted(own, prompts, settings=None):
        training = dataclasses.replace(own.spec.training, in_flight=0)
        kept, own.spec = own.spec, dataclasses.replace(own.spec, training=training)
        try:
            return original(own, prompts, settings)
        finally:
            own.spec = kept

    return sampler.Sampler, "answer", planted


def a_prompt_skipped_each_step() -> Plant:
    original = feed.Feed.next

    def planted(own, count):
        own.tasks.cursor += 1
        return original(own, count)

    return feed.Feed, "next", planted


# More of what a step prepares.


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


# More formulas.


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


# More of the optimizer.


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


# More of the hand-over.


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


# More of the critic.


def critic_waits_for_nobody() -> Plant:
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


# More of the reference.


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


# Conversations of several segments.


def every_segment_is_the_first() -> Plant:
    """What is known of a later segment's tokens is looked up where the first one's are."""
    original = prepare.transcript_sample
    return prepare, "transcript_sample", lambda *given, start=0, **options: original(*given, start=0, **options)


def last_segments_alone() -> Plant:
    """A conversation is trained from its last prompt on."""
    original = Transcript.segments.fget
    return Transcript, "segments", property(lambda own: original(own)[-1:])


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
