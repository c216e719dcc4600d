"""The machine: what is set before jax starts, and what jax then has."""

import hashlib
import os
import re

import jax
from jax.sharding import Mesh

from podium.accelerators import CPU_INFO, cpu_flags, recognise
from podium.files import user_cache
from podium.malloc import keep_freed_memory, only_cpu
from podium.run.machine import Machine
from podium.sharding import slice_of

CACHE_BYTES = 10 * 2**30
"""Of compiled programs that are kept; those not used for the longest time go first."""


def prepare_platform() -> None:
    """Have jax start on the CPU alone where there is nothing else, and keep what it compiles; a second call is free."""
    keep_compiled()
    keep_freed_memory()
    if only_cpu():
        jax.config.update("jax_platforms", "cpu")  # an installed libtpu would search for chips for a long time


def keep_compiled() -> None:
    """Have jax keep compiled programs in ~/.cache/podium/xla, so that a second start compiles nothing.

    `JAX_COMPILATION_CACHE_DIR` says another folder, or none if it is empty. Programs for CPU are kept apart by its
    features: a home folder may be shared by machines that differ.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.values.get("jax_compilation_cache_dir") is not None:
        return
    features = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    jax.config.update("jax_compilation_cache_dir", str(user_cache("xla") / features))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def machine_of(mesh: Mesh) -> Machine:
    """The machine that the devices of a mesh are."""
    devices = list(mesh.devices.flat)
    return Machine(
        platform=devices[0].platform,
        devices=len(devices),
        hosts=len({device.process_index for device in devices}),
        slices=len({slice_of(device) for device in devices}),
        accelerator=recognise(devices[0].device_kind, len(devices)),
        cpu_flags=cpu_flags(),
    )


def machine_text() -> str:
    """The devices of all processes in words, as in `8 x TPU v6e on 2 hosts` or `1 x cpu (AMD EPYC, 2 cores)`."""
    devices = jax.devices()
    text = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu":
        info = CPU_INFO.read_text() if CPU_INFO.exists() else ""
        name = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
        text += f" ({f'{name[1]}, ' if name else ''}{os.cpu_count()} cores)"
    return text + (f" on {jax.process_count()} hosts" if jax.process_count() > 1 else "")
