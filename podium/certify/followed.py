"""Follows a watched run with the naive implementation: the updates of each step, and what they change for the next.

Each optimizer step starts from the trainer's own weights. Weights of the loss that a run adapts, and models that follow
the policy, are computed from the first step on, without the trainer's numbers.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from podium.algorithms.controllers import ENTROPY_BONUS, KL_COEF, LAST_ENTROPY
from podium.certify.check_result import largest
from podium.certify.naive import Sequences
from podium.certify.naive_draws import prompt_index
from podium.certify.naive_rules import KL_TO, Rules, rules_of
from podium.certify.naive_run import Coefficients, moved_weights
from podium.certify.naive_step import imitated_steps
from podium.certify.numbers_task import Numbers
from podium.certify.subject import NaiveModel, Subject, shortest_prompt
from podium.certify.talk import demonstration
from podium.certify.tiny import Arrays
from podium.certify.training import SHORT_STEP, OptimizerStep, Step, Training
from podium.certify.updates import (
    NaiveUpdate,
    Update,
    added,
    gradient_difference,
    loss_difference,
    naive_update,
    naive_value_update,
    relative,
)
from podium.config.schema import AlgorithmConfig
from podium.tasks.task import TaskSource

IMITATION = dataclasses.replace(rules_of(AlgorithmConfig(recipe="sft")), old_logprobs="sampler")
"""The rules of demonstrations that are mixed in; they have no log-probabilities before the step."""


class Learned(NamedTuple):
    """The updates of a model that is trained beside the policy in a step of the run."""

    seen: Sequence[OptimizerStep]
    naive: list[Update]
    """The same updates by the naive implementation, each from the trainer's weights before it."""
    missing: int
    """Number of updates too few or too many, and of arrays that changed between two updates."""

    @property
    def error(self) -> float:
        """The largest relative error of a loss or of the gradient of a parameter."""
        errors: list[float] = []
        for seen, naive in zip(self.seen, self.naive, strict=False):
            errors.append(abs(seen.loss - naive.loss) / (abs(naive.loss) or 1.0))
            errors += [relative(seen.gradient[name], value) for name, value in naive.gradient.items()]
        return largest(errors)


class Moved(NamedTuple):
    """The weights of a model that follows the policy, at a step, in float64."""

    now: Arrays
    before: Arrays
    """The weights before it last moved; its first weights until it has moved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed:
    """A step of the run, and what the naive implementation computes for it."""

    step: Step
    updates: list[NaiveUpdate]
    """The step's optimizer steps by the naive implementation, from the trainer's weights before each."""
    missing: int
    """Number of optimizer steps that the trainer made too few or too many."""
    learned: Mapping[str, Learned]
    """The updates of the other models that are trained, by the name of their role."""
    moved: Mapping[str, Moved]
    """The models that follow the policy, before the step, by the name of their role."""
    coefs: Coefficients
    """The coefficients before the step."""
    batches: list[Sequences[np.ndarray] | None]
    """The drawn tokens that each of `updates` learned from; None if it had demonstrations alone."""
    applied: list[Coefficients]
    """The coefficients in the loss of each of `updates`."""

    @property
    def gradient_error(self) -> float:
        """The largest relative error of a loss or of a parameter's gradient."""
        errors: list[float] = []
        for seen, naive in zip(self.step.updates, self.updates, strict=False):
            errors.append(loss_difference(seen.loss, naive.loss, naive.sizes))
            errors.append(gradient_difference(seen.gradient, naive.gradient, naive.sizes))
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
    """The relative error of a number; infinite if the number is missing."""
    own = found.get(name, math.nan)
    if own == expected:
        return 0.0
    return abs(own - expected) / (abs(expected) or 1.0) if math.isfinite(own - expected) else math.inf


