"""Makes malloc keep the memory that XLA's programs free on a CPU. Imports neither jax nor numpy, because it must run
before they start threads.
"""

import contextlib
import ctypes
import glob
import os
from collections.abc import Iterator


def only_cpu() -> bool:
    """Whether jax will only find the CPU; does not start jax."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*"))


def keep_freed_memory() -> None:
    """Make malloc keep the memory that XLA's programs free for the next program, if there is only the CPU.

    By default glibc returns it to the kernel, which has to clear every page again: a third of an update's time
    (benches/results/pages-cpu.json). Call this before anything else: a thread that has already allocated memory, such
    as one that a library starts on import, has its own malloc arena; jax's later threads would share the arena, and
    glibc always returns its large arrays to the kernel. Has no effect with C libraries other than glibc.
    """
    # malloc.h
    m_trim_threshold = -1
    m_mmap_max = -4
    m_arena_max = -8
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and only_cpu():
        for parameter, value in ((m_arena_max, 1), (m_mmap_max, 0), (m_trim_threshold, -1)):
            mallopt(parameter, value)


@contextlib.contextmanager
def giving_back_memory() -> Iterator[None]:
    """On exit, return freed memory to the operating system, which `keep_freed_memory` otherwise prevents.

    For code that trains within a longer-lived process: a run may leave gigabytes of freed memory.
    """
    try:
        yield
    finally:
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
