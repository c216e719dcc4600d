"""Which number formats a run takes for itself: of the engine and of the update, by what the CPU says that it can do."""

import contextlib

import jax.numpy as jnp
import pytest
from tiny_runs import make_config, rollout_spec

from podium import accelerators
from podium.models.linear import kept, kept_dtype
from podium.sampling import sampler
from podium.train.setup import (
    load_frozen,
    load_trained,
    load_weights,
    make_model,
    run_spec,
)

OLD, NEW, AMX = "avx2 fma avx512f", "avx2 fma avx512f avx512_bf16", "avx2 fma avx512f amx_bf16 amx_tile"


@pytest.fixture
def cpu_says(tmp_path, monkeypatch):
    """Have this machine's CPU be another."""

    def say(flags: str) -> None:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
        monkeypatch.setattr(accelerators, "CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.delenv("XLA_FLAGS", raising=False)

    return say


@pytest.mark.parametrize(
    ("flags", "named", "engine", "update"),
    [
        (OLD, {}, "float32", "float32"),
        (NEW, {}, "bfloat16", "bfloat16"),
        (AMX, {}, "bfloat16", "bfloat16"),
        (OLD, {"rollout": {"dtype": "bfloat16"}}, "bfloat16", "float32"),
        (NEW, {"train": {"dtype": "float32"}}, "bfloat16", "float32"),
    ],
)
def test_engine_and_update_multiply_in_the_format_that_is_faster_on_this_cpu(
    tiny_model, tmp_path, one_device, cpu_says, flags, named, engine, update
):
    """The engine's own weights are in it; a format that the config names is taken as it is."""
    cpu_says(flags)
    config = make_config(tiny_model, tmp_path, **named)
    model = make_model(config)
    assert run_spec(config, model.decoder, model.mesh).update.dtype == update
    with contextlib.closing(
        sampler.Sampler(rollout_spec(config, model), model.decoder, model.tokenizer, model.mesh)
    ) as rollouts:
        rollouts.load(load_weights(model, None))
        params = rollouts.device.params
        assert rollouts.device.form.dtype == jnp.dtype(engine)
        assert params is not None
        assert params["layers.q"].dtype == params["embed"].dtype == kept_dtype(jnp.dtype(engine), model.rules)


def test_what_no_update_changes_is_there_once_in_bfloat16_too(tiny_model, tmp_path, one_device, cpu_says):
    """The engine has the trainer's own arrays, which on CPU are the bits of bfloat16."""
    cpu_says(NEW)
    config = make_config(tiny_model, tmp_path, lora={"rank": 2})
    model = make_model(config)
    frozen = kept(load_frozen(model), model.rules)
    assert {value.dtype for value in frozen.values()} == {jnp.dtype(jnp.uint16)}
    with contextlib.closing(
        sampler.Sampler(rollout_spec(config, model), model.decoder, model.tokenizer, model.mesh)
    ) as rollouts:
        rollouts.load(load_trained(model, None, frozen), frozen)
        assert rollouts.device.params is not None
        assert all(rollouts.device.params[name] is value for name, value in frozen.items())
