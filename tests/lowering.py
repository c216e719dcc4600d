"""Programs as they are lowered for a GPU or a TPU, without one."""

from collections.abc import Callable

import jax


def lowered_for_gpu(function: Callable, *arguments: jax.Array) -> str:
    """The text of the function's program for an H100."""
    h100 = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    return _lowered(h100, "cuda", function, arguments)


def lowered_for_tpu(function: Callable, *arguments: jax.Array) -> str:
    """The text of the function's program for a v6e."""
    v6e = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    return _lowered(v6e, "tpu", function, arguments)


def _lowered(
    device: jax.sharding.AbstractDevice, platform: str, function: Callable, arguments: tuple[jax.Array, ...]
) -> str:
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
