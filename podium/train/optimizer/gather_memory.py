"""Measures the memory effect of a mesh: one large array, split over fsdp like weights, or gathered on every device.

This reveals a misconfigured mesh in seconds, before a model is loaded: a split array takes target / fsdp bytes per
device, a gathered one the whole target.
"""

import json
import math
import os
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podium.accelerators import GIB
from podium.hosts.distributed import gather, is_leader, joined, local_memory
from podium.hosts.platform import prepare_platform
from podium.job.job_context import join_job
from podium.sharding import make_mesh

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
UNAVAILABLE = "unavailable"
Mode = Literal["sharded", "gather"]
Figure: TypeAlias = int | str | Sequence[int | str]
"""A number or a name, or one for each axis or process; UNAVAILABLE if a device does not report the figure."""


def bench(*, mode: Mode, mesh_shape: str, dtype: str, target_bytes_gib: float, cols: int, require: int) -> int:
    """Print the figures of all processes as one JSON object; returns the exit status of `podium bench gather`.

    `mesh_shape` is written like `mesh:` in a config. The target is the size of the whole array, rounded up to full rows
    of `cols` elements on every device. `require` is the number of processes that must be present; 0: any.
    """
    options = {"mode": mode, "mesh": mesh_shape, "dtype": dtype, "target": str(target_bytes_gib), "cols": str(cols)}
    with join_job({**os.environ, **({"REQUIRE_JAX_PROCESS_COUNT": str(require)} if require else {})}) as job:
        if job.guard is not None:
            job.guard.agree(options, None)
        prepare_platform()
        with joined(job):
            found = measure(make_mesh(mesh_shape), mode, dtype, target_bytes_gib=target_bytes_gib, cols=cols)
            if is_leader():
                print(json.dumps(found), flush=True)
    return 0


def measure(mesh: Mesh, mode: Mode, dtype: str, *, target_bytes_gib: float, cols: int) -> dict[str, Figure]:
    """Allocate the array and report what every device of every process holds; all processes must call this."""
    target = int(target_bytes_gib * GIB)
    shape = buffer_shape(target, cols, dtype, fsdp=mesh.shape["fsdp"])
    split: jax.Array = allocate(mesh, shape, dtype)()
    array: jax.Array = gathered(mesh)(split) if mode == "gather" else split
    jax.block_until_ready((split, array))
    total = math.prod(shape) * jnp.dtype(DTYPES[dtype]).itemsize
    return {
        "jax_version": jax.__version__,
        "backend": jax.default_backend(),
        "process_count": jax.process_count(),
        "local_device_count": jax.local_device_count(),
        "device_count": jax.device_count(),
        "mesh_shape": list(mesh.shape.values()),
        "mesh_axes": list(mesh.axis_names),
        "mode": mode,
        "dtype": dtype,
        "dtype_size": jnp.dtype(DTYPES[dtype]).itemsize,
        "target_bytes": target,
        "actual_total_bytes": total,
        "actual_total_bytes_human": f"{total / GIB:.3f} GiB",
        "buffer_shape": list(shape),
        **_of_all("per_device_array_bytes", max(shard.data.nbytes for shard in array.addressable_shards)),
        **_of_all("device_bytes_in_use", local_memory("bytes_in_use")),
        **_of_all("device_peak_bytes_in_use", local_memory("peak_bytes_in_use")),
    }


def planned(mesh: Mesh, mode: Mode, dtype: str, *, target_bytes_gib: float, cols: int) -> int:
    """Bytes of the array on each device, from lowered programs; the mesh's devices need not exist."""
    shape = buffer_shape(int(target_bytes_gib * GIB), cols, dtype, fsdp=mesh.shape["fsdp"])
    make = allocate(mesh, shape, dtype)
    array = jax.eval_shape(make)
    made = (make.trace() if mode == "sharded" else gathered(mesh).trace(array)).lower().out_info
    return math.prod(made.sharding.shard_shape(made.shape)) * made.dtype.itemsize


def buffer_shape(target_bytes: int, cols: int, dtype: str, *, fsdp: int) -> tuple[int, int]:
    """Shape (rows, columns) of an array of at least this size whose rows divide over fsdp."""
    elements = -(-target_bytes // jnp.dtype(DTYPES[dtype]).itemsize)
    rows = -(-elements // cols)
    return max(1, -(-rows // fsdp)) * fsdp, cols


def allocate(mesh: Mesh, shape: tuple[int, int], dtype: str) -> jax.stages.Wrapped:
    """The jitted `() -> zeros`, split over fsdp."""
    return jax.jit(
        lambda: jnp.zeros(shape, DTYPES[dtype]), out_shardings=NamedSharding(mesh, PartitionSpec("fsdp", None))
    )


def gathered(mesh: Mesh) -> jax.stages.Wrapped:
    """The jitted `array -> the same array, replicated on every device`."""
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _of_all(name: str, local: int | None) -> dict[str, Figure]:
    """A figure of this process, the figures of all processes in order, and their maximum."""
    values = gather(local)
    known = [value for value in values if value is not None]
    return {
        f"{name}_local_max": UNAVAILABLE if local is None else local,
        f"{name}_all_processes": [UNAVAILABLE if value is None else value for value in values],
        f"{name}_all_processes_max": max(known) if known else UNAVAILABLE,
    }
