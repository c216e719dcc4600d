"""Bugs of what a run reads: rows of data, files of weights, checkpoints; and of what it evaluates."""

import dataclasses

import jax
from planted_runs import Plant

from podium.config.critic_section import CriticConfig
from podium.models import decoder
from podium.models.files import gguf, names, peft
from podium.observe import stats
from podium.run import resolve, roles
from podium.sampling import demonstrations, groups
from podium.tasks import known_sets, mixture, preferences, question_files
from podium.tasks.code import code_blocks
from podium.tasks.games.calculator_task import CalculatorTask
from podium.train import learner
from podium.train.batches import prepare
from podium.train.checkpoints import step_files

# Rows of data.


def sides_of_conversations_swapped() -> Plant:
    """In pairs without a prompt of their own, the rejected answer is called the chosen one."""
    original = preferences._split

    def planted(location, row):
        before, answers = original(location, row)
        return before, answers[::-1]

    return preferences, "_split", planted


def earlier_messages_dropped() -> Plant:
    """Of a conversation that is to be continued, only the last message is asked."""
    original = question_files.question_of

    def planted(what, value):
        question, messages = original(what, value)
        return question, messages and messages[-1:]

    return question_files, "question_of", planted


def whole_solutions_as_references() -> Plant:
    return known_sets, "boxed", lambda answer: answer.strip()


# Files of weights.


def keys_and_values_swapped_in_files() -> Plant:
    known = names.NAMES
    swapped = {"layers.k": known["layers.v"], "layers.v": known["layers.k"]}
    return names, "NAMES", {**known, **swapped}


def pairs_of_gguf_not_turned() -> Plant:
    return gguf, "_halves_from_pairs", lambda rows, head_dim: rows


def adapters_of_the_layer_behind() -> Plant:
    original = peft._Target.tensor

    def planted(target, index, part):
        return original(target, ((index[0] + 1) % target.stacked[0], *index[1:]), part)

    return peft._Target, "tensor", planted


# What a run goes on from, and what it evaluates.


def newest_checkpoint_passed_over() -> Plant:
    original = step_files.saved_steps
    return step_files, "saved_steps", lambda folder: original(folder)[:-1]


def all_questions_evaluated() -> Plant:
    """`eval.questions` has no effect."""
    original = mixture.LevelPrompts.asked_of
    return mixture.LevelPrompts, "asked_of", lambda own, level, split, limit=None: original(own, level, split)


def first_level_evaluated() -> Plant:
    original = mixture.TaskMixture.eval_prompts

    def planted(own, limit=None):
        first = {label: max(each for each in own._first if each <= level) for label, level in own._evaluated.items()}
        own._evaluated = first
        return original(own, limit)

    return mixture.TaskMixture, "eval_prompts", planted


def failures_called_wrong_answers() -> Plant:
    """A conversation that failed counts as a wrong answer in the share of right ones."""

    def planted(group):
        found = [0.0 if each.failed else each.parts["correct"] for each in group.rewards]
        return None if all(each.failed for each in group.rewards) else min(1.0, max(0.0, sum(found) / len(found)))

    return groups.Group, "correct", property(planted)


def own_system_prompts_ignored() -> Plant:
    """A task's `system_prompt` in the config has no effect."""
    original = mixture.LevelPrompts.__init__

    def planted(own, levels, labels, selection):
        original(own, levels, labels, selection)
        own._system_prompts = [task.system_prompt for task in own._tasks]

    return mixture.LevelPrompts, "__init__", planted


# Demonstrations that are mixed in.


def demonstrations_of_three_times_their_weight() -> Plant:
    """The loss of demonstrations has three times its weight."""
    original = prepare._demonstrated

    def planted(groups, recipe, sizes):
        found = original(groups, recipe, sizes)
        return [
            dataclasses.replace(each, likelihoods=3 * each.likelihoods)
            for each in found
            if each.likelihoods is not None
        ]

    return prepare, "_demonstrated", planted


def the_first_demonstrations_again_and_again() -> Plant:
    original = demonstrations.Demonstrations.next

    def planted(own, prompts):
        if own.per_step:
            own.feed.tasks.cursor = 0
        return original(own, prompts)

    return demonstrations.Demonstrations, "next", planted


# Numbers that are reported.


def gap_of_the_last_update() -> Plant:
    original = stats.UpdateStats.then

    def planted(own, later):
        return dataclasses.replace(original(own, later), logprob_gap=later.logprob_gap)

    return stats.UpdateStats, "then", planted


def sizes_of_advantages_reported() -> Plant:
    """Advantages are reported without their signs."""
    original = prepare._batch_stats

    def planted(*given):
        found = original(*given)
        return dataclasses.replace(found, advantages=abs(found.advantages))

    return prepare, "_batch_stats", planted


# Code.


def first_block_of_code_graded() -> Plant:
    original = code_blocks._blocks
    return code_blocks, "_blocks", lambda answer: list(original(answer))[:1]


# Settings and shapes of updates.


def temperature_of_at_least_1() -> Plant:
    original = resolve.UpdateSpec
    return resolve, "UpdateSpec", lambda *, temperature, **given: original(temperature=max(temperature, 1.0), **given)


def last_rows_of_a_layer_without_gradient() -> Plant:
    """Where a layer computes some rows at a time, the last of them have no gradient."""
    original = decoder._in_groups

    def planted(*given):
        x, auxiliary = original(*given)
        return x.at[-1].set(jax.lax.stop_gradient(x[-1])), auxiliary

    return decoder, "_in_groups", planted


def critic_s_rates_counted_by_its_updates() -> Plant:
    """A critic passes no learning rates over in a step that lacks a minibatch."""

    def planted(state, position):
        *rules, schedule = state.opt_state
        return dataclasses.replace(state, opt_state=(*rules, schedule._replace(count=schedule.count)))

    return learner, "at_schedule_step", planted


def critic_at_the_policy_s_rate() -> Plant:
    original = roles._critic

    def planted(config, recipe, decoder):
        rate = {"learning_rate": config.train.optimizer.learning_rate}
        critic = (config.critic or CriticConfig()).model_copy(update=rate)
        return original(config.model_copy(update={"critic": critic}), recipe, decoder)

    return roles, "_critic", planted


def evaluated_questions_trained() -> Plant:
    """The questions of the evaluation are among those of the training."""

    original = CalculatorTask.prompts
    return CalculatorTask, "prompts", lambda task, split: [*original(task, "eval"), *original(task, split)][: task.size]
