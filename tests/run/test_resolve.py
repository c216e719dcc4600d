"""What a config means on a machine: one answer for the trainer's devices and for the planner's table."""

import dataclasses
from typing import Any

import jax
import pytest

from podium.accelerators import find_accelerator
from podium.plan.request.phase_sizes import Planned
from podium.run.machine import Machine
from podium.run.resolve import host_share, resolve
from podium.run.run_spec import RunSpec
from podium.sharding import make_mesh
from podium.train.setup import run_spec
from tests.plan.estimated import CPU, SMALL, tiny_config

SETTINGS: list[dict[str, Any]] = [
    {},
    {"mesh": "fsdp:2,sp:2,tp:2"},
    {"mesh": "host_local", "train": {"dtype": "bfloat16", "head_dtype": "float32"}},
    {"rollout": {"in_flight": 1.5, "dtype": "float32"}, "algorithm": {"minibatches": 2}},
]


def comparable(spec: RunSpec) -> dict[str, Any]:
    """The parts of a spec; the recipe's advantage is a partial function, which equals only itself."""
    parts = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.name != "machine"}
    advantage = spec.recipe.advantage
    parts["recipe"] = dataclasses.replace(spec.recipe, advantage=advantage.func)
    return parts | {"advantage": advantage.keywords, "mesh": dict(spec.mesh)}


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_planner_and_the_trainer_resolve_a_run_to_the_same_spec(settings):
    config = tiny_config(**settings)
    trained = run_spec(config, SMALL, make_mesh(config.mesh, jax.devices()[:8]))
    assert comparable(trained) == comparable(Planned.of(config, CPU, SMALL).sizes.spec)


def test_a_machine_changes_what_a_config_leaves_to_it():
    config = tiny_config()
    tpu = resolve(config, SMALL, Machine.planned(find_accelerator("v6e-8")))
    assert (tpu.update.head, tpu.update.attention, tpu.update.dtype) == ("fused", "tpu_kernel", "bfloat16")
    cpu = resolve(config, SMALL, Machine(platform="cpu", devices=8, cpu_flags=frozenset()))
    assert (cpu.update.head, cpu.update.attention, cpu.update.dtype) == ("chunked", "blocks", "float32")


def test_a_gpu_below_capability_8_computes_in_float32_without_kernels():
    config, t4 = tiny_config(), Machine(platform="gpu", devices=1, capability="7.5")
    old, new = (resolve(config, SMALL, machine) for machine in (t4, dataclasses.replace(t4, capability="8.0")))
    assert [old.update.attention, old.update.dtype, old.rollout.dtype] == ["blocks", "float32", "float32"]
    assert [new.update.attention, new.update.dtype, new.rollout.dtype] == ["gpu_kernel", "bfloat16", "bfloat16"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "fsdp:3"}, r"mesh 'fsdp:3' needs 3 devices, and this machine has 8; set mesh to auto"),
        ({"train": {"attention": "kernel"}}, r"train.attention: kernel needs a TPU, .* set it to blocks"),
        ({"train": {"head": "fused"}}, r"train.head: fused is for tpu, .* set it to chunked"),
        ({"rollout": {"layout": "hybrid", "group_chips": 3}}, r"rollout.layout is hybrid in groups of 3: .* can be"),
    ],
)
def test_what_a_machine_cannot_do_is_refused_with_a_way_out(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve(tiny_config(**settings), SMALL, Machine(platform="cpu", devices=8))


def test_a_host_has_its_share_of_the_engine():
    rollout = tiny_config(rollout={"cache_tokens": 4096}).rollout
    share = host_share(rollout, 2)
    assert (2 * share.slots, 2 * share.prefill_rows, share.cache_tokens) == (rollout.slots, rollout.prefill_rows, 2048)
    with pytest.raises(ValueError, match=r"rollout.slots is 16 and is split over 3 hosts; set it to a multiple of 3"):
        host_share(rollout, 3)
