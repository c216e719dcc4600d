"""The Pallas kernels of a GPU on a real one: errors against references in float32, and time beside what XLA makes.

    python -m benches.gpu_kernels          (a minute; on a machine with an NVIDIA GPU)
    python -m benches.gpu_kernels --tiny   (on the CPU, emulated and small, nothing kept: does this script work?)

Attention over packed rows forward and backward, beside attention in blocks; attention of a decode step over pages,
with the share of the memory's bandwidth; statistics of logits. Writes benches/results/gpu-kernels-GPU.json; exit
status 1 where a kernel in float32 is off by more than 1e-5 of the largest value, or one in bfloat16 by more than 1 %.
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benches.gpu_accuracy import this_gpu
from benches.record import arguments, record
from podium.doctor.kernels import packed_rows
from podium.kernels.gpu_decode import paged_attention
from podium.kernels.gpu_logits import gpu_statistics
from podium.kernels.tiles import Tiles
from podium.models.attention import causal_attention
from podium.models.blockwise import blockwise_attention
from podium.models.gpu_attention import gpu_attention
from podium.models.visibility import Visibility

ROWS = (  # rows, tokens, query heads, key heads, head size, format
    (4, 1024, 9, 3, 64, "float32"),
    (4, 1024, 9, 3, 64, "bfloat16"),
    (4, 1536, 16, 2, 128, "bfloat16"),
    (4, 1536, 8, 1, 256, "bfloat16"),
    (16, 1024, 9, 3, 64, "bfloat16"),
)
PAGES = (  # rows, query heads, key heads, tokens of a page, head size, pages of a row, format
    (8, 9, 3, 16, 64, 8, "float32"),
    (64, 16, 2, 16, 128, 64, "bfloat16"),
    (64, 16, 2, 32, 128, 32, "bfloat16"),
    (64, 16, 2, 64, 128, 16, "bfloat16"),
    (512, 9, 3, 64, 64, 8, "bfloat16"),
    (64, 32, 8, 64, 128, 16, "bfloat16"),
)
LOGITS = (2048, 151_936)
TINY = (((1, 64, 2, 1, 16, "float32"),), ((2, 2, 1, 16, 16, 2, "float32"),), (8, 300))
BARS = {"float32": 1e-5, "bfloat16": 1e-2}
SCALE = 0.7  # of the logits: one over the temperature


def best_ms(function: Callable[..., object], *given: jax.Array, calls: int = 20) -> float:
    """The fewest milliseconds of a call, in rounds of `calls` of them, after one that compiles."""
    jax.block_until_ready(function(*given))
    times = []
    for _ in range(5):
        start, result = time.perf_counter(), None
        for _ in range(calls):
            result = function(*given)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * min(times)


def error(found: jax.Array, expected: jax.Array) -> float:
    """The largest difference, as a share of the largest value."""
    return float(jnp.max(jnp.abs(found.astype(jnp.float32) - expected)) / jnp.max(jnp.abs(expected)))


def with_gradients(attend: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array) -> list:
    """What is attended, and the gradients of queries, keys and values."""
    out, pull = jax.vjp(attend, q, k, v)
    return [out, *pull(d)]


def rows_attention(tiny: bool) -> Iterator[dict[str, Any]]:
    """Attention over packed rows, forward and backward."""
    kernel = functools.partial(gpu_attention, sinks=None, interpret=tiny)
    for B, T, H, K, Q, dtype in TINY[0] if tiny else ROWS:
        segments, prompts, positions = map(jnp.asarray, packed_rows(B, T))
        visibility = Visibility(segments, prompts, positions)
        live = (visibility.segments > 0)[:, :, None, None]
        random = np.random.default_rng(0)
        given = [jnp.asarray(random.standard_normal((B, T, heads, Q)), dtype) for heads in (H, K, K, H)]
        given[3] = given[3] * live.astype(dtype)
        wide = [x.astype(jnp.float32) for x in given]
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(functools.partial(with_gradients, functools.partial(_reference, visibility)))(*wide)
        expected[0] = expected[0] * live
        row: dict[str, Any] = {"rows": B, "tokens": T, "heads": [H, K, Q], "dtype": dtype}
        for name, attend in (("kernel", kernel), ("blocks", blockwise_attention)):
            run = jax.jit(functools.partial(with_gradients, functools.partial(_seen, attend, visibility)))
            found = run(*given)
            pairs = zip([found[0] * live, *found[1:]], expected, strict=True)
            row |= {f"{name}_error": max(error(*pair) for pair in pairs), f"{name}_ms": best_ms(run, *given, calls=3)}
        yield row


def _seen(attend: Callable[..., jax.Array], visibility: Visibility, *given: jax.Array) -> jax.Array:
    return attend(*given, visibility=visibility)


def _reference(visibility: Visibility, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return causal_attention(q, k, v, visibility.mask())


def pages_attention(tiny: bool) -> Iterator[dict[str, Any]]:
    """Attention of one new token per row over the pages of its sequence."""
    paged = functools.partial(paged_attention, window=None, sinks=None, interpret=tiny)
    kernel, plain = jax.jit(paged, donate_argnums=(3, 4)), jax.jit(_gathered)
    for R, H, K, P, Q, C, dtype in TINY[1] if tiny else PAGES:
        parts = jax.random.split(jax.random.key(0), 5)
        new = [jax.random.normal(part, (R, n, Q)).astype(dtype) for part, n in zip(parts, (H, K, K), strict=False)]
        pages = [jax.random.normal(part, (2, R * C, K, P, Q)).astype(dtype) for part in parts[3:]]
        random = np.random.default_rng(0)
        tables = jnp.asarray(random.permutation(R * C).reshape(R, C), jnp.int32)
        lengths = jnp.asarray(random.integers(1, C * P + 1, R), jnp.int32).at[0].set(0)
        rows = jnp.int32(1), tables
        with jax.default_matmul_precision("highest"):
            found, *pages = kernel(*new, *pages, *rows, lengths)
            off = error(found, plain(new[0], *pages, *rows, lengths))
        full, read = jnp.full(R, C * P, jnp.int32), sum(each.nbytes for each in pages) // 2
        gathered_ms = best_ms(plain, new[0], *pages, *rows, full)
        ms = best_ms(functools.partial(_in_place, kernel, new, pages), *rows, full)
        yield {
            "rows": R,
            "heads": [H, K, Q],
            "pages": [C, P],
            "dtype": dtype,
            "kernel_error": off,
            "kernel_ms": ms,
            "terabytes_per_s": read / ms / 1e9,
            "gathered_ms": gathered_ms,
        }


def _in_place(
    kernel: Callable[..., Sequence[jax.Array]], new: list[jax.Array], pages: list[jax.Array], *rows: jax.Array
) -> jax.Array:
    """What is attended, in a call that updates `pages` in place."""
    found, *pages[:] = kernel(*new, *pages, *rows)
    return found


def _gathered(
    q: jax.Array, keys: jax.Array, values: jax.Array, layer: jax.Array, tables: jax.Array, lengths: jax.Array
) -> jax.Array:
    """The same, of pages that are gathered first."""
    (R, H, Q), (K, P), C = q.shape, keys.shape[2:4], tables.shape[1]
    k, v = (x[layer][tables].swapaxes(1, 2).reshape(R, K, C * P, Q).astype(jnp.float32) for x in (keys, values))
    scores = jnp.einsum("rkgq,rktq->rkgt", q.reshape(R, K, H // K, Q).astype(jnp.float32), k) * Q**-0.5
    seen = jnp.arange(C * P)[None, None, None] < lengths[:, None, None, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1) * (lengths > 0)[:, None, None, None]
    return jnp.einsum("rkgt,rktq->rkgq", shares, v).reshape(R, H, Q)


def logits_statistics(tiny: bool) -> Iterator[dict[str, Any]]:
    """Log-probabilities of the chosen tokens from the statistics of one pass over the logits."""
    T, V = TINY[2] if tiny else LOGITS
    kernel = jax.jit(functools.partial(gpu_statistics, scale=SCALE, entropy=True, tiles=Tiles(), interpret=tiny))
    targets = jax.random.randint(jax.random.key(1), (1, T), 0, V)
    for dtype in ("float32", "bfloat16"):
        logits = (3 * jax.random.normal(jax.random.key(0), (1, T, V))).astype(dtype)
        found = kernel(logits, targets)
        scaled = jax.nn.log_softmax(SCALE * logits.astype(jnp.float32))
        expected = jnp.take_along_axis(scaled, targets[..., None], axis=-1)[..., 0]
        ms = best_ms(kernel, logits, targets)
        yield {
            "tokens": T,
            "vocab": V,
            "dtype": dtype,
            "kernel_error": error(found.chosen - found.top - jnp.log(found.total), expected),
            "kernel_ms": ms,
            "terabytes_per_s": logits.nbytes / ms / 1e9,
        }


def main() -> int:
    """Prints and writes the figures of all kernels."""
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small arrays and emulated kernels, on the CPU")
    args = parser.parse_args()
    found: dict[str, Sequence[dict[str, Any]]] = {}
    for name, measure in (
        ("attention over rows", rows_attention),
        ("attention over pages", pages_attention),
        ("statistics of logits", logits_statistics),
    ):
        found[name] = list(measure(args.tiny))
        print(*(f"{name}: {json.dumps(row)}" for row in found[name]), sep="\n", flush=True)
    if args.tiny:
        return 0
    record(f"gpu-kernels-{this_gpu().generation}", {"kernels": found}, args.results)
    rows = [row for each in found.values() for row in each]
    return int(any(row["kernel_error"] > BARS[row["dtype"]] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
