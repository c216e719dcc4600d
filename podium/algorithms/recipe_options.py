"""Applies a config's options to its recipe, and finds options that cannot be combined.

Nothing here imports jax, so that an invalid combination is reported as a config error.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from functools import partial

from podium.algorithms.advantages import maxrl_advantages, pass_at_k_advantages
from podium.algorithms.recipes import LIKELIHOOD, LOSSES, OPTION_RANGES, Recipe, find_recipe, why_not_mixed
from podium.config.imports import imported, is_path
from podium.config.schema import AlgorithmConfig, LossPartConfig

_Conflicts = Iterator[tuple[str, str]]
"""(option, message) pairs; an option is a key of `algorithm:`, or group_size."""
_STD_OPTIONS = ("std", "std_ddof", "std_eps")


class RecipeError(ValueError):
    """Options of `algorithm:` that conflict."""

    def __init__(self, found: Sequence[tuple[str, str]]) -> None:
        """`found` are pairs of a config key and a message with the rule and the way out."""
        self.found = found
        super().__init__("\n".join(f"{key}: {message}" for key, message in found))


def make_recipe(config: AlgorithmConfig, *, group_size: int, prompts_per_step: int) -> Recipe:
    """The recipe of `algorithm:` with the config's options. Raises RecipeError, which lists all conflicts."""
    try:
        recipe = _changed(config)
    except ValueError as error:
        raise RecipeError([("algorithm.recipe", str(error))]) from error
    if found := conflicts(config, recipe, group_size, prompts_per_step):
        raise RecipeError(found)
    return recipe


def conflicts(config: AlgorithmConfig, recipe: Recipe, group_size: int, prompts_per_step: int) -> list[tuple[str, str]]:
    """The conflicts in `algorithm:`, as (config key, message) pairs; a message gives the rule and the way out."""
    found = [
        *_advantage_conflicts(config, recipe, group_size),
        *_advantage_option_conflicts(config, recipe, group_size),
        *_credit_conflicts(config, recipe),
        *_value_conflicts(config, recipe),
        *_loss_conflicts(config, recipe),
        *_loss_option_conflicts(config, recipe),
        *_correction_conflicts(config, recipe),
        *_adaption_conflicts(config, recipe),
        *_update_conflicts(config, recipe, prompts_per_step),
        *_pair_conflicts(config, recipe, group_size, prompts_per_step),
        *_part_conflicts(config, recipe, prompts_per_step),
    ]
    return [(key if key == "group_size" else f"algorithm.{key}", message) for key, message in found]


def _changed(config: AlgorithmConfig) -> Recipe:
    """The recipe with the config's options; options that its advantage does not take are ignored."""
    recipe = find_recipe(config.recipe)
    options = config.model_dump(exclude={"recipe", "advantage_options", "loss_parts"}, exclude_none=True)
    if options.get("loss") == "reinforce":
        options.setdefault("old_logprobs", "trainer")  # it has no ratio
    own = {name: options.pop(name) for name in _STD_OPTIONS if name in options} | (config.advantage_options or {})
    own = {name: value for name, value in own.items() if name in recipe.advantage.keywords}
    if "loss_options" in options:
        options["loss_options"] = {**recipe.loss_options, **options["loss_options"]}
    parts = {LIKELIHOOD if part.loss is None else part.loss: part.weight for part in config.loss_parts}
    options["loss_parts"] = {**recipe.loss_parts, **parts}
    return dataclasses.replace(recipe, advantage=partial(recipe.advantage, **own), **options)