def follow(subject: Subject, training: Training) -> list[Followed]:
    """The steps of a run, each with what the naive implementation computes from its groups."""
    rules = rules_of_run(subject, training)
    coefs = Coefficients(kl_coef=rules.kl_coef, entropy_bonus=rules.entropy_bonus)
    moved = {name: Moved(*[_wide(subject.models[name].weights)] * 2) for name in training.settings.moving}
    left = {name: subject.models[name].weights for name in training.settings.learning}  # by the last update
    found: list[Followed] = []
    for number, step in enumerate(training.steps):
        others = {**{name: own.now for name, own in moved.items()}, **{name: step.models[name] for name in left}}
        own = dataclasses.replace(rules, kl_coef=coefs.kl_coef)
        minibatches = zip(
            subject.naive_steps(step.groups, own, step.weights, others),
            _imitated(subject, training, number),
            strict=True,
        )
        todo = [each for each in minibatches if each != (None, None)]
        todo = todo[: len(todo) - (number == SHORT_STEP and rules.minibatches > 1)]
        sequences = [batch for batch, _ in todo if batch is not None]
        updates: list[NaiveUpdate] = []
        applied: list[Coefficients] = []
        now = coefs
        for seen, (batch, imitated) in zip(step.updates, todo * rules.updates_per_batch, strict=False):
            weights, parts = {**step.weights, **seen.before}, list[NaiveUpdate]()
            applied.append(now.applied(rules))
            if batch is not None:
                weighed = dataclasses.replace(
                    batch, kl_coef=np.asarray(now.kl_coef), entropy_bonus=np.asarray(applied[-1].entropy_bonus)
                )
                parts.append(naive_update(subject, weighed, weights))
                now = now.after_update(rules, parts[-1].entropy)
            if imitated is not None:
                own_part = naive_update(dataclasses.replace(subject, rules=IMITATION), imitated, weights)
                parts.append(own_part._replace(tokens=0))  # the model drew none of them
            updates.append(parts[0] if len(parts) == 1 else added(*parts))
        waits = any(number < each.warmup_steps for each in training.settings.learning.values())
        found.append(
            Followed(
                step=step,
                updates=updates,
                missing=abs(len(step.updates) - (0 if waits else len(todo) * rules.updates_per_batch)),
                learned={
                    name: _learned(subject.models[name], training, step, weights, sequences)
                    for name, weights in left.items()
                },
                moved=dict(moved),
                coefs=coefs,
                batches=[batch for batch, _ in (todo * rules.updates_per_batch)[: len(updates)]],
                applied=applied,
            )
        )
        left = {name: made[-1].after if (made := step.learned[name]) else weights for name, weights in left.items()}
        coefs = now.after_step(rules, _mean_kl(rules, sequences, updates)) if updates else now
        for name, settings in training.settings.moving.items():
            if (number + 1) % settings.sync_every == 0:
                before = moved[name].now
                moved[name] = Moved(moved_weights(before, training.version(number + 1), settings.mixup), before)
    return found


def _imitated(subject: Subject, training: Training, number: int) -> list[Sequences[np.ndarray] | None]:
    """What each minibatch of a step imitates, by the seed's order of demonstrations; None where it imitates nothing."""
    config = training.config
    minibatches, count = config.algorithm.minibatches, config.demonstrations_per_step
    if config.demonstrations is None:
        return [None] * minibatches
    numbers = Numbers(TaskSource(), vocab=subject.decoder.vocab, shortest=shortest_prompt(subject.recipe))
    known = numbers.prompts("train")
    places = [prompt_index(config.seed, place, len(known)) for place in range(number * count, (number + 1) * count)]
    own = [demonstration(known[place], tools=subject.converses) for place in places]
    return imitated_steps(own, subject.room, minibatches=minibatches, weight=config.demonstrations.weight)


def _learned(
    model: NaiveModel, training: Training, step: Step, left: Arrays, sequences: Sequence[Sequences[np.ndarray]]
) -> Learned:
    """A step's updates of a model, which learns from each minibatch in turn, from the weights `left` before them."""
    name = model.role.name
    settings, seen = training.settings.learning[name], step.learned[name]
    minibatches = list(sequences) * settings.updates
    naive = [
        naive_value_update(batch, model._replace(weights=each.before), settings.clip)
        for each, batch in zip(seen, minibatches, strict=False)
    ]
    changed = sum(not np.array_equal(step.models[name][each], x) for each, x in left.items())
    return Learned(seen, naive, abs(len(seen) - len(minibatches)) + changed)


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


def _mean_kl(rules: Rules, sequences: Sequence[Sequences[np.ndarray]], updates: Sequence[NaiveUpdate]) -> float:
    """A step's mean KL, in nats: the one charged to rewards, or that of all updates, weighted by their tokens."""
    masks = [each.valid for each in sequences]
    if rules.kl == "k1_reward":
        charged = [each.sampled_logprobs - each.scores[KL_TO] for each in sequences]
        return float(np.concatenate([x[mask] for x, mask in zip(charged, masks, strict=True)]).mean())
    tokens = [each.tokens for each in updates]
    return float(np.average([each.kl for each in updates], weights=tokens)) if any(tokens) else 0.0


def _wide(weights: Arrays) -> Arrays:
    return {name: np.asarray(value, np.float64) for name, value in weights.items()}
