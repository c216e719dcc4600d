"""The compiler of a TPU or GPU that is not there: its environment, the devices that it describes, its versions.

GPUs are described by a file each in `gpus`: fields of XLA's GpuTargetConfigProto, as text, with their source.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from importlib import resources
from typing import Any

from podium.accelerators import Accelerator

GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
GPU_FLAGS = "--xla_gpu_autotune_level=0"  # choosing kernels by trying them needs the GPU
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc", "nvidia-cudnn-cu12"),
}
"""What besides jax decides a compiled program, where it is installed."""
LIBRARIES = {
    "libdevice": "nvidia-cuda-nvcc-cu12",
    "ptxas": "nvidia-cuda-nvcc-cu12",
    "libnvptxcompiler": "nvidia-cuda-nvcc-cu12",
    "cudnn": "nvidia-cudnn-cu12",
    "cublas": "nvidia-cublas-cu12",
    "nvrtc": "nvidia-cuda-nvrtc-cu12",
    "cudart": "nvidia-cuda-runtime-cu12",
}
"""What the GPU's compiler says it cannot find, in small letters, and the package that has it."""


def compiler_environment(accelerator: Accelerator) -> dict[str, str]:
    """Environment of a process that compiles for this accelerator; it must be set before jax is imported.

    libtpu is loaded for its compiler alone: it must not ask a metadata server what machine this is, nor take the lock
    that a process with a TPU holds.
    """
    environment = {"JAX_PLATFORMS": "cpu"}
    if accelerator.platform == "gpu":
        return environment | {"XLA_FLAGS": " ".join(filter(None, [os.environ.get("XLA_FLAGS"), GPU_FLAGS]))}
    if accelerator.platform == "tpu":
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": accelerator.name,
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
    return environment


def topology_devices(accelerator: Accelerator) -> list[Any]:
    """The devices of a TPU or GPU that is not there, to compile for; `make_mesh` takes them as it takes real ones.

    The process must have been started with `compiler_environment`.

    Raises:
        ValueError: its compiler is not installed.
    """
    check_compiler(accelerator)
    from jax.experimental import topologies

    options: dict[str, Any] = {"platform": "tpu", **accelerator.topology_options}
    if accelerator.platform == "gpu":
        options = {"platform": "cuda", "target_config": gpu_target(accelerator), "topology": accelerator.topology}
    return list(topologies.get_topology_desc(accelerator.topology, **options).devices)


def gpu_target(accelerator: Accelerator) -> str:
    """The compiler's description of a GPU."""
    return resources.files("podium.plan").joinpath("gpus", f"{accelerator.generation}.txtpb").read_text("utf-8")


def target_of(accelerator: Accelerator) -> list[Any]:
    """All that the compiler is told of an accelerator."""
    described = gpu_target(accelerator) if accelerator.platform == "gpu" else ""
    return [accelerator.topology, accelerator.topology_options, accelerator.devices, described]


def check_compiler(accelerator: Accelerator) -> None:
    """Raises ValueError where the compiler of an accelerator's programs is not installed."""
    kind = accelerator.platform.upper()
    found = ["libtpu"] if kind == "TPU" else GPU_PLUGINS
    if not any(importlib.util.find_spec(name) for name in found):
        extra = "tpu" if kind == "TPU" else "plan-gpu"
        raise ValueError(
            f"{accelerator.name}: the {kind} compiler ({found[0]}) is not installed; pip install 'podium-rl[{extra}]',"
            " or plan with --fast"
        )


def missing_library(text: str) -> str | None:
    """What to install where a GPU's compiler failed for want of a library; None: it failed for another reason."""
    for line in text.lower().splitlines():
        if any(sign in line for sign in ("not found", "no such file", "can't find", "cannot find", "failed to load")):
            for name, package in LIBRARIES.items():
                if name in line:
                    return f"{name} is missing; pip install {package} (it comes with 'podium-rl[plan-gpu]')"
    return None


def compiler_versions(accelerator: Accelerator) -> dict[str, str]:
    """Versions of what decides a compiled program, by package; without importing them."""
    installed = [name for name in PACKAGES.get(accelerator.platform, ()) if _version(name)]
    return {name: _version(name) for name in ("jax", "jaxlib", *installed)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