def _advantage_conflicts(config: AlgorithmConfig, recipe: Recipe, group_size: int) -> _Conflicts:
    name = config.recipe
    std_options = recipe.advantage.keywords
    zero_variance = recipe.zero_variance
    given = [option for option in _STD_OPTIONS if getattr(config, option) is not None]
    for option in given:
        if option not in std_options:
            yield option, f"recipe {name} has no such option; leave it unset, or set algorithm.recipe to grpo"
    if recipe.group_baseline and group_size < 2:
        rule = f"recipe {name} compares completions of one prompt and needs at least 2, got {group_size}"
        yield "group_size", f"{rule}; raise group_size, or set algorithm.recipe to reinforce or reinforce_pp"
    for option in given:
        if std_options.get("std") == "none" and option != "std":
            way_out = f"set algorithm.std to group or batch, or leave {option} unset"
            yield option, f"std is none, so nothing reads it; {way_out}"
    if zero_variance != "keep" and not recipe.group_baseline:
        rule = f"recipe {name} has no group baseline, so a group of equal rewards still teaches"
        yield "zero_variance", f"{rule}; set it to keep, got {zero_variance}"
    if zero_variance == "keep" and recipe.zero_variance_metric is not None:
        way_out = "set zero_variance to drop or refill, or leave it unset"
        yield "zero_variance_metric", f"zero_variance is keep, so nothing reads it; {way_out}"
    if zero_variance != "refill" and config.max_refills != AlgorithmConfig().max_refills:
        rule = f"it only applies with zero_variance: refill, and zero_variance is {zero_variance}"
        yield "max_refills", f"{rule}; set zero_variance to refill, or leave max_refills unset"


def _advantage_option_conflicts(config: AlgorithmConfig, recipe: Recipe, group_size: int) -> _Conflicts:
    known = [option for option in recipe.advantage.keywords if option not in _STD_OPTIONS]
    for option in config.advantage_options or {}:
        if option not in known:
            rule = f"recipe {config.recipe} has no option {option!r}"
            yield "advantage_options", f"{rule}; it has: {', '.join(known) or 'none'}"
    if recipe.advantage.func is not pass_at_k_advantages:
        return
    k = recipe.advantage.keywords["k"]
    if not 1 <= k < group_size or k != int(k):
        rule = f"k {k:g} must be a whole number below group_size {group_size}"
        yield "advantage_options", f"{rule}: with all completions there is only one set, and nothing to compare it with"


def _credit_conflicts(config: AlgorithmConfig, recipe: Recipe) -> _Conflicts:
    if recipe.credit == "episode":
        if config.gamma is not None:
            yield "gamma", "it discounts the rewards of turns, and credit is episode; set algorithm.credit to turn"
        return
    if not recipe.group_baseline:
        rule = f"recipe {config.recipe} does not compare a prompt's completions, and so cannot compare turns"
        yield "credit", f"{rule}; set algorithm.recipe to grpo, dr_grpo, rloo or dapo, or credit to episode"
    if "tokens" in recipe.reads:
        yield "credit", f"recipe {config.recipe} gives each token its own advantage already; set credit to episode"
    if "parts" in recipe.reads:
        yield (
            "credit",
            f"recipe {config.recipe} compares parts of rewards, and turns have no parts; set credit to episode",
        )
    if recipe.zero_variance_metric is not None:
        yield "zero_variance_metric", "turns have no parts of the reward; leave it unset, or set credit to episode"
    if "baselines" in recipe.reads and recipe.group_baseline:
        rule = f"recipe {config.recipe} compares with a greedy completion, whose turns differ"
        yield "credit", f"{rule}; set credit to episode"
    if recipe.kl == "k1_reward":
        yield "credit", "a KL in the reward covers whole conversations; set algorithm.kl to k2, k3 or k3+"


def _value_conflicts(config: AlgorithmConfig, recipe: Recipe) -> _Conflicts:
    if not recipe.learns_values:
        return
    bound = recipe.advantage.keywords
    if bound.get("std") == "group":
        rule = f"recipe {config.recipe} has an advantage for each token, not each completion"
        yield "std", f"{rule}; set it to batch or none"
    for option in ("gamma", "lam"):
        if not 0 <= bound[option] <= 1:
            yield "advantage_options", f"{option} {bound[option]:g} must be from 0 to 1"
    if recipe.loss in ("gspo", "gmpo"):
        rule = f"loss {recipe.loss} has one ratio for a completion, and a critic gives each token its own advantage"
        yield "loss", f"{rule}; set it to clipped"


