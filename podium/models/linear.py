"""The matrix products of the model: operands in one number format, sums and results in another.

`dtype` of a model is that of its products' operands. What lies between the products (`activation_dtype`) is the same
on TPU and GPU, and float32 on CPU: there XLA multiplies bfloat16 numbers into float32 sums at twice float32's speed,
and into bfloat16 results at less than float32's, as it does all elementwise work (benches/results/products-cpu.json).
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from podium.models.blocks.spec import ParamSpec, is_matrix
from podium.models.blocks.weights import Adapted, AnyWeight, LayerWeight, Weight
from podium.models.params import LORA_A, LORA_B, SCALE, is_adapter
from podium.sharding import ShardingRules

Linear = Callable[[str, jax.Array, LayerWeight], jax.Array]
"""`(pattern, x, weight) -> y`, an einsum of two operands."""


@jax.named_scope("weights")
def layer_weight(
    name: str, stored: jax.Array, spec: ParamSpec, *, frozen: bool, rules: ShardingRules, dtype: jnp.dtype, wide: bool
) -> AnyWeight:
    """A stored weight as a layer uses it: in `dtype` and gathered. With `wide` a trained one has a float32 gradient.

    With `wide` a norm or a bias has a number of `dtype` as float32, and so has what it is added to or multiplied with.
    """
    as_stored, stored = stored, of_bits(stored)
    axes, matrix = spec.axes[len(spec.axes) - stored.ndim :], is_matrix(spec)
    if name.endswith(SCALE) or stored.dtype == jnp.int8:
        return rules.constrain_weight(stored, *axes)
    kept = as_stored if rules.on_cpu and rules.mesh.size == 1 else None  # nothing is gathered, and a cast is cheap
    if frozen or not wide:
        value = rules.constrain_weight(stored.astype(dtype), *axes)
        return Weight(value, None, kept) if frozen and matrix else value
    if matrix:
        value = rules.constrain_weight(jax.lax.stop_gradient(stored).astype(dtype), *axes)
        return Weight(value, rules.weight_sums(stored, *axes), kept)
    here = rules.constrain_weight(stored, *axes)
    return here + jax.lax.stop_gradient(here.astype(dtype).astype(jnp.float32) - here)


def with_adapters(w: Mapping[str, AnyWeight], scale: float) -> dict[str, LayerWeight]:
    """The weights of a layer, each adapted matrix with its adapter."""
    return {
        name: Adapted(value, w[name + LORA_A], w[name + LORA_B], scale) if name + LORA_A in w else value
        for name, value in w.items()
        if not is_adapter(name)
    }


def activation_dtype(rules: ShardingRules, dtype: jnp.dtype) -> jnp.dtype:
    """The format of activations, keys and values of a model whose products are in `dtype`."""
    return jnp.dtype(jnp.float32) if rules.on_cpu else dtype


def as_bits(value: jax.Array) -> jax.Array:
    """bfloat16 numbers as uint16, which XLA on CPU takes out of a stack of layers, or of a table, as they are.

    Of bfloat16 itself it makes float32 in every call, of all layers, and bfloat16 again of each in every step: that
    takes several times as long as the products of a decode step (benches/results/products-cpu.json).
    """
    return jax.lax.bitcast_convert_type(value, jnp.uint16) if value.dtype == jnp.bfloat16 else value


def kept(params: dict[str, jax.Array], rules: ShardingRules) -> dict[str, jax.Array]:
    """Weights that stay as they are, as devices keep them: `as_bits` on CPU. They are taken out of `params`."""
    return {name: as_bits(params.pop(name)) for name in list(params)} if rules.on_cpu else params


def kept_dtype(dtype: jnp.dtype, rules: ShardingRules) -> jnp.dtype:
    """What `kept` makes of a number format."""
    return jnp.dtype(jnp.uint16) if rules.on_cpu and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def of_bits(stored: jax.Array) -> jax.Array:
    """The numbers that `as_bits` stored; others as they are."""
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def make_linear(rules: ShardingRules) -> Linear:
    """The product `(pattern, x, weights) -> y` of all layers, an einsum of two operands, in the dtype of `x`.

    On CPU a barrier keeps the elementwise work before the backward pass out of its products; elsewhere compilers fuse
    it to good effect.
    """

    def linear(pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        if isinstance(w, Adapted):
            return linear(pattern, x, w.matrix) + adapter(linear, pattern, x, w)
        return product(pattern, jnp.dtype(x.dtype), rules.on_cpu, x, w)

    return linear


def several(
    linear: Linear, rules: ShardingRules, pattern: str, x: jax.Array, weights: Sequence[LayerWeight], axis: str
) -> list[jax.Array]:
    """Products of one activation with several weights, which differ in the size of the logical `axis`.

    It is the first output dimension. In training on TPU they are one product: where few heads of keys and values are
    read and written, they take as long as many.
    """
    trained = [each for each in weights if isinstance(each, Weight) and each.sums is not None]
    if rules.platform != "tpu" or len(trained) < len(weights) or rules.num_shards(axis) > 1:
        return [linear(pattern, x, each) for each in weights]
    x_axes, w_axes, y_axes = pattern.replace("->", ",").split(",")
    outer = next(letter for letter in w_axes if letter not in x_axes)
    dim, split = w_axes.index(outer), y_axes.index(outer)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=dim), *trained)
    ends = list(itertools.accumulate(each.value.shape[dim] for each in trained))[:-1]
    return jnp.split(linear(pattern, x, joined), ends, axis=split)


def adapter(linear: Linear, pattern: str, x: jax.Array, w: Adapted) -> jax.Array:
    """What an adapter adds to the product of a pattern: scale (xA)B, through r numbers a token."""
    x_axes, w_axes, y_axes = pattern.replace("->", ",").split(",")
    rows = "".join(axis for axis in x_axes if axis not in w_axes)
    inner, outer = x_axes.removeprefix(rows), "".join(axis for axis in w_axes if axis in y_axes)
    thin = linear(f"{x_axes},{inner}r->{rows}r", x, w.a) * w.scale
    return linear(f"{rows}r,r{outer}->{y_axes}", thin, w.b)


def full_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """The precision of a product of such operands: float32 ones count in full, on TPU and in TF32's stead too."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def product(pattern: str, dtype: jnp.dtype, barrier: bool, x: jax.Array, w: AnyWeight) -> jax.Array:
    """An einsum whose operands are in the dtype of `w`, in forward and backward, with a result in `dtype`.

    The backward pass is written out. Left to itself jax makes the weights' gradient transposed, and XLA on CPU then
    turns elementwise work on activations into strided loops: a third more time for both passes
    (benches/results/linear-backward-cpu.json).
    """
    if not isinstance(w, Weight):
        return _product(Form(pattern, dtype, w.dtype, barrier, "own"), x, w, w, w)
    kept = w.value if w.kept is None else w.kept
    gradient, sums = ("none", w.value) if w.sums is None else ("float32", w.sums)
    return _product(Form(pattern, dtype, w.value.dtype, barrier, gradient), x, w.value, sums, kept)


