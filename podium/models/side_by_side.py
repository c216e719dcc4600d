"""Stores matrices of a layer side by side as one, and splits the product with the joined matrix again.

If the dimension along which they lie is split over devices, each device has its part of every matrix: the order is
device by device, and on a device matrix by matrix.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from podium.models.params import LORA_A, LORA_B, SCALE, Group
from podium.sharding import Params, ShardingRules


def joined(layer: Params, groups: Sequence[Group], rules: ShardingRules) -> Params:
    """Join each group of a layer's weights into one weight; the weights may also be only the adapters, or all others.

    Shapes are those that `param_specs` declares for a decoder that is `joined`.
    """
    found = dict(layer)
    for group in groups:
        shards = _shards(group, rules)
        for suffix in ("", SCALE):
            if group.names[0] + suffix in layer:
                own = [found.pop(name + suffix) for name in group.names]
                found[group.whole + suffix] = _side_by_side(own, own[0].ndim - group.outputs, shards)
        if adapted := [name for name in group.names if name + LORA_A in layer]:
            factors = [found.pop(name + LORA_A) for name in adapted]
            found[group.whole + LORA_A] = jnp.concatenate(factors, axis=-1)
            seconds = {name: found.pop(name + LORA_B) for name in adapted}
            found[group.whole + LORA_B] = _side_by_side(_diagonal(seconds, group), 1, shards)
    return found


def _diagonal(seconds: Params, group: Group) -> list[jax.Array]:
    """The second factors of a group's adapters as a block-diagonal matrix, with the columns [r, ...] of each matrix."""
    first = next(iter(seconds.values()))
    rank = sum(len(value) for value in seconds.values())
    columns: list[jax.Array] = []
    before = 0
    for name, size in zip(group.names, group.sizes, strict=True):
        if name in seconds:
            after = rank - before - len(seconds[name])
            columns.append(jnp.pad(seconds[name], ((before, after), *[(0, 0)] * (first.ndim - 1))))
            before = rank - after
        else:
            columns.append(jnp.zeros((rank, size, *first.shape[2:]), first.dtype))
    return columns


def _shards(group: Group, rules: ShardingRules) -> int:
    return rules.num_shards(group.axis) if group.axis else 1


def _side_by_side(values: Sequence[jax.Array], dim: int, shards: int) -> jax.Array:
    """Concatenate arrays along `dim`, shard by shard, for the `shards` into which the dimension is split."""
    cut = [value.reshape(*value.shape[:dim], shards, -1, *value.shape[dim + 1 :]) for value in values]
    whole = jnp.concatenate(cut, axis=dim + 1)
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])


def apart(y: jax.Array, dim: int, group: Group, rules: ShardingRules) -> list[jax.Array]:
    """Split the product with a joined matrix along `dim` into the products with each of the group's matrices."""
    shards = _shards(group, rules)
    cut = y.reshape(*y.shape[:dim], shards, -1, *y.shape[dim + 1 :])
    ends = list(itertools.accumulate(size // shards for size in group.sizes))[:-1]
    parts = jnp.split(cut, ends, axis=dim + 1)
    return [part.reshape(*y.shape[:dim], -1, *y.shape[dim + 1 :]) for part in parts]
