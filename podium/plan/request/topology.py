"""The compiler for a TPU or GPU that this machine lacks: its environment, devices and versions.

A file in `gpus` describes each kind of GPU: fields of XLA's GpuTargetConfigProto, as text, with their source.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING

from podium.accelerators import Accelerator

if TYPE_CHECKING:  # the compiler's environment must be set before jax is imported
    from podium.sharding import Device

GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# Autotuning would need the GPU; so would jaxlib 0.11 for its choice of a product's kernel among those that repeat their
# bits. A scatter that repeats them takes an update 0.8 % longer (`podium.compiler.GPU_OPTIONS`).
GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=false"
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc", "nvidia-cudnn-cu12"),
}
"""Installed packages besides jax whose version affects a compiled program."""
LIBRARIES = {
    "libdevice": "nvidia-cuda-nvcc-cu12",
    "ptxas": "nvidia-cuda-nvcc-cu12",
    "libnvptxcompiler": "nvidia-cuda-nvcc-cu12",
    "cudnn": "nvidia-cudnn-cu12",
    "cublas": "nvidia-cublas-cu12",
    "nvrtc": "nvidia-cuda-nvrtc-cu12",
    "cudart": "nvidia-cuda-runtime-cu12",
}
"""Libraries, in lower case, that the GPU compiler may report as missing, with the package of each."""


def compiler_environment(accelerator: Accelerator) -> dict[str, str]:
    """The environment variables of a process that compiles for this accelerator; set them before importing jax.

    libtpu is loaded only for its compiler, so it must neither ask a metadata server which machine this is nor take the
    lock of a process that uses a TPU.
    """
    environment = {"JAX_PLATFORMS": "cpu"}
    if accelerator.platform == "gpu":
        return environment | {"XLA_FLAGS": " ".join(filter(None, [os.environ.get("XLA_FLAGS"), GPU_FLAGS]))}
    if accelerator.platform == "tpu":
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": accelerator.slice_name,
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
    return environment


def topology_devices(accelerator: Accelerator) -> "list[Device]":
    """The devices of an absent TPU or GPU, to compile for; `make_mesh` takes them like real devices.

    The process must have been started with `compiler_environment`.

    Raises:
        ValueError: its compiler is not installed.
    """
    check_compiler(accelerator)
    from jax.experimental import topologies

    name = accelerator.topology
    if accelerator.platform == "gpu":
        target = gpu_target(accelerator)
        return list(topologies.get_topology_desc(name, "cuda", target_config=target, topology=name).devices)
    return list(topologies.get_topology_desc(name, "tpu", **accelerator.topology_options).devices)


def gpu_target(accelerator: Accelerator) -> str:
    """The path of the compiler's description of a GPU."""
    return resources.files("podium.plan").joinpath("gpus", f"{accelerator.generation}.txtpb").read_text("utf-8")


def target_of(accelerator: Accelerator) -> list[object]:
    """The target description that the compiler gets for an accelerator."""
    described = gpu_target(accelerator) if accelerator.platform == "gpu" else ""
    return [accelerator.topology, accelerator.topology_options, accelerator.devices, described]


def check_compiler(accelerator: Accelerator) -> None:
    """Check that the compiler for an accelerator is installed, if there is one. Raises ValueError if it is missing."""
    if accelerator.platform == "cpu" or not accelerator.compiled:  # jaxlib's compiler, or none
        return
    kind = accelerator.platform.upper()
    found = ["libtpu"] if kind == "TPU" else GPU_PLUGINS
    if not any(importlib.util.find_spec(name) for name in found):
        extra = "tpu" if kind == "TPU" else "plan-gpu"
        raise ValueError(
            f"{accelerator.name}: the {kind} compiler ({found[0]}) is not installed; pip install 'podium-rl[{extra}]',"
            " or plan with --fast"
        )


def missing_library(text: str) -> str | None:
    """How to install the library whose absence made a GPU compilation fail; None if it failed for another reason."""
    for line in text.lower().splitlines():
        if any(sign in line for sign in ("not found", "no such file", "can't find", "cannot find", "failed to load")):
            for name, package in LIBRARIES.items():
                if name in line:
                    return f"{name} is missing; pip install {package} (it comes with 'podium-rl[plan-gpu]')"
    return None


def compiler_versions(accelerator: Accelerator) -> dict[str, str]:
    """Versions of the packages that affect a compiled program, read without importing them."""
    installed = [name for name in PACKAGES.get(accelerator.platform, ()) if _version(name)]
    return {name: _version(name) for name in ("jax", "jaxlib", *installed)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