class Form(NamedTuple):
    """What `_product` knows when it is traced."""

    pattern: str
    result: jnp.dtype
    operands: jnp.dtype
    barrier: bool
    gradient: Literal["own", "float32", "none"]
    """The format of the weight's gradient, its own or float32, or that it has none."""


def _einsum(pattern: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(pattern, x, y, precision=full_precision(y.dtype), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(form: Form, x: jax.Array, w: jax.Array, sums: jax.Array, kept: jax.Array) -> jax.Array:
    return _einsum(form.pattern, x.astype(form.operands), w, form.result)


def _forward(
    form: Form, x: jax.Array, w: jax.Array, sums: jax.Array, kept: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The einsum itself, not `_product`: policies of jax.checkpoint know a product by its primitive. A loop over layers
    # keeps a stack of what is saved here.
    y = _einsum(form.pattern, x.astype(form.operands), w, form.result)
    return y, (x, as_bits(kept) if form.barrier else kept)


def _backward(form: Form, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array | None, ...]:
    (x, kept), (x_axes, w_axes, y_axes) = saved, form.pattern.replace("->", ",").split(",")
    w = of_bits(kept).astype(form.operands)
    dy = (jax.lax.optimization_barrier(dy) if form.barrier else dy).astype(form.operands)
    dx = _einsum(f"{y_axes},{w_axes}->{x_axes}", dy, w, x.dtype)
    if form.gradient == "none":
        return dx, None, None, None
    # Devices exchange their shares of the sum as they are here, before any cast.
    shares = jnp.dtype(jnp.float32) if form.gradient == "float32" else x.dtype
    dw = _gradient_of_weights(x_axes, y_axes, w_axes, x.astype(form.operands), dy, shares, on_cpu=form.barrier)
    return (dx, None, dw, None) if form.gradient == "float32" else (dx, dw.astype(form.operands), None, None)


_product.defvjp(_forward, _backward)


def _gradient_of_weights(
    x_axes: str, y_axes: str, w_axes: str, x: jax.Array, dy: jax.Array, dtype: jnp.dtype, *, on_cpu: bool
) -> jax.Array:
    """The product of inputs and their outputs' gradients over all tokens.

    XLA on CPU lays the first operand of such a product out anew, slowly: there the narrower one comes first, and if the
    product is then not as the weights lie, it is turned afterwards, being smaller than what has all tokens.
    """
    inner, outer = ("".join(axis for axis in axes if axis in w_axes) for axes in (x_axes, y_axes))
    first, last = (x_axes, inner, x), (y_axes, outer, dy)
    if first[2].size > last[2].size:
        first, last = last, first
    made = first[1] + last[1]
    if not on_cpu or made == w_axes:
        return _einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy, dtype)
    turned = _einsum(f"{first[0]},{last[0]}->{made}", first[2], last[2], dtype)
    return jnp.einsum(f"{made}->{w_axes}", jax.lax.optimization_barrier(turned))  # else XLA would turn it back
