"""The mixture of experts of each device's tokens: with the rows sorted by expert, or with all experts for every token.

Experts are stored split over devices (`podium.models.params`). In an update they are gathered for each layer, since a
layer's experts are less than its rows for all experts. In a rollout's group of devices each device keeps its experts
and computes their part for all tokens of the group; the parts are added.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podium.kernels.grouped import LANES, Form, grouped_product
from podium.models.blocks.activation import Activation
from podium.models.blocks.experts import DENSE_ROWS
from podium.models.blocks.mathematics import gated
from podium.models.blocks.weights import Adapted, AnyWeight, LayerWeight, Weight
from podium.models.params import mesh_axis_names
from podium.sharding import ShardingRules

MOST_AT_ONCE = 8
"""Most devices that exchange parts of experts at once (`_phases`)."""
SUBLANES = 8
"""Rows of a tile of LANES columns."""
INTO, OUT_OF = ("experts", "expert_width", "expert_mlp"), ("experts", "expert_mlp", "expert_width")
"""Logical axes of the matrices of all experts: into their width, and out of it."""
AXES = (
    (INTO, ("experts", "expert_width", "rank"), ("experts", "rank", "expert_mlp")),
    (INTO, ("experts", "expert_width", "rank"), ("experts", "rank", "expert_mlp")),
    (OUT_OF, ("experts", "expert_mlp", "rank"), ("experts", "rank", "expert_width")),
)
"""Logical axes of gate, up and down, and of the factors of their adapters."""
INTO_BIAS, OUT_OF_BIAS = ("experts", "expert_mlp"), ("experts", None)


def mixed(
    rules: ShardingRules,
    x: jax.Array,
    gates: jax.Array,
    chosen: jax.Array,
    matrices: Sequence[LayerWeight],
    biases: Sequence[jax.Array] = (),
    *,
    count: int,
    activation: Activation,
) -> jax.Array:
    """The sum over each token's experts of gate times expert, [B, T, D]; no token is dropped.

    Args:
        rules: where weights and activations are.
        x: [B, T, D].
        gates: [B, T, k] float32.
        chosen: [B, T, k] int32.
        matrices: gate, up [E, D, F] and down [E, F, D], as stored, and perhaps with adapters.
        biases: of gate, up [E, F] and down [E, D], as layers compute with them; empty without biases.
        count: E.
        activation: opens the gate.
    """
    weights = [_factors(each) for each in matrices]
    scales = [each.scale if isinstance(each, Adapted) else 0.0 for each in matrices]
    local = functools.partial(_local, rules, count, activation, scales)
    if rules.mesh.size == 1:
        return local(x, gates, chosen, weights, biases)
    rows = rules.spec(("rows", "tokens", None))

    def stored(axes: Sequence[str], w: AnyWeight) -> AnyWeight:
        return jax.tree.map(lambda _: rules.storage.spec(axes), w)

    specs = [list(map(stored, axes, each)) for axes, each in zip(AXES, weights, strict=True)]
    of_biases = [rules.spec(axes) for axes in (INTO_BIAS, INTO_BIAS, OUT_OF_BIAS)[: len(biases)]]
    given = (rows, rows, rows, specs, of_biases)
    return jax.shard_map(local, mesh=rules.mesh, in_specs=given, out_specs=rows, check_vma=False)(
        x, gates, chosen, weights, list(biases)
    )


def _local(
    rules: ShardingRules,
    count: int,
    activation: Activation,
    scales: Sequence[float],
    x: jax.Array,
    gates: jax.Array,
    chosen: jax.Array,
    weights: Sequence[Sequence[AnyWeight]],
    biases: Sequence[jax.Array],
) -> jax.Array:
    """`mixed` for the tokens of one device."""
    B, T, D = x.shape
    gathered = [
        Group(*(_gathered(rules, own, w) for own, w in zip(axes, each, strict=False)), scale=scale)
        for axes, each, scale in zip(AXES, weights, scales, strict=True)
    ]
    held = len(gathered[0].matrix[0])
    flat = x.reshape(B * T, D)
    own = chosen.reshape(B * T, -1)
    if held < count:  # those of this device come first
        own = (own - held * _index(rules, "experts")) % count
    weights_of = gates.reshape(B * T, -1)
    if T == 1 and B <= DENSE_ROWS:
        y = dense_form(flat, weights_of, own, gathered, activation, biases, platform=rules.platform)
    else:
        y = sorted_form(
            flat, weights_of, own, gathered, activation, biases, platform=rules.platform, all_here=held == count
        )
    if biases:
        y = y + _out_bias(rules, weights_of, own, biases[-1]).astype(y.dtype)
    summed = [name for axis in ("experts", "expert_mlp") for name in mesh_axis_names(rules.axes.get(axis))]
    if parts := tuple(name for name in summed if rules.mesh.shape[name] > 1):
        y = jax.lax.psum(y, parts)
    return y.reshape(x.shape)


def _index(rules: ShardingRules, axis: str) -> jax.Array:
    """The number of this device's part of a logical axis."""
    return jax.lax.axis_index(mesh_axis_names(rules.axes[axis]))


