"""Plans of runs with LoRA: what they hold, what they do, and that they are offered where nothing else fits."""

import dataclasses
from typing import Any

import jax
import pytest
from tiny_decoder import DECODER

from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.config.rollout_weights import RolloutWeights
from podium.config.schema import Config
from podium.models.architecture import make_lora
from podium.models.params import count, frozen_specs, param_specs, trained_specs
from podium.plan.closed_form.estimate import decode_phase, estimate, sync_phase, update_phase
from podium.plan.closed_form.resident_memory import frozen_bytes, kept_bytes, residents, shares_frozen
from podium.plan.compiled.compile import compile_phases
from podium.plan.compiled.compile_worker import Job
from podium.plan.compiled.phases import device_bytes, phase_programs
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.search.tunable_settings import candidates, search_range
from podium.run.roles import decoder_of_run
from podium.sharding import make_mesh
from podium.train.setup import run_spec
from tests.plan.estimated import QWEN3_8B, tiny_config

CPU = Accelerator(name="cpu", generation="cpu", devices=8, hosts=1, hbm_bytes=GIB)
ONE = dataclasses.replace(CPU, devices=1)


def config_of(lora: dict[str, Any] | None, **rollout: Any) -> Config:
    lengths = {"max_prompt_tokens": 40, "dtype": "bfloat16"}
    return tiny_config({"rollout": lengths}, lora=lora, rollout=rollout)


def sizes(lora: dict[str, Any] | None, machine: Accelerator = ONE, decoder=DECODER, **rollout: Any) -> RunSizes:
    config = config_of(lora, **rollout)
    return Planned.of(config, machine, dataclasses.replace(decoder, lora=make_lora(config.lora))).sizes


def programs(lora: dict[str, Any] | None, devices: int, **rollout: Any):
    config = config_of(lora, **rollout)
    decoder = dataclasses.replace(DECODER, lora=make_lora(config.lora))
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    found = phase_programs(run_spec(config, decoder, mesh), mesh)
    return found | {"decode": found["decode:16"]}


BASE = 2 * count(param_specs(DECODER))  # bytes in bfloat16


@pytest.mark.parametrize("base", ["bfloat16", "int8"])
def test_on_one_device_trainer_and_rollout_have_one_base_between_them(base):
    found = programs({"rank": 4, "base": base}, 1)
    run = sizes({"rank": 4, "base": base})
    assert shares_frozen(run)
    frozen = frozen_bytes(run)
    assert frozen == device_bytes(found["update"].arguments[2])
    assert (frozen == BASE) == (base == "bfloat16")
    assert "frozen_weights" not in found["decode"].residents  # they are among its arguments
    assert not found["update"].residents
    weights = residents(run, "sync")["rollout_weights"] + frozen
    assert weights == device_bytes(found["decode"].arguments[0])
    assert kept_bytes(run) == 0


@pytest.mark.parametrize("base", ["bfloat16", "int8"])
def test_on_a_gpu_the_rollout_shares_the_base_only_if_told_to(base):
    apart, shared = ({"rank": 4, "base": base, "rollout": how} for how in ("apart", "shared"))
    h100 = find_accelerator("h100-1")
    two, one = (sizes(lora, h100) for lora in (apart, shared))
    assert (shares_frozen(two), shares_frozen(one)) == (False, True)
    assert kept_bytes(two) == frozen_bytes(two) == frozen_bytes(one)
    assert kept_bytes(one) == 0
    # the default saves memory where memory was the reason for int8
    assert shares_frozen(sizes({"rank": 4, "base": base}, h100)) == (base == "int8")

    def offered(lora: dict[str, Any], run: RunSizes) -> list[object]:
        return [change.value for change in candidates(Planned(config_of(lora), run)) if change.key == "lora.rollout"]

    assert (offered(apart, two), offered(shared, one), offered(apart, sizes(apart))) == (["shared"], ["apart"], [])


def test_on_several_devices_the_rollout_has_a_base_of_its_own():
    found, run = programs({"rank": 4}, 8), sizes({"rank": 4}, CPU)
    assert not shares_frozen(run)
    assert found["update"].residents["rollout_weights"] == kept_bytes(run) == BASE
    assert (
        found["decode"].residents["frozen_weights"] == frozen_bytes(run) == device_bytes(found["update"].arguments[2])
    )
    assert found["sync"].residents["rollout_weights"] == BASE
    assert (
        found["sync"].arguments[0].keys() == trained_specs(dataclasses.replace(DECODER, lora=run.decoder.lora)).keys()
    )


