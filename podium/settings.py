"""Loads a run's settings and checks them against recipes, rewards, layouts, tasks, and a model on disk.

`podium.config` checks rules between settings; this module adds the rules of other parts of Podium. It downloads nothing
and imports no jax, so every error in a config is reported before anything slow starts.
"""

import dataclasses
import functools
import os
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from podium.algorithms.advantages import no_advantages
from podium.algorithms.recipe_options import RecipeError
from podium.algorithms.recipes import LOSSES, RECIPES, Recipe, find_recipe
from podium.config.document import Plain
from podium.config.errors import ConfigError, Contradiction, nearest, not_in
from podium.config.imports import imported, is_path
from podium.config.load import Loaded, Override, load
from podium.config.optimizer import OPTIMIZER_COPIES
from podium.config.schema import ASSUMED_PROMPT_TOKENS, Config, RolloutConfig, TaskConfig
from podium.config.sizes import too_long, too_long_to_score
from podium.files import as_path
from podium.models.architecture import ModelError
from podium.models.files.hf_config import Head
from podium.models.files.source import on_disk, read_architecture, resolve
from podium.models.layouts import AUTO
from podium.models.params import ROLLOUT_LAYOUTS
from podium.observe.own_config import at_home, check_place, continues, with_writers
from podium.observe.run_dir import Fork, recipe_of
from podium.run.resolve import resolve_recipe
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.curriculum import leveled
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
"""Settings whose allowed values are the names in a table."""
IMPORTABLE: Mapping[str, str] = {
    "algorithm.recipe": "a recipe",
    "algorithm.loss": "a loss",
    "train.optimizer.name": "an optimizer",
}
"""The settings that also accept the import path of a user's object, each with a description of the object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Loaded):
    """The checked settings of a run, with their recipe."""

    recipe: Recipe


def load_settings(
    files: Sequence[str | Path],
    overrides: Sequence[str | Override],
    environ: Mapping[str, str] = os.environ,
    *,
    elsewhere: bool = False,
) -> Settings:
    """Load settings as `podium.config.load.load` does, and check them against tasks and model without network access.

    If a file is the config.yaml of a run, the settings get that run's folder, unless the run is `elsewhere` (on another
    machine). Raises ConfigError with all problems.
    """
    check = Checks(reads_disk=True)
    if elsewhere:
        return check.settings(load(files, overrides, environ, rules=[check]))
    paths = [Path(file) if isinstance(file, str) else file for file in files]
    try:
        loaded = load(paths, overrides, environ, rules=[check], settled=at_home)
    except ConfigError as error:
        if any("unknown key" in problem.message for problem in error.problems):
            raise with_writers(error, paths) from None
        raise
    if paths:
        check_place(paths, loaded)
    return check.settings(loaded)


def named_after(loaded: Settings, files: Sequence[Path], recipe: str) -> Settings:
    """Settings for `podium sft` and `podium dpo`, with `-sft` or `-dpo` added to the run's name.

    If the config of a run of that recipe is among the files, the name stays as it is, so that the run is continued.
    """
    name = loaded.config.name or ""
    home = as_path(loaded.config.runs_dir) / name
    if continues(files, loaded) and recipe_of(Fork(str(home), None)) == recipe:
        return loaded
    named = loaded.config.model_copy(update={"name": f"{name.removesuffix(f'-{recipe}')}-{recipe}"})
    return dataclasses.replace(loaded, config=named)


def preference_overrides(files: Sequence[str | Path], overrides: Sequence[str | Override]) -> list[Override]:
    """Overrides for `podium dpo`: the recipe, and the group size that the config's loss needs.

    Raises ConfigError for files that cannot be read.
    """
    recipe = Override("algorithm.recipe", "dpo", "podium dpo")
    chosen = load(files, [recipe, *overrides], os.environ).config.algorithm.loss
    labels = chosen is not None and chosen in LOSSES and LOSSES[chosen].data_form == "label"
    return [recipe, Override("group_size", 1 if labels else 2, "podium dpo")]


def evaluation_overrides(
    target: str, files: Sequence[Path], *, task: str | None, given: Mapping[str, Plain], options: Mapping[str, Plain]
) -> list[Override]:
    """Convert the options of `podium eval` to settings: tasks graded for correctness, all questions unless limited.

    Args:
        target: the model, or the run whose config is `files`.
        files: the run's config; empty for a model.
        task: the task to ask, which may be one of the run's; None: all tasks of the run.
        given: the user's settings for each task; None: unset.
        options: the user's settings for the evaluation; None: unset.
    """
    config = load(files, [], os.environ).config if files else None
    own = [Override("model", target, f"argument {target}"), *_fitting_lengths(target)] if config is None else []
    known = [] if config is None else [each.model_dump(mode="json") for each in config.tasks]
    scored = set() if config is None else {each.name for each in config.reward_models}
    prompt = known[0]["system_prompt"] if known else None  # also for a task that the run does not have
    chosen = known if task is None else [each for each in known if each["name"] == task][:1]
    changes = {key: value for key, value in given.items() if value is not None}
    tasks: list[dict[str, Plain]] = []
    for each in chosen or [{"name": task, "system_prompt": prompt}]:
        kept = {part: weight for part, weight in each.get("rewards", {}).items() if part in scored}
        tasks.append({**each, **changes, "rewards": {each.get("correct", "correct"): 1.0, **kept}})
    return [
        *own,
        Override("tasks", tasks, f"--task {tasks[0]['name']}"),
        Override("grading.overlong_buffer_tokens", 0, "podium eval"),
        *([Override("eval.temperature", 1.0, "--samples 0")] if options["eval.samples"] == 0 else []),
        *(
            Override(key, value, f"--{key.removeprefix('eval.')}")
            for key, value in options.items()
            if value is not None or key == "eval.questions"
        ),
    ]


def check_read_by_evaluations(keys: Iterable[str]) -> None:
    """Raise ValueError for settings that affect only training's completions, because evaluations ignore them."""
    for key in keys:
        if key in ("rollout.temperature", "rollout.repetition_penalty"):
            own = key.replace("rollout.", "eval.")
            raise ValueError(
                f"{key}: evaluations ignore this setting; set {own}, and eval.samples to sample at a temperature"
            )