def _loss_conflicts(config: AlgorithmConfig, recipe: Recipe) -> _Conflicts:
    name, kl = config.recipe, recipe.kl
    if rule := _most_clip(recipe):
        yield "clip_low", rule
    if recipe.loss == "dppo_tv" and recipe.clip_high > 1:
        rule = f"a probability never rises by more than 1, so a bound of {recipe.clip_high:g} has no effect"
        yield "clip_high", f"{rule}; set 1 for no upper bound"
    if recipe.dual_clip is not None and recipe.loss != "clipped":
        yield "dual_clip", f"it bounds PPO's token ratio, which recipe {name} does not have; leave it unset"
    if kl == "none" and recipe.kl_coef > 0:
        way_out = "set algorithm.kl to k2, k3, k3+ or k1_reward"
        yield "kl_coef", f"kl is none, so nothing uses the weight {recipe.kl_coef:g}; {way_out}"
    if recipe.kl_by_ratio and kl in ("none", "k1_reward"):
        yield "kl_by_ratio", f"it weighs a KL in the loss, and kl is {kl}; set algorithm.kl to k2, k3 or k3+"
    if kl != "none" and not recipe.kl_coef:
        yield "kl", f"{kl} needs a weight: set algorithm.kl_coef above 0 (1e-4 to 1e-3 is usual), or kl to none"
    if kl == "k1_reward" and "parts" in recipe.reads:
        yield "kl", f"recipe {name} reads the parts of rewards, not their sum; set algorithm.kl to k2, k3 or k3+"
    if kl == "k1_reward" and recipe.advantage.func is maxrl_advantages:
        rule = "a KL in the reward can make it negative, and maxrl divides by its mean"
        yield "kl", f"{rule}; set algorithm.kl to k2, k3 or k3+"
    if kl == "k1_reward" and recipe.zero_variance != "keep":
        rule = "a group of equal rewards still teaches, because each reward includes a different KL penalty"
        way_out = "set zero_variance to keep, or kl to k2, k3 or k3+"
        yield "kl", f"{rule}, and zero_variance {recipe.zero_variance} would drop it; {way_out}"


def _most_clip(recipe: Recipe) -> str:
    """Why a loss cannot use this clip_low; empty if it can. Only `gmpo` and `dppo_kl` may have one above 1."""
    if recipe.clip_low <= 1 or recipe.loss in ("gmpo", "dppo_kl"):
        return ""
    if recipe.loss == "dppo_tv":
        rule = f"a probability never falls by more than 1, so a bound of {recipe.clip_low:g} has no effect"
    else:
        rule = f"a ratio is never below 0, so 1 - clip_low must be 0 or more, got clip_low {recipe.clip_low:g}"
    return f"{rule}; set 1 for no lower bound"


def _loss_option_conflicts(config: AlgorithmConfig, recipe: Recipe) -> _Conflicts:
    loss, kind = recipe.loss, LOSSES.get(recipe.loss)
    for option in ("clip_low", "clip_high"):
        if kind and not kind.clips and getattr(config, option) is not None:
            way_out = "leave it unset, or set algorithm.recipe to reinforce_pp"
            yield option, f"loss {loss} has no ratio to clip; {way_out}"
    for option, value in (config.loss_options or {}).items():
        known = kind.options if kind else inspect.signature(imported(loss, what="a loss")).parameters
        if option not in known:
            yield "loss_options", f"loss {loss} has no option {option!r}; it has: {', '.join(known) or 'none'}"
        elif kind and (problem := OPTION_RANGES[option].problem(value)):
            yield "loss_options", f"{option} {problem}"
    numbers = {**(kind.options if kind else {}), **recipe.loss_options}
    if loss == "clip_cov" and numbers["cov_low"] >= numbers["cov_high"]:
        rule = f"no covariance is between cov_low {numbers['cov_low']:g} and cov_high {numbers['cov_high']:g}"
        yield "loss_options", f"{rule}; set cov_low below cov_high"
    if loss == "vespo" and recipe.correction != "none":
        rule = "loss vespo weighs a sequence by its ratio to the sampler already"
        yield "correction", f"{rule}; set it to none, and algorithm.old_logprobs to sampler"


