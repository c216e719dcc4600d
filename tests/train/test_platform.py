"""How the process keeps memory on a CPU, and gives it back."""

import os
import subprocess
import sys

import pytest

CHILD = """
from podium.malloc import giving_back_memory
from podium.train.platform import prepare_platform
prepare_platform()
import jax, jax.numpy as jnp
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
made = [jnp.ones((16, 1 << 20)) * n for n in range(4)]
jax.block_until_ready(made)
kept = jnp.ones(4)  # behind them: what is freed is not the end of the heap
full = resident()
del made
freed = resident()
with giving_back_memory():
    pass
print(full, freed, resident())
"""


def test_the_memory_of_what_has_ended_is_kept_until_it_is_given_back():
    """XLA's programs find it there again; a notebook whose run is over has it for others."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, env=environment)
    full, freed, after = map(int, ran.stdout.split())
    assert freed > full - 64
    assert after < full - 192


ARENAS = """
import ctypes, os, sys, threading
{start}
import numpy, jax.numpy as jnp
jnp.ones(8).block_until_ready()
thread = threading.Thread(target=lambda: bytearray(1 << 16))
thread.start(), thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
report, to = os.pipe()
stream = ctypes.c_void_p(libc.fdopen(to, b"w"))
libc.malloc_info(0, stream), libc.fclose(stream)
print(os.read(report, 1 << 20).decode().count("<heap nr"))
"""
STARTS = {
    "command": "import podium.cli as cli; sys.argv = ['podium', '--version']\ntry: cli.main()\nexcept SystemExit: pass",
    "Python": "import podium; podium.grpo",
}


@pytest.mark.parametrize("start", STARTS)
def test_all_threads_share_one_arena_whose_large_arrays_are_kept(start):
    """What lies in an arena of a thread's own is given back at once, whatever malloc was told."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ARENAS.format(start=STARTS[start])]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.split()[-1] == "1"
