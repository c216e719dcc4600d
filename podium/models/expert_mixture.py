"""The mixture of experts of each device's tokens (`podium.models.expert_forms`), on a mesh.

Experts are stored split over devices (`podium.models.params`). In an update they are gathered for each layer, because a
layer's experts are smaller than the rows that would be sent to them. In a rollout's group of devices each device
keeps its experts and computes their part for all tokens of the group; the parts are added.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podium.kernels.grouped import WHOLE_INNER
from podium.models.blocks.activation import Activation
from podium.models.blocks.choices import Routed
from podium.models.blocks.experts import DENSE_ROWS
from podium.models.blocks.weights import Adapted, AnyWeight, Codes, LayerWeight, Weight
from podium.models.expert_forms import DeviceExperts, Group, Matrices, dense_form, every_gate, sorted_form, split_form
from podium.models.linear import full_precision
from podium.models.params import mesh_axis_names
from podium.sharding import ShardingRules, gathered_parts, scattered_sum

INTO, OUT_OF = ("experts", "expert_width", "expert_mlp"), ("experts", "expert_mlp", "expert_width")
"""Logical axes of the experts' matrices: gate and up (into the experts' width), and down (out of it)."""
AXES = (
    (INTO, ("experts", "expert_width", "rank"), ("experts", "rank", "expert_mlp")),
    (INTO, ("experts", "expert_width", "rank"), ("experts", "rank", "expert_mlp")),
    (OUT_OF, ("experts", "expert_mlp", "rank"), ("experts", "rank", "expert_width")),
)
"""Logical axes of gate, up and down, and of the factors of their adapters."""
INTO_BIAS, OUT_OF_BIAS = ("experts", "expert_mlp"), ("experts", None)


def mixed(
    rules: ShardingRules,
    routed: Routed,
    matrices: Sequence[LayerWeight],
    biases: Sequence[jax.Array] = (),
    *,
    count: int,
    activation: Activation,
) -> jax.Array:
    """The sum over each token's experts of gate times expert, [B, T, D]; no token is dropped.

    Args:
        rules: where weights and activations are.
        routed: the tokens.
        matrices: gate, up [E, D, F] and down [E, F, D], as stored, and perhaps with adapters.
        biases: of gate, up [E, F] and down [E, D], as layers compute with them; empty without biases.
        count: E.
        activation: opens the gate.
    """
    weights = [_factors(each) for each in matrices]
    scales = [each.scale if isinstance(each, Adapted) else 0.0 for each in matrices]
    local = functools.partial(_local, rules=rules, scales=scales, count=count, activation=activation)
    if rules.mesh.size == 1:
        return local(routed, weights, biases)
    rows = rules.spec(("rows", "tokens", None))

    def stored(axes: Sequence[str], w: AnyWeight) -> AnyWeight:
        own = rules.storage.spec(axes)
        if isinstance(w, Weight) and w.layer is not None:
            return w._replace(value=P(None, *own), layer=P())
        return jax.tree.map(lambda _: own, w)

    specs = [list(map(stored, axes, each)) for axes, each in zip(AXES, weights, strict=True)]
    of_biases = [rules.spec(axes) for axes in (INTO_BIAS, INTO_BIAS, OUT_OF_BIAS)[: len(biases)]]
    given = (rows, specs, of_biases)
    return jax.shard_map(local, mesh=rules.mesh, in_specs=given, out_specs=rows, check_vma=False)(
        routed, weights, list(biases)
    )


def _local(
    routed: Routed,
    weights: Sequence[Sequence[AnyWeight]],
    biases: Sequence[jax.Array],
    *,
    rules: ShardingRules,
    scales: Sequence[float],
    count: int,
    activation: Activation,
) -> jax.Array:
    """`mixed` for the tokens of one device."""
    x, gates, chosen = routed
    B, T, D = x.shape
    gate, up, _ = weights
    if _side_by_side(rules, gate, up):
        gathered, apart = [Group(_gathered(rules, INTO, gate[0], up[0]))], slice(2, None)
    else:
        gathered, apart = [], slice(None)
    gathered += [
        Group(*(_gathered(rules, own, w) for own, w in zip(axes, each, strict=False)), scale=scale)
        for axes, each, scale in zip(AXES[apart], weights[apart], scales[apart], strict=True)
    ]
    held = gathered[0].matrix.shape[0]
    flat = x.reshape(B * T, D)
    own = chosen.reshape(B * T, -1)
    if held < count:  # this device's experts come first
        own = (own - held * _index(rules, "experts")) % count
    weights_of = gates.reshape(B * T, -1)
    form = sorted_form if held == count else functools.partial(split_form, count=count)
    if T == 1 and B <= DENSE_ROWS:
        form = dense_form
    y = form(Routed(flat, weights_of, own), DeviceExperts(gathered, activation, biases), kernels=rules.kernels)
    if biases:
        y = y + _out_bias(rules, weights_of, own, biases[-1]).astype(y.dtype)
    summed = [name for axis in ("experts", "expert_mlp") for name in mesh_axis_names(rules.axes.get(axis))]
    if parts := tuple(name for name in summed if rules.mesh.shape[name] > 1):
        y = jax.lax.psum(y, parts)
    return y.reshape(x.shape)


def _index(rules: ShardingRules, axis: str) -> jax.Array:
    """Index of this device's part of a logical axis."""
    return jax.lax.axis_index(mesh_axis_names(rules.axes[axis]))


