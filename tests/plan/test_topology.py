import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from podium.accelerators import (
    GPUS,
    accelerators,
    find_accelerator,
    pool_share,
    recognise,
    reserve_gpu_memory,
    usable_gpu_memory,
)
from podium.plan.calibration import load_chip
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.topology import compiler_environment, gpu_target, missing_library, topology_devices
from podium.plan.result import Seconds
from podium.plan.search.study import cost_of
from podium.prices import Price
from podium.run.machine import Machine
from podium.run.roles import find_decoder
from podium.settings import load_settings

GIB = 2**30
ROOT = Path(__file__).parents[2]
CHIPS = ROOT / "podium" / "chips"
COMPILED_TPUS = [each for each in accelerators().values() if each.platform == "tpu" and each.compiled]


def shape(name: str) -> tuple:
    each = find_accelerator(name)
    return each.generation, each.devices, each.hosts, each.devices_per_host, each.torus


def test_names_count_cores_which_are_chips_of_v5e_and_v6e_and_halves_of_others_chips():
    assert shape("v6e-8") == ("v6e", 8, 1, 8, (2, 4))
    assert shape("v6e-16") == ("v6e", 16, 4, 4, (4, 4))
    assert shape("v6e-256") == ("v6e", 256, 64, 4, (16, 16))
    assert shape("v5litepod-32") == ("v5e", 32, 8, 4, (4, 8))
    assert shape("v4-16") == ("v4", 8, 2, 4, (2, 2, 2))
    assert shape("v4-512") == ("v4", 256, 64, 4, (4, 8, 8))
    assert shape("v5p-64") == ("v5p", 32, 8, 4, (2, 4, 4))
    assert shape("tpu7x-2") == ("tpu7x", 2, 1, 2, (1, 1, 1))
    assert shape("tpu7x-128") == ("tpu7x", 128, 16, 8, (4, 4, 4))
    assert shape("tpu8t-8") == ("tpu8t", 8, 2, 4, (2, 2, 2))
    assert shape("tpu8i-8") == ("tpu8i", 8, 1, 8, ())
    assert shape("h100-8") == ("h100", 8, 1, 8, ())


@pytest.mark.parametrize(
    ("name", "chips", "per_host"),
    [
        ("tpu7x-8", 4, 4),
        ("tpu7x-2", 1, 1),
        ("2xtpu7x-16", 16, 4),
        ("tpu8i-16", 8, 4),
        ("v5p-64", 32, 4),
        ("h100-8", 8, 8),
    ],
)
def test_clouds_rent_chips(name, chips, per_host):
    machine = find_accelerator(name)
    assert (machine.chips, machine.chips_per_host) == (chips, per_host)


def test_the_range_of_each_kind_is_whole():
    names = list(accelerators())
    assert [name for name in names if name.startswith("v4")] == [f"v4-{8 * 2**k}" for k in range(7)]
    assert [name for name in names if name.startswith("v6e")] == [f"v6e-{n}" for n in (1, 4, 8, 16, 32, 64, 128, 256)]
    assert {"v5p-8", "v5p-1024", "v5litepod-1", "v5litepod-256", "h200-1", "b200-256"} <= set(names)


def test_v5e_is_another_name_of_v5litepod():
    assert find_accelerator("v5e-16") is find_accelerator("V5litepod-16")


def test_topology_is_what_the_compiler_is_asked_for():
    assert find_accelerator("v6e-8").topology == "v6e:2x4"
    assert find_accelerator("v6e-8").topology_options == {"chips_per_host_bounds": (2, 4, 1)}
    v4 = find_accelerator("v4-16")
    assert (v4.topology, v4.topology_options) == (
        "v4:2x2x2",
        {"chips_per_host_bounds": (2, 2, 1), "chip_config_name": "megacore"},
    )
    ironwood = find_accelerator("tpu7x-8")
    assert (ironwood.topology, ironwood.topology_options) == ("tpu7x:2x2x1", {"chips_per_host_bounds": (2, 2, 1)})


@pytest.mark.parametrize(
    ("name", "links"),
    [("v6e-1", 0), ("v6e-8", 2), ("v6e-16", 2), ("v6e-128", 3), ("v6e-256", 4), ("v4-16", 3), ("v4-128", 6)],
)
def test_the_worst_placed_chip_has_one_link_where_an_axis_ends(name, links):
    assert find_accelerator(name).ici_links == links


def test_usable_memory_is_the_compilers_figure():
    expected = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
    assert {kind: find_accelerator(f"{kind}-8").hbm_bytes / GIB for kind in expected} == pytest.approx(expected)


def test_a_gpu_offers_the_share_that_jax_takes_but_for_the_allocators_reserve():
    assert find_accelerator("h100-1").hbm_bytes == int(0.98 * 0.9 * 84_942_979_072)
    assert usable_gpu_memory("h100", 1.0) == int(0.98 * (84_942_979_072 - GIB))  # CUDA's context is beside