def _beyond_tiles(rows: int, shape: tuple[int, ...], platform: str) -> int:
    """How many rows to add so that a TPU's compiler takes experts [G, D, F] as they are stored.

    If the rows fill its tiles and the experts do not, it computes everything transposed, and first copies all experts
    of all layers into another layout: gpt-oss's are 2,880 wide.
    """
    fill = rows % LANES == 0 and any(size % LANES for size in shape[1:])
    return SUBLANES if platform == "tpu" and fill else 0


def _out_bias(rules: ShardingRules, gates: jax.Array, chosen: jax.Array, bias: jax.Array) -> jax.Array:
    """Each token's gates times its experts' biases [G, D] of the output, [N, D]; where tp adds up, on one device."""
    every = _every_gate(gates, chosen, len(bias)).astype(bias.dtype)
    y = jnp.einsum("ng,gd->nd", every, bias, precision=_precision(bias.dtype), preferred_element_type=jnp.float32)
    for name in mesh_axis_names(rules.axes.get("expert_mlp")):
        if rules.mesh.shape[name] > 1:
            y = jnp.where(jax.lax.axis_index(name) == 0, y, 0)
    return y


def _every_gate(gates: jax.Array, chosen: jax.Array, here: int) -> jax.Array:
    """The gate [N, G] of every expert that is here, from those [N, k] of the chosen ones: 0 for the others."""
    hits = chosen[..., None] == jnp.arange(here)[None, None]  # [N, k, G]
    return jnp.sum(jnp.where(hits, gates[..., None], 0.0), axis=1)


def _factors(matrix: LayerWeight) -> list[AnyWeight]:
    """A matrix of all experts, with the two factors of its adapters if it has some."""
    return [matrix.matrix, matrix.a, matrix.b] if isinstance(matrix, Adapted) else [matrix]


Matrices = tuple[jax.Array, jax.Array | None, bool]
"""A device's experts [G, ...]; what gets their gradient in their stead, if it is float32; and whether they are
frozen."""


class Group(NamedTuple):
    """A matrix of a device's experts, with the factors of their adapters, if they have some."""

    matrix: Matrices  # [G, D, F]
    a: Matrices | None = None  # [G, D, r]
    b: Matrices | None = None  # [G, r, F]
    scale: float = 0.0
    """Factor of the adapters' products."""


