"""Products of rows that are sorted by group, each group with its own matrix: the experts of a mixture.

TPUs use jax's megablox kernels, GPUs those of `podium.kernels.gpu_grouped`: their work does not depend on the number of
groups. Other devices use `jax.lax.ragged_dot`. The gradient that jax derives for its matrices multiplies all rows for
each group (20 times the operations on TPU), so the backward pass is written out.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.xla_metadata import set_xla_metadata

from podium.accelerators import Kernels
from podium.kernels.gpu_grouped import gpu_matrices, gpu_rows

TILE_ROWS = 512
"""Rows of a tile; a tile that two groups share is computed for each of them."""
WHOLE_INNER, TILE_INNER, TILE_OUTER = 3072, 2048, 768
"""The largest inner dimension that is a single tile, so that each matrix is read once, as in Qwen3-30B-A3B and gpt-oss;
the largest tile of a longer inner dimension; and the largest tile of an outer dimension."""
TILE_BYTES = 15 * 2**20
"""Most bytes of a kernel's tiles, which are double-buffered. A TPU's compiler allows 16 MiB per kernel, 32 on v6e."""
LANES = 128


class Form(NamedTuple):
    """Static arguments of a product."""

    kernels: Kernels
    result: jnp.dtype
    gradient: Literal["own", "float32", "none"]
    """Format of the matrices' gradient: their own, float32, or none."""
    interpret: bool = False  # emulate the kernels, slowly