POOL_VARIABLES = ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"]


@pytest.mark.parametrize("share", ["0", "1.5", "most"])
@pytest.mark.parametrize("name", POOL_VARIABLES)
def test_a_share_that_is_none_is_refused(monkeypatch, name, share):
    monkeypatch.setenv(name, share)
    with pytest.raises(ValueError, match=f"{name}={share}: expected a fraction of the memory"):
        pool_share()


@pytest.mark.parametrize("name", POOL_VARIABLES)
def test_jax_takes_most_of_a_gpu_unless_the_user_says_otherwise(monkeypatch, name):
    for each in POOL_VARIABLES:
        monkeypatch.delenv(each, raising=False)
    reserve_gpu_memory()
    assert pool_share() == 0.9 and os.environ.pop(POOL_VARIABLES[0]) == "0.9"
    monkeypatch.setenv(name, "0.5")
    reserve_gpu_memory()
    assert pool_share() == 0.5
    assert [each for each in POOL_VARIABLES if each in os.environ] == [name]  # jax refuses both


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v6e-12", "v6e-8, v6e-16"),
        ("v5e-24", "v5litepod-16, v5litepod-32"),
        ("a100-8", "a100-40-8, a100-80-8"),
        ("h800-8", "h100-8"),
        ("rtx3080-1", "rtx3090-1"),
        ("h100-12", "h100-8, h100-16"),
        ("rtx4090", "rtx4090-1, rtx4090-4, rtx4090-8"),
        ("a100-40", "a100-40-1, a100-40-4, a100-40-8"),
        ("v5e", "v5litepod-1, v5litepod-4, v5litepod-8"),
    ],
)
def test_an_unknown_name_is_told_its_nearest(name, near):
    with pytest.raises(ValueError, match=f"unknown accelerator '{name}'; nearest: .*{near}"):
        find_accelerator(name)


def test_a_plan_on_the_cpu_says_what_to_do_instead():
    with pytest.raises(ValueError, match=r"--on cpu: .* podium train CONFIG --set steps=3"):
        find_accelerator("cpu")


def test_machines_of_gpus_are_joined_where_their_network_has_a_figure():
    assert shape("h100-16") == ("h100", 16, 2, 8, ())
    assert (find_accelerator("h100-16").slices, find_accelerator("h100-16").topology) == (2, "2x1x8")
    with pytest.raises(
        ValueError, match=r"l4-16: .*the bandwidth between machines.*plan for one machine, l4-8, or .*h100"
    ):
        find_accelerator("l4-16")


@pytest.mark.parametrize(
    ("name", "dtype", "kernels"),
    [
        ("t4-1", "float32", "none"),
        ("v100-32-8", "float32", "none"),
        ("a10g-1", "bfloat16", "gpu"),
        ("b300-8", "bfloat16", "gpu"),
        ("mi300x-8", "bfloat16", "none"),
    ],
)
def test_a_gpus_capability_decides_number_format_and_kernels(name, dtype, kernels):
    machine = Machine.planned(find_accelerator(name))
    assert (machine.dtype, machine.kernels) == (dtype, kernels)


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("Tesla T4", "t4-1"),
        ("Tesla V100-SXM2-32GB", "v100-32-1"),
        ("NVIDIA A10G", "a10g-1"),
        ("NVIDIA A100-SXM4-80GB", "a100-80-1"),
        ("NVIDIA L40", "l40-1"),
        ("NVIDIA L40S", "l40s-1"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada-1"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000-1"),
        ("NVIDIA GH200 480GB", "gh200-1"),
        ("NVIDIA GB200", "gb200-1"),
        ("AMD Instinct MI355X", "mi355x-1"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GH200 144G HBM3e", None),
    ],
)
def test_a_gpu_is_known_by_what_jax_calls_it(device_kind, name):
    found = recognise(device_kind, 1)
    assert (found and found.name) == name


def test_a_tray_of_gb200_has_four_gpus():
    assert (shape("gb200-4")[1:4], shape("gh200-1")[1:4]) == ((4, 1, 4), (1, 1, 1))
    with pytest.raises(ValueError, match=r"gb200-8: .*plan for one machine, gb200-4, or"):
        find_accelerator("gb200-8")


@pytest.mark.parametrize("name", ["mi300x-8", "tpu8t-4", "tpu8i-8"])
def test_what_has_no_compiler_is_planned_by_its_figures_and_says_so(name):
    config = load_settings([ROOT / "configs" / "demo.yaml"], [], {}).config
    plan = make_plan(Planned.of(config, find_accelerator(name)))
    assert plan.estimate_only and plan.step is not None
    assert any(note.startswith(f"planned by the figures of {name[:-2]} alone") for note in plan.notes)


