"""TPU kernels (Pallas) that compute log-probabilities from hidden states and head, without logits in HBM.

The kernels compute tiles of logits, transposed to [vocabulary, tokens] so that per-token statistics run along sublanes.
The forward pass saves each token's softmax statistics. The backward pass recomputes the logits, as the chunked XLA head
does, and writes the gradient of a chunk's logits in the products' format. XLA multiplies it with the head and with the
hidden states, for the gradients of both.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from podium.config.head import head_chunks, head_tile
from podium.kernels.tiles import LOWEST, Gradients, Interpret


class HeadOptions(NamedTuple):
    """Static arguments of a call."""

    scale: float  # factor of the logits: 1 / temperature
    chunk: int  # tokens per chunk of logits' gradients
    memory: int  # bytes of fast memory
    precision: jax.lax.Precision | None  # of the products
    interpret: Interpret = False  # emulate without a TPU, slowly


def tpu_head(
    hidden: jax.Array, head: jax.Array, sums: jax.Array | None, targets: jax.Array, options: HeadOptions
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of targets [B, T] and entropy, from hidden states [B, T, D] and a head [V, D]; [B, T] float32
    each.

    Equals `podium.models.logprobs.token_logprobs` on one device. The head's gradient is summed over chunks in the
    head's format. If `sums` [V, D] float32 is given, it gets the gradient instead, summed in float32; its values are
    not read.
    """
    B, T, D = hidden.shape
    tile = head_tile(B * T, len(head), D, head.dtype.itemsize, options.memory)
    chunks, size = head_chunks(B * T, options.chunk, tile[0])
    options = options._replace(chunk=size)
    padding = chunks * size - B * T
    flat = jnp.pad(hidden.reshape(B * T, D).astype(head.dtype), [(0, padding), (0, 0)])
    padded = jnp.pad(targets.reshape(1, B * T), [(0, 0), (0, padding)])
    found: tuple[jax.Array, jax.Array] = _scores(options, tile, flat, head, sums=sums, targets=padded)
    logprobs, entropy = found
    return logprobs[0, : B * T].reshape(B, T), entropy[0, : B * T].reshape(B, T)


_Saved = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array, jax.Array]
"""Hidden states, head, sums, targets, log-sum-exp and entropy."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(
    options: HeadOptions,
    tile: tuple[int, int],
    hidden: jax.Array,
    head: jax.Array,
    sums: jax.Array | None,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies [1, N] of targets [1, N], from hidden states [N, D] and a head [V, D]."""
    return _forward(options, tile, hidden, head, sums=sums, targets=targets)[0]


