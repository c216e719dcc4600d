"""The model's matrix products, with operands in one number format and results in another.

A model's `dtype` is that of its products' operands. Activations between products (`activation_dtype`) have the same
format on TPU and GPU, and are float32 on CPU: there XLA multiplies bfloat16 operands into float32 results at twice
float32's speed, but produces bfloat16 results, and all elementwise work on them, at less than float32's speed
(benches/results/products-cpu.json).
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from podium.models.blocks.spec import ParamSpec, is_matrix, matrix_outputs
from podium.models.blocks.weights import Adapted, AnyWeight, Codes, LayerWeight, Weight
from podium.models.params import LORA_A, LORA_B, SCALE, is_adapter
from podium.models.quantised import step_of
from podium.sharding import ShardingRules

Linear = Callable[[str, jax.Array, LayerWeight], jax.Array]
"""`(pattern, x, weight) -> y`, an einsum of two operands."""


def of_experts(spec: ParamSpec) -> bool:
    """Whether a weight has one matrix per expert; `podium.models.expert_mixture` gathers these."""
    return is_matrix(spec) and "experts" in spec.axes


@jax.named_scope("weights")
def layer_weight(
    name: str, stored: jax.Array, spec: ParamSpec, *, frozen: bool, rules: ShardingRules, dtype: jnp.dtype, wide: bool
) -> AnyWeight:
    """Convert a stored weight for a layer: in `dtype` and gathered. With `wide`, a trained weight's gradient is
    float32.

    With `wide`, norm scales and biases hold values of `dtype` as float32; so do the activations they apply to.
    """
    as_stored, stored = stored, of_bits(stored)
    axes, matrix = spec.axes[len(spec.axes) - stored.ndim :], is_matrix(spec)
    many = matrix and "router" not in axes and rules.in_many_parts(*axes)
    gathered = rules.gathered_weight if many else rules.constrain_weight
    if name.endswith(SCALE) or stored.dtype in (jnp.int8, jnp.uint8):
        return gathered(stored, *axes)
    kept = as_stored if rules.on_cpu and rules.mesh.size == 1 else None  # nothing is gathered, and a cast is cheap
    if of_experts(spec):
        if frozen:
            return Weight(stored.astype(dtype), None)
        return Weight(jax.lax.stop_gradient(stored).astype(dtype), stored) if wide else stored.astype(dtype)
    if frozen or not (wide or many):
        value = gathered(stored.astype(dtype), *axes)
        return Weight(value, None, kept) if frozen and matrix else value
    if matrix:
        value = gathered(jax.lax.stop_gradient(stored).astype(dtype), *axes)
        return Weight(value, _sums(stored if wide else stored.astype(dtype), axes, rules, many=many), kept)
    here = rules.constrain_weight(stored, *axes)
    return here + jax.lax.stop_gradient(here.astype(dtype).astype(jnp.float32) - here)


def _sums(stored: jax.Array, axes: Sequence[str | None], rules: ShardingRules, *, many: bool) -> jax.Array:
    """The array that gets the gradient of a matrix, in the format of `stored`.

    With `many`, it has a gradient for each device's part of the tokens, which `rules` add up; otherwise XLA does.
    """
    if many:
        return rules.sums_of_copies(stored, *axes, pieces=("batch", "tokens"))
    return rules.weight_sums(stored, *axes)


def with_adapters(w: Mapping[str, AnyWeight | Codes], scale: float) -> dict[str, LayerWeight]:
    """A layer's weights, with each adapted matrix combined with its adapter."""
    found: dict[str, LayerWeight] = {}
    for name, value in w.items():
        if name + LORA_A in w:
            a, b = w[name + LORA_A], w[name + LORA_B]
            assert not isinstance(a, Codes) and not isinstance(b, Codes), "adapters are never stored as codes"
            found[name] = Adapted(value, a, b, scale)
        elif not is_adapter(name):
            found[name] = value
    return found


def input_parts(spec: ParamSpec, rules: ShardingRules) -> tuple[int, ...]:
    """The number of parts into which devices split each input dimension of a stack's matrices."""
    inputs = spec.axes[spec.stacked : matrix_outputs(spec)]
    return tuple(rules.num_shards(axis) if axis else 1 for axis in inputs)


