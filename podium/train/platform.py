"""The machine: what is set before jax starts, its platform and how memory is kept on CPU, and what jax then has."""

import contextlib
import ctypes
import glob
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from podium.accelerators import CPU_INFO, cpu_flags

CACHE_BYTES = 10 * 2**30
"""Of compiled programs that are kept; those not used for the longest time go first."""


def prepare_platform() -> None:
    """Have jax start on the CPU alone where there is nothing else, and keep what it compiles; a second call is free."""
    keep_compiled()
    if only_cpu():
        jax.config.update("jax_platforms", "cpu")  # an installed libtpu would search for chips for a long time
        keep_freed_memory()


def keep_compiled() -> None:
    """Have jax keep compiled programs in ~/.cache/podium/xla, so that a second start compiles nothing.

    `JAX_COMPILATION_CACHE_DIR` says another folder, or none if it is empty. Programs for CPU are kept apart by its
    features: a home folder may be shared by machines that differ.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.values.get("jax_compilation_cache_dir") is not None:
        return
    features = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    jax.config.update("jax_compilation_cache_dir", str(cache / "podium" / "xla" / features))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def keep_freed_memory() -> None:
    """Have malloc keep the memory that XLA's programs free on CPU, for the next one to use.

    glibc gives it back to the kernel, which then has to clear every page again: a sixth of the CPU time of the demo's
    update (benches/results/pages-cpu.json). Only threads that start later use it, so it comes before jax's backend.
    Does nothing where the C library is another.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((m_arena_max, 1), (m_mmap_max, 0), (m_trim_threshold, -1)):
            mallopt(parameter, value)


@contextlib.contextmanager
def giving_back_memory() -> Iterator[None]:
    """Give the kernel in the end what `keep_freed_memory` kept: the gigabytes of a run, in a Python that goes on."""
    try:
        yield
    finally:
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def only_cpu() -> bool:
    """Whether jax will find nothing but the CPU; known without starting it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*"))


def machine_text() -> str:
    """The devices of all processes in words, as in `8 x TPU v6e on 2 hosts` or `1 x cpu (AMD EPYC, 2 cores)`."""
    devices = jax.devices()
    text = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu":
        info = CPU_INFO.read_text() if CPU_INFO.exists() else ""
        name = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
        text += f" ({f'{name[1]}, ' if name else ''}{os.cpu_count()} cores)"
    return text + (f" on {jax.process_count()} hosts" if jax.process_count() > 1 else "")
