"""The machine: jax settings before it starts, and a description of the devices."""

import hashlib
import os
import re
from collections.abc import Sequence

import jax

from podium.accelerators import (
    CPU_INFO,
    GIB,
    capability_of,
    cpu_flags,
    host_memory,
    recognise,
    reserve_gpu_memory,
)
from podium.compiler import hide_plugin_errors
from podium.files import user_cache
from podium.malloc import keep_freed_memory, only_cpu
from podium.run.machine import Machine
from podium.sharding import Device, find_devices, slice_of

CACHE_BYTES = 10 * 2**30
"""Size limit of the cache of compiled programs; the least recently used ones are deleted first."""


def prepare_platform() -> None:
    """Make jax use only the CPU, or most of a GPU's memory if there is one, and cache compiled programs; idempotent."""
    keep_compiled()
    keep_freed_memory()
    if only_cpu():
        jax.config.update("jax_platforms", "cpu")  # otherwise an installed libtpu searches for chips for a long time
        hide_plugin_errors()
    else:
        reserve_gpu_memory()


def keep_compiled() -> None:
    """Make jax cache compiled programs in ~/.cache/podium/xla, so that a second start compiles nothing.

    `JAX_COMPILATION_CACHE_DIR` sets another folder, or disables the cache if empty. Programs for CPU are cached by its
    features, because machines with different CPUs may share a home folder.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.values.get("jax_compilation_cache_dir") is not None:
        return
    features = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    jax.config.update("jax_compilation_cache_dir", str(user_cache("xla") / features))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def machine_of(devices: Sequence[Device]) -> Machine:
    """The machine that these devices form."""
    slices = len({slice_of(device) for device in devices})
    return Machine(
        platform=devices[0].platform,
        devices=len(devices),
        hosts=len({device.process_index for device in devices}),
        slices=slices,
        accelerator=recognise(devices[0].device_kind, len(devices), slices),
        cpu_flags=cpu_flags(),
        capability=capability_of(devices[0]),
    )


def machine_text() -> str:
    """Describe the devices of all processes, as `8 x TPU v6e on 2 hosts` or `1 x cpu (AMD EPYC, 2 cores)`."""
    devices = find_devices()
    text = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu":
        info = CPU_INFO.read_text() if CPU_INFO.exists() else ""
        name = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
        text += f" ({f'{name[1]}, ' if name else ''}{os.cpu_count()} cores)"
    return text + (f" on {jax.process_count()} hosts" if jax.process_count() > 1 else "")


def devices_line(update: str, rollout: str) -> str:
    """The line that a run begins with: its devices, the memory that each may use, and the number formats.

    Example: `1 x NVIDIA H200, 124.6 GiB, bfloat16`. A warning follows if jax leaves this machine's accelerators unused.
    """
    own = next(each for each in find_devices() if each.process_index == jax.process_index())  # others cannot be asked
    stats = own.memory_stats() or {}
    memory = stats.get("bytes_limit") or host_memory()
    formats = update if update == rollout else f"update {update}, rollout {rollout}"
    each = " each" if stats and len(find_devices()) > 1 else ""
    text = f"{machine_text()}, {memory / GIB:.1f} GiB{each}, {formats}"
    if find_devices()[0].platform == "cpu" and not only_cpu():
        text += "; jax does not use this machine's accelerator: run podium doctor to find out why"
    return text
