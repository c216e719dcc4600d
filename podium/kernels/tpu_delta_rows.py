"""TPU kernels (Pallas) for the gated delta rule over packed rows, in chunks, with gradients.

XLA computes the rule of `podium.models.blocks.delta_rule` in many passes over float32 arrays in main memory, most of
which are larger than the queries, keys and values. Here a chunk's arrays and the states stay on the chip:
main memory holds inputs and outputs, and, for the backward pass, the states before each chunk.

With A the strictly lower part of beta (k k') D, where D has the decays between two tokens of a path, and W the values
less what the carried states already give for their keys, the new values of a chunk are u = (I + A)^-1 beta W, and the
outputs are those of the carried states plus ((q k') D) u.

Shapes: B rows, M chunks of C tokens, K key heads, V = K R value heads, N elements of a key, P of a value, J states. In
a kernel, "column" is [C, 1] and "row" [1, C], float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from podium.kernels.tiles import LOWEST, Interpret

EPSILON = 1e-6
"""Added to the squared length of a vector before its root divides the vector."""
PASSES = 6
"""Number of bfloat16 products that a TPU computes for a float32 product at the highest precision."""
STEPS = 4
"""Rows of `Paths.steps` for each state."""


class Tokens(NamedTuple):
    """The inputs of the rule, and their gradients."""

    q: jax.Array  # [B, K, M C, N], neither normed nor scaled, in any format
    k: jax.Array  # [B, K, M C, N], not normed
    v: jax.Array  # [B, V, M C, P]
    decays: jax.Array  # [B, M, K, R, C] float32, logarithm of the decay since the chunk began, along the token's path
    beta: jax.Array  # [B, M, K, R, C] float32


class Paths(NamedTuple):
    """Which carried states, and which tokens of its own chunk, are on each token's path; 0 or 1 in float32."""

    seen: jax.Array  # [B, M, C, C], whether the second token is on the first one's path
    steps: jax.Array
    """[B, M, 4 J, C]. J rows each: the tokens whose path begins in a state from the previous chunk; the token after
    which a state is passed on; the tokens on the path of that one; and 1 everywhere if the state is passed on
    unchanged."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def delta_rows(tokens: Tokens, paths: Paths, interpret: Interpret = False) -> jax.Array:
    """Outputs [B, V, M C, P] in the format of `v`; states are zeros before the first chunk.

    Equals `podium.models.blocks.delta_rule.packed`. `interpret` emulates the kernels without a TPU, slowly.
    """
    return _run(_forward_kernel, tokens, paths, interpret, saved=False)[0]


def _forward(tokens: Tokens, paths: Paths, interpret: Interpret) -> tuple[jax.Array, tuple[Tokens, Paths, jax.Array]]:
    y, states = _run(_forward_kernel, tokens, paths, interpret, saved=True)
    return y, (tokens, paths, states)


def _backward(
    interpret: Interpret, saved: tuple[Tokens, Paths, jax.Array], dy: jax.Array
) -> tuple[Tokens, Paths | None]:
    tokens, paths, states = saved
    return Tokens(*_run(_backward_kernel, tokens, paths, interpret, saved=True, given=(states, dy))), None


delta_rows.defvjp(_forward, _backward)


def _run(
    kernel: Callable[..., None],
    tokens: Tokens,
    paths: Paths,
    interpret: Interpret,
    *,
    saved: bool,
    given: Sequence[jax.Array] = (),
) -> Sequence[jax.Array]:
    """Run a kernel over rows, key heads and chunks, one after another; a backward pass is `given` states and dy.

    The results are y and, if `saved`, the states before each chunk, [B, K, M, R J, N, P]; or the gradients.
    """
    B, M, K, R, C = tokens.decays.shape
    N, P = tokens.q.shape[-1], tokens.v.shape[-1]
    J = paths.steps.shape[2] // STEPS

    def at(m: jax.Array) -> jax.Array:
        return M - 1 - m if given else m

    keys = pl.BlockSpec((None, None, C, N), lambda b, h, m: (b, h, at(m), 0))
    values = pl.BlockSpec((None, R, C, P), lambda b, h, m: (b, h, at(m), 0))
    numbers = pl.BlockSpec((None, None, None, R, C), lambda b, h, m: (b, at(m), h, 0, 0))
    pairs = pl.BlockSpec((None, None, C, C), lambda b, h, m: (b, at(m), 0, 0))
    steps = pl.BlockSpec((None, None, STEPS * J, C), lambda b, h, m: (b, at(m), 0, 0))
    states = pl.BlockSpec((None, None, None, R * J, N, P), lambda b, h, m: (b, h, at(m), 0, 0, 0))
    of_tokens = [keys, keys, values, numbers, numbers]
    kept = jax.ShapeDtypeStruct((B, K, M, R * J, N, P), jnp.float32)
    results = [tokens.v, kept][: 1 + saved]
    if given:
        results = [*tokens]
    return pl.pallas_call(
        kernel,
        grid=(B, K, M),
        in_specs=[*of_tokens, pairs, steps, *([states, values] if given else [])],
        out_specs=of_tokens if given else [values, states][: 1 + saved],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        scratch_shapes=[pltpu.VMEM((R * J, N, P), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * PASSES * B * K * M * _multiplied(C, N, P, R, J, backward=bool(given)),
            transcendentals=B * K * M * R * C * C,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*tokens, *paths, *given, *results)),
        ),
        interpret=interpret,
        name="delta_rows_backward" if given else "delta_rows",
    )(*tokens, *paths, *given)


def _multiplied(C: int, N: int, P: int, R: int, J: int, *, backward: bool) -> int:
    """Multiply-adds of a chunk of one key head."""
    solving = 2 * (C.bit_length() - 2) * C**3
    forward = 2 * C * C * N + R * (solving + 3 * J * C * N * P + 2 * C * C * P)
    if not backward:
        return forward
    return forward + 4 * C * C * N + R * (6 * J * C * N * P + 4 * C * C * P)


def _product(a: jax.Array, b: jax.Array, dims: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two matrices, summed over the given dimension of each."""
    return jax.lax.dot_general(
        a,
        b,
        (((dims[0],), (dims[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


_by_rows = functools.partial(_product, dims=(1, 1))  # a b'
_by_columns = functools.partial(_product, dims=(0, 0))  # a' b


def _equal(C: int) -> jax.Array:
    """[C, C] bool, True on the diagonal."""
    return jax.lax.broadcasted_iota(jnp.int32, (C, C), 0) == jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)


def _column(row: jax.Array) -> jax.Array:
    """A row as a column."""
    C = row.shape[1]
    return jnp.sum(jnp.where(_equal(C), jnp.broadcast_to(row, (C, C)), 0.0), axis=1, keepdims=True)


def _row(column: jax.Array) -> jax.Array:
    """A column as a row."""
    C = len(column)
    return jnp.sum(jnp.where(_equal(C), jnp.broadcast_to(column, (C, C)), 0.0), axis=0, keepdims=True)


def _along(x: jax.Array) -> jax.Array:
    """The sum of each row of x, as a column."""
    return jnp.sum(x, axis=1, keepdims=True)


def _all(x: jax.Array) -> jax.Array:
    """The sum of x, [1, 1]."""
    return jnp.sum(_along(x), axis=0, keepdims=True)


def _inverse(a: jax.Array) -> jax.Array:
    """The inverse of I + a, with a [C, C] strictly lower and C a power of 2.

    The inverses of the blocks along the diagonal are combined into those of blocks of twice the size, all at once.
    """
    C = len(a)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (C, C), dim) for dim in (0, 1))
    inverse = jnp.where(i == j, 1.0, 0.0)
    for level in range(C.bit_length() - 1):  # blocks of 2^level
        below = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        between = jnp.where(below, a, 0.0)
        inverse -= _product(_product(inverse, between), inverse) if level else between
    return inverse


class _Unit(NamedTuple):
    """Vectors divided by their length, times a scale."""

    x: jax.Array  # [C, N]
    factor: jax.Array  # column, scale / length
    scale: float

    def gradient(self, dx: jax.Array) -> jax.Array:
        """The gradient with respect to the vectors before normalisation."""
        return self.factor * (dx - self.x * _along(self.x * dx) / self.scale**2)


def _unit(x: jax.Array, scale: float = 1.0) -> _Unit:
    x = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(_along(x * x) + EPSILON) * scale
    return _Unit(x * factor, factor, scale)


class _Chunk(NamedTuple):
    """A chunk of one key head."""

    q: _Unit
    k: _Unit
    alike: jax.Array  # [C, C], k k'
    scores: jax.Array  # [C, C], q k'
    seen: jax.Array  # [C, C] bool
    earlier: jax.Array  # [C, C] bool, strictly lower
    reads: Sequence[jax.Array]  # J rows each, as in `Paths.steps`
    ends: Sequence[jax.Array]
    reached: Sequence[jax.Array]
    stays: Sequence[jax.Array]


def _chunk(q: jax.Array, k: jax.Array, seen: jax.Array, steps: jax.Array) -> _Chunk:
    (C, N), J = q.shape, len(steps) // STEPS
    queries, keys = _unit(q, N**-0.5), _unit(k)
    rows = [steps[at : at + 1] for at in range(STEPS * J)]
    return _Chunk(
        q=queries,
        k=keys,
        alike=_by_rows(keys.x, keys.x),
        scores=_by_rows(queries.x, keys.x),
        seen=seen > 0,
        earlier=jax.lax.broadcasted_iota(jnp.int32, (C, C), 0) > jax.lax.broadcasted_iota(jnp.int32, (C, C), 1),
        reads=rows[:J],
        ends=rows[J : 2 * J],
        reached=rows[2 * J : 3 * J],
        stays=rows[3 * J :],
    )


class _Head(NamedTuple):
    """A chunk of one value head."""

    beta: jax.Array  # column
    decay: jax.Array  # [C, C], between two tokens of a path; else 0
    reads: Sequence[jax.Array]  # J columns, decay of a state until a token whose path begins in it; else 0
    of_keys: Sequence[jax.Array]  # J arrays [C, P], what the states give for the keys
    of_queries: Sequence[jax.Array]  # J arrays [C, P], for the queries
    inverse: jax.Array  # [C, C], of I + A
    w: jax.Array  # [C, P], values less what the carried states give for their keys
    u: jax.Array  # [C, P], new values
    left: Sequence[jax.Array]  # J columns, decay from a token on the path of a state's last one until that; else 0
    at_end: Sequence[jax.Array]  # J scalars [1, 1], decay of a chunk's beginning until a state's last token
    reads_at_end: Sequence[Sequence[jax.Array]]  # [1, 1] for each state, and each state that its path may begin in
    kept: Sequence[Sequence[jax.Array]]  # like `steps`: the factor of that state


def _head(chunk: _Chunk, v: jax.Array, decays: jax.Array, beta: jax.Array, states: Sequence[jax.Array]) -> _Head:
    """Solve a chunk of a value head: v [C, P]; decays and beta rows; J states [N, P]."""
    since, strength = _column(decays), _column(beta)
    decay = jnp.exp(jnp.where(chunk.seen, since - decays, LOWEST))
    inverse = _inverse(jnp.where(chunk.earlier, strength * chunk.alike * decay, 0.0))
    columns = [_column(each * jnp.exp(decays)) for each in chunk.reads]
    of_keys = [_product(chunk.k.x, state) for state in states]
    w = v.astype(jnp.float32)
    for read, given in zip(columns, of_keys, strict=True):
        w -= read * given
    last = [_all(end * decays) for end in chunk.ends]
    at_end = [jnp.exp(each) for each in last]
    since_then = zip(chunk.reached, last, strict=True)
    left = [_column(jnp.exp(jnp.where(on > 0, end - decays, LOWEST))) for on, end in since_then]
    reads_at_end = [[_all(end * read) for read in chunk.reads] for end in chunk.ends]
    stays = [jnp.max(each, axis=1, keepdims=True) for each in chunk.stays]
    kept = [
        [found * at_end[i] + (stays[i] if i == j else 0.0) for j, found in enumerate(of_state)]
        for i, of_state in enumerate(reads_at_end)
    ]
    return _Head(
        beta=strength,
        decay=decay,
        reads=columns,
        of_keys=of_keys,
        of_queries=[_product(chunk.q.x, state) for state in states],
        inverse=inverse,
        w=w,
        u=_product(inverse, strength * w),
        left=left,
        at_end=at_end,
        reads_at_end=reads_at_end,
        kept=kept,
    )


def _begin(carried: jax.Ref) -> None:
    """Zero the state carried between chunks, in the first chunk of a row that the kernel computes."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = jnp.zeros(carried.shape, jnp.float32)


def _forward_kernel(
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    decays: jax.Ref,
    beta: jax.Ref,
    seen: jax.Ref,
    steps: jax.Ref,
    y: jax.Ref,
    *kept: jax.Ref,
) -> None:
    """`kept` are the states before each chunk, if these are saved, and the states passed from chunk to chunk."""
    *saved, carried = kept
    _begin(carried)
    for out in saved:
        out[...] = carried[...]
    chunk = _chunk(q[...], k[...], seen[...], steps[...])
    J = len(carried) // len(v)
    for r in range(len(v)):
        states = [carried[r * J + j] for j in range(J)]
        head = _head(chunk, v[r], decays[r : r + 1], beta[r : r + 1], states)
        out = _product(chunk.scores * head.decay, head.u)
        for read, given in zip(head.reads, head.of_queries, strict=True):
            out += read * given
        y[r] = out.astype(y.dtype)
        for i, (factors, left) in enumerate(zip(head.kept, head.left, strict=True)):
            new = _by_columns(chunk.k.x, left * head.u)
            for factor, state in zip(factors, states, strict=True):
                new += factor * state
            carried[r * J + i] = new


def _backward_kernel(
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    decays: jax.Ref,
    beta: jax.Ref,
    seen: jax.Ref,
    steps: jax.Ref,
    saved: jax.Ref,
    dy: jax.Ref,
    dq: jax.Ref,
    dk: jax.Ref,
    dv: jax.Ref,
    d_decays: jax.Ref,
    d_beta: jax.Ref,
    carried: jax.Ref,
) -> None:
    """`carried` are the gradients of the states between two chunks."""
    _begin(carried)
    chunk = _chunk(q[...], k[...], seen[...], steps[...])
    J = len(carried) // len(v)
    d_queries, d_keys = jnp.zeros(q.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)
    d_alike, d_scores = jnp.zeros(seen.shape, jnp.float32), jnp.zeros(seen.shape, jnp.float32)
    for r in range(len(v)):
        own = range(r * J, (r + 1) * J)
        states, after = [saved[j] for j in own], [carried[j] for j in own]
        row = slice(r, r + 1)
        head = _head(chunk, v[r], decays[row], beta[row], states)
        found = _head_gradient(chunk, head, states, after, dy[r].astype(jnp.float32))
        d_queries, d_keys = d_queries + found.q, d_keys + found.k
        d_alike, d_scores = d_alike + found.alike, d_scores + found.scores
        dv[r] = found.v.astype(dv.dtype)
        d_decays[row], d_beta[row] = found.decays, found.beta
        for j, state in zip(own, found.states, strict=True):
            carried[j] = state
    d_queries += _product(d_scores, chunk.k.x)
    d_keys += _by_columns(d_scores, chunk.q.x) + _product(d_alike, chunk.k.x) + _by_columns(d_alike, chunk.k.x)
    dq[...] = chunk.q.gradient(d_queries).astype(dq.dtype)
    dk[...] = chunk.k.gradient(d_keys).astype(dk.dtype)


class _HeadGradient(NamedTuple):
    """The contribution of one value head to the gradients of a chunk."""

    q: jax.Array  # [C, N], of the unit vectors, without the part through `scores`
    k: jax.Array  # [C, N], without the part through `scores` and `alike`
    alike: jax.Array  # [C, C]
    scores: jax.Array  # [C, C]
    v: jax.Array  # [C, P]
    decays: jax.Array  # row
    beta: jax.Array  # row
    states: Sequence[jax.Array]  # J arrays [N, P]


def _head_gradient(
    chunk: _Chunk, head: _Head, states: Sequence[jax.Array], after: Sequence[jax.Array], dy: jax.Array
) -> _HeadGradient:
    """Gradients of a value head's inputs, given those of the outputs, dy [C, P], and of the states after the chunk,
    `after`.
    """
    of_after = [_product(chunk.k.x, each) for each in after]
    du = _by_columns(chunk.scores * head.decay, dy)
    for left, given in zip(head.left, of_after, strict=True):
        du += left * given
    solved = _by_columns(head.inverse, du)
    dw = head.beta * solved
    d_system = jnp.where(chunk.earlier, -_by_rows(solved, head.u), 0.0)
    d_weights = _by_rows(dy, head.u)  # of the scores times their decays
    d_decay = (d_system * head.beta * chunk.alike + d_weights * chunk.scores) * head.decay
    d_since = _along(d_decay)  # column, of the decays
    dq, dk = jnp.zeros_like(chunk.q.x), jnp.zeros_like(chunk.k.x)
    before: list[jax.Array] = []
    for j, (read, state) in enumerate(zip(head.reads, states, strict=True)):
        by_query, by_key = read * dy, -read * dw
        dq += _by_rows(by_query, state)
        dk += _by_rows(by_key, state)
        d_since += read * _along(dy * head.of_queries[j] - dw * head.of_keys[j])
        before.append(_by_columns(chunk.q.x, by_query) + _by_columns(chunk.k.x, by_key))
    d_row = -jnp.sum(d_decay, axis=0, keepdims=True)
    for i, (left, new) in enumerate(zip(head.left, after, strict=True)):
        dk += _by_rows(left * head.u, new)
        of_left = left * _along(of_after[i] * head.u)
        d_since -= of_left
        at_end = _all(of_left)
        for j, state in enumerate(states):
            before[j] += head.kept[i][j] * new
            at_end += head.reads_at_end[i][j] * head.at_end[i] * _all(new * state)
        d_row += chunk.ends[i] * at_end
    return _HeadGradient(
        q=dq,
        k=dk,
        alike=d_system * head.beta * head.decay,
        scores=d_weights * head.decay,
        v=dw,
        decays=d_row + _row(d_since),
        beta=_row(_along(solved * head.w) + _along(d_system * chunk.alike * head.decay)),
        states=before,
    )
