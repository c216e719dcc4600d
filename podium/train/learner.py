"""Trains a model other than the policy: its compiled programs, and its updates in a step.

The model's state is in `TrainState.models` under its role name.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

from podium.observe.stats import LearnerStats
from podium.run.run_spec import LearningSpec, Role
from podium.train.batches.batch import Batch
from podium.train.optimizer.transforms import learning_rate
from podium.train.scorers import make_role_program, role_settings
from podium.train.state import TrainState, at_schedule_step
from podium.train.step import CompiledScore, CompiledTrainStep, Metrics, TrainSettings, make_value_step


class DivergedError(ValueError):
    """An update produced NaN or infinity; the message names the update and what to do."""


class Learner(NamedTuple):
    """A trained model other than the policy, which estimates the future reward at each token."""

    role: Role
    score: CompiledScore
    step: CompiledTrainStep

    @property
    def spec(self) -> LearningSpec:
        """How the model is trained."""
        assert self.role.learning is not None, "the model is trained"
        return self.role.learning


def make_learner(role: Role, settings: TrainSettings, optimizer: optax.GradientTransformation) -> Learner:
    """Make the programs of a trained role; each is compiled on first use. `settings` are those of the trainer."""
    assert role.learning is not None, "the model is trained"
    step = make_value_step(role_settings(role, settings), optimizer, clip=role.learning.clip)
    return Learner(role, make_role_program(role, settings), step)


def update_learner(
    learner: Learner, state: TrainState, batches: Sequence[Batch[jax.Array]], step: int, *, minibatches: int
) -> tuple[TrainState, LearnerStats | None]:
    """Run a learner's updates in one step. Each step covers an equal share of the learning rate schedule, as for the
    policy.

    `state` is the learner's state, and is donated; without batches it is returned unchanged, with None as statistics.

    Raises:
        DivergedError: the loss or the gradient is not finite.
    """
    start, spec = time.perf_counter(), learner.spec
    end = (step + 1) * spec.updates * minibatches
    todo = [batch for _ in range(spec.updates) for batch in batches]
    made: list[Metrics] = []
    for position, batch in enumerate(todo, start=end - len(todo)):
        state, metrics = learner.step(at_schedule_step(state, position), batch)
        metrics = jax.device_get(metrics)
        made.append(metrics)
        if not np.isfinite([metrics["loss"], metrics["gradient_norm"]]).all():
            name = learner.role.name
            raise DivergedError(
                f"update {int(state.step)} of the {name} diverged: loss {metrics['loss']}, gradient norm"
                f" {metrics['gradient_norm']}. Continue from the last checkpoint under another name, with a lower"
                f" {name}.learning_rate"
            )
    state = at_schedule_step(state, end)
    if not made:
        return state, None
    tokens = [float(batch.num_tokens) for batch in todo]
    loss, clipped, norm = (
        float(np.average([metrics[name] for metrics in made], weights=tokens))
        for name in ("loss", "clipped", "gradient_norm")
    )
    schedule = learning_rate(spec.optimizer.settings, spec.optimizer.steps)
    stats = LearnerStats(
        loss=loss,
        clip_fraction=clipped,
        gradient_norm=norm,
        learning_rate=float(np.asarray(schedule(end - 1))),
        update_s=time.perf_counter() - start,
    )
    return state, stats
