"""How malloc keeps what XLA's programs free on a CPU. No jax, no numpy: it is set before their threads start."""

import contextlib
import ctypes
import glob
import os
from collections.abc import Iterator


def only_cpu() -> bool:
    """Whether jax will find nothing but the CPU; known without starting it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*"))


def keep_freed_memory() -> None:
    """Have malloc keep the memory that XLA's programs free, for the next one to use, where there is only the CPU.

    glibc gives it back to the kernel, which then has to clear every page again: a third of an update's time
    (benches/results/pages-cpu.json). A thread that has allocated before, as some do that libraries start when they are
    imported, has an arena of its own. Later threads of jax share it, and its large arrays are always given back: so
    this comes first of all. Does nothing where the C library is another.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and only_cpu():
        for parameter, value in ((m_arena_max, 1), (m_mmap_max, 0), (m_trim_threshold, -1)):
            mallopt(parameter, value)


@contextlib.contextmanager
def giving_back_memory() -> Iterator[None]:
    """Give the kernel in the end what `keep_freed_memory` kept: the gigabytes of a run, in a Python that goes on."""
    try:
        yield
    finally:
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
