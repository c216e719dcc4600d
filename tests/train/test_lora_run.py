"""Runs that train adapters: from the model to checkpoints, exports, and on from either."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_runs import SIZES, make_config, read_records, write_tiny_model

from podium.config.lora import MATRICES
from podium.config.show import to_yaml
from podium.models.adapters import fingerprint
from podium.models.architecture import ModelError
from podium.models.params import is_adapter
from podium.models.quantised import NF4_LEVELS
from podium.observe.run_dir import Fork, parse_fork, read_config
from podium.train.checkpoints.step_files import CheckpointError
from podium.train.evaluate import evaluate_command
from podium.train.export import export_run
from podium.train.loop import train
from podium.train.setup import load_frozen, load_trained, load_weights, make_model

pytestmark = pytest.mark.usefixtures("one_device")

LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0}
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
"""Of 64 numbers, a block of `nf4`."""
SHORT: dict[str, Any] = {
    "steps": 2,
    "tasks": [{"name": "arithmetic", "rewards": {"correct": 1.0, "length": 1.0}}],  # lengths differ
    "grading": {"overlong_buffer_tokens": 2},
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 1},
}


def run(model: Path, runs: Path, name: str = "run", fork: Fork | None = None, lora: Any = LORA, **changes: Any) -> Path:
    config = make_config(model, runs, name=name, lora=lora, **{**SHORT, **changes})
    assert train(config, fork=fork, plain=True) == 0
    return runs / name


@pytest.fixture(scope="module")
def done(tiny_model, tmp_path_factory, one_device) -> Path:
    """A run of two steps, both saved."""
    return run(tiny_model, tmp_path_factory.mktemp("runs"))


def adapters(run: Path, step: int | None = None) -> dict[str, bytes]:
    found = load_weights(make_model(read_config(run)), Fork(str(run), step))
    return {name: np.asarray(value).tobytes() for name, value in found.items() if is_adapter(name)}


def test_a_checkpoint_has_adapters_and_not_the_model(done):
    stored = json.loads((done / "checkpoints/2/params/_METADATA").read_text())["tree_metadata"]
    names = {
        json.loads(key.replace("'", '"').replace("(", "[").replace(",)", "]").replace(")", "]"))[0] for key in stored
    }
    assert names == {f"layers.{name}.lora_{part}" for name in MATRICES for part in "ab"}
    model = make_model(read_config(done))
    host = json.loads((done / "checkpoints/2/host/metadata").read_text())
    assert host["base"] == fingerprint(load_frozen(model))


@pytest.mark.long
def test_moments_of_adapters_may_wait_in_the_hosts_memory(done, tiny_model, tmp_path):
    moved = run(tiny_model, tmp_path, train={"offload_optimizer": True})
    assert adapters(moved) == adapters(done)


def test_both_factors_learn_and_the_model_stays(done):
    first, last = adapters(done, 1), adapters(done, 2)
    assert all(first[name] != last[name] for name in first)
    frozen = load_frozen(make_model(read_config(done)))
    assert {str(value.dtype) for value in frozen.values()} == {"bfloat16"}


def test_a_run_that_was_stopped_goes_on_bit_for_bit(done, tiny_model, tmp_path):
    run(tiny_model, tmp_path, steps=1)
    again = run(tiny_model, tmp_path)
    assert adapters(again, 2) == adapters(done, 2)


def test_merged_rollouts_are_those_of_adapters_apart_but_for_rounding(done, tiny_model, tmp_path):
    """In float32 both samplers draw the same tokens, and differ from the trainer alike."""
    other = run(tiny_model, tmp_path, lora={**LORA, "rollout": "merged"})
    for mine, theirs in zip(read_records(done / "metrics.jsonl"), read_records(other / "metrics.jsonl"), strict=True):
        assert mine["train-reward/total/mean"] == theirs["train-reward/total/mean"]
        assert mine["policy/logprob_gap/max"] < 1e-4
        assert theirs["policy/logprob_gap/max"] < 1e-2  # the sum is rounded to the rollout's number format
        assert mine["optimizer/gradient_norm"] == pytest.approx(theirs["optimizer/gradient_norm"], rel=1e-3)


def test_another_model_under_the_adapters_is_refused(done, tiny_model, tmp_path):
    changed = make_model(read_config(done))
    frozen = load_frozen(changed)
    frozen["embed"] = frozen["embed"] + jnp.bfloat16(1)
    with pytest.raises(CheckpointError, match=r"has adapters of the base .* set model and lora.base to what"):
        load_trained(changed, Fork(str(done), 2), frozen)
    whole = make_model(make_config(tiny_model))
    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_trained(whole, Fork(str(done), 2), {})


def test_the_reference_of_the_kl_is_the_base_without_a_second_model(tiny_model, tmp_path, monkeypatch):
    """At the first step the adapters add nothing, and the KL is 0; the model is loaded once."""
    loads = []
    monkeypatch.setattr("podium.train.setup.load_params", _counting(loads))
    folder = run(tiny_model, tmp_path, steps=1, algorithm={"kl": "k3", "kl_coef": 0.1})
    (record,) = [each for each in read_records(folder / "metrics.jsonl") if "policy/kl_reference" in each]
    assert abs(record["policy/kl_reference"]) < 1e-9
    assert len(loads) == 1


def _counting(calls: list) -> Any:
    from podium.models.files.hf import load_params

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return load_params(*args, **kwargs)

    return counted


def values_of_codes(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The matrices [L, D, heads, head] that these codes stand for, one block after the other."""
    if codes.dtype == np.int8:
        return codes.astype(np.float32) * scale[:, None]
    found = np.empty((len(codes), 2 * codes.shape[1], *codes.shape[2:]), np.float32)
    for row in range(found.shape[1]):
        block, place = divmod(row, 64)
        packed = codes[:, 32 * block + place % 32]
        found[:, row] = np.array(NF4_LEVELS)[packed >> 4 if place < 32 else packed & 15] * scale[:, block]
    return found