def test_rates_and_prices_are_those_of_chips():
    """A step of 3 s, of which the plan of a machine of eight devices on four chips says 12 chip-seconds."""
    config = load_settings([ROOT / "configs" / "demo.yaml"], [], {}).config
    plan = make_plan(Planned.of(config, find_accelerator("tpu7x-8")), by="closed_form")
    assert plan.step is not None and plan.tokens_per_s_per_chip is not None
    step = dataclasses.replace(plan, step=Seconds(value=3.0, low=3.0, high=3.0))
    cost = cost_of(step, 300, {"tpu7x": Price(usd_per_chip_hour=12.0, source="a shop", date="2026-11-01")})
    assert cost is not None and cost.usd is not None
    assert (cost.chip_hours.value, cost.usd.value) == pytest.approx((1.0, 12.0))
    made = plan.workload.completion_tokens / plan.step.value
    assert plan.tokens_per_s_per_chip.value == pytest.approx(made / 4)
    assert any("tpu7x-8 has 4 chips of 2 devices each" in note for note in plan.notes)


def test_several_slices_are_one_machine_whose_devices_are_counted_together():
    two = find_accelerator("2xv6e-16")
    assert (two.name, two.slice_name, two.platform) == ("2xv6e-16", "v6e-16", "tpu")
    assert (two.devices, two.hosts, two.slices, two.devices_per_host, two.devices_per_slice) == (32, 8, 2, 4, 16)
    assert two.topology == "v6e:4x4"
    assert two.topology_options == {"chips_per_host_bounds": (2, 2, 1), "num_slices": 2}
    assert find_accelerator("1xv6e-16") is find_accelerator("v6e-16")
    assert recognise("TPU v6 lite", 32, 2) == two
    assert recognise("TPU v4", 16, 2) == find_accelerator("2xv4-16")
    assert recognise("TPU v5 lite", 8) is find_accelerator("v5litepod-8")
    assert recognise("TPU7x", 8) is find_accelerator("tpu7x-8")
    assert recognise("NVIDIA H100 80GB HBM3", 16, 2) is find_accelerator("h100-16")
    with pytest.raises(ValueError, match="2xh100-8: write a number of slices before a type of TPU"):
        find_accelerator("2xh100-8")


@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_slices_have_a_network_far_slower_than_their_links(kind):
    constants = json.loads((CHIPS / f"{kind}.json").read_text())["constants"]
    assert 0 < constants["network_bandwidth"]["value"] < constants["link_bandwidth"]["value"] / 5


@pytest.mark.parametrize(("name", "extra"), [("v6e-8", "tpu"), ("h100-8", "plan-gpu")])
def test_a_missing_compiler_is_told_with_what_installs_it(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"{name}: .*pip install 'podium-rl\[{extra}\]'"):
        topology_devices(find_accelerator(name))


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("E0000 libdevice.10.bc: cannot find in /usr/local/cuda", "nvidia-cuda-nvcc-cu12"),
        ("INTERNAL: cuDNN not found", "nvidia-cudnn-cu12"),
        ("Failed to load libcublas.so.12: no such file", "nvidia-cublas-cu12"),
    ],
)
def test_a_library_that_the_gpus_compiler_misses_is_told_with_its_package(text, package):
    found = missing_library(f"a line\n{text}\nanother")
    assert found is not None and f"pip install {package}" in found


def test_a_failure_for_another_reason_misses_no_library():
    assert missing_library("INTERNAL: cudnn graph has no plan\nValueError: file not found: x.yaml") is None


@pytest.mark.parametrize("kind", GPUS)
def test_every_gpu_has_figures_and_a_target_of_its_memory_with_a_source(kind):
    if GPUS[kind].compiled:
        target, capability = gpu_target(find_accelerator(f"{kind}-1")), GPUS[kind].capability.split(".")
        assert target.startswith("# Source: ") and f"device_memory_size: {GPUS[kind].memory}\n" in target
        assert f"cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} " in target
    assert ("network_bandwidth" in json.loads((CHIPS / f"{kind}.json").read_text())["constants"]) == GPUS[
        kind
    ].networked


def test_the_environment_of_a_gpus_compiler_keeps_the_users_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    environment = compiler_environment(find_accelerator("h100-8"))
    flags = "--xla_a=1 --xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=false"
    assert environment == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


GPU_COMPILER = importlib.util.find_spec("jax_cuda12_plugin") is not None
DESCRIBE_GPU = """
import sys
from podium.accelerators import GPUS, find_accelerator
from podium.plan.request.topology import topology_devices
for kind, gpu in GPUS.items():
    if gpu.compiled:
        devices = topology_devices(find_accelerator(f"{kind}-1"))
        print(kind, len(devices), *{(device.platform, device.compute_capability) for device in devices})
print(*sorted({device.process_index for device in topology_devices(find_accelerator("h100-16"))}))
"""


