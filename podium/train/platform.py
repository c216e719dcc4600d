"""The machine: what is set before jax starts, its platform and how memory is kept on CPU, and what jax then has."""

import ctypes
import glob
import os
import re
from pathlib import Path

import jax


def prepare_platform() -> None:
    """Have jax start on the CPU alone where there is nothing else; a second call does nothing new."""
    if only_cpu():
        jax.config.update("jax_platforms", "cpu")  # an installed libtpu would search for chips for a long time
        keep_freed_memory()


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
        try:
            name = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        except OSError:
            name = None
        text += f" ({f'{name[1]}, ' if name else ''}{os.cpu_count()} cores)"
    return text + (f" on {jax.process_count()} hosts" if jax.process_count() > 1 else "")