@pytest.mark.long
@pytest.mark.parametrize(("base", "stored"), [("int8", "int8"), ("nf4", "uint8")])
def test_a_base_of_fewer_bits_trains_and_its_codes_values_are_exported(tmp_path, base, stored):
    write_tiny_model(tmp_path / "model", sizes={**SIZES, "hidden_size": 64, **ONE_HEAD})
    folder = run(tmp_path / "model", tmp_path, lora={**LORA, "base": base}, steps=1)
    model = make_model(read_config(folder))
    weights = {name: np.asarray(value) for name, value in load_weights(model, parse_fork(str(folder))).items()}
    assert str(weights["layers.q"].dtype) == stored
    assert str(weights["embed"].dtype) == "bfloat16"
    gaps = [record["policy/logprob_gap/max"] for record in read_records(folder / "metrics.jsonl")]
    assert max(gaps) < 1e-4
    assert export_run(folder, tmp_path / "out", step=None, dtype="float32", merge=True) == 0
    added = np.einsum("ldr,lrhk->ldhk", weights["layers.q.lora_a"], weights["layers.q.lora_b"])
    expected = values_of_codes(weights["layers.q"], weights["layers.q.scale"]) + 2 * added
    for layer, value in enumerate(expected):
        found = load_file(tmp_path / "out/model.safetensors")[f"model.layers.{layer}.self_attn.q_proj.weight"]
        np.testing.assert_allclose(found, value.reshape(64, 64).T, atol=1e-6)


# Exports


def test_an_exported_adapter_begins_another_run_where_this_one_ended(done, tiny_model, tmp_path, capsys):
    assert export_run(done, tmp_path / "adapter", step=None, dtype="bfloat16") == 0
    said = capsys.readouterr().out
    assert (
        "PeftModel.from_pretrained(model, " in said
        and f"its base model is local: to use the adapter elsewhere, also copy {tiny_model}" in said
    )
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tiny_model
    )
    model = make_model(make_config(tiny_model, lora={**LORA, "adapter": str(tmp_path / "adapter")}))
    found = load_trained(model, None, load_frozen(model))
    assert {name: np.asarray(value).tobytes() for name, value in found.items()} == adapters(done)
    with pytest.raises(ModelError, match=r"r is 2 and lora.rank is 4"):
        other = make_model(make_config(tiny_model, lora={"rank": 4, "adapter": str(tmp_path / "adapter")}))
        load_trained(other, None, load_frozen(other))


def test_a_merged_export_answers_as_the_run_does(done, tmp_path, capsys):
    assert export_run(done, tmp_path / "merged", step=None, dtype="float32", merge=True) == 0
    config = read_config(done)
    questions = config.model_copy(update={"eval": config.eval.model_copy(update={"questions": 4})})
    capsys.readouterr()
    evaluate_command(questions, run=Fork(str(done), 2), as_json=True)
    plain = questions.model_copy(update={"model": str(tmp_path / "merged"), "lora": None})
    evaluate_command(plain, run=None, as_json=True)
    mine, theirs = (json.loads(line) for line in capsys.readouterr().out.strip().splitlines())
    assert answers(mine) == answers(theirs)


def answers(record: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation found, without whose and when."""
    return {k: v for k, v in record.items() if k not in ("target", "step") and not k.startswith("time/")}


def test_what_cannot_be_merged_is_refused(tiny_model, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(make_config(tiny_model).model_dump(mode="json")))
    with pytest.raises(ValueError, match="was trained without lora, so it has no adapter to merge; leave out --merge"):
        export_run(folder, tmp_path / "out", step=None, dtype="float32", merge=True)