@pytest.mark.skipif(not GPU_COMPILER, reason="jax-cuda12-plugin, the GPU's compiler, is not installed")
def test_the_gpus_compiler_knows_every_gpu_and_machine():
    environment = {**os.environ, **compiler_environment(find_accelerator("h100-8"))}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE_GPU], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    described = (f"{kind} 1 ('gpu', '{gpu.capability}')" for kind, gpu in GPUS.items() if gpu.compiled)
    assert done.stdout.split("\n")[:-1] == [*described, "0 1"]


@pytest.mark.parametrize("kind", GPUS)
def test_the_demo_is_planned_on_every_gpu(kind):
    """An update multiplies each weight six times per token, counting additions."""
    config = load_settings([ROOT / "configs" / "demo.yaml"], [], {}).config
    planned = Planned.of(config, find_accelerator(f"{kind}-1"))
    made = make_plan(planned, by="closed_form")
    constants = json.loads((CHIPS / f"{kind}.json").read_text())["constants"]
    update = next(phase for phase in made.phases if phase.name == "update")
    assert made.verdict == "fits" and update.seconds is not None
    multiplied = 6 * find_decoder(config).stored * made.workload.completion_tokens
    assert update.seconds.high > multiplied / constants["flops_bf16"]["value"]


@pytest.mark.slow
@pytest.mark.skipif(not GPU_COMPILER, reason="jax-cuda12-plugin, the GPU's compiler, is not installed")
def test_a_t4_trains_the_demo():
    config = load_settings([ROOT / "configs" / "demo.yaml"], [], {}).config
    made = make_plan(Planned.of(config, find_accelerator("t4-1")))
    assert made.verdict == "fits" and not made.doubts
    assert {phase.name for phase in made.phases if phase.compiled} == {
        "init", "sync", "prefill", "copy", "decode", "update"
    }  # fmt: skip


def test_the_compilers_environment_keeps_it_from_looking_for_a_tpu():
    environment = compiler_environment(find_accelerator("v4-16"))
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["TPU_ACCELERATOR_TYPE"] == "v4-16"


DESCRIBE = """
import json, sys
from podium.accelerators import find_accelerator
from podium.plan.request.topology import topology_devices
from podium.sharding import make_mesh
seen = {}
for name in sys.argv[1:]:
    devices = topology_devices(find_accelerator(name))
    mesh = make_mesh("host_local", devices).devices
    seen[name] = {
        "ids": len({device.id for device in devices}),
        "hosts": [sum(d.process_index == host for d in devices) for host in sorted({d.process_index for d in devices})],
        "coords": [1 + max(device.coords[axis] for device in devices) for axis in range(3)],
        "mesh": list(mesh.shape),
        "rows_of_one_host": all(len({device.process_index for device in row.flat}) == 1 for row in mesh),
    }
print(json.dumps(seen))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU's compiler, is not installed")
def test_the_compiler_has_the_devices_hosts_and_axes_of_the_table():
    names = [each.name for each in COMPILED_TPUS]
    environment = {**os.environ, **compiler_environment(find_accelerator("v6e-8"))}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE, *names], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    expected = {
        each.name: {
            "ids": each.devices,
            "hosts": [each.devices_per_host] * each.hosts,
            "coords": [*each.torus, 1][:3],
            "mesh": [each.hosts, each.devices_per_host, 1, 1],
            "rows_of_one_host": True,
        }
        for each in COMPILED_TPUS
    }
    assert seen == expected


@pytest.mark.parametrize("generation", sorted({each.generation for each in accelerators().values()}))
def test_every_generation_has_constants_with_sources_and_factors_with_ranges(generation):
    raw = json.loads((ROOT / "podium" / "chips" / f"{generation}.json").read_text())
    some = next(each for each in accelerators().values() if each.generation == generation)
    assert all(constant["source"] for constant in raw["constants"].values())
    assert raw["constants"]["hbm_bytes"]["value"] > some.hbm_bytes
    chip = load_chip(generation)
    of_launches = {"latency"} if some.platform == "gpu" else set()
    assert set(chip.calibration) == {"update", "prefill", "decode", "ici", "host", "host_s"} | of_launches
    assert (chip.peaks.kernel_s > 0) == bool(of_launches)
    assert 0 < chip.peaks.host_bandwidth < chip.peaks.hbm_bandwidth
    for factor in chip.calibration.values():
        assert 0 < factor.low <= factor.value <= factor.high
        assert factor.source


def test_v6e_has_the_published_constants():
    peaks = load_chip("v6e").peaks
    assert (peaks.flops_bf16, peaks.hbm_bandwidth, peaks.link_bandwidth) == (918e12, 1.638e12, 9e10)
    assert load_chip("v6e").links == 4
