"""Follows a watched run with the naive implementation: what it makes of each step, and what that changes for the next.

Each optimizer step starts from the trainer's own weights. What a step changes besides, the weights of the loss and the
reference, is followed from the first step on, without the trainer's numbers.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from podium.algorithms.controllers import ENTROPY_BONUS, KL_COEF, LAST_ENTROPY
from podium.certify.check_result import largest
from podium.certify.naive import Sequences
from podium.certify.naive_rules import Rules
from podium.certify.naive_run import Coefficients, moved_reference
from podium.certify.subject import NaiveModel, Subject
from podium.certify.tiny import Arrays
from podium.certify.training import OptimizerStep, Step, Training
from podium.certify.updates import (
    NaiveUpdate,
    Update,
    gradient_difference,
    loss_difference,
    naive_update,
    naive_value_update,
    relative,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed:
    """A step of the run, and what the naive implementation makes of it."""

    step: Step
    updates: list[NaiveUpdate]
    """Those of the step's optimizer steps, from the trainer's weights before each."""
    missing: int
    """How many optimizer steps the trainer made too few, or too many."""
    criticised: list[Update]
    """The critic's updates as the naive implementation computes them, each from the critic's weights before it."""
    missing_of_critic: int
    """How many of them were made too few, or too many, and how many of its weights are not what they were after the
    last one before."""
    coefs: Coefficients
    """Before the step."""
    applied: list[Coefficients]
    """In the loss of each of `updates`."""
    reference: Arrays
    """Before the step; empty if it stays."""
    reference_before: Arrays
    """Before it moved last, or the first one."""

    @property
    def gradient_error(self) -> float:
        """The largest relative error of a loss or of a parameter's gradient."""
        errors: list[float] = []
        for seen, naive in zip(self.step.updates, self.updates, strict=False):
            errors.append(loss_difference(seen.loss, naive.loss, naive.sizes))
            errors.append(gradient_difference(seen.gradient, naive.gradient, naive.sizes))
        return largest(errors)

    @property
    def critic_error(self) -> float:
        """The largest relative error of the critic's loss or of the gradient of one of its parameters."""
        errors: list[float] = []
        for seen, naive in zip(self.step.learned["critic"], self.criticised, strict=False):
            errors.append(abs(seen.loss - naive.loss) / (abs(naive.loss) or 1.0))
            errors += [relative(seen.gradient[name], value) for name, value in naive.gradient.items()]
        return largest(errors)

    def coefs_error(self, rules: Rules) -> float:
        """The largest relative error of an adapted coefficient, before the step or in one of its losses."""
        before = [(self.step.coefs, self.coefs)]
        in_losses = [(seen.coefs, own) for seen, own in zip(self.step.updates, self.applied, strict=False)]
        errors = [0.0]
        if rules.entropy_target is not None:
            errors += [_error(seen, ENTROPY_BONUS, own.entropy_bonus) for seen, own in (*before, *in_losses)]
            errors.append(_error(self.step.coefs, LAST_ENTROPY, self.coefs.last_entropy))
        if rules.kl_target is not None:
            weighed = [(self.step.charged, self.coefs)] if rules.kl == "k1_reward" else in_losses
            errors += [_error(seen, KL_COEF, own.kl_coef) for seen, own in (*before, *weighed)]
        return largest(errors)


def _error(found: Mapping[str, float], name: str, expected: float) -> float:
    """The relative error of a number; infinite if there is none."""
    own = found.get(name, math.nan)
    if own == expected:
        return 0.0
    return abs(own - expected) / (abs(expected) or 1.0) if math.isfinite(own - expected) else math.inf


