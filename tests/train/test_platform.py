"""How the process keeps memory on a CPU, and gives it back; how a run names its machine."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from podium.hosts import platform
from podium.hosts.platform import devices_line

CHILD = """
from podium.malloc import giving_back_memory
from podium.hosts.platform import prepare_platform
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


STARTING = (
    "from podium.sharding import find_devices\ntry:\n    find_devices()\nexcept ValueError as error:\n    print(error)"
)


@pytest.mark.parametrize(
    ("platform", "way_out"),
    [
        ("cuda", "pip install 'podium-rl[cuda]', or unset JAX_PLATFORMS"),
        ("gpu", "pip install 'podium-rl[cuda]', or unset JAX_PLATFORMS"),
        ("tpuu", "unset JAX_PLATFORMS"),
    ],
)
def test_a_platform_that_jax_lacks_is_named_with_the_way_out(platform: str, way_out: str):
    environment = {**os.environ, "JAX_PLATFORMS": platform}
    ran = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True, check=True, env=environment)
    (line,) = ran.stdout.splitlines()
    assert line.startswith(f"JAX_PLATFORMS={platform}: jax does not start (")
    assert f"; {way_out} to use the devices that jax finds; podium doctor examines this machine" in line


@pytest.mark.parametrize(
    ("formats", "given"),
    [(("bfloat16", "bfloat16"), "bfloat16"), (("float32", "bfloat16"), "update float32, rollout bfloat16")],
)
def test_a_run_begins_with_its_devices_their_memory_and_its_formats(formats, given, monkeypatch):
    memory = {"bytes_limit": 133_776_277_504}
    device = SimpleNamespace(
        id=0, process_index=0, platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: memory
    )
    monkeypatch.setattr(platform, "find_devices", lambda: [device])
    assert devices_line(*formats) == f"1 x NVIDIA H200, 124.6 GiB, {given}"
    monkeypatch.setattr(platform, "find_devices", lambda: [device] * 8)
    assert devices_line(*formats) == f"8 x NVIDIA H200, 124.6 GiB each, {given}"


@pytest.mark.parametrize("hidden", [False, True])
def test_a_run_says_that_it_trains_on_the_cpu_beside_an_accelerator(hidden, monkeypatch):
    monkeypatch.setattr(platform, "host_memory", lambda: 24 * 2**30)
    monkeypatch.setattr(platform, "only_cpu", lambda: hidden)  # JAX_PLATFORMS=cpu, or no device file
    line = devices_line("float32", "float32")
    assert re.match(r"\d+ x cpu \(.*\), 24\.0 GiB, float32", line)
    assert ("jax does not use this machine's accelerator: run podium doctor to find out why" in line) == (not hidden)
