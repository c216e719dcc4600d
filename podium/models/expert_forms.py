"""The computation of a mixture on one device: with all experts for every token, or with its rows sorted by expert.

Pure jax, without a mesh: `podium.models.expert_mixture` gives each device its experts.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.accelerators import Kernels
from podium.kernels.grouped import LANES, TILE_ROWS, Form, grouped_product, token_sums
from podium.models.blocks.activation import Activation
from podium.models.blocks.choices import Routed
from podium.models.blocks.experts import SPARE
from podium.models.blocks.mathematics import gated
from podium.models.linear import full_precision

SUBLANES = 8
"""Rows of a tile of LANES columns."""


class Matrices(NamedTuple):
    """A matrix of each of a device's experts."""

    value: jax.Array  # [G, ...], or [L, G, ...] with `layer`
    sums: tuple[jax.Array, ...] = ()
    """Arrays that get the matrices' gradient if it is float32: [G, ...] each, in the order in which they lie side by
    side in `value`."""
    frozen: bool = False
    layer: jax.Array | None = None
    """[] int32, index of the layer in the stack `value`; None: `value` holds a single layer's experts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[G, ...]."""
        return self.value.shape if self.layer is None else self.value.shape[1:]

    @property
    def own(self) -> jax.Array:
        """The matrices [G, ...] of this layer, taken out of the stack if `value` is one."""
        return self.value if self.layer is None else self.value[self.layer]


class Group(NamedTuple):
    """A matrix of each of a device's experts, with the factors of their adapters, if any."""

    matrix: Matrices  # [G, D, F]
    a: Matrices | None = None  # [G, D, r]
    b: Matrices | None = None  # [G, r, F]
    scale: float = 0.0
    """Factor of the adapters' products."""


class DeviceExperts(NamedTuple):
    """The experts on a device."""

    groups: Sequence[Group]
    """Gate, up and down; or, for sorted rows, gate and up side by side, [G, D, 2 F], and down."""
    activation: Activation
    biases: Sequence[jax.Array] = ()
    """Biases of gate and up, [G, F], and optionally of down, which the caller adds."""


def beyond_tiles(rows: int, shape: tuple[int, ...], kernels: Kernels) -> int:
    """How many rows to add so that a TPU's compiler multiplies experts [G, D, F] in their stored layout.

    If the rows fill its tiles and the experts do not, it computes everything transposed, and first copies all experts
    of all layers into another layout: gpt-oss's are 2,880 wide.
    """
    fill = rows % LANES == 0 and any(size % LANES for size in shape[1:])
    return SUBLANES if kernels == "tpu" and fill else 0


def every_gate(gates: jax.Array, chosen: jax.Array, here: int) -> jax.Array:
    """The gates [N, G] of all experts on this device, from the gates [N, k] of each token's chosen experts; 0 for
    others.
    """
    hits = chosen[..., None] == jnp.arange(here)[None, None]  # [N, k, G]
    return jnp.sum(jnp.where(hits, gates[..., None], 0.0), axis=1)


def dense_form(
    routed: Routed,
    experts: DeviceExperts,
    *,
    kernels: Kernels = "none",
) -> jax.Array:
    """Compute all experts on this device for every token [N, D], with a gate of 0 for those not chosen. Has no
    gradient.
    """
    x, (first, second, down) = routed.x, experts.groups
    dtype, shape = first.matrix.value.dtype, first.matrix.shape
    every = every_gate(routed.gates, routed.chosen, shape[0])  # [N, G]
    einsum = functools.partial(jnp.einsum, precision=full_precision(dtype), preferred_element_type=x.dtype)

    def product(pattern: str, rows: jax.Array, group: Group) -> jax.Array:
        y = einsum(pattern, rows, group.matrix.own)
        if group.a is None or group.b is None:
            return y
        thin = (einsum("gnd,gdr->gnr", rows, group.a.own) * group.scale).astype(rows.dtype)
        return y + einsum(pattern.replace("f" if pattern.endswith("d") else "d", "r"), thin, group.b.own)

    operand = x.astype(dtype)
    if beyond := beyond_tiles(len(x), shape, kernels):
        operand, every = (jnp.pad(each, ((0, beyond), (0, 0))) for each in (operand, every))
    every_operand = jnp.broadcast_to(operand[None], (shape[0], *operand.shape))  # so that experts stay as stored
    opening, passing = (product("gnd,gdf->gnf", every_operand, group) for group in (first, second))
    if experts.biases:
        pairs = zip((opening, passing), experts.biases, strict=False)
        opening, passing = ((y + b[:, None]).astype(y.dtype) for y, b in pairs)
    opened = gated(opening, passing, experts.activation)
    weighted = (opened.astype(jnp.float32) * every.T[..., None]).astype(dtype)
    y = product("gnf,gfd->nd", weighted, down)
    return jax.lax.optimization_barrier(y)[: len(x)] if beyond else y  # else rows would be cut off before the product


def sorted_form(
    routed: Routed,
    experts: DeviceExperts,
    *,
    kernels: Kernels,
) -> jax.Array:
    """Compute each token [N, D] with its experts, all on this device: rows are sorted by expert, and multiplied in
    groups.
    """
    x, gates, chosen = routed
    k = chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1))  # [N k]
    places = jnp.argsort(order)
    rows: jax.Array = _spread(k, x, order, places)
    gate_of: jax.Array = _spread(1, gates.reshape(-1, 1), order, places)
    own, sizes = chosen.reshape(-1)[order], _sizes(chosen, experts)
    return _collected(k, _multiplied(_SortedRows(rows, gate_of, own, sizes), experts, kernels), order, places)


