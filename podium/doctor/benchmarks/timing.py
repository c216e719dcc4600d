"""Times jitted functions, and measures the rates of a roofline: products, reading, copying, transfers to a device.

Each figure is from the fastest of several rounds, after a call that compiles.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from podium.hlo.cost import Peaks

ROUNDS = 5
PRODUCT = 2048
"""Rows and columns of the products that measure a CPU's peak."""
ARRAY_BYTES = 2**28
"""Size of the array whose copy measures a CPU's memory."""
ROW = 4096
"""Values of a row of the array whose reading is measured."""


def fastest_s(function: Callable[..., object], *given: object, calls: int = 1, rounds: int = ROUNDS) -> float:
    """Seconds per call in the fastest of several rounds, each with `calls` calls that are issued without waiting."""
    jax.block_until_ready(function(*given))
    times = []
    for _ in range(rounds):
        start, result = time.perf_counter(), None
        for _ in range(calls):
            result = function(*given)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def product_rate(dtype: jnp.dtype, side: int = PRODUCT, *, calls: int = 1) -> float:
    """Operations per second of one device in a square product, float32 at full precision; integers add up in int32."""
    x = jnp.ones((side, side), dtype)
    sums = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision, preferred_element_type=sums))
    return 2 * side**3 / fastest_s(product, x, x, calls=calls)


def copy_rate(size: int = ARRAY_BYTES, *, calls: int = 1) -> float:
    """Bytes per second that one device reads and writes when it replaces an array of `size` bytes in place."""
    step = jax.jit(lambda a: a + 1, donate_argnums=0)
    held = [jnp.ones(size // 4, jnp.float32)]

    def replace() -> jax.Array:
        held.append(step(held.pop()))  # the previous array is donated
        return held[0]

    return 2 * held[0].nbytes / fastest_s(replace, calls=calls)


def read_rate(size: int = ARRAY_BYTES, *, calls: int = 1) -> float:
    """Bytes per second that one device reads when it finds the largest value of each row of an array of `size` bytes.

    Sums would measure a CPU's additions, each of which waits for the one before.
    """
    x = jnp.ones((size // (4 * ROW), ROW), jnp.float32)
    return x.nbytes / fastest_s(jax.jit(lambda a: a.max(-1)), x, calls=calls)


def to_device_rate(size: int = ARRAY_BYTES) -> float:
    """Bytes per second from the host's memory to a device."""
    x = np.ones(size // 4, np.float32)
    device = jax.local_devices()[0]
    return x.nbytes / fastest_s(lambda: jax.device_put(x, device), rounds=3)


def from_device_rate(size: int = ARRAY_BYTES) -> float:
    """Bytes per second from a device to the host's memory."""
    x = jnp.ones(size // 4, jnp.float32)

    def fetch() -> np.ndarray:
        return np.asarray(x + 0)  # a new array: jax keeps the host's copy of one that was fetched before

    return x.nbytes / fastest_s(fetch, rounds=3)


def cpu_peaks() -> Peaks:
    """Measure the peak rates of this machine's CPU, because none are published; a CPU has no links."""
    return Peaks(
        flops_bf16=product_rate(jnp.dtype(jnp.bfloat16)),
        flops_f32=product_rate(jnp.dtype(jnp.float32)),
        hbm_bandwidth=copy_rate(),
        link_bandwidth=1.0,
    )
