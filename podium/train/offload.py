"""Moments in the host's memory: where they wait between updates, and the update that takes them from there.

A compiler fetches all of them as soon as it can, before the backward pass, which needs the memory; barriers do not hold
it back. So each parameter's update is a loop of its own: what a loop takes from the host it fetches when it begins, and
loops run one after the other, behind the gradient.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, Sharding

from podium.sharding import Params

HOST_MEMORY = "pinned_host"
"""Jax's name of the memory of a host that its devices read and write by themselves."""
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Offloaded(optax.GradientTransformationExtraArgs):
    """An optimizer whose moments are in the host's memory between updates; it updates each parameter by itself."""


class OffloadedWhole(Offloaded):
    """The same of an optimizer that may look at several parameters at once."""


def offloaded(optimizer: optax.GradientTransformation, *, whole: bool) -> Offloaded:
    """The optimizer with its moments in the host's memory.

    Without `whole` it must make of a parameter's gradient, given the norm of all as `norm`, what it makes of it among
    the others.
    """
    kind = OffloadedWhole if whole else Offloaded
    return kind(optimizer.init, optax.with_extra_args_support(optimizer).update)


def in_host_memory(sharding: Sharding) -> Sharding:
    """The same parts, each in the memory of its device's host."""
    return sharding.with_memory_kind(HOST_MEMORY)


def takes_no_device(sharding: Sharding) -> bool:
    """Whether an array takes memory of the host and none of a device; a CPU has one memory."""
    return sharding.memory_kind == HOST_MEMORY and next(iter(sharding.device_set)).platform != "cpu"


def check_host_memory(mesh: Mesh) -> None:
    """Raises ValueError where jax has no memory of the host that the mesh's devices can read."""
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"train.offload_optimizer true needs a device that reads its host's memory ({HOST_MEMORY}), and jax has"
            f" {' and '.join(kinds)} for {device.device_kind}; set train.offload_optimizer to false"
        )


def apply_gradients(
    optimizer: optax.GradientTransformation, grads: Params, opt_state: optax.OptState, params: Params, *, streamed: bool
) -> tuple[Params, optax.OptState, jax.Array]:
    """The parameters and the optimizer's state after an update, and the update's norm.

    Moments that come from the host's memory go back there. With `streamed` one parameter's are on the device at once;
    a CPU has one memory, and the same program with moments there and elsewhere gives the same bits.
    """
    if not (streamed and isinstance(optimizer, Offloaded)):
        updates, params, opt_state = _update(optimizer, grads, opt_state, params)
        return params, opt_state, optax.tree.norm(updates)
    groups = [list(params)] if isinstance(optimizer, OffloadedWhole) else [[name] for name in params]
    norm = optax.tree.norm(grads)
    rounds = jnp.where(norm < 0, 0, 1)  # always one, which the compiler must not know: it would take the loop apart
    made = []
    for names in groups:
        given = [{name: tree[name] for name in names} for tree in (grads, params)]

        def once(_: jax.Array, carried: tuple) -> tuple:
            grads, params, own = carried
            return _update(optimizer, grads, own, params, norm=norm)

        made.append(jax.lax.fori_loop(0, rounds, once, (*given, _part(opt_state, names))))
    updates, new, states = zip(*made, strict=True)
    whole = jax.tree.map(_union, *states, is_leaf=lambda x: _is_by_name(x, params))
    return _union(*new), whole, optax.tree.norm(_union(*updates))


def _update(
    optimizer: optax.GradientTransformation, grads: Params, opt_state: optax.OptState, params: Params, **norm: jax.Array
) -> tuple[Params, Params, optax.OptState]:
    """Updates, parameters and state; what comes from the host's memory goes back there."""
    waiting = jax.tree.map(lambda x: jax.typeof(x).memory_space == HOST, opt_state)
    move = lambda tree, to: jax.tree.map(lambda x, host: jax.device_put(x, to) if host else x, tree, waiting)  # noqa: E731
    changes, opt_state = optimizer.update(grads, move(opt_state, DEVICE), params, **norm)
    updates: Any = changes
    return updates, jax.tree.map(jnp.add, params, updates), move(opt_state, HOST)


def _part(opt_state: optax.OptState, names: Collection[str]) -> optax.OptState:
    """The state of an optimizer that knows these parameters alone: in place of each dict of all, one of them."""
    is_leaf = lambda x: _is_by_name(x, names)  # noqa: E731
    pick = lambda x: {name: x[name] for name in names if name in x} if is_leaf(x) else x  # noqa: E731
    return jax.tree.map(pick, opt_state, is_leaf=is_leaf)


def _union(*parts: Any) -> Any:
    """Of dicts with different names one with all; of what is equal in all parts, such as counts, the first."""
    return {name: x for part in parts for name, x in part.items()} if isinstance(parts[0], dict) else parts[0]


def _is_by_name(x: Any, names: Collection[str]) -> bool:
    return isinstance(x, dict) and not x.keys().isdisjoint(names)