def _out_bias(rules: ShardingRules, gates: jax.Array, chosen: jax.Array, bias: jax.Array) -> jax.Array:
    """The sum of each token's gates times its experts' output biases [G, D], [N, D]; only on one device of tp, which
    sums.
    """
    every = every_gate(gates, chosen, len(bias)).astype(bias.dtype)
    y = jnp.einsum("ng,gd->nd", every, bias, precision=full_precision(bias.dtype), preferred_element_type=jnp.float32)
    for name in mesh_axis_names(rules.axes.get("expert_mlp")):
        if rules.mesh.shape[name] > 1:
            y = jnp.where(jax.lax.axis_index(name) == 0, y, 0)
    return y


def _factors(matrix: LayerWeight) -> list[AnyWeight]:
    """A matrix of all experts, with both factors of its adapters, if any."""
    value = matrix.matrix if isinstance(matrix, Adapted) else matrix
    assert not isinstance(value, Codes), "experts are never stored as codes"
    return [value, matrix.a, matrix.b] if isinstance(matrix, Adapted) else [value]


def _side_by_side(rules: ShardingRules, gate: Sequence[AnyWeight], up: Sequence[AnyWeight]) -> bool:
    """Whether to join gate and up into one matrix [E, D, 2 F] for the product.

    The gradient of the rows is then one product instead of a sum of two. If devices exchange the experts, joining costs
    no extra copy. Two products are faster if twice an expert's width exceeds what a kernel reads at once, and they are
    needed with adapters, which belong to a single matrix.
    """
    value = gate[0].value if isinstance(gate[0], Weight) else gate[0]
    alone = len(gate) == len(up) == 1
    return alone and 2 * value.shape[-1] <= WHOLE_INNER and bool(_exchanged(rules, INTO))


def _exchanged(rules: ShardingRules, axes: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """The dimensions along which experts are gathered for a layer, each with the mesh axes that split it."""
    return {
        dim: mesh_axis_names(own)
        for dim, (own, wanted) in enumerate(zip(rules.storage.spec(axes), rules.spec(axes), strict=True))
        if own != wanted and any(rules.mesh.shape[name] > 1 for name in mesh_axis_names(own))
    }


def _gathered(rules: ShardingRules, axes: Sequence[str], *parts: AnyWeight) -> Matrices:
    """The experts that a device multiplies with, gathered from the stored parts; several matrices are joined side by
    side.

    Joining several matrices requires exchanges between devices.
    """
    whole = _exchanged(rules, axes)
    held = [
        Matrices(w) if not isinstance(w, Weight) else Matrices(w.value, _one(w.sums), w.sums is None, w.layer)
        for w in parts
    ]
    if not whole:
        (alone,) = held
        return alone
    value = jnp.concatenate([each.own for each in held], axis=-1)
    for dim, names in whole.items():
        value = _gather(value, dim, names, rules.mesh)

    def zeros(sums: jax.Array) -> jax.Array:
        return _sums(tuple(whole.items()), rules.mesh, sums)

    return Matrices(value, tuple(zeros(own) for each in held for own in each.sums), held[0].frozen)


def _one(sums: jax.Array | None) -> tuple[jax.Array, ...]:
    return () if sums is None else (sums,)


def _gather(x: jax.Array, dim: int, names: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """The parts of all devices side by side along a dimension.

    Along the first, they are gathered along a new one: for a gather along the dimension itself, the TPU's compiler
    would copy the stack of all layers into a layout in which that dimension comes first.
    """
    if dim:
        return jax.lax.all_gather(x, names, axis=dim, tiled=True)
    return gathered_parts(x, names, mesh)


def _scattered(dx: jax.Array, dim: int, names: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """The sum over devices of each device's part; the transpose of `_gather`."""
    return jax.lax.psum_scatter(dx, names, scatter_dimension=dim, tiled=True) if dim else scattered_sum(dx, names, mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(whole: tuple[tuple[int, tuple[str, ...]], ...], mesh: Mesh, x: jax.Array) -> jax.Array:
    """Zeros in place of gathered experts; their gradient becomes that of the stored experts, and is summed in its own
    format.
    """
    shape = list(x.shape)
    for dim, names in whole:
        for name in names:
            shape[dim] *= mesh.shape[name]
    return jnp.zeros(shape, x.dtype)


def _scatter(whole: tuple[tuple[int, tuple[str, ...]], ...], mesh: Mesh, _: None, dx: jax.Array) -> tuple[jax.Array]:
    for dim, names in reversed(whole):
        dx = _scattered(dx, dim, names, mesh)
    return (dx,)


_sums.defvjp(lambda whole, mesh, x: (_sums(whole, mesh, x), None), _scatter)