def grouped_product(
    form: Form,
    x: jax.Array,
    w: jax.Array,
    sums: tuple[jax.Array, ...],
    sizes: jax.Array,
    layer: jax.Array | None = None,
) -> jax.Array:
    """Rows [M, F] in `form.result`: those of group g are x [M, D] times w[g], of w [G, D, F].

    The first `sizes[0]` rows are those of group 0, and so on; rows after the last group are undefined. Operands are in
    the format of `w`. With gradient "float32", `sums` get the gradient of `w`, cut along F into as many arrays
    [G, D, F / n]; their values are not read. Several arrays can be exchanged while the next ones are made.

    With `layer` [] int32, `w` is a stack [L, G, D, F], of which kernels read the matrices of this layer where they are;
    the product then has no gradient.
    """
    if layer is not None:
        return _rows(form, x.astype(w.dtype), w, sizes, form.result, transposed=False, layer=layer)
    return _grouped(form, len(sums), x, w, sums=sums, sizes=sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(
    form: Form, parts: int, x: jax.Array, w: jax.Array, sums: tuple[jax.Array, ...], sizes: jax.Array
) -> jax.Array:
    return _rows(form, x.astype(w.dtype), w, sizes, form.result, transposed=False)


def _forward(
    form: Form, parts: int, x: jax.Array, w: jax.Array, sums: tuple[jax.Array, ...], sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _grouped(form, parts, x, w, sums=sums, sizes=sizes), (x, w, sizes)


def _backward(
    form: Form, parts: int, saved: tuple[jax.Array, jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, ...] | None, None]:
    x, w, sizes = saved
    x_operand, dy = x.astype(w.dtype), dy.astype(w.dtype)
    dx = _rows(form, dy, w, sizes, x.dtype, transposed=True)
    if form.gradient == "none":
        return dx, None, None, None
    if form.gradient == "own":
        return dx, _matrices(form, x_operand, dy, sizes, w.dtype), None, None
    wide, cut = jnp.dtype(jnp.float32), jnp.split(dy, parts, axis=-1)
    return dx, None, tuple(_matrices(form, x_operand, part, sizes, wide) for part in cut), None


_grouped.defvjp(_forward, _backward)


def _rows(
    form: Form,
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    transposed: bool,
    layer: jax.Array | None = None,
) -> jax.Array:
    """Each group's rows times its matrix, or its transposed matrix; of a layer of `w`, if it is a stack."""
    if form.kernels == "tpu":
        inner, outer = (w.shape[-1], w.shape[-2]) if transposed else w.shape[-2:]
        rows = _row_tile(len(x))
        padded = jnp.pad(x, [(0, -len(x) % rows), (0, 0)])
        tiling = product_tiles(rows, inner, outer, w.dtype.itemsize, dtype.itemsize)
        multiply = functools.partial(gmm, transpose_rhs=transposed, interpret=form.interpret)
        if layer is None:
            return multiply(padded, w, sizes, dtype, tiling)[: len(x)]
        with set_xla_metadata(reads_one_of=len(w)):  # for `podium.hlo.traffic`
            first = -layer * len(sizes)  # the layer's groups, counted from those of the stack
            return multiply(padded, w.reshape(-1, *w.shape[2:]), sizes, dtype, tiling, group_offset=first)[: len(x)]
    if form.kernels == "gpu":
        multiply = functools.partial(gpu_rows, transposed=transposed, interpret=form.interpret)
        if layer is None:
            return multiply(x, w, sizes, dtype)
        with set_xla_metadata(reads_one_of=len(w)):  # for `podium.hlo.traffic`
            return multiply(x, w.reshape(-1, *w.shape[2:]), sizes, dtype, first_group=layer * len(sizes))
    if layer is not None:
        w = w[layer]
    return jax.lax.ragged_dot(
        x,
        w.swapaxes(1, 2) if transposed else w,
        sizes,
        precision=_precision(w.dtype),
        preferred_element_type=dtype,
    )


_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


def _matrices(form: Form, x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The products [G, D, F] of each group's rows of x [M, D] and dy [M, F], summed over the rows."""
    if form.kernels == "tpu":
        rows = _row_tile(len(x))
        x, dy = (jnp.pad(each, [(0, -len(x) % rows), (0, 0)]) for each in (x, dy))
        tiling = gradient_tiles(rows, x.shape[1], dy.shape[1], x.dtype.itemsize, dtype.itemsize)
        return tgmm(x.swapaxes(0, 1), dy, sizes, dtype, tiling, interpret=form.interpret)
    if form.kernels == "gpu":
        return gpu_matrices(x, dy, sizes, dtype, interpret=form.interpret)
    return jax.lax.ragged_dot_general(
        x, dy, sizes, _OVER_ROWS, precision=_precision(x.dtype), preferred_element_type=dtype
    )


def token_sums(form: Form, rows: jax.Array, tokens: jax.Array, counts: jax.Array, *, most: int) -> jax.Array:
    """The sum [N, D] of each token's rows, in `form.result`; further rows are ignored.

    On TPU it is a product with a 0/1 matrix that says which row belongs to which token, for LANES tokens at a time.

    Args:
        form: of the product on TPU.
        rows: [M, D], those of token 0 first.
        tokens: [M] int32, the token of each row.
        counts: [N] int32, the number of each token's rows.
        most: largest possible count.
    """
    N = len(counts)
    if form.kernels == "tpu":
        sizes = jnp.sum(jnp.pad(counts, (0, -N % LANES)).reshape(-1, LANES), axis=1)
        ones = (tokens[:, None] % LANES == jnp.arange(LANES)[None]).astype(rows.dtype)
        return _matrices(form, ones, rows, sizes, form.result).reshape(-1, rows.shape[1])[:N]
    behind = jnp.arange(len(rows)) >= jnp.sum(counts)
    sums = jnp.where(behind[:, None], 0, rows).astype(jnp.float32)
    tokens, step = jnp.where(behind, N, tokens), 1
    while step < min(most, len(rows)):  # of each row and the next ones of its token: of 2 rows, then 4, then 8
        same = (tokens[step:] == tokens[:-step])[:, None]
        sums = sums + jnp.pad(jnp.where(same, sums[step:], 0), ((0, step), (0, 0)))
        step *= 2
    begins = jnp.minimum(jnp.cumsum(counts) - counts, len(rows) - 1)
    return jnp.where((counts > 0)[:, None], sums[begins], 0).astype(form.result)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _row_tile(rows: int) -> int:
    """Rows of a tile: at most TILE_ROWS, a multiple of LANES."""
    return min(TILE_ROWS, -(-rows // LANES) * LANES)


def product_tiles(rows: int, inner: int, outer: int, operand: int, result: int) -> tuple[int, int, int]:
    """The tiles of a product of `rows` rows at a time: rows, inner and outer dimension, within TILE_BYTES.

    `operand` and `result` are the bytes of a number. Tiles need not divide a dimension.
    """
    deep = inner if inner <= WHOLE_INNER else _tile(inner, TILE_INNER)
    most = (TILE_BYTES - 2 * operand * rows * deep) // (2 * operand * deep + (2 * result + 4) * rows)
    return rows, deep, _tile(outer, min(TILE_OUTER, most))


def gradient_tiles(rows: int, inner: int, outer: int, operand: int, result: int) -> tuple[int, int, int]:
    """The tiles of a gradient of matrices [inner, outer] as products of `rows` rows at a time, like `product_tiles`."""
    high = _tile(inner, TILE_INNER // 2)
    most = (TILE_BYTES - 2 * operand * rows * high) // (2 * operand * rows + (2 * result + 4) * high)
    return rows, high, _tile(outer, min(TILE_OUTER, most))


def _tile(size: int, most: int) -> int:
    """The tile size for a dimension: all of it, or the largest multiple of LANES up to `most`.

    A divisor of the dimension is preferred if it is more than half as large.
    """
    if size <= most:
        return size
    largest = max(LANES, most - most % LANES)
    return next((tile for tile in range(largest, largest // 2, -LANES) if size % tile == 0), largest)