def _forward(
    options: HeadOptions,
    tile: tuple[int, int],
    hidden: jax.Array,
    head: jax.Array,
    sums: jax.Array | None,
    targets: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    line = jax.ShapeDtypeStruct(targets.shape, jnp.float32)
    logprobs, entropy, log_total = _call(
        functools.partial(_statistics_kernel, V=len(head), options=options),
        (hidden, head, targets),
        outputs=(("line", line),) * 3,
        scratch=4,
        tile=tile,
        options=options,
        name="head_statistics",
    )
    return (logprobs, entropy), (hidden, head, sums, targets, log_total, entropy)


def _backward(
    options: HeadOptions, tile: tuple[int, int], saved: _Saved, gradient: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    hidden, head, sums, targets, log_total, entropy = saved
    of_logprob, of_entropy = (x * options.scale for x in gradient)
    gradients = Gradients(log_total, of_logprob, of_entropy, entropy)
    V, D = head.shape
    product = functools.partial(jnp.einsum, precision=options.precision, preferred_element_type=jnp.float32)

    def chunk(d_head: jax.Array, xs: tuple[jax.Array, jax.Array, Gradients]) -> tuple[jax.Array, jax.Array]:
        hidden, targets, gradients = xs  # [c, D], [1, c]
        (d_logits,) = _call(
            functools.partial(_gradient_kernel, options=options),
            (hidden, head, targets, gradients),
            outputs=(("tile", jax.ShapeDtypeStruct((V, options.chunk), head.dtype)),),
            scratch=0,
            tile=tile,
            options=options,
            name="head_gradient",
        )
        d_hidden = product("vc,vd->cd", d_logits, head).astype(head.dtype)
        return d_head + product("vc,cd->vd", d_logits, hidden).astype(d_head.dtype), d_hidden

    of_tokens = jax.tree.map(lambda x: x.reshape(-1, 1, options.chunk), (targets, gradients))
    xs = (hidden.reshape(-1, options.chunk, D), *of_tokens)
    d_head, d_hidden = jax.lax.scan(chunk, jnp.zeros((V, D), head.dtype if sums is None else jnp.float32), xs)
    d_hidden = d_hidden.reshape(hidden.shape)
    return (d_hidden, d_head, None, None) if sums is None else (d_hidden, None, d_head, None)


_scores.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None],
    given: tuple[jax.Array, jax.Array, *tuple[jax.Array | Gradients, ...]],
    *,
    outputs: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
    scratch: int,
    tile: tuple[int, int],
    options: HeadOptions,
    name: str,
) -> Sequence[jax.Array]:
    """Run a kernel over tiles of tokens and, for each, tiles of the vocabulary.

    `given`: hidden states, head, and per-token arrays [1, N].
    """
    t, v = tile
    N, D = given[0].shape
    V = len(given[1])
    itemsize = given[1].dtype.itemsize
    line = pl.BlockSpec((1, t), lambda i, j: (0, i))
    blocks = {"line": line, "tile": pl.BlockSpec((v, t), lambda i, j: (j, i))}
    operands = [pl.BlockSpec((t, D), lambda i, j: (i, 0)), pl.BlockSpec((v, D), lambda i, j: (j, 0))]
    written = sum(shape.size * shape.dtype.itemsize for _, shape in outputs)
    return pl.pallas_call(
        kernel,
        grid=(N // t, pl.cdiv(V, v)),
        in_specs=[*operands, *jax.tree.map(lambda _: line, given[2:])],
        out_specs=[blocks[kind] for kind, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        scratch_shapes=[pltpu.VMEM((1, t), jnp.float32)] * scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=options.memory
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * V * D, transcendentals=N * V, bytes_accessed=(N + N // t * V) * D * itemsize + written
        ),
        interpret=options.interpret,
        name=name,
    )(*given)


def _logits(hidden: jax.Ref, head: jax.Ref, options: HeadOptions) -> tuple[jax.Array, jax.Array]:
    """One tile of logits [v, t] float32, and their vocabulary indices."""
    x = jax.lax.dot_general(
        head[...],
        hidden[...],
        (((1,), (1,)), ((), ())),  # over the width
        precision=options.precision,
        preferred_element_type=jnp.float32,
    )
    places = pl.program_id(1) * x.shape[0] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return (x * options.scale if options.scale != 1 else x), places


def _statistics_kernel(
    hidden: jax.Ref,
    head: jax.Ref,
    targets: jax.Ref,
    logprobs: jax.Ref,
    entropy: jax.Ref,
    log_total: jax.Ref,
    top: jax.Ref,
    total: jax.Ref,
    chosen: jax.Ref,
    weighted: jax.Ref,
    *,
    V: int,
    options: HeadOptions,
) -> None:
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, LOWEST, jnp.float32)
        for each in (total, chosen, weighted):
            each[...] = jnp.zeros(each.shape, jnp.float32)

    x, places = _logits(hidden, head, options)
    if V % x.shape[0]:  # beyond the end of the vocabulary is garbage
        x = jnp.where(places < V, x, LOWEST)
    before = top[...]
    higher = jnp.maximum(before, jnp.max(x, axis=0, keepdims=True))
    kept, shares = jnp.exp(before - higher), jnp.exp(x - higher)
    weighted[...] = kept * (weighted[...] + (before - higher) * total[...]) + jnp.sum(
        shares * (x - higher), axis=0, keepdims=True
    )
    total[...] = kept * total[...] + jnp.sum(shares, axis=0, keepdims=True)
    chosen[...] += jnp.sum(jnp.where(places == targets[...], x, 0.0), axis=0, keepdims=True)
    top[...] = higher

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        log_sum = jnp.log(total[...])
        log_total[...] = higher + log_sum
        logprobs[...] = chosen[...] - log_total[...]
        entropy[...] = log_sum - weighted[...] / total[...]


def _gradient_kernel(
    hidden: jax.Ref,
    head: jax.Ref,
    targets: jax.Ref,
    gradients: Gradients,
    d_logits: jax.Ref,
    *,
    options: HeadOptions,
) -> None:
    x, places = _logits(hidden, head, options)
    log_total, of_logprob, of_entropy, entropy = (each[...] for each in gradients)
    table = x - log_total
    slope = of_logprob + of_entropy * (table + entropy)
    one = jnp.where(places == targets[...], of_logprob, 0.0)
    d_logits[...] = (one - jnp.exp(table) * slope).astype(d_logits.dtype)
