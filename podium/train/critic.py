"""The critic of a run: its programs, and how its weights are trained. `TrainState.critic` has its weights."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
import optax

from podium.algorithms.advantages import VALUES
from podium.observe.stats import CriticStats
from podium.run.run_spec import LearningSpec, Role
from podium.sharding import Params
from podium.train.batches.batch import Batch
from podium.train.optimizer.transforms import learning_rate
from podium.train.scorers import Scorer, make_role_program, role_settings
from podium.train.state import TrainState, at_schedule_step
from podium.train.step import CompiledScore, CompiledTrainStep, Metrics, TrainSettings, make_value_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
    """A model that scores tokens with the rewards to come, and learns them: its programs and how it is trained."""

    spec: LearningSpec
    settings: TrainSettings
    """The trainer's, with the critic's decoder."""
    values: CompiledScore
    step: CompiledTrainStep

    def scorer(self, params: Params) -> Scorer:
        """The scorer with the critic's current weights."""
        return Scorer(
            name=VALUES, decoder=self.settings.decoder, params=params, program=self.values, follows_choices=False
        )


class CriticDivergedError(ValueError):
    """An update of the critic produced NaN or infinity."""


def make_critic(role: Role, settings: TrainSettings, optimizer: optax.GradientTransformation) -> Critic:
    """Make the critic's programs; each is compiled on first use. `settings` are the trainer's."""
    assert role.learning is not None, "a critic is trained"
    own = role_settings(role, settings)
    step = make_value_step(own, optimizer, clip=role.learning.clip)
    return Critic(spec=role.learning, settings=own, values=make_role_program(role, settings), step=step)


def update_critic(
    critic: Critic, state: TrainState, batches: Sequence[Batch[jax.Array]], step: int, *, minibatches: int
) -> tuple[TrainState, CriticStats | None]:
    """Run the critic's updates of a step; each step owns a share of its schedule, as for the policy.

    The state is the critic's own, and is donated; without batches it is returned unchanged, with None.

    Raises:
        CriticDivergedError: the loss or the gradient is not finite.
    """
    start = time.perf_counter()
    end = (step + 1) * critic.spec.updates * minibatches
    todo = [batch for _ in range(critic.spec.updates) for batch in batches]
    made: list[Metrics] = []
    for position, batch in enumerate(todo, start=end - len(todo)):
        state, metrics = critic.step(at_schedule_step(state, position), batch)
        metrics = jax.device_get(metrics)
        made.append(metrics)
        if not np.isfinite([metrics["loss"], metrics["gradient_norm"]]).all():
            raise CriticDivergedError(
                f"update {int(state.step)} of the critic diverged: loss {metrics['loss']}, gradient norm"
                f" {metrics['gradient_norm']}. Continue from the last checkpoint under another name, with a lower"
                " critic.learning_rate"
            )
    state = at_schedule_step(state, end)
    if not made:
        return state, None
    tokens = [float(batch.num_tokens) for batch in todo]
    loss, clipped, norm = (
        float(np.average([metrics[name] for metrics in made], weights=tokens))
        for name in ("loss", "clipped", "gradient_norm")
    )
    schedule = learning_rate(critic.spec.optimizer.settings, critic.spec.optimizer.steps)
    stats = CriticStats(
        loss=loss,
        clip_fraction=clipped,
        gradient_norm=norm,
        learning_rate=float(np.asarray(schedule(end - 1))),
        update_s=time.perf_counter() - start,
    )
    return state, stats