def coded(w: Mapping[str, AnyWeight], operands: DTypeLike, parts: Callable[[str], tuple[int, ...]]) -> dict[str, Codes]:
    """The layer's weights that are stored as int8 codes, with their scales.

    `parts` gives the number of parts into which devices split each input dimension of a matrix.
    """
    found: dict[str, Codes] = {}
    for name, value in w.items():
        if isinstance(value, jax.Array) and value.dtype == jnp.int8:
            scale = w[name + SCALE]
            assert isinstance(scale, jax.Array), "scales are plain arrays"
            found[name] = Codes(value, scale, operands, parts(name))
    return found


def activation_dtype(rules: ShardingRules, dtype: jnp.dtype) -> jnp.dtype:
    """The format of activations, keys and values in a model whose products are in `dtype`."""
    return jnp.dtype(jnp.float32) if rules.on_cpu else dtype


def as_bits(value: jax.Array) -> jax.Array:
    """Reinterpret bfloat16 as uint16, which XLA on CPU can slice from a stack of layers or a table without conversion.

    XLA would convert bfloat16 itself to float32 in every call, for all layers, and back for each layer in every step:
    several times the time of a decode step's products (benches/results/products-cpu.json).
    """
    return jax.lax.bitcast_convert_type(value, jnp.uint16) if value.dtype == jnp.bfloat16 else value


def kept(params: dict[str, jax.Array], rules: ShardingRules) -> dict[str, jax.Array]:
    """Stored form of weights that do not change: `as_bits` on CPU. They are removed from `params`."""
    return {name: as_bits(params.pop(name)) for name in list(params)} if rules.on_cpu else params


def kept_dtype(dtype: jnp.dtype, rules: ShardingRules) -> jnp.dtype:
    """The number format in which `kept` stores weights of format `dtype`."""
    return jnp.dtype(jnp.uint16) if rules.on_cpu and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def of_bits(stored: jax.Array) -> jax.Array:
    """Undo `as_bits`; arrays of other formats are returned unchanged."""
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def make_linear(rules: ShardingRules) -> Linear:
    """Make the layers' product `(pattern, x, weight) -> y`, an einsum of two operands with the dtype of `x`.

    On CPU, a barrier keeps elementwise work that precedes the backward pass from being fused into its products; other
    compilers benefit from the fusion.
    """

    def linear(pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        if isinstance(w, Adapted):
            return linear(pattern, x, w.matrix) + adapter(linear, pattern, x, w)
        if isinstance(w, Codes) and w.operands == jnp.int8:
            return integer_product(pattern, x, w)
        if isinstance(w, Codes):
            matrix = Weight(w.codes.astype(w.operands), None, w.codes)
            y = product(pattern, jnp.dtype(x.dtype), rules.on_cpu, x, matrix)
            # Already in the dtype of `x`, because devices that split the inputs exchange it before it is scaled.
            scale = jnp.expand_dims(w.scale, tuple(range(y.ndim - w.scale.ndim)))
            return (y.astype(jnp.float32) * scale).astype(x.dtype)
        return product(pattern, jnp.dtype(x.dtype), rules.on_cpu, x, w)

    return linear


def several(
    linear: Linear, rules: ShardingRules, pattern: str, x: jax.Array, weights: Sequence[LayerWeight], axis: str
) -> list[jax.Array]:
    """Multiply one activation with several weights, which differ only in the size of the logical `axis`.

    `axis` is the first output dimension. In training on TPU this is one product, because reading and writing few
    key/value heads takes as long as many.
    """
    trained = [each for each in weights if isinstance(each, Weight) and each.sums is not None]
    if rules.platform != "tpu" or len(trained) < len(weights) or rules.num_shards(axis) > 1:
        return [linear(pattern, x, each) for each in weights]
    dim, split = output_dims(pattern)
    behind = dim - trained[0].value.ndim  # counted from the end, as sums may have dimensions for parts of the tokens
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=behind), *trained)
    ends = list(itertools.accumulate(each.value.shape[dim] for each in trained))[:-1]
    return jnp.split(linear(pattern, x, joined), ends, axis=split)