def _pair_conflicts(config: AlgorithmConfig, recipe: Recipe, group_size: int, prompts_per_step: int) -> _Conflicts:
    form = recipe.data_form
    if not find_recipe(config.recipe).preferences:
        if recipe.preferences:
            learns_from = "pairs" if form == "pair" else "labelled answers"
            rule = f"{recipe.loss} learns from {learns_from} of the data, and recipe {config.recipe} does not use them"
            yield "loss", f"{rule}; set algorithm.recipe to dpo, or loss to clipped"
        return
    if not recipe.preferences:
        losses = [name for name, kind in LOSSES.items() if kind.data_form != "text"]
        rule = f"recipe {config.recipe} learns from preferences of the data, and {recipe.loss} does not"
        yield "loss", f"{rule}; set {' or '.join(losses)}"
    if form == "label" and group_size != 1:
        yield (
            "group_size",
            (f"loss {recipe.loss} uses one completion of each row, got group_size {group_size}; set it to 1"),
        )
    if form == "label" and prompts_per_step < 2 * recipe.minibatches:
        rule = f"loss {recipe.loss} pairs each prompt with another row's completion, for its estimate of the KL"
        yield "minibatches", f"{rule}; set prompts_per_step to 2 or more for each of {recipe.minibatches} minibatches"
    if form != "label" and group_size != 2:
        yield (
            "group_size",
            (f"recipe {config.recipe} compares two completions of a prompt, got group_size {group_size}; set it to 2"),
        )
    if recipe.mean != "sequence":
        yield "mean", f"the loss compares pairs, and {recipe.mean} would weigh them by length; leave mean unset"
    unread: dict[str, bool] = {
        "kl": recipe.kl != "none",
        "correction": recipe.correction != "none",
        "off_policy_threshold": recipe.off_policy_threshold is not None,
        "drift_coef": recipe.drift_coef > 0,
        "top_entropy": recipe.top_entropy < 1,
        "mask_truncated": recipe.mask_truncated,
        "old_logprobs": recipe.old_logprobs == "sampler",
    }
    for option in (name for name, is_set in unread.items() if is_set):
        yield option, f"recipe {config.recipe} samples nothing and compares with the first model; leave it unset"


def _part_conflicts(config: AlgorithmConfig, recipe: Recipe, prompts_per_step: int) -> _Conflicts:
    """Parts of the loss that cannot be mixed with the recipe or with each other."""
    yield from _repeated_parts(config)
    for index, part in enumerate(config.loss_parts):
        key = f"loss_parts.{index}"
        if (part.recipe is None) == (part.loss is None):
            yield key, "a part has either a recipe, sft, or a loss, package.module:name; set one of them"
        elif part.loss is not None:
            yield from ((f"{key}.{option}", message) for option, message in _own_part_conflicts(part))
        elif part.recipe != "sft":
            yield f"{key}.recipe", why_not_mixed(part.recipe or "", config.recipe)
        elif recipe.preferences:
            rule = f"recipe {config.recipe} learns from preferences, whose rows are packed differently"
            yield (
                f"{key}.recipe",
                (f"{rule}; sft cannot be mixed with it: run podium sft first, and continue from that run"),
            )
        elif recipe.demonstrations:
            rule = f"recipe {config.recipe} imitates data already"
            yield f"{key}.recipe", f"{rule}; add the part's tasks to tasks, mixed by weight, and leave it out"
        elif (part.prompts_per_step or prompts_per_step) % recipe.minibatches:
            rule = f"{part.prompts_per_step} must be a multiple of minibatches {recipe.minibatches}"
            yield f"{key}.prompts_per_step", f"{rule}, each of which imitates an equal share"
    if LIKELIHOOD in recipe.loss_parts and all(part.recipe != "sft" for part in config.loss_parts):
        rule = f"recipe {config.recipe} imitates demonstrations, and no part of the loss names them"
        yield "loss_parts", f"{rule}; add a part, {{recipe: sft, tasks: [...]}}"


def _repeated_parts(config: AlgorithmConfig) -> _Conflicts:
    """Parts that an earlier part is, or has the name of."""
    names = [part.recipe or part.loss or "" for part in config.loss_parts]
    for index, (part, name) in enumerate(zip(config.loss_parts, names, strict=True)):
        if name in names[:index]:
            way_out = "mix the data by the weights of its tasks" if part.loss is None else "add up their weights"
            yield f"loss_parts.{index}", f"{name} occurs in two parts of the loss; {way_out}, in one part"
        elif name.rpartition(":")[2] in [other.rpartition(":")[2] for other in names[:index]]:
            rule = (
                f"metrics are named by a part's function, and an earlier part has a function of the same name: {name}"
            )
            yield f"loss_parts.{index}", f"{rule}; give one of the functions another name"


