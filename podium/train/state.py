"""The state that an update reads and replaces, concrete or abstract."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podium.sharding import Params, to_devices
from podium.train.optimizer.transforms import abstract_opt_state, make_opt_init, replicated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that an update reads and replaces; saving it saves the run."""

    step: jax.Array  # [] int32, number of updates so far
    params: Params  # float32, as declared by ParamSpecs
    opt_state: optax.OptState
    models: dict[str, "ModelState"] = dataclasses.field(default_factory=dict)
    """The states of the other models that change, by role name."""
    coefs: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    """Coefficients that `podium.algorithms.controllers` adapts, [] float32 each, by name."""

    def weights(self, role: str) -> Params:
        """The weights of another model that changes."""
        own = self.models[role]
        return own.params if isinstance(own, TrainState) else own

    def learned(self, role: str) -> "TrainState":
        """The state of another model that is trained."""
        own = self.models[role]
        assert isinstance(own, TrainState), f"{role} is trained"
        return own


ModelState = TrainState | Params
"""The state of a model that changes: a trained model has a step and an optimizer's state; a model that follows the
policy has only weights."""


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update; takes ownership of `params` without a copy."""
    step = jax.device_put(jnp.zeros((), jnp.int32), replicated(params))
    return TrainState(step=step, params=params, opt_state=make_opt_init(optimizer, params)(params))


def abstract_state(
    abstract_params: dict[str, jax.ShapeDtypeStruct], optimizer: optax.GradientTransformation
) -> TrainState:
    """Shapes, dtypes and shardings of `init_state`'s result: for checkpoints and the planner."""
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(abstract_params))
    return TrainState(
        step=step,  # pyright: ignore[reportArgumentType]  # abstract arrays
        params=abstract_params,  # pyright: ignore[reportArgumentType]
        opt_state=abstract_opt_state(optimizer, abstract_params),
    )


def with_coefs(state: TrainState, coefs: Mapping[str, float]) -> TrainState:
    """The state with these adapted coefficients, replicated on every device."""
    sharding = replicated(state.params)
    placed = {name: to_devices(np.asarray(value, np.float32), sharding) for name, value in coefs.items()}
    return dataclasses.replace(state, coefs=placed)


@functools.partial(jax.jit, static_argnames="mixup", donate_argnames="follower")
def mixed(follower: Params, policy: Params, mixup: float) -> Params:
    """Mixup x policy + (1 - mixup) x follower, for each weight (arXiv:2404.09656); `follower` is donated."""
    return {name: mixup * policy[name] + (1 - mixup) * value for name, value in follower.items()}


def abstract_coefs(params: Params | dict[str, jax.ShapeDtypeStruct], names: Iterable[str]) -> dict[str, jax.Array]:
    """The abstract coefficients of `with_coefs`, on the mesh of these parameters."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(params))
    return dict.fromkeys(names, scalar)  # pyright: ignore[reportReturnType]  # abstract arrays


def at_schedule_step(state: TrainState, position: int) -> TrainState:
    """Set the learning rate of the next update to that of optimizer step `position` of the run, counted from 0.

    The optimizer counts its own updates (the last link of `make_optimizer`'s chain), so its count would fall behind the
    run's if a step makes no update.
    """
    assert isinstance(state.opt_state, tuple), "the state of a chain has one entry for each of its links"
    *rules, schedule = state.opt_state
    assert isinstance(schedule, optax.ScaleByScheduleState)
    assert isinstance(schedule.count, jax.Array)
    if int(schedule.count) == position:
        return state
    count = jnp.full_like(schedule.count, position, device=schedule.count.sharding)
    return dataclasses.replace(state, opt_state=(*rules, schedule._replace(count=count)))


def restarted(state: TrainState) -> TrainState:
    """The state as the start of another run: keeps weights and moments, and restarts the learning rate schedule."""
    step = jnp.zeros_like(state.step, device=state.step.sharding)
    models = {name: restarted(own) if isinstance(own, TrainState) else own for name, own in state.models.items()}
    return dataclasses.replace(at_schedule_step(state, 0), step=step, models=models)