def output_dims(pattern: str) -> tuple[int, int]:
    """Index of the first output dimension in the weight, and in the product, of `(pattern, x, weight) -> y`."""
    x_axes, w_axes, y_axes = pattern.replace("->", ",").split(",")
    outer = next(letter for letter in w_axes if letter not in x_axes)
    return w_axes.index(outer), y_axes.index(outer)


def adapter(linear: Linear, pattern: str, x: jax.Array, w: Adapted) -> jax.Array:
    """An adapter's contribution to a product: scale (xA)B, through r elements per token."""
    x_axes, w_axes, y_axes = pattern.replace("->", ",").split(",")
    rows = "".join(axis for axis in x_axes if axis not in w_axes)
    inner, outer = x_axes.removeprefix(rows), "".join(axis for axis in w_axes if axis in y_axes)
    thin = linear(f"{x_axes},{inner}r->{rows}r", x, w.a) * w.scale
    return linear(f"{rows}r,r{outer}->{y_axes}", thin, w.b)


def full_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """The precision of a product with `dtype` operands: full for float32, without TPU's bfloat16 or GPU's TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def product(pattern: str, dtype: jnp.dtype, barrier: bool, x: jax.Array, w: AnyWeight) -> jax.Array:
    """An einsum with operands in the dtype of `w`, forward and backward, and a result in `dtype`.

    The backward pass is explicit. By default jax computes the weights' gradient transposed, and XLA on CPU then turns
    elementwise work on activations into strided loops, which take a third more time for both passes
    (benches/results/linear-backward-cpu.json).
    """
    if not isinstance(w, Weight):
        return _product(Form(pattern, dtype, w.dtype, barrier, "own"), x, w, w, w)
    kept = w.value if w.kept is None else w.kept
    form = Form(pattern, dtype, w.value.dtype, barrier, "none")
    if w.sums is None:
        return _product(form, x, w.value, w.value, kept)
    form = form._replace(gradient="sums", sums=w.sums.dtype, pieces=w.sums.shape[: w.sums.ndim - w.value.ndim])
    return _product(form, x, w.value, w.sums, kept)


def integer_product(pattern: str, x: jax.Array, w: Codes) -> jax.Array:
    """An einsum of int8 operands, summed in int32, with the dtype of `x`; no gradient flows.

    Activations are rounded to int8, with a scale for each token and part of the inputs that maps the largest absolute
    value to 127. So devices that split the inputs exchange only sums in the dtype of `x`, and no scales.
    """
    x_axes, w_axes, _ = pattern.replace("->", ",").split(",")
    rows, inner = x.ndim - len(w.parts), len(w.parts)
    of_rows, of_inputs, outputs = x_axes[:rows], x_axes[rows:], w_axes[inner:]
    cut = "".join(axis.upper() + axis for axis in of_inputs)
    sizes: list[int] = []  # of each input dimension: its parts, then the inputs of a part
    for whole, parts in zip(x.shape[rows:], w.parts, strict=True):
        sizes += [parts, whole // parts]
    wide = x.astype(jnp.float32).reshape(*x.shape[:rows], *sizes)
    inputs = tuple(range(rows + 1, wide.ndim, 2))
    step = step_of(jnp.max(jnp.abs(wide), axis=inputs, keepdims=True))
    codes = w.codes.reshape(*sizes, *w.codes.shape[inner:])
    by_part = f"{of_rows}{cut},{cut}{outputs}->{of_rows}{of_inputs.upper()}{outputs}"
    rounded = jnp.round(wide / step).astype(jnp.int8)
    sums = jnp.einsum(by_part, rounded, codes, preferred_element_type=jnp.int32)
    step = jnp.expand_dims(jnp.squeeze(step, inputs), tuple(range(rows + inner, sums.ndim)))
    y = sums.astype(jnp.float32) * step * jnp.expand_dims(w.scale, tuple(range(rows + inner)))
    return jax.lax.reduce(y.astype(x.dtype), jnp.zeros((), x.dtype), jax.lax.add, tuple(range(rows, rows + inner)))


class Form(NamedTuple):
    """Static arguments of `_product`."""

    pattern: str
    result: jnp.dtype
    operands: jnp.dtype
    barrier: bool
    gradient: Literal["own", "sums", "none"]
    """Which operand gets the weight's gradient: the weight, the sums, or none."""
    sums: jnp.dtype | None = None
    """Format of the sums."""
    pieces: tuple[int, ...] = ()
    """The number of parts of the rows, and of each row's tokens, if the sums have dimensions for them."""