def _own_part_conflicts(part: LossPartConfig) -> _Conflicts:
    """What is wrong with a part that is a user's own loss."""
    assert part.loss is not None
    if not is_path(part.loss):
        rule = f"{part.loss!r} is not your own function; a built-in loss is the policy term of a recipe"
        yield "loss", f"{rule}: set algorithm.loss, or package.module:name here"
    else:
        try:
            given = inspect.signature(imported(part.loss, what="a loss")).parameters.values()
        except ValueError as error:
            yield "loss", str(error)
            return
        for each in given:
            if each.kind is each.KEYWORD_ONLY and each.default is each.empty:
                rule = f"{part.loss} asks for {each.name}, and loss_options apply only to the recipe's own loss"
                yield "loss", f"{rule}; give the parameter a default"
    for option, is_set in (("prompts_per_step", part.prompts_per_step is not None), ("tasks", bool(part.tasks))):
        if is_set:
            yield option, "your own loss always uses the tokens that the recipe trains on; leave it out"


def _correction_conflicts(config: AlgorithmConfig, recipe: Recipe) -> _Conflicts:
    low, high = config.correction_low, config.correction_high
    correction = recipe.correction
    banded = correction in ("mask", "reject")
    for option in ("correction_high", "correction_level"):
        if correction == "none" and getattr(config, option) is not None:
            yield (
                option,
                "correction is none, so nothing reads it; set algorithm.correction to truncate, mask or reject",
            )
    if not banded and low is not None:
        rule = f"it only applies with correction: mask or reject, and correction is {correction}"
        yield "correction_low", f"{rule}; leave it unset"
    if banded and high is None:
        yield "correction", f"{correction} needs the upper end of its band: set correction_high (2 is usual)"
    if banded and low is not None and high is not None and low >= high:
        yield "correction_low", f"the band is empty: correction_low {low} must be below correction_high {high}"
    if correction == "reject" and recipe.correction_level == "token":
        way_out = "set algorithm.correction_level to sequence or mean, or correction to mask"
        yield "correction_level", f"reject leaves out whole sequences, and the level is token; {way_out}"
    if correction != "none" and recipe.old_logprobs == "sampler":
        rule = "the ratio is already relative to the sampler, so nothing is left to correct"
        yield "correction", f"{rule}; set algorithm.old_logprobs to trainer, or correction to none"


def _adaption_conflicts(config: AlgorithmConfig, recipe: Recipe) -> _Conflicts:
    fixed, usual = recipe.entropy_target is None, AlgorithmConfig()
    for option in ("entropy_step", "entropy_bonus_max"):
        if fixed and getattr(config, option) != getattr(usual, option):
            yield option, "the entropy bonus is fixed, so nothing reads it; set entropy_target, or leave it unset"
    if not fixed and recipe.entropy_bonus > recipe.entropy_bonus_max:
        rule = f"it starts at {recipe.entropy_bonus:g}, and entropy_bonus_max is {recipe.entropy_bonus_max:g}"
        yield "entropy_bonus", f"{rule}; lower it, or raise entropy_bonus_max"
    if recipe.kl_target is None and config.kl_gain != usual.kl_gain:
        yield "kl_gain", "kl_coef is fixed, so nothing reads it; set algorithm.kl_target, or leave it unset"
    if recipe.kl_target is not None and recipe.kl == "none":
        yield "kl_target", "it needs a KL term to adapt; set algorithm.kl and kl_coef, or leave kl_target unset"


def _update_conflicts(config: AlgorithmConfig, recipe: Recipe, prompts_per_step: int) -> _Conflicts:
    no_ratio = recipe.loss == "reinforce"
    for option in ("updates_per_batch", "minibatches"):
        if no_ratio and getattr(recipe, option) > 1:
            rule = f"recipe {config.recipe} has no ratio and is wrong after a batch's first update"
            yield option, f"{rule}; set it to 1, or algorithm.recipe to reinforce_pp"
    if no_ratio and recipe.old_logprobs == "sampler":
        yield "old_logprobs", f"recipe {config.recipe} has no ratio, so nothing reads the sampler's; leave it unset"
    if prompts_per_step % recipe.minibatches:
        rule = f"prompts_per_step {prompts_per_step} must be a multiple of it"
        yield "minibatches", f"{rule}, got {recipe.minibatches}"
