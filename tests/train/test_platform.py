"""How the process keeps memory on a CPU, and gives it back."""

import os
import subprocess
import sys

CHILD = """
import podium.train.platform as platform
platform.prepare_platform()
import jax, jax.numpy as jnp
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
made = [jnp.ones((16, 1 << 20)) * n for n in range(4)]
jax.block_until_ready(made)
kept = jnp.ones(4)  # behind them: what is freed is not the end of the heap
full = resident()
del made
freed = resident()
with platform.giving_back_memory():
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
