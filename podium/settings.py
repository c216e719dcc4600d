"""Loads a run's settings and checks them against Podium's recipes, rewards, layouts, tasks, and a model on disk.

`podium.config` checks the settings among themselves; this module adds the rules of other parts. It downloads nothing
and imports no jax, so every error in a config is reported before anything slow starts.
"""

import functools
import math
import os
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from podium.algorithms.advantages import no_advantages
from podium.algorithms.options import conflicts
from podium.algorithms.recipes import LOSSES, RECIPES, Recipe, find_recipe
from podium.config.document import Plain
from podium.config.errors import ConfigError, Contradiction, nearest, not_in
from podium.config.imports import imported, is_path
from podium.config.load import Loaded, Override, load
from podium.config.optimizer import OPTIMIZER_COPIES
from podium.config.schema import ASSUMED_PROMPT_TOKENS, Config, RolloutConfig, TaskConfig
from podium.config.sizes import too_long, too_long_to_score
from podium.config.teacher import template_names
from podium.files import as_path
from podium.models.architecture import ModelError
from podium.models.layouts import AUTO
from podium.models.params import ROLLOUT_LAYOUTS
from podium.models.source import on_disk, read_architecture, read_reward_model, read_scorer, resolve
from podium.observe.own_config import at_home, check_place, continues, with_writers
from podium.observe.run_dir import Fork, recipe_of
from podium.run.resolve import resolve_algorithm, resolve_recipe
from podium.run.sizes import prompts_in_flight
from podium.tasks.curriculum import leveled
from podium.tasks.environment_forms import conversing
from podium.tasks.functions import RewardFunction
from podium.tasks.registry import make_task
from podium.tasks.rewards import BUILT_IN, GRADED_REWARDS, label

_LAYOUTS: Mapping[str, object] = ChainMap[str, object](
    cast(dict[str, object], ROLLOUT_LAYOUTS), {AUTO: "chosen by `podium.models.layouts`"}
)
NAMES: Mapping[str, Mapping[str, object]] = {
    "algorithm.recipe": RECIPES,
    "algorithm.loss": dict.fromkeys(LOSSES),
    "rollout.layout": _LAYOUTS,
    "train.optimizer.name": OPTIMIZER_COPIES,
}
"""Settings whose values are entries of a table; a new entry of a table is a new allowed value here."""
IMPORTABLE: Mapping[str, str] = {
    "algorithm.recipe": "a recipe",
    "algorithm.loss": "a loss",
    "train.optimizer.name": "an optimizer",
}
"""Those settings that also accept the import path of a user's object, with a description of the object."""


def load_settings(
    files: Sequence[str | Path],
    overrides: Sequence[str | Override],
    environ: Mapping[str, str] = os.environ,
    *,
    elsewhere: bool = False,
) -> Loaded:
    """Load settings as `podium.config.load.load` does, and check them against tasks and model without a network.

    A run's own config leads to the folder that holds it, unless the run is `elsewhere`, on another machine. Raises
    ConfigError with all problems.
    """
    rules = (*RULES, _tasks, _models, _reward_models)
    if elsewhere:
        return load(files, overrides, environ, rules=rules)
    paths = [Path(file) if isinstance(file, str) else file for file in files]
    try:
        loaded = load(paths, overrides, environ, rules=rules, settled=at_home)
    except ConfigError as error:
        if any("unknown key" in problem.message for problem in error.problems):
            raise with_writers(error, paths) from None
        raise
    check_place(paths, loaded)
    return loaded


def named_after(loaded: Loaded, files: Sequence[Path], recipe: str) -> Config:
    """The settings of `podium sft` and `podium dpo`: the run has the config's name with `-sft` or `-dpo`.

    A run of that recipe keeps its name if its own config is among the files: it is continued.
    """
    name = loaded.config.name or ""
    home = as_path(loaded.config.runs_dir) / name
    if continues(files, loaded) and recipe_of(Fork(str(home), None)) == recipe:
        return loaded.config
    return loaded.config.model_copy(update={"name": f"{name.removesuffix(f'-{recipe}')}-{recipe}"})