def follow(subject: Subject, training: Training) -> list[Followed]:
    """The steps of a run, each with what the naive implementation makes of its groups."""
    rules = rules_of_run(subject, training)
    moving = training.config.reference
    reference = before = {} if moving is None else _wide(subject.models["reference"].weights)
    coefs = Coefficients(kl_coef=rules.kl_coef, entropy_bonus=rules.entropy_bonus)
    found: list[Followed] = []
    critic = subject.models.get("critic")
    valued = {} if critic is None else critic.weights
    for number, step in enumerate(training.steps):
        given, learned = step.models.get("critic", {}), step.learned.get("critic", [])
        own = dataclasses.replace(rules, kl_coef=coefs.kl_coef)
        sequences = subject.naive_steps(step.groups, own, step.weights, given, reference)
        waits = training.config.critic is not None and number < training.config.critic.warmup_steps
        updates: list[NaiveUpdate] = []
        applied: list[Coefficients] = []
        now = coefs
        for seen, batch in zip(step.updates, sequences * rules.updates_per_batch, strict=False):
            applied.append(now.applied(rules))
            weighed = dataclasses.replace(
                batch, kl_coef=np.asarray(now.kl_coef), entropy_bonus=np.asarray(applied[-1].entropy_bonus)
            )
            updates.append(naive_update(subject, weighed, {**step.weights, **seen.before}))
            now = now.after_update(rules, updates[-1].entropy)
        found.append(
            Followed(
                step=step,
                updates=updates,
                missing=abs(len(step.updates) - (0 if waits else len(sequences) * rules.updates_per_batch)),
                criticised=_criticised(critic, training, learned, sequences),
                missing_of_critic=abs(len(learned) - len(sequences) * _critic_updates(training))
                + sum(not np.array_equal(given[name], x) for name, x in valued.items()),
                coefs=coefs,
                applied=applied,
                reference=reference,
                reference_before=before,
            )
        )
        valued = learned[-1].after if learned else valued
        coefs = now.after_step(rules, _mean_kl(rules, sequences, updates)) if updates else now
        if moving is not None and (number + 1) % moving.sync_every == 0:
            reference, before = moved_reference(reference, training.version(number + 1), moving.mixup), reference
    return found


def _critic_updates(training: Training) -> int:
    """How often the critic learns from each minibatch; 0 without one."""
    return 0 if training.config.critic is None else training.config.critic.updates


def _criticised(
    critic: NaiveModel | None, training: Training, learned: Sequence[OptimizerStep], sequences: Sequence[Sequences]
) -> list[Update]:
    """The naive updates of the critic, which learns from each minibatch in turn."""
    if critic is None or training.config.critic is None:
        return []
    return [
        naive_value_update(batch, critic._replace(weights=seen.before), training.config.critic.clip)
        for seen, batch in zip(learned, list(sequences) * _critic_updates(training), strict=False)
    ]


def rules_of_run(subject: Subject, training: Training) -> Rules:
    """The subject's rules with the run's numbers of minibatches and of updates per batch, and its targets."""
    algorithm = training.config.algorithm
    rules = dataclasses.replace(
        subject.rules, minibatches=algorithm.minibatches, updates_per_batch=algorithm.updates_per_batch
    )
    if rules.kl_target is not None:
        rules = dataclasses.replace(rules, kl_target=algorithm.kl_target, kl_gain=algorithm.kl_gain)
    if rules.entropy_target is not None:
        most = algorithm.entropy_bonus_max
        rules = dataclasses.replace(rules, entropy_target=algorithm.entropy_target, entropy_bonus_max=most)
    return rules


def _mean_kl(rules: Rules, sequences: Sequence[Sequences], updates: Sequence[NaiveUpdate]) -> float:
    """A step's mean KL to the reference, in nats: that charged to rewards, or of all updates, by their tokens."""
    masks = [np.asarray(each.valid) for each in sequences]
    if rules.kl == "k1_reward":
        charged = [np.asarray(each.sampled_logprobs) - np.asarray(each.reference_logprobs) for each in sequences]
        return float(np.concatenate([x[mask] for x, mask in zip(charged, masks, strict=True)]).mean())
    tokens = [int(mask.sum()) for mask in masks] * rules.updates_per_batch
    return float(np.average([each.kl for each in updates], weights=tokens[: len(updates)]))


def _wide(weights: Arrays) -> Arrays:
    return {name: np.asarray(value, np.float64) for name, value in weights.items()}
