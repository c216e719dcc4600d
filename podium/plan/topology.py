"""The compiler of a TPU that is not there: its environment, the devices that it describes, its versions."""

import importlib.metadata
import importlib.util
from typing import Any

from podium.accelerators import Accelerator


def compiler_environment(accelerator: Accelerator) -> dict[str, str]:
    """Environment of a process that compiles for this TPU; it must be set before jax is imported.

    libtpu is loaded for its compiler alone: it must not ask a metadata server what machine this is, nor take the lock
    that a process with a TPU holds.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": accelerator.name,
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


def topology_devices(accelerator: Accelerator) -> list[Any]:
    """The devices of a TPU that is not there, to compile for; `make_mesh` takes them as it takes real ones.

    The process must have been started with `compiler_environment`.

    Raises:
        ValueError: the compiler does not know the machine, or is not installed.
    """
    check_compiler(accelerator)
    from jax.experimental import topologies

    description = topologies.get_topology_desc(accelerator.topology, platform="tpu", **accelerator.topology_options)
    return list(description.devices)


def check_compiler(accelerator: Accelerator) -> None:
    """Raises ValueError where programs for a TPU cannot be compiled: it is none, or its compiler is not installed."""
    if not accelerator.compiles:
        raise ValueError(
            f"{accelerator.name}: only TPU programs can be compiled in advance; use --fast, the closed form"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"{accelerator.name}: the TPU compiler (libtpu) is not installed; pip install 'podium-rl[tpu]', or plan"
            " with --fast"
        )


def compiler_versions(accelerator: Accelerator) -> dict[str, str]:
    """Versions of what decides a compiled program, by package; without importing them."""
    packages = ["jax", "jaxlib", *(["libtpu"] if accelerator.compiles else [])]
    return {name: importlib.metadata.version(name) for name in packages}