def _einsum(pattern: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(pattern, x, y, precision=full_precision(y.dtype), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(form: Form, x: jax.Array, w: jax.Array, sums: jax.Array, kept: jax.Array) -> jax.Array:
    return _einsum(form.pattern, x.astype(form.operands), w, form.result)


def _forward(
    form: Form, x: jax.Array, w: jax.Array, sums: jax.Array, kept: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The einsum itself instead of `_product`, since policies of jax.checkpoint identify products by primitive. A loop
    # over layers stores a stack of what is saved here.
    y = _einsum(form.pattern, x.astype(form.operands), w, form.result)
    return y, (x, as_bits(kept) if form.barrier else kept)


def _backward(form: Form, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array | None, ...]:
    (x, kept), (x_axes, w_axes, y_axes) = saved, form.pattern.replace("->", ",").split(",")
    w = of_bits(kept).astype(form.operands)
    dy = (jax.lax.optimization_barrier(dy) if form.barrier else dy).astype(form.operands)
    dx = _einsum(f"{y_axes},{w_axes}->{x_axes}", dy, w, x.dtype)
    if form.gradient == "none":
        return dx, None, None, None
    # Devices reduce their shares of the sum in this format, before any cast.
    shares = jnp.dtype(jnp.float32) if form.sums == jnp.float32 else x.dtype
    x = x.astype(form.operands)
    if form.pieces:
        x_axes, y_axes, w_axes = (f"BbTt{x_axes[2:]}", f"BbTt{y_axes[2:]}", f"BT{w_axes}")
        x, dy = (_in_pieces(each, form.pieces) for each in (x, dy))
    dw = _gradient_of_weights(f"{x_axes},{y_axes}->{w_axes}", x, dy, shares, on_cpu=form.barrier and not form.pieces)
    if form.gradient == "sums":
        return dx, None, dw.astype(form.sums), None
    return dx, dw.astype(form.operands), None, None


def _in_pieces(x: jax.Array, pieces: tuple[int, ...]) -> jax.Array:
    """[B, T, ...] with its rows and tokens in parts: [parts, B / parts, cuts, T / cuts, ...]."""
    (parts, cuts), (B, T) = pieces, x.shape[:2]
    return x.reshape(parts, B // parts, cuts, T // cuts, *x.shape[2:])


_product.defvjp(_forward, _backward)


def _gradient_of_weights(pattern: str, x: jax.Array, dy: jax.Array, dtype: jnp.dtype, *, on_cpu: bool) -> jax.Array:
    """The weights' gradient: the product of inputs and output gradients over all tokens.

    XLA on CPU copies the first operand of such a product to another layout, slowly, so the narrower operand comes
    first. If the result's dimensions then differ from the weights', it is transposed afterwards, as it is smaller than
    operands.
    """
    x_axes, y_axes, w_axes = pattern.replace("->", ",").split(",")
    inner, outer = ("".join(axis for axis in axes if axis in w_axes) for axes in (x_axes, y_axes))
    first, last = (x_axes, inner, x), (y_axes, outer, dy)
    if first[2].size > last[2].size:
        first, last = last, first
    made = first[1] + last[1]
    if not on_cpu or made == w_axes:
        return _einsum(pattern, x, dy, dtype)
    turned = _einsum(f"{first[0]},{last[0]}->{made}", first[2], last[2], dtype)
    return jnp.einsum(f"{made}->{w_axes}", jax.lax.optimization_barrier(turned))  # else XLA would undo the reordering
