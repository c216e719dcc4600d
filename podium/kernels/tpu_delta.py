"""A TPU kernel (Pallas) for decoding with delta nets: each state is read and written once, where the cache stores it.

XLA gathers the states of a step's sequences into their own array and scatters the new ones back, which moves each
state several times.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from podium.kernels.tiles import Interpret
from podium.models.blocks.kind import DeltaToken

SUBLANES = 8
OPERATIONS = 8
"""Elementwise operations per element of a state."""


def delta_step(
    states: jax.Array,
    layer: jax.Array,
    cells: jax.Array,
    live: jax.Array,
    token: DeltaToken,
    *,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """Advance the states of rows by one token each (arXiv:2412.06464), in place.

    Equals `podium.models.blocks.delta_rule.one_step` on the states of the rows' cells. The states of other cells, and
    those of rows that are not live, do not change; y of these rows is 0.

    Args:
        states: [L, M, V, N, P] float32, of all layers and cells.
        layer: [] int32.
        cells: [R] int32, cell of each row; live rows have different cells.
        live: [R] bool.
        token: the new token of each row.
        interpret: emulate without a TPU, slowly.

    Returns:
        The states, and y [R, V, P] float32.
    """
    q, k, v, decay, beta = token
    (R, V, P), (K, N) = v.shape, k.shape[1:]
    # A row that is not live stays at the cell of the live row before it, or else of the first: a block that does not
    # change from one row to the next is neither read nor written between them.
    order = jnp.arange(R, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(live, order, -1))
    where = cells[jnp.where(last < 0, jnp.argmax(live), last)].astype(jnp.int32)
    padding = [(0, 0), (0, -K % SUBLANES), (0, 0)]
    token = token._replace(
        q=jnp.pad(q, padding),
        k=jnp.pad(k, padding),
        decay=jnp.broadcast_to(decay[..., None], v.shape),
        beta=jnp.broadcast_to(beta[..., None], v.shape),
    )

    def of_row(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda r, *_: (r, 0, 0))

    def cell(r: jax.Array, where: jax.Ref, live: jax.Ref, layer: jax.Ref) -> tuple[jax.Array, jax.Array, int, int, int]:
        return layer[0], where[r], 0, 0, 0

    block = pl.BlockSpec((None, None, V, N, P), cell)
    moved = 2 * V * N * P + 2 * (K + -K % SUBLANES) * N + 4 * V * P
    return pl.pallas_call(
        functools.partial(_kernel, shared=V // K),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(R,),
            in_specs=[block, jax.tree.map(of_row, token)],
            out_specs=[block, of_row(v)],
        ),
        out_shape=[jax.ShapeDtypeStruct(states.shape, states.dtype), jax.ShapeDtypeStruct(v.shape, jnp.float32)],
        input_output_aliases={3: 0},  # counted with the prefetched scalars
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=OPERATIONS * R * V * N * P, transcendentals=0, bytes_accessed=R * moved * states.dtype.itemsize
        ),
        interpret=interpret,
        name="delta_step",
    )(where, live.astype(jnp.int32), layer.reshape(1).astype(jnp.int32), states, token)


def _kernel(
    where: jax.Ref,
    live: jax.Ref,
    layer: jax.Ref,
    states: jax.Ref,
    token: DeltaToken,
    new: jax.Ref,
    y: jax.Ref,
    *,
    shared: int,
) -> None:
    r = pl.program_id(0)

    @pl.when(live[r] != 0)
    def _() -> None:
        q, k, v, decay, beta = token
        of_q, of_k = q[...].T, k[...].T  # [N, K]
        for head in range(v.shape[0]):
            one, key = slice(head, head + 1), slice(head // shared, head // shared + 1)
            state = states[head] * decay[one]
            u = beta[one] * (v[one] - jnp.sum(of_k[:, key] * state, axis=0, keepdims=True))
            state = state + of_k[:, key] * u
            new[head] = state
            y[one] = jnp.sum(of_q[:, key] * state, axis=0, keepdims=True)

    @pl.when(live[r] == 0)
    def _() -> None:
        y[...] = jnp.zeros(y.shape, y.dtype)

    @pl.when((live[r] == 0) & (r == 0))
    def _() -> None:
        new[...] = states[...]
