"""Optimizer moments in host memory: where they are stored between updates, and the update that streams them.

The compiler would fetch all moments as early as possible, before the backward pass, which needs the memory; barriers do
not prevent this. So each parameter's update is its own loop: a loop fetches its operands when it starts, and the loops
run one after another, after the gradient is complete.
"""

from collections.abc import Collection, Iterable
from typing import TypeAlias, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, Sharding

from podium.sharding import Params

HOST_MEMORY = "pinned_host"
"""jax's name for host memory that devices can read and write directly."""
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
T = TypeVar("T")


class Offloaded(optax.GradientTransformationExtraArgs):
    """An optimizer whose moments are in host memory between updates, and which updates each parameter separately."""


class OffloadedWhole(Offloaded):
    """An offloaded optimizer whose update of a parameter may depend on others, so that all moments are fetched
    together.
    """


def offloaded(optimizer: optax.GradientTransformation, *, whole: bool) -> Offloaded:
    """Wrap an optimizer so that its moments are in host memory.

    Unless `whole`, updating one parameter alone (given the global norm as `norm`) must give the same result as updating
    it together with all others.
    """
    kind = OffloadedWhole if whole else Offloaded
    return kind(optimizer.init, optax.with_extra_args_support(optimizer).update)


def in_host_memory(sharding: Sharding) -> Sharding:
    """The sharding with its memory changed to the host's."""
    return sharding.with_memory_kind(HOST_MEMORY)


def takes_no_device(sharding: Sharding) -> bool:
    """Whether an array is in host memory only; False on a CPU, where both memories are the same."""
    return sharding.memory_kind == HOST_MEMORY and next(iter(sharding.device_set)).platform != "cpu"


def check_host_memory(mesh: Mesh) -> None:
    """Raise ValueError if the mesh's devices cannot read host memory through jax."""
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"train.offload_optimizer true needs a device that can read host memory ({HOST_MEMORY}), and jax has "
            f"{' and '.join(kinds)} for {device.device_kind}; set train.offload_optimizer to false"
        )


_Parts: TypeAlias = tuple[Params, Params, optax.OptState]
"""For some parameters: gradients, values and state before an update; or updates, values and state after it."""


def apply_gradients(
    optimizer: optax.GradientTransformation, grads: Params, opt_state: optax.OptState, params: Params, *, streamed: bool
) -> tuple[Params, optax.OptState, jax.Array]:
    """Apply an update; returns the parameters, the optimizer's state, and the norm of the update.

    Moments from host memory are moved back there. With `streamed`, only one parameter's moments are on the device at a
    time. On a CPU, which has only one memory, the program and its results are the same with and without offloading.
    """
    if not (streamed and isinstance(optimizer, Offloaded)):
        updates, params, opt_state = _update(optimizer, grads, opt_state, params)
        return params, opt_state, optax.tree.norm(updates)
    groups = [list(params)] if isinstance(optimizer, OffloadedWhole) else [[name] for name in params]
    norm = optax.tree.norm(grads)
    rounds = jnp.where(norm < 0, 0, 1)  # always 1, but hidden from the compiler, which would otherwise unroll the loop
    made: list[_Parts] = []
    for names in groups:
        given = [{name: tree[name] for name in names} for tree in (grads, params)]

        def once(_: jax.Array, carried: _Parts) -> _Parts:
            grads, params, own = carried
            return _update(optimizer, grads, own, params, norm=norm)

        made.append(jax.lax.fori_loop(0, rounds, once, (*given, _part(opt_state, names))))
    updates, new, states = zip(*made, strict=True)
    whole = jax.tree.map(_union, *states, is_leaf=lambda x: _is_by_name(x, params))
    return _merged(new), whole, optax.tree.norm(_merged(updates))


def _update(
    optimizer: optax.GradientTransformation, grads: Params, opt_state: optax.OptState, params: Params, **norm: jax.Array
) -> tuple[Params, Params, optax.OptState]:
    """Return updates, parameters and state; moments from host memory are moved back there."""
    waiting = jax.tree.map(lambda x: jax.typeof(x).memory_space == HOST, opt_state)
    move = lambda tree, to: jax.tree.map(lambda x, host: jax.device_put(x, to) if host else x, tree, waiting)  # noqa: E731
    changes, opt_state = optimizer.update(grads, move(opt_state, DEVICE), params, **norm)
    updates = cast(Params, changes)  # optax types a tree as arbitrarily nested
    return updates, jax.tree.map(jnp.add, params, updates), move(opt_state, HOST)


def _part(opt_state: optax.OptState, names: Collection[str]) -> optax.OptState:
    """The optimizer's state restricted to these parameters: each dict by parameter keeps only these names."""
    is_leaf = lambda x: _is_by_name(x, names)  # noqa: E731
    pick = lambda x: {name: x[name] for name in names if name in x} if is_leaf(x) else x  # noqa: E731
    return jax.tree.map(pick, opt_state, is_leaf=is_leaf)


def _union(*parts: object) -> object:
    """Merge dicts with different keys; for values that are equal in all parts, such as counts, take the first."""
    return _merged(part for part in parts if _is_dict(part)) if _is_dict(parts[0]) else parts[0]


def _merged(parts: Iterable[dict[str, T]]) -> dict[str, T]:
    return {name: x for part in parts for name, x in part.items()}


def _is_by_name(x: object, names: Collection[str]) -> bool:
    return _is_dict(x) and not x.keys().isdisjoint(names)


def _is_dict(x: object) -> TypeGuard[dict[str, object]]:
    """Whether part of an optimizer's state is a dict; all its dicts are keyed by parameter."""
    return isinstance(x, dict)
