"""How fast does XLA multiply on this CPU, by number format? See `podium.models.linear`.

    python -m benches.products

The products of SmolLM2-135M's decode (64 rows) and update (320 and 1280), by turns in one run: float32; bfloat16 into
float32 results, which is what Podium's `bfloat16` means on CPU; bfloat16 into bfloat16. Then the product of decode with
layers out of a stack, in a loop, as a decoder has them: also bfloat16 as the bits of uint16, as an engine on CPU keeps
it (`podium.models.linear.as_bits`). GFLOP per second of CPU time. Writes benches/results/products-cpu.json.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benches.record import arguments, record
from podium.models.linear import of_bits

SIZES = {
    "decode": (64, 576, 1536),
    "up, 320 tokens": (320, 576, 1536),
    "up": (1280, 576, 1536),
    "down": (1280, 1536, 576),
    "gradient": (576, 1280, 1536),
    "head": (1280, 576, 49152),
}
FORMATS = {
    "float32": (jnp.float32, jnp.float32),
    "bfloat16_into_float32": (jnp.bfloat16, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
}
STACKED = {
    "float32": (jnp.float32, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "bits": (jnp.uint16, jnp.bfloat16),
}
LAYERS = 20
CALLS = 10


def product(operands: Any, result: Any, m: int, k: int, n: int) -> Callable[[], jax.Array]:
    """A compiled call of one product [m, k] x [k, n]."""
    a, b = jnp.ones((m, k), operands), jnp.ones((k, n), operands)
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=result))
    jax.block_until_ready(multiply(a, b))
    return lambda: multiply(a, b)


def stacked(kept: Any, operands: Any, m: int, k: int, n: int) -> Callable[[], jax.Array]:
    """A compiled call of as many products as there are layers, whose weights lie in one array of dtype `kept`."""

    def multiply(x: jax.Array, layers: jax.Array) -> jax.Array:
        def layer(i: jax.Array, x: jax.Array) -> jax.Array:
            y = jnp.dot(x.astype(operands), of_bits(layers[i]), preferred_element_type=jnp.float32)
            return x + y[:, :1]

        return jax.lax.fori_loop(0, LAYERS, layer, x)

    compiled = jax.jit(multiply)
    x, layers = jnp.ones((m, k), jnp.float32), jnp.zeros((LAYERS, k, n), kept)
    jax.block_until_ready(compiled(x, layers))
    return lambda: compiled(x, layers)


def cpu_s(call: Callable[[], jax.Array]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    jax.block_until_ready([call() for _ in range(CALLS)])
    return (time.process_time() - start) / CALLS


def main() -> None:
    """Prints and writes the table."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of each; the best counts")
    args = parser.parse_args()
    rows = []
    for name, (m, k, n) in SIZES.items():
        calls = {title: product(*formats, m, k, n) for title, formats in FORMATS.items()}
        times = [{title: cpu_s(call) for title, call in calls.items()} for _ in range(args.repeats)]
        rates = {title: round(2e-9 * m * k * n / min(time[title] for time in times), 1) for title in calls}
        rows.append({"product": name, "m_k_n": [m, k, n], "gflop_per_cpu_s": rates})
        print(name, rates)
    m, k, n = SIZES["decode"]
    calls = {title: stacked(*formats, m, k, n) for title, formats in STACKED.items()}
    times = [{title: cpu_s(call) for title, call in calls.items()} for _ in range(args.repeats)]
    rates = {title: round(2e-9 * LAYERS * m * k * n / min(time[title] for time in times), 1) for title in calls}
    rows.append({"product": "decode, out of a stack", "m_k_n": [m, k, n], "gflop_per_cpu_s": rates})
    print("decode, out of a stack", rates)
    record("products-cpu", {"rows": rows}, args.results)


if __name__ == "__main__":
    main()
