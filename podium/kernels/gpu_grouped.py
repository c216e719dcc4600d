"""The products of `podium.kernels.grouped` for a GPU (Pallas, lowered to Triton).

XLA for GPUs multiplies all rows with the matrix of each group and keeps all of these products, [G, M, F]: an update of
gpt-oss-20b would take 32 times the operations, and 459 GiB for 474,240 rows (LOG.md). Here each program multiplies rows
of a single group.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podium.kernels.tiles import tile_product

TILE_ROWS, TILE_OUTER = 128, 128
TILE_BYTES = 128
"""Bytes of a tile along the dimension that is summed over: 64 numbers of bfloat16. With STAGES, a program's tiles take
64 KiB of a multiprocessor's shared memory; the smallest GPUs in the planner's table have 99 KiB."""
SMALLEST = 16  # rows and columns of Triton's smallest product
WARPS = 8
STAGES = 2


class _Tiles(NamedTuple):
    """The tiles of rows, each within one group; some tiles may be unused."""

    groups: jax.Array  # [tiles] int32
    begins: jax.Array  # [tiles] int32, first row
    ends: jax.Array  # [tiles] int32, end of the group's rows; 0: the tile is empty


def gpu_rows(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    transposed: bool,
    first_group: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Rows [M, F]: those of group g are x [M, D] times w[g], of w [G, D, F], or [G, F, D] if `transposed`.

    Groups follow one another in x, `sizes` [G] int32 rows each; rows after the last group are undefined. With
    `first_group`, the matrix of group 0 is w[first_group], as `w` may hold more matrices.
    """
    (M, D), F = x.shape, w.shape[1 if transposed else 2]
    rows, inner, outer = _tile(M, TILE_ROWS), _tile(D, TILE_BYTES // x.dtype.itemsize), _tile(F, TILE_OUTER)
    tiles = _tiles(sizes, M, rows)
    if first_group is not None:
        tiles = tiles._replace(groups=tiles.groups + first_group)
    return pl.pallas_call(
        functools.partial(_rows_kernel, rows=rows, inner=inner, outer=outer, transposed=transposed),
        grid=(pl.cdiv(F, outer), len(tiles.groups)),  # the first index runs fastest: all columns of some rows
        in_specs=[*(_number(len(tiles.groups)) for _ in tiles), _whole(x.shape), _whole(w.shape)],
        out_specs=_whole((M, F)),
        out_shape=jax.ShapeDtypeStruct((M, F), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="grouped_rows",
        metadata={"flops": str(2 * M * D * F)},  # for the planner, since Triton discards cost estimates
    )(*tiles, x, w)


def gpu_matrices(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: jnp.dtype, *, interpret: bool = False
) -> jax.Array:
    """The products [G, D, F] of each group's rows of x [M, D] and dy [M, F], summed over the rows; 0 for no rows."""
    (M, D), F, G = x.shape, dy.shape[1], len(sizes)
    rows, high, wide = _tile(M, TILE_BYTES // x.dtype.itemsize), _tile(D, TILE_ROWS), _tile(F, TILE_OUTER)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return pl.pallas_call(
        functools.partial(_matrices_kernel, rows=rows, high=high, wide=wide),
        grid=(pl.cdiv(F, wide), pl.cdiv(D, high), G),  # the first index runs fastest: a group's whole matrix first
        in_specs=[_number(G), _number(G), _whole(x.shape), _whole(dy.shape)],
        out_specs=pl.BlockSpec((None, D, F), lambda j, i, g: (g, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((G, D, F), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="grouped_matrices",
        metadata={"flops": str(2 * M * D * F)},
    )(ends - sizes, ends, x, dy)


def _tiles(sizes: jax.Array, M: int, rows: int) -> _Tiles:
    """Tiles of up to `rows` rows of a group; as many tiles as M rows may need for groups of any sizes."""
    counts = -(-sizes // rows)
    last = jnp.cumsum(counts)
    numbers = jnp.arange(pl.cdiv(M, rows) + len(sizes))
    found = jnp.sum(numbers[:, None] >= last[None], axis=1)  # the number of groups whose tiles come before
    groups = jnp.minimum(found, len(sizes) - 1)
    ends = jnp.cumsum(sizes)
    begins = (ends - sizes)[groups] + (numbers - (last - counts)[groups]) * rows
    tiles = _Tiles(groups, begins, jnp.where(found < len(sizes), ends[groups], 0))
    return _Tiles(*(each.astype(jnp.int32) for each in tiles))


def _tile(size: int, most: int) -> int:
    """The size of a tile, a power of two as Triton requires: `most`, or less for a smaller `size`."""
    return min(most, max(SMALLEST, pl.next_power_of_2(size)))


def _number(count: int) -> pl.BlockSpec:
    """The block that covers a whole array [count]."""
    return pl.BlockSpec((count,), lambda *_: (0,))


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """The block that covers a whole array, of which a program reads the parts that it needs."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _rows_kernel(
    groups: jax.Ref,
    begins: jax.Ref,
    ends: jax.Ref,
    x: jax.Ref,
    w: jax.Ref,
    out: jax.Ref,
    *,
    rows: int,
    inner: int,
    outer: int,
    transposed: bool,
) -> None:
    column, tile = pl.program_id(0) * outer, pl.program_id(1)
    group, begin, end = groups[tile], begins[tile], ends[tile]
    D, F = x.shape[1], out.shape[1]
    of_group = (begin + jnp.arange(rows) < end)[:, None]
    in_columns = column + jnp.arange(outer) < F

    @pl.when(begin < end)
    def _() -> None:
        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            place = step * inner
            summed = place + jnp.arange(inner) < D
            own = plgpu.load(x.at[pl.ds(begin, rows), pl.ds(place, inner)], mask=of_group & summed[None], other=0)
            if transposed:
                matrix = plgpu.load(
                    w.at[group, pl.ds(column, outer), pl.ds(place, inner)],
                    mask=in_columns[:, None] & summed[None],
                    other=0,
                ).T
            else:
                matrix = plgpu.load(
                    w.at[group, pl.ds(place, inner), pl.ds(column, outer)],
                    mask=summed[:, None] & in_columns[None],
                    other=0,
                )
            return total + tile_product(own, matrix)

        total = jax.lax.fori_loop(0, pl.cdiv(D, inner), add, jnp.zeros((rows, outer), jnp.float32))
        plgpu.store(
            out.at[pl.ds(begin, rows), pl.ds(column, outer)], total.astype(out.dtype), mask=of_group & in_columns[None]
        )


def _matrices_kernel(
    begins: jax.Ref, ends: jax.Ref, x: jax.Ref, dy: jax.Ref, out: jax.Ref, *, rows: int, high: int, wide: int
) -> None:
    column, row, group = pl.program_id(0) * wide, pl.program_id(1) * high, pl.program_id(2)
    begin, end = begins[group], ends[group]
    in_rows, in_columns = row + jnp.arange(high) < x.shape[1], column + jnp.arange(wide) < dy.shape[1]

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        place = begin + step * rows
        summed = (place + jnp.arange(rows) < end)[:, None]
        left = plgpu.load(x.at[pl.ds(place, rows), pl.ds(row, high)], mask=summed & in_rows[None], other=0)
        right = plgpu.load(dy.at[pl.ds(place, rows), pl.ds(column, wide)], mask=summed & in_columns[None], other=0)
        return total + tile_product(left.T, right)

    total = jax.lax.fori_loop(0, pl.cdiv(end - begin, rows), add, jnp.zeros((high, wide), jnp.float32))
    plgpu.store(
        out.at[pl.ds(row, high), pl.ds(column, wide)],
        total.astype(out.dtype),
        mask=in_rows[:, None] & in_columns[None],
    )
