"""Programs as they are lowered for a GPU, without one."""

from collections.abc import Callable

import jax


def lowered_for_gpu(function: Callable, *arguments: jax.Array) -> str:
    """The text of the function's program for an H100."""
    h100 = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=h100)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