def weighed(lora: dict[str, Any] | None, devices: int, weights: RolloutWeights):
    """The programs and sizes of a run whose rollout has its weights in this format."""
    config = config_of(lora, weights=weights)
    decoder = decoder_of_run(DECODER, config.lora, config.rollout.weights)
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    found = phase_programs(run_spec(config, decoder, mesh), mesh)
    return found | {"decode": found["decode:16"]}, Planned.of(
        config, dataclasses.replace(CPU, devices=devices), decoder
    ).sizes


@pytest.mark.parametrize("weights", ["int8", "w8a8"])
@pytest.mark.parametrize("lora", [None, {"rank": 4, "rollout": "merged"}])
def test_an_int8_copy_of_all_weights_goes_before_the_update(lora, weights):
    found, run = weighed(lora, 8, weights)
    assert device_bytes(found["decode"].arguments[0]) == residents(run, "sync")["rollout_weights"] < 0.8 * BASE
    assert not found["update"].residents.get("rollout_weights")
    assert kept_bytes(run) == 0
    (_, plain) = weighed(lora, 8, "dtype")
    assert sync_phase(run).hbm_bytes < sync_phase(plain).hbm_bytes
    assert decode_phase(run).least_bytes < decode_phase(plain).least_bytes


def test_an_int8_copy_of_a_frozen_base_stays_beside_it():
    found, run = weighed({"rank": 4}, 1, "int8")
    assert not shares_frozen(run)
    assert device_bytes(found["decode"].arguments[0]) == residents(run, "sync")["rollout_weights"]
    assert found["update"].residents["rollout_weights"] == kept_bytes(run) < 0.8 * BASE
    assert frozen_bytes(run) == BASE
    _, shared = weighed({"rank": 4, "base": "int8"}, 1, "int8")
    assert shares_frozen(shared)


def test_merged_weights_are_a_copy_that_goes_before_the_update():
    found, run = programs({"rank": 4, "rollout": "merged"}, 1), sizes({"rank": 4, "rollout": "merged"})
    assert not found["update"].residents
    assert kept_bytes(run) == 0
    assert device_bytes(found["decode"].arguments[0]) == residents(run, "sync")["rollout_weights"] == BASE
    assert found["decode"].residents["frozen_weights"] == BASE
    assert found["sync"].arguments[0].keys() == param_specs(run.decoder).keys()


def test_the_base_is_the_reference_and_only_adapters_have_moments():
    run = sizes({"rank": 4})
    trained = 4 * count(trained_specs(run.decoder))
    trainers = {"parameters": trained, "optimizer": 2 * trained, "frozen_weights": BASE}
    assert trainers.items() <= residents(run, "sync").items()
    assert "reference_weights" in residents(sizes(None), "sync")
    assert count(frozen_specs(run.decoder)) == count(param_specs(DECODER))


def test_an_update_does_two_thirds_of_the_matrices_products():
    with_lora, without = ({p.name: p for p in estimate(sizes(lora, decoder=QWEN3_8B))} for lora in ({"rank": 8}, None))
    assert 0.6 < with_lora["update"].flops / without["update"].flops < 0.85
    assert with_lora["decode"].flops == without["decode"].flops
    assert with_lora["sync"].hbm_bytes < 0.01 * without["sync"].hbm_bytes


def test_what_is_not_recomputed_has_a_copy_of_the_layers_frozen_weights():
    """With `remat: none`: each layer's part of the stack, once more in bfloat16."""
    lora = {"rank": 4, "base": "bfloat16"}
    config = tiny_config(
        {"rollout": {"max_prompt_tokens": 40}}, lora=lora, train={"remat": "none", "dtype": "bfloat16"}
    )
    decoder = dataclasses.replace(DECODER, lora=make_lora(config.lora))
    layers = {name: spec for name, spec in param_specs(decoder).items() if name not in ("embed", "head")}
    parts = update_phase(Planned.of(config, ONE, decoder).sizes).parts
    assert parts["saved_weights"] == 2 * count(layers)


def test_the_closed_form_is_near_what_the_compiler_says_of_an_update(tmp_path):
    config, run = config_of({"rank": 4}), sizes({"rank": 4})
    job = Job(phase="update", config=config, decoder=run.decoder, accelerator=ONE, programs=tmp_path / "programs")
    update = compile_phases([job], folder=tmp_path)["update"]
    assert update.parts["frozen_weights"] == BASE
    assert update.cost(1).flops == pytest.approx(update_phase(run).flops, rel=0.25)


# What is offered


def test_ranks_are_searched_up_to_the_smallest_matrix():
    found = search_range("lora.rank", Planned(config_of({"rank": 2}), sizes({"rank": 2}, decoder=QWEN3_8B)))
    assert (found.unit, found.most) == (8, 1024)
    with pytest.raises(ValueError, match=r"the config trains all weights; add --set lora.rank=32"):
        search_range("lora.rank", Planned(config_of(None), sizes(None)))