def _fitting_lengths(model: str) -> list[Override]:
    """Overrides with shorter prompt and completion limits, if the model is on disk and its context is too short for the
    defaults.

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


class Checks:
    """Podium's rules about a config, in addition to those of `podium.config.schema`; called by `podium.config.load`.

    Keeps the recipe of the last config checked, so that a run need not resolve it again.
    """

    def __init__(self, *, reads_disk: bool) -> None:
        """With `reads_disk`, check against the tasks and models on this machine, too."""
        self.reads_disk = reads_disk
        self.recipe: Recipe | None = None
        """None if no config was checked yet, or if its options conflict."""

    def __call__(self, config: Config) -> Iterator[Contradiction]:
        """The contradictions in a config."""
        rules = _Rules(config)
        yield from rules.found(reads_disk=self.reads_disk)
        self.recipe = rules.recipe

    def settings(self, loaded: Loaded) -> Settings:
        """The loaded settings with their recipe."""
        assert self.recipe is not None, "settings that load have a recipe"
        return Settings(config=loaded.config, provenance=loaded.provenance, recipe=self.recipe)


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The rules for one config; each yields the contradictions that it finds."""

    config: Config

    @functools.cached_property
    def _resolved(self) -> Recipe | ValueError:
        """The recipe with the config's options; a ValueError, not raised, if they conflict."""
        try:
            return resolve_recipe(self.config)
        except ValueError as error:
            return error

    @property
    def recipe(self) -> Recipe | None:
        """The recipe with the config's options; None if they conflict, which `_algorithm` reports."""
        return self._resolved if isinstance(self._resolved, Recipe) else None

    def found(self, *, reads_disk: bool) -> Iterator[Contradiction]:
        """The contradictions of all rules."""
        for rule in (
            self._names,
            self._algorithm,
            self._pairs,
            self._teacher,
            self._privileged,
            self._critic,
            self._reference,
            self._rewards,
            self._length_reward,
            self._zero_variance,
            self._sampling,
            self._stale_tokens,
            self._conversations,
            *((self._tasks, self._models, self._reward_models) if reads_disk else ()),
        ):
            yield from rule()

    def _names(self) -> Iterator[Contradiction]:
        for key, table in NAMES.items():
            section, _, name = key.rpartition(".")
            part = functools.reduce(getattr, section.split("."), self.config)
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

    def _algorithm(self) -> Iterator[Contradiction]:
        """Report conflicts of the recipe with other settings."""
        name, error = self.config.algorithm.recipe, self._resolved
        try:
            recipe = find_recipe(name)
        except ValueError as unknown:
            if is_path(name):
                yield Contradiction(("algorithm.recipe",), str(unknown))
            return  # `_names` has reported it
        if recipe.demonstrations and not recipe.preferences and self.config.group_size != 1:
            rule = f"recipe {name} trains on one completion per prompt, from the data; got {self.config.group_size}"
            yield Contradiction(("group_size", "algorithm.recipe"), f"{rule}; set group_size to 1")
        scope = ("algorithm", "group_size", "prompts_per_step")
        settings = [f"algorithm.{option}" for option in type(self.config.algorithm).model_fields] + list(scope[1:])
        for key, message in error.found if isinstance(error, RecipeError) else ():
            mentioned = set(re.findall(r"\w+", message))
            named = [other for other in settings if other != key and other.rpartition(".")[2] in mentioned]
            yield Contradiction((key, *named), message, scope)

    def _pairs(self) -> Iterator[Contradiction]:
        """Report packing settings that would separate the two completions of a pair."""
        recipe = self.recipe
        if recipe is None or recipe.data_form != "pair":
            return
        if self.config.train.packing != "shared_prompts":
            packing = self.config.train.packing
            rule = f"{packing} puts the completions of a pair in different rows; set it to shared_prompts"
            yield Contradiction(("train.packing", "algorithm.recipe"), rule)
        whole = (self.config.rollout.max_prompt_tokens or 1) + 2 * self.config.rollout.max_new_tokens
        if self.config.train.row_tokens is not None and self.config.train.row_tokens < whole:
            rule = f"{self.config.train.row_tokens} is less than a prompt with both completions, {whole}"
            yield Contradiction(
                ("train.row_tokens", "algorithm.recipe"), f"{rule}; set that or more, or leave it unset"
            )

    def _teacher(self) -> Iterator[Contradiction]:
        """Report settings that a teacher cannot be combined with, and a recipe that needs a teacher but has none."""
        recipe = self.recipe
        if recipe is None:
            return
        name = self.config.algorithm.recipe
        if self.config.teacher is None:
            if recipe.advantage.func is no_advantages:
                rule = f"recipe {name} learns only from a teacher, and teacher is not set"
                yield Contradiction(("algorithm.recipe", "teacher"), f"{rule}; set teacher.model")
            return
        if recipe.demonstrations:
            rule = f"recipe {name} trains on completions of the data, and a teacher is asked about the policy's own"
            yield Contradiction(("teacher", "algorithm.recipe"), f"{rule}; set algorithm.recipe to distill or grpo")
        if recipe.loss in ("gspo", "gmpo") and self.config.teacher.loss == "sampled":
            rule = f"loss {recipe.loss} uses one ratio per completion, and a teacher gives each token its own advantage"
            yield Contradiction(
                ("teacher", "algorithm.loss", "algorithm.recipe"), f"{rule}; set algorithm.loss to clipped"
            )
        if recipe.zero_variance != "keep":
            rule = f"completions of equal reward still learn from a teacher, and {recipe.zero_variance} leaves them out"
            yield Contradiction(("algorithm.zero_variance", "teacher"), f"{rule}; set algorithm.zero_variance to keep")
        for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self.config.rollout, key) != off:
                rule = "tokens sampled from a part of the vocabulary do not estimate the KL to a teacher over"
                rule += " all of it"
                yield Contradiction((f"rollout.{key}", "teacher"), f"{rule}; set it to {off:g}")
        if self.config.rollout.repetition_penalty != 1:
            rule = (
                "tokens sampled with a penalty do not estimate the KL from the policy, which has no penalty, to a "
                "teacher"
            )
            yield Contradiction(("rollout.repetition_penalty", "teacher"), f"{rule}; set it to 1")

    def _critic(self) -> Iterator[Contradiction]:
        """Report a critic that the recipe does not use."""
        recipe = self.recipe
        if recipe is None or self.config.critic is None:
            return
        if not recipe.learns_values:
            rule = f"recipe {self.config.algorithm.recipe} computes advantages without a critic, so nothing reads it"
            yield Contradiction(
                ("critic", "algorithm.recipe"), f"{rule}; set algorithm.recipe to ppo, or leave critic out"
            )
        elif self.config.critic.warmup_steps >= self.config.steps:
            rule = f"in {self.config.critic.warmup_steps} of {self.config.steps} steps the policy is not updated"
            yield Contradiction(("critic.warmup_steps", "steps"), f"{rule}; set it below steps")

    def _reference(self) -> Iterator[Contradiction]:
        """Report a moving reference that the loss does not use, or that would be LoRA's frozen base."""
        recipe = self.recipe
        if recipe is None or self.config.reference is None:
            return
        if not recipe.needs_reference:
            rule = f"recipe {self.config.algorithm.recipe} compares with no reference, so nothing reads it"
            yield Contradiction(("reference", "algorithm.kl"), f"{rule}; set algorithm.kl and kl_coef, or leave it out")
        if self.config.lora is not None:
            rule = "with adapters the reference is the frozen base, which never moves"
            yield Contradiction(("reference", "lora"), f"{rule}; leave reference out, or train all weights")
        if self.config.reference.sync_every > self.config.steps:
            every, steps = self.config.reference.sync_every, self.config.steps
            rule = f"{every} is more than the run's {steps} steps, so it would never move"
            yield Contradiction(("reference.sync_every", "steps"), f"{rule}; lower it, or leave reference out")

    def _privileged(self) -> Iterator[Contradiction]:
        """Report a privileged teacher prompt for tasks whose environment may add to the policy's prompt."""
        this = "teacher.prompt"
        if self.config.teacher is None or self.config.teacher.prompt == "same":
            return
        for index, task in enumerate(self.config.tasks):
            try:
                held = conversing(leveled([task])[0][0])
            except (ValueError, OSError):  # `_conversations` reports the error
                continue
            if held is not None and held.begins:
                rule = (
                    f"a privileged prompt is made from a row alone, and {task.environment or task.name} may add to "
                    "the prompt"
                )
                keys = (this, f"tasks.{index}.{'environment' if task.environment else 'name'}")
                yield Contradiction(keys, f"{rule}; set {this} to same, or use a task that only has tools")

    def _rewards(self) -> Iterator[Contradiction]:
        models = [each.name for each in self.config.reward_models]
        judges = [each.name for each in self.config.grading.judges]
        keys = [f"reward_models.{index}" for index in range(len(models))]
        keys += [f"grading.judges.{index}" for index in range(len(judges))]
        for index, (key, name) in enumerate(zip(keys, [*models, *judges], strict=True)):
            if name in BUILT_IN or name in [*models, *judges][:index]:
                rule = (
                    "a built-in part of the reward" if name in BUILT_IN else "the name of two reward models or judges"
                )
                yield Contradiction((f"{key}.name",), f"{name!r} is {rule}; choose another")
        for index, task in enumerate(self.config.tasks):
            yield from _reward_parts(index, task, models, judges)
        if self.config.teacher is None and not any(
            weight for task in self.config.tasks for weight in task.rewards.values()
        ):
            message = "every weight is 0: nothing would be rewarded; set one, as `correct: 1.0`"
            yield Contradiction(("tasks.0.rewards",), message)

    def _length_reward(self) -> Iterator[Contradiction]:
        """Check that the length reward and its buffer are set together."""
        config = self.config
        buffer, longest = config.grading.overlong_buffer_tokens, config.rollout.max_new_tokens
        key = "grading.overlong_buffer_tokens"
        shaped = [
            f"tasks.{index}.rewards.length" for index, task in enumerate(config.tasks) if "length" in task.rewards
        ]
        if shaped and not buffer:
            yield Contradiction(
                (shaped[0], key),
                f"the length reward falls over the last {key} tokens, and that is 0; "
                f"set {key}, for example to {max(1, longest // 5)}, or remove the reward",
            )
        if shaped and buffer >= longest:
            rule = f"{buffer} is not less than rollout.max_new_tokens {longest}: every completion would be overlong"
            yield Contradiction((key, "rollout.max_new_tokens"), f"{rule}; lower it")
        if buffer and not shaped:
            message = f"{buffer} has no effect: no task has a length reward; add `length: 1.0` to the rewards of a task"
            yield Contradiction((key,), message)

    def _zero_variance(self) -> Iterator[Contradiction]:
        """Check that every task's reward has the part that `zero_variance_metric` names."""
        recipe = self.recipe
        metric = None if recipe is None else recipe.zero_variance_metric
        if metric is None:
            return
        for index, task in enumerate(self.config.tasks):
            parts = list(dict.fromkeys(("correct", *map(label, task.rewards))))
            if metric not in parts:
                rule = (
                    f"{metric!r} is not a part of the reward of {task.name}, so all groups of this task would be left "
                    "out"
                )
                keys = ("algorithm.zero_variance_metric", f"tasks.{index}.rewards")
                yield Contradiction(keys, f"{rule}; set {', '.join(parts)}")

    def _sampling(self) -> Iterator[Contradiction]:
        """Report settings that have no effect because the recipe samples no completions."""
        recipe, config = self.recipe, self.config
        if recipe is None or not recipe.demonstrations:
            return
        name, limit, how = config.algorithm.recipe, config.rollout.max_logprob_gap, config.rollout.weights
        unread = f"recipe {name} samples nothing, so"
        if how != "dtype":
            rule = f"{unread} {how} would only change what is evaluated; leave it out"
            yield Contradiction(("rollout.weights", "algorithm.recipe"), rule)
        if limit is not None:
            rule = f"{limit:g} has no effect: recipe {name} samples nothing; leave it out"
            yield Contradiction(("rollout.max_logprob_gap", "algorithm.recipe"), rule)
        if config.rollout.in_flight != 1:
            yield Contradiction(("rollout.in_flight",), f"{unread} no prompts are in flight; leave it out")
        for index, task in enumerate(config.tasks):
            if task.curriculum is not None:
                rule = f"{unread} no curriculum level is scored; leave it out"
                yield Contradiction((f"tasks.{index}.curriculum", "algorithm.recipe"), rule)
        for each in type(config.data).model_fields:
            if getattr(config.data, each) is not None:
                rule = f"{unread} no prompt is scored; leave it out"
                yield Contradiction((f"data.{each}", "algorithm.recipe"), rule)

    def _stale_tokens(self) -> Iterator[Contradiction]:
        """Report stale tokens that the recipe does not correct, or for which its correction is not enough."""
        recipe, over, oldest = self.recipe, self.config.rollout.in_flight, self.config.rollout.max_staleness
        if recipe is None or over == 1 or recipe.demonstrations:
            return
        this, bound = "rollout.in_flight", "rollout.max_staleness"
        if recipe.old_logprobs == "trainer" and recipe.correction == "none":
            rule = (
                f"{over:g} trains on tokens sampled by older weights, and the ratio's denominator is the trainer's own"
            )
            ways = "set algorithm.old_logprobs to sampler, or algorithm.correction to truncate"
            ways = "set algorithm.correction to truncate" if recipe.loss == "reinforce" else ways
            keys = (this, "algorithm.recipe", "algorithm.old_logprobs", "algorithm.correction")
            yield Contradiction(keys, f"{rule}: nothing corrects it; {ways}, or {this} to 1")
        if oldest > 1 and recipe.updates_per_batch * recipe.minibatches > 1:
            passes = ("algorithm.updates_per_batch", "algorithm.minibatches")
            rule = f"{oldest} with several updates of a batch: both make tokens stale"
            yield Contradiction((bound, this, *passes), f"{rule}; set it to 1, or {' and '.join(passes)} to 1")

    def _conversations(self) -> Iterator[Contradiction]:
        """Check settings of tools and environments, and settings that conversations cannot be combined with."""
        for index, task in enumerate(self.config.tasks):
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
                rule = f"{task.environment} gives no reward, and there are no answers to compare"
                way_out = "give it a method get_reward, or name a reward function instead of `correct`"
                yield Contradiction((f"tasks.{index}.rewards", f"tasks.{index}.environment"), f"{rule}; {way_out}")

    def _tasks(self) -> Iterator[Contradiction]:
        """Report unknown tasks, and tasks that reject their options or data."""
        tasks = self.config.data_tasks
        for (section, task), levels in zip(tasks.items(), leveled(list(tasks.values())), strict=True):
            for number, level in enumerate(levels):
                try:
                    make_task(level)
                except (ValueError, OSError) as error:
                    named = [option for option in level.options if f"options.{option}:" in str(error)]
                    key = f"options.{named[0]}" if named else "name"
                    of_level = task.curriculum is not None and named and named[0] in task.curriculum.levels[number]
                    yield Contradiction((f"{section}.{'curriculum.levels' if of_level else key}",), str(error))
                    break

    def _models(self) -> Iterator[Contradiction]:
        """Report models on disk that are unusable, or whose context is too short for the rollout's lengths."""
        teacher = None if self.config.teacher is None else self.config.teacher.model
        critic = None if self.config.critic is None else self.config.critic.model
        models: tuple[tuple[str, str | None, Head], ...] = (
            ("model", self.config.model, "logits"),
            ("teacher.model", teacher, "logits"),
            ("critic.model", critic, "scores"),
        )
        for key, model, head in models:
            folder = None if model is None else on_disk(model)
            if model is None or folder is None:
                continue
            try:
                positions = read_architecture(resolve(folder), head).max_positions
            except ModelError as error:
                yield Contradiction((key,), str(error))
                continue
            new = self.config.rollout.max_new_tokens
            if self.config.rollout.max_prompt_tokens is None and new < positions:
                continue  # the longest prompt is then chosen to fit
            if found := too_long(self.config.rollout, positions, model):
                yield found

    def _reward_models(self) -> Iterator[Contradiction]:
        """Report reward models on disk that are unusable, or whose context is too short for the conversations."""
        for index, each in enumerate(self.config.reward_models):
            section = f"reward_models.{index}"
            if (folder := on_disk(each.model)) is None:
                continue
            try:
                positions = read_architecture(resolve(folder), "own scores").max_positions
            except ModelError as error:
                yield Contradiction((f"{section}.model",), str(error))
                continue
            key, model = f"{section}.max_tokens", each.model
            if found := too_long_to_score(self.config.rollout, each.max_tokens, positions, key=key, model=model):
                yield found


def _reward_parts(
    index: int, task: TaskConfig, models: Sequence[str], judges: Sequence[str]
) -> Iterator[Contradiction]:
    """Check that each part of a task's reward exists, has a unique label, and does not duplicate the graded part.

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
        yield Contradiction(
            (f"tasks.{index}.correct", section), f"{task.correct!r} is not a part of the reward; set {parts}"
        )
    if task.correct in GRADED_REWARDS:
        message = f"{task.correct} depends on correctness, so it cannot define it; set correct, or another part"
        yield Contradiction((f"tasks.{index}.correct",), message)
    if task.correct in models and not GRADED_REWARDS.keys().isdisjoint(task.rewards):
        message = f"{task.correct} scores after the other parts, and cosine_length reads whether an answer is right"
        yield Contradiction((f"tasks.{index}.correct", section), f"{message}; leave one of them out")
    if task.correct != "correct" and "correct" in task.rewards:
        message = (
            f"evaluation counts {task.correct}, so the task does not grade answers; remove correct, or leave this unset"
        )
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