def _gathered(rules: ShardingRules, axes: Sequence[str], w: AnyWeight) -> Matrices:
    """The experts with which a device multiplies, from its part of the stored ones."""
    stored, here = rules.storage.spec(axes), rules.spec(axes)
    whole = {
        dim: mesh_axis_names(own)
        for dim, (own, wanted) in enumerate(zip(stored, here, strict=True))
        if own != wanted and any(rules.mesh.shape[name] > 1 for name in mesh_axis_names(own))
    }
    value, sums = (w.value, w.sums) if isinstance(w, Weight) else (w, None)
    for dim, names in whole.items():
        value = _gather(value, dim, names, rules.mesh)
    if sums is not None and whole:
        zeros: jax.Array = _sums(tuple(whole.items()), rules.mesh, sums)
        sums = zeros
    return value, sums, isinstance(w, Weight) and w.sums is None


def _gather(x: jax.Array, dim: int, names: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """The parts of all devices side by side along a dimension.

    Along the first, they are gathered along a new one: for a gather along the dimension itself, the TPU's compiler
    would copy the stack of all layers into a layout in which that dimension comes first.
    """
    if dim:
        return jax.lax.all_gather(x, names, axis=dim, tiled=True)
    for groups in _phases(names, mesh):
        x = jax.lax.all_gather(x, names, axis=0, tiled=False, axis_index_groups=groups).reshape(-1, *x.shape[1:])
    return x


def _scattered(dx: jax.Array, dim: int, names: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """The sum over devices of each device's part; the transpose of `_gather`."""
    if dim:
        return jax.lax.psum_scatter(dx, names, scatter_dimension=dim, tiled=True)
    for groups in reversed(_phases(names, mesh)):
        parts = len(groups[0]) if groups else math.prod(mesh.shape[name] for name in names)
        split = dx.reshape(parts, -1, *dx.shape[1:])
        dx = jax.lax.psum_scatter(split, names, scatter_dimension=0, tiled=False, axis_index_groups=groups)
    return dx


def _phases(names: tuple[str, ...], mesh: Mesh) -> list[list[list[int]] | None]:
    """The groups of devices that exchange parts, one exchange after another: first neighbours, then the groups.

    None: all devices at once. The TPU's compiler would make an exchange of sums over many devices one of all sums of
    all devices, which sends twice as much and keeps them.
    """
    size = math.prod(mesh.shape[name] for name in names)
    inner = 2 ** (int(math.log2(size)) // 2)
    if size <= MOST_AT_ONCE or size % inner:
        return [None]
    devices = np.arange(size).reshape(-1, inner)
    return [devices.tolist(), devices.T.tolist()]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(whole: tuple[tuple[int, tuple[str, ...]], ...], mesh: Mesh, x: jax.Array) -> jax.Array:
    """Zeros in place of gathered experts; their gradient becomes that of the stored ones, added in its own format."""
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


def dense_form(
    x: jax.Array,
    gates: jax.Array,
    chosen: jax.Array,
    experts: Sequence[Group],
    activation: Activation,
    biases: Sequence[jax.Array] = (),
    *,
    platform: str = "cpu",
) -> jax.Array:
    """Every token [N, D] with all experts that are here, by a gate of 0 where it was not chosen. Has no gradient.

    Of `biases`, those into the experts are added here.
    """
    gate, down = experts[0].matrix[0], experts[2].matrix[0]
    every = _every_gate(gates, chosen, len(down))  # [N, G]
    einsum = functools.partial(jnp.einsum, precision=_precision(gate.dtype), preferred_element_type=x.dtype)

    def product(pattern: str, rows: jax.Array, group: Group) -> jax.Array:
        y = einsum(pattern, rows, group.matrix[0])
        if group.a is None or group.b is None:
            return y
        thin = (einsum("gnd,gdr->gnr", rows, group.a[0]) * group.scale).astype(rows.dtype)
        return y + einsum(pattern.replace("f" if pattern.endswith("d") else "d", "r"), thin, group.b[0])

    operand = x.astype(gate.dtype)
    if beyond := _beyond_tiles(len(x), gate.shape, platform):
        operand, every = (jnp.pad(each, ((0, beyond), (0, 0))) for each in (operand, every))
    every_operand = jnp.broadcast_to(operand[None], (len(down), *operand.shape))  # so that experts stay as stored
    opening, passing = (product("gnd,gdf->gnf", every_operand, group) for group in experts[:2])
    if biases:
        opening, passing = ((y + b[:, None]).astype(y.dtype) for y, b in zip((opening, passing), biases, strict=False))
    opened = gated(opening, passing, activation)
    weighted = (opened.astype(jnp.float32) * every.T[..., None]).astype(down.dtype)
    y = product("gnf,gfd->nd", weighted, experts[2])
    return jax.lax.optimization_barrier(y)[: len(x)] if beyond else y  # else rows would be cut off before the product


def sorted_form(
    x: jax.Array,
    gates: jax.Array,
    chosen: jax.Array,
    experts: Sequence[Group],
    activation: Activation,
    biases: Sequence[jax.Array] = (),
    *,
    platform: str,
    all_here: bool,
) -> jax.Array:
    """Each token [N, D] with its experts: its rows sorted by expert, and multiplied group by group.

    Of `biases`, those into the experts are added here. Unless `all_here`, numbers from the number of experts on are
    those of other devices' experts, which add nothing.
    """
    N, k = chosen.shape
    here = len(experts[0].matrix[0])
    order = jnp.argsort(chosen.reshape(-1))  # [N k]
    places = jnp.argsort(order)
    sizes = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(here)[None], axis=0, dtype=jnp.int32)

    def plain(rows: jax.Array, matrices: Matrices) -> jax.Array:
        value, sums, frozen = matrices
        gradient = "none" if frozen else "own" if sums is None else "float32"
        return grouped_product(Form(platform, jnp.dtype(x.dtype), gradient), rows, value, sums, sizes)

    def product(rows: jax.Array, group: Group) -> jax.Array:
        y = plain(rows, group.matrix)
        return y if group.a is None or group.b is None else y + plain(plain(rows, group.a) * group.scale, group.b)

    rows: jax.Array = _spread(k, x, order, places)
    gate, up, down = experts
    opening, passing = product(rows, gate), product(rows, up)
    if biases:
        own = chosen.reshape(-1)[order]  # [N k]
        opening, passing = (y + _of_rows(b, own, y.dtype) for y, b in zip((opening, passing), biases, strict=False))
    opened = gated(opening, passing, activation)
    weighted = opened.astype(jnp.float32) * _spread(1, gates.reshape(-1, 1), order, places)
    made = product(weighted.astype(x.dtype), down)
    if not all_here:
        made = jnp.where((jnp.arange(N * k) < jnp.sum(sizes))[:, None], made, 0)  # what lies behind is undefined
    return _collected(k, made, order, places)


def _of_rows(bias: jax.Array, own: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Each row's bias [M, F], that of its expert; by a product, since a gather's gradient is a scatter.

    In bfloat16 it is exact: a float32 bias holds values of bfloat16 then (`podium.models.linear.layer_weight`).
    """
    hits = (own[:, None] == jnp.arange(len(bias))[None]).astype(bias.dtype)  # [M, G]
    return jnp.einsum("mg,gf->mf", hits, bias, precision=_precision(dtype), preferred_element_type=dtype)


# A permutation's transpose is its inverse. As gathers both are fast; a gather's own transpose is a scatter.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(k: int, x: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """Rows [N k, ...] in an order of which k each are a token's of x [N, ...]."""
    return x[order // k]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collected(k: int, rows: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """The sum [N, ...] of each token's k rows."""
    return jnp.sum(rows[places].reshape(-1, k, *rows.shape[1:]), axis=1)


Permutation = tuple[jax.Array, jax.Array]
_spread.defvjp(
    lambda k, x, order, places: (_spread(k, x, order, places), (order, places)),
    lambda k, saved, d: (_collected(k, d, *saved), None, None),
)
_collected.defvjp(
    lambda k, rows, order, places: (_collected(k, rows, order, places), (order, places)),
    lambda k, saved, d: (_spread(k, d, *saved), None, None),
)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
