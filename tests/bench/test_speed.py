"""`podium bench update` and `podium bench rollout` measure every kind of run, on every kind of device."""

import dataclasses
from types import SimpleNamespace

import pytest
from tiny_decoder import tiny

from podium.accelerators import find_accelerator
from podium.config.schema import Config
from podium.doctor.benchmarks import rollout, update
from podium.models.architecture import make_lora
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.sharding import make_mesh
from podium.train.setup import run_spec

CONFIG = {
    "model": "demo",
    "tasks": [{"name": "arithmetic"}],
    "prompts_per_step": 2,
    "group_size": 2,
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 8, "slots": 4},
    "train": {"row_tokens": 64, "rows_per_device": 2},
}


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 2, "base": "int8"},
        pytest.param(None, marks=pytest.mark.long),
        pytest.param({"rank": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_an_update_is_timed_with_and_without_adapters(lora):
    config = Config.model_validate(CONFIG if lora is None else {**CONFIG, "lora": lora})
    decoder = tiny(vocab=512, max_positions=64)
    if config.lora is not None:
        decoder = dataclasses.replace(decoder, lora=make_lora(config.lora))
    mesh = make_mesh(config.mesh)
    spec = run_spec(config, decoder, mesh)
    found = update.measure(spec, mesh, rollout.run_lengths("fixed:4", spec), 1)
    assert found["completion_tokens"] == 16
    assert isinstance(found["wall_s"], float) and found["wall_s"] > 0


def floor_on(name):
    """What `podium bench rollout` calls the floor on a machine of this name; None: a GPU that has no name here."""
    config = rollout.rollout_config("demo", 8, "auto", 16, 8, shards=1)
    rules = SimpleNamespace(on_cpu=False, mesh=None)
    device = SimpleNamespace(form=SimpleNamespace(rules=rules), params={})
    unknown = Machine(platform="gpu", devices=1, capability="8.0")
    machine = unknown if name is None else Machine.planned(find_accelerator(name))
    spec = resolve(config, tiny(vocab=512, max_positions=512), machine)
    return rollout._floor(spec, device, 20.0)  # pyright: ignore[reportArgumentType]  # all that it reads


def test_the_floor_of_a_decode_step_is_the_roofline_of_the_machine_that_it_runs_on():
    slow, why = floor_on("l4-1")
    fast, _ = floor_on("h100-1")
    assert slow > fast > 0 and why.startswith("roofline")


def test_a_gpu_without_constants_has_no_floor():
    floor, why = floor_on(None)
    assert floor == 0 and why.startswith("none: podium plan has no target")
