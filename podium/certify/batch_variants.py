"""The algorithms whose batches a certificate checks, each as the trainer's recipe and as the naive rules."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from podium.algorithms.recipes import RECIPES, Recipe, Teaching
from podium.certify.naive_rules import RULES, Distillation, Rules
from podium.certify.subject import RIGHT

TEACHER_WEIGHT = 0.7


class Variant(NamedTuple):
    """One algorithm, as the trainer's recipe and as the rules of the naive implementation."""

    recipe: Recipe
    rules: Rules

    def changed(self, **changes: Any) -> "Variant":
        """The algorithm with these fields of both changed."""
        return Variant(dataclasses.replace(self.recipe, **changes), dataclasses.replace(self.rules, **changes))

    @property
    def usable(self) -> "list[Variant]":
        """The algorithm with all groups kept, and if it drops groups of equal rewards, also as it is."""
        whole = self.changed(zero_variance="keep")
        return [whole] if self.rules.zero_variance == "keep" else [whole, self]

    @property
    def may_fail(self) -> bool:
        """Whether it is also checked with a failed episode; each way to compute advantages is, once."""
        rules = self.rules
        return (rules.kl, rules.old_logprobs, rules.zero_variance) == ("none", "sampler", "keep")


def variants() -> Iterator[Variant]:
    """Yield every recipe with two minibatches, and recipes with other options that affect a batch."""
    halves = {"minibatches": 2}
    dropping = {**halves, "zero_variance": "drop"}
    for name in (each for each in RECIPES if not RECIPES[each]().preferences):
        # With a k as large as a group, all advantages of pass@k would be 0.
        yield make_variant(name, halves, {"k": 2} if name == "pass_at_k" else {})
    yield make_variant("grpo", dropping)
    yield make_variant("dr_grpo", dropping)
    yield make_variant("grpo", {**dropping, "zero_variance_metric": RIGHT})
    yield make_variant("dapo", {"minibatches": 3, "zero_variance": "refill"})
    yield make_variant("grpo", {**halves, "mask_truncated": True, "old_logprobs": "trainer"})
    yield make_variant("grpo", {**halves, "old_logprobs": "trainer", "correction": "mask", "penalised": True})
    yield make_variant("grpo", {"std": "batch", "std_ddof": 0, "std_eps": 0.1, "kl": "k3", "kl_coef": 0.1})
    for name in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"):
        yield make_variant(name, {**halves, "kl": "k1_reward", "kl_coef": 0.05})
    for name in ("grpo", "dr_grpo", "rloo", "gspo"):
        yield make_variant(name, {**halves, "credit": "turn", "gamma": 0.5})
    yield make_variant("dapo", {**halves, "zero_variance": "drop", "credit": "turn"})
    yield make_variant("dapo", {**halves, "top_entropy": 0.2})
    for loss in ("clip_cov", "kl_cov"):
        share = {"cov_share": 0.1, **({"cov_low": 0.01} if loss == "clip_cov" else {})}
        yield make_variant("grpo", {**halves, "loss": loss, "loss_options": share})
    yield make_variant("ppo", {"std": "none", "mask_truncated": True}, {"gamma": 0.9, "lam": 0.8})
    yield make_variant("ppo", {"kl": "k1_reward", "kl_coef": 0.05})
    taught: list[tuple[str, Literal["sampled", "full"]]]
    taught = [("distill", "sampled"), ("grpo", "sampled"), ("distill", "full")]
    for name, loss in taught:
        plain, distilled = make_variant(name, halves), Distillation(TEACHER_WEIGHT, loss)
        recipe = dataclasses.replace(plain.recipe, teaching=Teaching(weight=TEACHER_WEIGHT, loss=loss))
        yield Variant(recipe, dataclasses.replace(plain.rules, distilled=distilled))
        if loss == "sampled":
            distilled = distilled._replace(own_prompts=True)
            yield Variant(recipe, dataclasses.replace(plain.rules, distilled=distilled))


def make_variant(name: str, changes: Mapping[str, Any], options: Mapping[str, float] = MappingProxyType({})) -> Variant:
    """A recipe with these changes of its settings.

    `options` are `advantage_options`; they are bound to its advantage, as are changes whose names begin with `std`.
    """
    recipe, rules = RECIPES[name](), RULES[name]
    bound = {key: value for key, value in changes.items() if key.startswith("std")} | dict(options)
    others = {key: value for key, value in changes.items() if not key.startswith("std")}
    advantage = functools.partial(recipe.advantage, **bound)
    numbers = {**rules.advantage_options, **options}
    return Variant(
        dataclasses.replace(recipe, advantage=advantage, **others),
        dataclasses.replace(rules, advantage_options=numbers, **changes),
    )
