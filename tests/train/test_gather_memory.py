import json
import os
import subprocess
import sys
from typing import Any

import jax
import pytest

from podium import cli
from podium.accelerators import find_accelerator
from podium.plan.request.topology import compiler_environment
from podium.sharding import make_mesh
from podium.train.optimizer.gather_memory import buffer_shape, measure

HEADER = [
    "jax_version",
    "backend",
    "process_count",
    "local_device_count",
    "device_count",
    "mesh_shape",
    "mesh_axes",
    "mode",
    "dtype",
    "dtype_size",
    "target_bytes",
    "actual_total_bytes",
    "actual_total_bytes_human",
    "buffer_shape",
]
FIGURES = [
    f"{figure}_{of}"
    for figure in ("per_device_array_bytes", "device_bytes_in_use", "device_peak_bytes_in_use")
    for of in ("local_max", "all_processes", "all_processes_max")
]


@pytest.mark.parametrize(
    ("mesh", "mode", "share"),
    [("auto", "sharded", 8), ("auto", "gather", 1), ("dp:2,fsdp:4", "sharded", 4), ("host_local", "sharded", 8)],
)
def test_a_device_holds_the_target_over_fsdp_or_all_of_it(mesh, mode, share):
    found = measure(make_mesh(mesh), mode, "bf16", target_bytes_gib=0.01, cols=1024)
    total = found["actual_total_bytes"]
    assert found["per_device_array_bytes_local_max"] * share == total
    assert found["per_device_array_bytes_all_processes"] == [total // share]
    assert 0 <= total - found["target_bytes"] < 8 * 1024 * 2  # whole rows on each of eight devices
    assert found["buffer_shape"][0] % share == 0
    assert list(found) == HEADER + FIGURES


def test_memory_that_devices_do_not_tell_is_unavailable():
    found = measure(make_mesh("auto"), "sharded", "f32", target_bytes_gib=0.001, cols=64)
    assert found["device_bytes_in_use_local_max"] == "unavailable"
    assert found["device_peak_bytes_in_use_all_processes"] == ["unavailable"]
    assert found["device_peak_bytes_in_use_all_processes_max"] == "unavailable"


def test_rows_are_rounded_up_to_a_multiple_of_fsdp():
    assert buffer_shape(1, 4096, "bf16", fsdp=8) == (8, 4096)
    assert buffer_shape(16 * 4096 * 2, 4096, "bf16", fsdp=8) == (16, 4096)
    assert buffer_shape(16 * 4096 * 2 + 1, 4096, "bf16", fsdp=8) == (24, 4096)


def command(monkeypatch, *options: str) -> int:
    """The status of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["podium", "bench", "gather", *options])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_the_command_prints_one_object(monkeypatch, capsys):
    options = ("--mode", "sharded", "--target-bytes-gib", "0.01", "--cols", "1024", "--mesh-shape", "1,-1,1")
    assert command(monkeypatch, *options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["device_count"], found["mesh_shape"]) == (8, [1, 8, 1, 1])
    assert found["mesh_axes"] == ["dp", "fsdp", "sp", "tp"]
    assert found["per_device_array_bytes_local_max"] * 8 == found["actual_total_bytes"]
    assert found["jax_version"] == jax.__version__


def test_processes_that_are_required_and_missing_are_an_error(monkeypatch, capsys):
    assert command(monkeypatch, "--mode", "gather", "--require-process-count", "4") == 78
    assert "REQUIRE_JAX_PROCESS_COUNT is 4 and this job has 1" in capsys.readouterr().err


PLAN = """
import json, math
from podium.accelerators import find_accelerator
from podium.plan.request.topology import topology_devices
from podium.sharding import make_mesh
from podium.train.optimizer.gather_memory import GIB, allocate, buffer_shape, gathered

shares, compiled = {}, {}
for text in ("auto", "host_local"):
    mesh = make_mesh(text, topology_devices(find_accelerator("v6e-16")))
    for gib, found in ((5.6, shares), (2**-6, compiled)):
        shape = buffer_shape(int(gib * GIB), 4096, "bf16", fsdp=mesh.shape["fsdp"])
        split = allocate(mesh, shape, "bf16").lower()
        programs = (split, gathered(mesh).lower(split.out_info))
        if found is compiled:  # at full size it takes the compiler many minutes
            sizes = [each.compile().memory_analysis().output_size_in_bytes for each in programs]
            found[text] = [size / math.prod(shape) for size in sizes]
        else:
            sizes = [each.out_info.sharding.shard_shape(shape) for each in programs]
            found[text] = [math.prod(size) * 2 / GIB for size in sizes]
print(json.dumps([shares, compiled]))
"""


def test_a_v6e_16_would_hold_what_its_owners_measured():
    """By the shards of its devices in GiB, and by its compiler in bytes per element of a smaller array."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed; pip install 'podium-rl[tpu]'")
    environ = {**os.environ, **compiler_environment(find_accelerator("v6e-16"))}
    done = subprocess.run([sys.executable, "-c", PLAN], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    shares, compiled = json.loads(done.stdout.splitlines()[-1])
    assert shares["auto"] == pytest.approx([0.350, 5.600], abs=0.001)
    assert shares["host_local"] == pytest.approx([1.400, 5.600], abs=0.001)
    assert compiled == {"auto": [2 / 16, 2], "host_local": [2 / 4, 2]}