def preference_overrides(files: Sequence[str | Path], overrides: Sequence[str | Override]) -> list[Override]:
    """The settings of `podium dpo`: the recipe, and the group size of the loss that the config sets.

    Raises ConfigError for files that cannot be read.
    """
    recipe = Override("algorithm.recipe", "dpo", "podium dpo")
    chosen = load(files, [recipe, *overrides], os.environ).config.algorithm.loss
    labels = chosen is not None and chosen in LOSSES and LOSSES[chosen].labels
    return [recipe, Override("group_size", 1 if labels else 2, "podium dpo")]


def evaluation_overrides(
    target: str, run: object | None, tasks: Sequence[Mapping[str, Plain]], options: Mapping[str, Plain]
) -> list[Override]:
    """Convert the options of `podium eval` to settings: tasks graded for correctness, all questions unless limited."""
    given = [Override(key, value, f"--{key.removeprefix('eval.')}") for key, value in options.items()]
    return [
        *([] if run else [Override("model", target, f"argument {target}"), *_fitting_lengths(target)]),
        Override("tasks", tasks, f"--task {tasks[0]['name']}"),
        Override("grading.overlong_buffer_tokens", 0, "podium eval"),
        *(override for override in given if override.value is not None or override.key == "eval.questions"),
    ]