def split_form(
    routed: Routed,
    experts: DeviceExperts,
    *,
    kernels: Kernels,
    count: int,
) -> jax.Array:
    """Compute each token [N, D] with those of its experts that are on this device, the first ones of `count`. No
    gradient.

    The rows for this device's experts are sorted by expert, and multiplied one window of rows at a time. One window is
    enough unless tokens strongly prefer this device's experts; each window has different experts, so further windows do
    not read weights again.
    """
    x, gates, chosen = routed
    (N, k), here = chosen.shape, experts.groups[0].matrix.shape[0]
    window = min(N * k, -(-SPARE * N * k * here // (count * TILE_ROWS)) * TILE_ROWS)
    own = chosen.reshape(-1)
    order = jnp.argsort(own)  # [N k]
    places = jnp.argsort(order).reshape(N, k)
    order = jnp.pad(order, (0, -len(order) % window))
    ends = jnp.cumsum(_sizes(chosen, experts))

    def add_window(number: jax.Array, y: jax.Array) -> jax.Array:
        first = number * window
        end = jnp.minimum(first + window, ends[-1])
        slots = jax.lax.dynamic_slice(order, (first,), (window,))
        sizes = jnp.diff(jnp.clip(ends - first, 0, window), prepend=0)
        gate_of = gates.reshape(-1, 1)[slots]
        made = _multiplied(_SortedRows(x[slots // k], gate_of, own[slots], sizes), experts, kernels)
        counted = jnp.arange(window) < end - first  # what follows is undefined
        by_token = jnp.argsort(jnp.where(counted, slots, N * k))
        counts = jnp.sum((places >= first) & (places < end), axis=1, dtype=jnp.int32)  # [N], each token's rows
        form = Form(kernels, jnp.dtype(x.dtype), "none")
        return y + token_sums(form, made[by_token], slots[by_token] // k, counts, most=k)

    with jax.named_scope("windows"):
        return jax.lax.fori_loop(0, -(-ends[-1] // window), add_window, jnp.zeros_like(x))


def _sizes(chosen: jax.Array, experts: DeviceExperts) -> jax.Array:
    """How many tokens chose each of this device's experts, [G] int32."""
    here = jnp.arange(experts.groups[0].matrix.shape[0])
    return jnp.sum(chosen.reshape(-1, 1) == here[None], axis=0, dtype=jnp.int32)


class _SortedRows(NamedTuple):
    """Rows that are sorted by expert, one for each of a token's experts."""

    x: jax.Array  # [M, D]
    gates: jax.Array  # [M, 1]
    own: jax.Array  # [M], the expert of each row
    sizes: jax.Array  # [G] int32, number of rows of each expert


def _multiplied(sorted_rows: _SortedRows, experts: DeviceExperts, kernels: Kernels) -> jax.Array:
    """Gate times expert of each row, [M, D]; what follows the last expert's rows is undefined."""

    def plain(rows: jax.Array, matrices: Matrices) -> jax.Array:
        gradient = "none" if matrices.frozen else "float32" if matrices.sums else "own"
        form = Form(kernels, jnp.dtype(rows.dtype), gradient)
        return grouped_product(form, rows, matrices.value, matrices.sums, sorted_rows.sizes, layer=matrices.layer)

    def product(rows: jax.Array, group: Group) -> jax.Array:
        y = plain(rows, group.matrix)
        return y if group.a is None or group.b is None else y + plain(plain(rows, group.a) * group.scale, group.b)

    *into, down = experts.groups
    found = [product(sorted_rows.x, group) for group in into]
    opening, passing = found if len(found) == 2 else jnp.split(found[0], 2, axis=-1)
    if experts.biases:
        pairs = zip((opening, passing), experts.biases, strict=False)
        opening, passing = (y + _of_rows(b, sorted_rows.own, y.dtype) for y, b in pairs)
    weighted = gated(opening, passing, experts.activation).astype(jnp.float32) * sorted_rows.gates
    return product(weighted.astype(sorted_rows.x.dtype), down)


def _of_rows(bias: jax.Array, own: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The bias [M, F] of each row's expert, selected by a matrix product, because a gather's gradient would be a
    scatter.

    In bfloat16 it is exact, because the float32 bias then holds bfloat16 values (`podium.models.linear.layer_weight`).
    The product has a batch dimension of one so that `remat: products` does not save it: the sum of rows and biases is
    recomputed.
    """
    hits = (own[:, None] == jnp.arange(len(bias))[None]).astype(bias.dtype)  # [M, G]
    exact = full_precision(dtype)
    return jnp.einsum("zmg,zgf->zmf", hits[None], bias[None], precision=exact, preferred_element_type=dtype)[0]


# A permutation's transpose is its inverse. As gathers both are fast; a gather's own transpose is a scatter.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(k: int, x: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """Repeat each token of x [N, ...] k times, as rows [N k, ...] in a given order."""
    return x[order // k]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collected(k: int, rows: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """The sum [N, ...] of each token's k rows."""
    return jnp.sum(rows[places].reshape(-1, k, *rows.shape[1:]), axis=1)


_spread.defvjp(
    lambda k, x, order, places: (_spread(k, x, order, places), (order, places)),
    lambda k, saved, d: (_collected(k, d, *saved), None, None),
)
_collected.defvjp(
    lambda k, rows, order, places: (_collected(k, rows, order, places), (order, places)),
    lambda k, saved, d: (_spread(k, d, *saved), None, None),
)