def _fitting_lengths(model: str) -> list[Override]:
    """Shorter prompt and completion limits, if the model is on disk and its context is shorter than the defaults need.

    Empty if the default limits fit, or if the model is not on disk.
    """
    prompt, new = ASSUMED_PROMPT_TOKENS, RolloutConfig.model_fields["max_new_tokens"].default
    try:
        folder = on_disk(model)
        longest = read_architecture(resolve(folder)).max_positions if folder is not None else prompt + new
    except ModelError:
        return []  # `_models` says so
    if prompt + new <= longest:
        return []
    prompt = min(prompt, longest // 2)
    origin = f"podium eval: the model has {longest} positions"
    lengths = {"rollout.max_prompt_tokens": prompt, "rollout.max_new_tokens": longest - prompt}
    return [Override(key, value, origin) for key, value in lengths.items()]


def _names(config: Config) -> Iterator[Contradiction]:
    for key, table in NAMES.items():
        section, _, name = key.rpartition(".")
        part = functools.reduce(getattr, section.split("."), config)
        value = getattr(part, name)
        if value is None or value in table:
            continue
        if key in IMPORTABLE and is_path(value):
            try:
                imported(value, what=IMPORTABLE[key])
            except ValueError as error:
                yield Contradiction((key,), str(error))
        else:
            yield Contradiction((key,), not_in(table, value), about=type(part).model_fields[name].description)


def _algorithm(config: Config) -> Iterator[Contradiction]:
    """Report the recipe's conflicts with other settings."""
    try:
        find_recipe(config.algorithm.recipe)
    except ValueError as error:
        if is_path(config.algorithm.recipe):
            yield Contradiction(("algorithm.recipe",), str(error))
        return  # `_names` has reported it
    recipe = find_recipe(config.algorithm.recipe)
    if recipe.demonstrations and not recipe.preferences and config.group_size != 1:
        rule = (
            f"recipe {config.algorithm.recipe} has one completion of each prompt, the data's, got {config.group_size}"
        )
        yield Contradiction(("group_size", "algorithm.recipe"), f"{rule}; set group_size to 1")
    scope = ("algorithm", "group_size", "prompts_per_step")
    settings = [f"algorithm.{name}" for name in type(config.algorithm).model_fields] + list(scope[1:])
    algorithm = resolve_algorithm(config)
    found = conflicts(algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
    for key, message in found:
        mentioned = set(re.findall(r"\w+", message))
        named = [other for other in settings if other != key and other.rpartition(".")[2] in mentioned]
        yield Contradiction((key, *named), message, scope)


def _recipe(config: Config) -> Recipe | None:
    """The recipe with the config's options; None if they conflict, which `_algorithm` reports."""
    try:
        return resolve_recipe(config)
    except ValueError:
        return None


def _pairs(config: Config) -> Iterator[Contradiction]:
    """Report batches in which the two completions of a pair would not share a row."""
    recipe = _recipe(config)
    if recipe is None or recipe.data_form != "pair":
        return
    if config.train.packing != "shared_prompts":
        rule = f"{config.train.packing} puts the completions of a pair in different rows; set it to shared_prompts"
        yield Contradiction(("train.packing", "algorithm.recipe"), rule)
    whole = (config.rollout.max_prompt_tokens or 1) + 2 * config.rollout.max_new_tokens
    if config.train.row_tokens is not None and config.train.row_tokens < whole:
        rule = f"{config.train.row_tokens} is less than a prompt with both completions, {whole}"
        yield Contradiction(("train.row_tokens", "algorithm.recipe"), f"{rule}; set that or more, or leave it unset")


def _teacher(config: Config) -> Iterator[Contradiction]:
    """Report what a teacher cannot be combined with, and a recipe that has nothing to learn from."""
    recipe = _recipe(config)
    if recipe is None:
        return
    name = config.algorithm.recipe
    if config.teacher is None:
        if recipe.advantage.func is no_advantages:
            rule = f"recipe {name} learns from a teacher alone, and there is none"
            yield Contradiction(("algorithm.recipe", "teacher"), f"{rule}; set teacher.model")
        return
    if recipe.demonstrations:
        rule = f"recipe {name} trains on completions of the data, and a teacher is asked about the policy's own"
        yield Contradiction(("teacher", "algorithm.recipe"), f"{rule}; set algorithm.recipe to distill or grpo")
    if recipe.loss in ("gspo", "gmpo") and config.teacher.loss == "sampled":
        rule = f"{recipe.loss} has one ratio for a completion, and a teacher gives each token an advantage of its own"
        yield Contradiction(("teacher", "algorithm.loss", "algorithm.recipe"), f"{rule}; set algorithm.loss to clipped")
    if recipe.zero_variance != "keep":
        rule = f"completions of equal reward still learn from a teacher, and {recipe.zero_variance} leaves them out"
        yield Contradiction(("algorithm.zero_variance", "teacher"), f"{rule}; set algorithm.zero_variance to keep")
    for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if getattr(config.rollout, key) != off:
            rule = "tokens drawn from a part of the vocabulary do not estimate the distance to a teacher over all of it"
            yield Contradiction((f"rollout.{key}", "teacher"), f"{rule}; set it to {off:g}")
    if config.rollout.repetition_penalty != 1:
        rule = "tokens drawn with a penalty do not estimate the distance of the policy, which has none, to a teacher"
        yield Contradiction(("rollout.repetition_penalty", "teacher"), f"{rule}; set it to 1")


def _critic(config: Config) -> Iterator[Contradiction]:
    """Report a critic that the recipe does not use."""
    recipe = _recipe(config)
    if recipe is None or config.critic is None:
        return
    if not recipe.learns_values:
        rule = f"recipe {config.algorithm.recipe} computes advantages without a critic, so nothing reads it"
        yield Contradiction(("critic", "algorithm.recipe"), f"{rule}; set algorithm.recipe to ppo, or leave critic out")
    elif config.critic.warmup_steps >= config.steps:
        rule = f"in {config.critic.warmup_steps} of {config.steps} steps the policy is not updated"
        yield Contradiction(("critic.warmup_steps", "steps"), f"{rule}; set it below steps")


def _reference(config: Config) -> Iterator[Contradiction]:
    """Report a moving reference that nothing compares with, or that is LoRA's frozen base."""
    recipe = _recipe(config)
    if recipe is None or config.reference is None:
        return
    if not recipe.needs_reference:
        rule = f"recipe {config.algorithm.recipe} compares with no reference, so nothing reads it"
        yield Contradiction(("reference", "algorithm.kl"), f"{rule}; set algorithm.kl and kl_coef, or leave it out")
    if config.lora is not None:
        rule = "with adapters the reference is the frozen base, which never moves"
        yield Contradiction(("reference", "lora"), f"{rule}; leave reference out, or train all weights")
    if config.reference.sync_every > config.steps:
        rule = f"{config.reference.sync_every} is more than the run's {config.steps} steps, so it would never move"
        yield Contradiction(("reference.sync_every", "steps"), f"{rule}; lower it, or leave reference out")


def _teacher_loss(config: Config) -> Iterator[Contradiction]:
    """Report options that a way to learn from a teacher does not read, or cannot be combined with."""
    if config.teacher is None:
        return
    if config.teacher.loss == "full" and config.train.head == "fused":
        rule = "fused computes no logits to compare with a teacher's"
        yield Contradiction(
            ("train.head", "teacher.loss"), f"{rule}; set train.head to auto, or teacher.loss to sampled"
        )
    if config.teacher.loss == "sampled" and config.teacher.reverse != 1:
        rule = f"{config.teacher.reverse:g}, and tokens that the policy draws estimate KL(policy || teacher) alone"
        yield Contradiction(("teacher.reverse", "teacher.loss"), f"{rule}; set teacher.loss to full, or leave this out")


def _teacher_prompt(config: Config) -> Iterator[Contradiction]:
    """Report settings of a privileged prompt that nothing reads, or that are missing."""
    teacher, this = config.teacher, "teacher.prompt"
    if teacher is None:
        return
    if teacher.prompt == "same":
        for name, value in (("template", teacher.template), ("max_prompt_tokens", teacher.max_prompt_tokens)):
            if value is not None:
                rule = f"{value!r}, and the teacher reads the policy's prompt, so nothing reads it"
                yield Contradiction((f"teacher.{name}", this), f"{rule}; set {this} to privileged, or leave it out")
        return
    if teacher.template is None:
        rule = "privileged needs the text of the teacher's message"
        yield Contradiction((this, "teacher.template"), f'{rule}; set teacher.template, as "{{question}} {{solution}}"')
        return
    try:
        template_names(teacher.template)
    except ValueError as error:
        yield Contradiction(("teacher.template",), str(error))


def _privileged(config: Config) -> Iterator[Contradiction]:
    """Report what a privileged prompt cannot be combined with."""
    this = "teacher.prompt"
    if config.teacher is None or config.teacher.prompt == "same":
        return
    if config.teacher.loss == "full":
        rule = "privileged puts completions in other rows than the policy's, and full compares states place by place"
        yield Contradiction((this, "teacher.loss"), f"{rule}; set teacher.loss to sampled, or {this} to same")
    if config.rollout.thinking == "segment":
        rule = "privileged is one prompt, and with rollout.thinking segment a conversation has several"
        yield Contradiction((this, "rollout.thinking"), f"{rule}; set rollout.thinking to keep, or {this} to same")
    for index, task in enumerate(config.tasks):
        try:
            held = conversing(leveled([task])[0][0])
        except (ValueError, OSError):  # `_conversations` reports it
            continue
        if held is not None and held.begins:
            rule = f"privileged is made from a row, and {task.environment or task.name} may add to the prompt"
            keys = (this, f"tasks.{index}.{'environment' if task.environment else 'name'}")
            yield Contradiction(keys, f"{rule}; set {this} to same, or use a task that has tools alone")


def _rewards(config: Config) -> Iterator[Contradiction]:
    models = [each.name for each in config.reward_models]
    judges = [each.name for each in config.grading.judges]
    keys = [f"reward_models.{index}" for index in range(len(models))]
    keys += [f"grading.judges.{index}" for index in range(len(judges))]
    for index, (key, name) in enumerate(zip(keys, [*models, *judges], strict=True)):
        if name in BUILT_IN or name in [*models, *judges][:index]:
            rule = "a built-in part of the reward" if name in BUILT_IN else "the name of two reward models or judges"
            yield Contradiction((f"{key}.name",), f"{name!r} is {rule}; choose another")
    for index, judge in enumerate(config.grading.judges):
        if judge.lowest >= judge.highest:
            rule = f"{judge.lowest:g} is not below highest, {judge.highest:g}; lower it"
            yield Contradiction((f"grading.judges.{index}.lowest", f"grading.judges.{index}.highest"), rule)
    for index, task in enumerate(config.tasks):
        yield from _reward_parts(index, task, models, judges)
    yield from _length_reward(config)
    if config.teacher is None and not any(weight for task in config.tasks for weight in task.rewards.values()):
        message = "every weight is 0: nothing would be rewarded; set one, as `correct: 1.0`"
        yield Contradiction(("tasks.0.rewards",), message)


def _reward_parts(
    index: int, task: TaskConfig, models: Sequence[str], judges: Sequence[str]
) -> Iterator[Contradiction]:
    """Check the parts of a task's reward: each exists, has a unique label, and does not duplicate the graded part.

    `models` and `judges` are the names of reward models and judges.
    """
    section = f"tasks.{index}.rewards"
    for part in task.rewards:
        if problem := _reward_problem(part, [*models, *judges]):
            yield Contradiction((f"{section}.{part}",), problem)
    labels = [label(part) for part in task.rewards]
    for part in {each for each in labels if labels.count(each) > 1}:
        yield Contradiction((section,), f"two parts would be reported as {part!r}; give one function another name")
    if task.correct not in ("correct", *task.rewards):
        parts = ", ".join(dict.fromkeys(("correct", *task.rewards)))
        yield Contradiction((f"tasks.{index}.correct", section), f"{task.correct!r} is not a part of it; set {parts}")
    if task.correct in GRADED_REWARDS:
        message = f"{task.correct} depends on correctness, so it cannot be it; set correct, or another part"
        yield Contradiction((f"tasks.{index}.correct",), message)
    if task.correct in models and not GRADED_REWARDS.keys().isdisjoint(task.rewards):
        message = f"{task.correct} scores after the other parts, and cosine_length reads whether an answer is right"
        yield Contradiction((f"tasks.{index}.correct", section), f"{message}; leave one of them out")
    if task.correct != "correct" and "correct" in task.rewards:
        message = f"evaluation counts {task.correct}, so the task does not grade; drop correct, or leave this unset"
        yield Contradiction((f"{section}.correct", f"tasks.{index}.correct"), message)


def _reward_problem(part: str, named: Sequence[str]) -> str:
    """Why a name or import path is not a valid reward part; empty if it is."""
    known = (*BUILT_IN, *named)
    if part in known:
        return ""
    if is_path(part):
        try:
            RewardFunction(part)
        except (ValueError, OSError) as error:
            return str(error)
        return ""
    near = nearest(part, known)
    way_out = (
        f"did you mean {near}?"
        if near
        else f"the parts are {', '.join(known)}, and those in reward_models and grading.judges"
    )
    return f"not a part of the reward; {way_out}"


def _length_reward(config: Config) -> Iterator[Contradiction]:
    """Check that the length reward and its buffer are set together."""
    buffer, longest = config.grading.overlong_buffer_tokens, config.rollout.max_new_tokens
    key = "grading.overlong_buffer_tokens"
    shaped = [f"tasks.{index}.rewards.length" for index, task in enumerate(config.tasks) if "length" in task.rewards]
    if shaped and not buffer:
        yield Contradiction(
            (shaped[0], key),
            f"the length reward falls over the last {key} tokens, and that is 0; "
            f"set {key}, for example to {max(1, longest // 5)}, or remove the reward",
        )
    if shaped and buffer >= longest:
        yield Contradiction(
            (key, "rollout.max_new_tokens"),
            f"{buffer} is not less than rollout.max_new_tokens {longest}: every completion would be overlong; lower it",
        )
    if buffer and not shaped:
        message = f"{buffer} has no effect: no task has a length reward; add `length: 1.0` to its rewards"
        yield Contradiction((key,), message)


def _zero_variance(config: Config) -> Iterator[Contradiction]:
    """Check that every task's reward has the part by which groups are left out."""
    recipe = _recipe(config)
    metric = None if recipe is None else recipe.zero_variance_metric
    if metric is None:
        return
    for index, task in enumerate(config.tasks):
        parts = list(dict.fromkeys(("correct", *map(label, task.rewards))))
        if metric not in parts:
            rule = f"{metric!r} is not a part of the reward of {task.name}, so all its groups would be left out"
            keys = ("algorithm.zero_variance_metric", f"tasks.{index}.rewards")
            yield Contradiction(keys, f"{rule}; set {', '.join(parts)}")


def _layout(config: Config) -> Iterator[Contradiction]:
    layout, group = config.rollout.layout, config.rollout.group_chips
    if group is not None and layout != "hybrid":
        key, other = "rollout.group_chips", "rollout.layout"
        yield Contradiction(
            (key, other), f"{group} has no effect with {other} {layout}; set that to hybrid, or leave this out"
        )


def _rollout_weights(config: Config) -> Iterator[Contradiction]:
    """Report a rounded copy of the weights that the rollout would not make, or for which nothing samples."""
    this, how = "rollout.weights", config.rollout.weights
    if how == "dtype":
        return
    recipe, lora = _recipe(config), config.lora
    if recipe is not None and recipe.demonstrations:
        rule = f"recipe {config.algorithm.recipe} samples nothing, so {how} would only change what is evaluated"
        yield Contradiction((this, "algorithm.recipe"), f"{rule}; leave it out")
    if lora is None:
        return
    if lora.base == "nf4":
        rule = f"{how} would be a second copy, larger than lora.base nf4 and rounded once more"
        yield Contradiction((this, "lora.base"), f"{rule}; leave it out, or set lora.base to int8 or bfloat16")
    elif lora.base == "bfloat16" and lora.rollout == "shared":
        rule = f"shared reads the trainer's frozen weights as they are, in bfloat16, and {this} {how} is a copy"
        yield Contradiction(("lora.rollout", this), f"{rule}; set lora.rollout to auto, or lora.base to int8")


def _gap_limit(config: Config) -> Iterator[Contradiction]:
    """Report `rollout.max_logprob_gap` where the recipe samples nothing."""
    limit, recipe = config.rollout.max_logprob_gap, _recipe(config)
    if limit is not None and recipe is not None and recipe.demonstrations:
        rule = f"{limit:g} has no effect: recipe {config.algorithm.recipe} samples nothing"
        yield Contradiction(("rollout.max_logprob_gap", "algorithm.recipe"), f"{rule}; leave it out")


def _in_flight(config: Config) -> Iterator[Contradiction]:
    """Check `rollout.in_flight`: stale completions need a ratio to the sampling policy, and a bound on their age."""
    over = config.rollout.in_flight
    oldest = config.rollout.max_staleness
    N = config.prompts_per_step
    this, bound = "rollout.in_flight", "rollout.max_staleness"
    if over == 1.0:
        if oldest not in (0, type(config.rollout).model_fields["max_staleness"].default):
            rule = f"{oldest} has no effect with {this} 1: a step trains on completions of its own weights alone"
            yield Contradiction((bound, this), f"{rule}; set {this}, 1.5 is usual, or leave this out")
        return
    least = math.ceil(over - 1)
    if prompts_in_flight(config) == N:
        rule = f"{over:g} x prompts_per_step {N} is not one prompt more than a step has"
        yield Contradiction((this, "prompts_per_step"), f"{rule}; set {math.ceil(100 + 100 / N) / 100:g} or more, or 1")
    if oldest < least:
        rule = f"{oldest} is too low for {this} {over:g}: prompts that a step leaves may wait for up to {least} more"
        yield Contradiction((bound, this), f"{rule}; set {least} or more, or {this} to {1 + oldest} or less")
    recipe = _recipe(config)
    if recipe is None:
        return
    name, passes = config.algorithm.recipe, ("algorithm.updates_per_batch", "algorithm.minibatches")
    if recipe.demonstrations:
        yield Contradiction((this,), f"recipe {name} samples nothing, so nothing is in flight; leave it out")
    elif recipe.old_logprobs == "trainer" and recipe.correction == "none":
        rule = f"{over:g} trains on tokens of older weights, and the ratio is to the trainer's own: nothing corrects it"
        ways = "set algorithm.old_logprobs to sampler, or algorithm.correction to truncate"
        ways = "set algorithm.correction to truncate" if recipe.loss == "reinforce" else ways
        keys = (this, "algorithm.recipe", "algorithm.old_logprobs", "algorithm.correction")
        yield Contradiction(keys, f"{rule}; {ways}, or {this} to 1")
    if oldest > 1 and recipe.updates_per_batch * recipe.minibatches > 1:
        rule = f"{oldest} with several updates of a batch: both make tokens stale"
        yield Contradiction((bound, this, *passes), f"{rule}; set it to 1, or {' and '.join(passes)} to 1")


def _conversations(config: Config) -> Iterator[Contradiction]:
    """Check tools and environments, and what conversations cannot be combined with."""
    for index, task in enumerate(config.tasks):
        try:
            held = conversing(leveled([task])[0][0])
        except (ValueError, OSError) as error:
            key = "tools" if task.tools and "tool" in str(error) else "environment" if task.environment else "name"
            if key != "name":  # `_tasks` reports it
                yield Contradiction((f"tasks.{index}.{key}",), str(error))
            continue
        if held is None:
            continue
        key = "environment" if task.environment else "tools" if task.tools else "name"
        if key == "environment" and not held.rewards and "correct" in task.rewards and not task.path:
            rule = f"{task.environment} pays no reward of its own, and there are no answers to compare"
            way_out = "give it a method get_reward, or name a reward function instead of `correct`"
            yield Contradiction((f"tasks.{index}.rewards", f"tasks.{index}.environment"), f"{rule}; {way_out}")


def _curricula(config: Config) -> Iterator[Contradiction]:
    """Check that curricula have answers to go by."""
    recipe = _recipe(config)
    if recipe is None:
        return
    for index, task in enumerate(config.tasks):
        if task.curriculum is not None and recipe.demonstrations:
            rule = f"recipe {config.algorithm.recipe} samples nothing, so no level goes well or badly; leave it out"
            yield Contradiction((f"tasks.{index}.curriculum", "algorithm.recipe"), rule)


def _data(config: Config) -> Iterator[Contradiction]:
    """Check that what is learned of prompts has answers to go by, and something to choose from."""
    recipe, data = _recipe(config), config.data
    used = [name for name in type(data).model_fields if getattr(data, name) is not None]
    if recipe is not None and recipe.demonstrations:
        for name in used:
            rule = f"recipe {config.algorithm.recipe} samples nothing, so no prompt goes well or badly; leave it out"
            yield Contradiction((f"data.{name}", "algorithm.recipe"), rule)
    if data.filter is not None and data.filter.pass_rate[0] > data.filter.pass_rate[1]:
        least, most = data.filter.pass_rate
        yield Contradiction(
            ("data.filter.pass_rate",), f"the least, {least:g}, is above the largest, {most:g}; swap them"
        )
    if data.progress is None:
        return
    if len(config.tasks) < 2:
        rule = "there is one task, and progress decides between several; leave it out"
        yield Contradiction(("data.progress", "tasks"), rule)
    for index, task in enumerate(config.tasks):
        if task.curriculum is not None:
            rule = "with data.progress tasks are drawn as the levels of a curriculum are, and have none of their own"
            yield Contradiction((f"tasks.{index}.curriculum", "data.progress"), f"{rule}; leave one of them out")


RULES = (
    _names,
    _algorithm,
    _pairs,
    _teacher,
    _teacher_loss,
    _teacher_prompt,
    _privileged,
    _critic,
    _reference,
    _rewards,
    _zero_variance,
    _layout,
    _rollout_weights,
    _gap_limit,
    _in_flight,
    _conversations,
    _curricula,
    _data,
)
"""Rules of recipes and rewards, in addition to those of `podium.config.schema`."""


def _tasks(config: Config) -> Iterator[Contradiction]:
    """Report unknown tasks, and tasks that reject their options or data."""
    for index, (task, levels) in enumerate(zip(config.tasks, leveled(config.tasks), strict=True)):
        for number, level in enumerate(levels):
            try:
                make_task(level)
            except (ValueError, OSError) as error:
                named = [option for option in level.options if f"options.{option}:" in str(error)]
                key = f"options.{named[0]}" if named else "name"
                of_level = task.curriculum is not None and named and named[0] in task.curriculum.levels[number]
                yield Contradiction((f"tasks.{index}.{'curriculum.levels' if of_level else key}",), str(error))
                break


def _models(config: Config) -> Iterator[Contradiction]:
    """Report models on disk that are unusable, or have too few positions for the rollout's lengths."""
    teacher = None if config.teacher is None else config.teacher.model
    critic = None if config.critic is None else config.critic.model
    for key, model, read in (
        ("model", config.model, read_architecture),
        ("teacher.model", teacher, read_architecture),
        ("critic.model", critic, read_scorer),
    ):
        folder = None if model is None else on_disk(model)
        if model is None or folder is None:
            continue
        try:
            positions = read(resolve(folder)).max_positions
        except ModelError as error:
            yield Contradiction((key,), str(error))
            continue
        new = config.rollout.max_new_tokens
        if config.rollout.max_prompt_tokens is None and new < positions:
            continue  # the longest prompt is then chosen to fit
        if found := too_long(config.rollout, positions, model):
            yield found


def _reward_models(config: Config) -> Iterator[Contradiction]:
    """Report reward models on disk that are unusable, or have too few positions for the conversations."""
    for index, each in enumerate(config.reward_models):
        section = f"reward_models.{index}"
        if (folder := on_disk(each.model)) is None:
            continue
        try:
            positions = read_reward_model(resolve(folder)).max_positions
        except ModelError as error:
            yield Contradiction((f"{section}.model",), str(error))
            continue
        key, model = f"{section}.max_tokens", each.model
        if found := too_long_to_score(config.rollout, each.max_tokens, positions, key=key, model=model):
            yield found
