import json
import socket
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from fake_hub import UPLOADED, WRITER, fake_hub
from huggingface_hub import constants
from others_code import others_code
from safetensors.numpy import load_file, save_file
from tiny_runs import SHORT, make_config, read_records, write_tiny_model

from podium.config.errors import UsageError
from podium.models.files.hf import load_params
from podium.models.files.source import read_architecture, resolve
from podium.models.text.tokenizer import load_tokenizer
from podium.observe.run_dir import Fork, read_config
from podium.train.checkpoints.step_files import CheckpointError
from podium.train.export import PushError, export_run
from podium.train.loop import train
from podium.train.setup import load_weights, make_model

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def run(run_of) -> Path:
    """A run with checkpoints of its steps 1 and 2, which differ: lengths are rewarded, and those of a group differ."""
    return run_of(
        steps=2,
        tasks=[{"name": "arithmetic", "rewards": {"correct": 1.0, "length": 1.0}}],
        grading={"overlong_buffer_tokens": 2},
        eval={"at_start": False},
        checkpoint={"every_steps": 1, "keep_last": 2},
    )


def weights(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    found = load_weights(make_model(read_config(run)), Fork(str(run), step))
    return {name: np.asarray(value) for name, value in found.items()}


def exported(folder: Path) -> dict[str, np.ndarray]:
    source = resolve(str(folder))
    config = read_architecture(source)
    found = load_params(source, config, make_model(make_config(folder)).rules, jnp.float32)
    return {name: np.asarray(value) for name, value in found.items()}


@pytest.mark.parametrize("step", [None, 1, 2])
def test_a_float32_export_is_the_checkpoint_bit_for_bit(run, tmp_path, step):
    assert export_run(run, tmp_path / "out", step=step, dtype="float32") == 0
    found, expected = exported(tmp_path / "out"), weights(run, step or 2)
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def test_a_step_can_be_named_with_the_run(run, tmp_path, capsys):
    export_run(Path(f"{run}@1"), tmp_path / "out", step=None, dtype="float32")
    found, expected = exported(tmp_path / "out"), weights(run, 1)
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    assert capsys.readouterr().out.startswith(f"{run}@1 -> ")


def test_steps_differ_so_that_the_test_above_can_fail(run):
    assert any(not np.array_equal(weights(run, 1)[name], x) for name, x in weights(run, 2).items())


def test_a_bfloat16_export_is_the_checkpoint_rounded(run, tmp_path):
    export_run(run, tmp_path / "out", step=None, dtype="bfloat16")
    for name, found in exported(tmp_path / "out").items():
        assert np.array_equal(found, np.asarray(jnp.asarray(weights(run)[name], jnp.bfloat16), np.float32)), name


def test_a_run_trains_and_exports_the_head_that_its_model_has_beside_a_tied_config(tmp_path):
    """From the files over rollout, update and checkpoint to the export, with its own config.json."""
    model = tmp_path / "model"
    write_tiny_model(model)
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    first = np.random.default_rng(3).normal(0, 0.5, embed.shape).astype(np.float32)
    save_file(tensors | {"lm_head.weight": first}, model / "model.safetensors")
    assert train(make_config(model, tmp_path, steps=1, **SHORT), plain=True) == 0
    (record,) = [each for each in read_records(tmp_path / "run/metrics.jsonl") if "policy/logprob_gap/max" in each]
    assert record["policy/logprob_gap/max"] < 1e-2  # sampler and trainer have the same head
    export_run(tmp_path / "run", tmp_path / "out", step=None, dtype="float32")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    trained = load_file(tmp_path / "out/model.safetensors")
    for name, before in (("lm_head.weight", first), ("model.embed_tokens.weight", embed)):
        assert 0 < np.abs(trained[name] - before).max() < 0.1, name  # one step of training away from the files


def test_an_export_has_the_tokenizer_and_its_chat_template(run, tmp_path, tiny_model):
    export_run(run, tmp_path / "out", step=None, dtype="float32")
    ours, theirs = load_tokenizer(resolve(str(tiny_model))), load_tokenizer(resolve(str(tmp_path / "out")))
    assert theirs.encode_chat("What is 3 + 4?", None) == ours.encode_chat("What is 3 + 4?", None)
    assert theirs.eos_tokens == ours.eos_tokens


def test_an_export_says_what_it_wrote_and_how_to_load_it(run, tmp_path, capsys):
    export_run(run, tmp_path / "out", step=None, dtype="float32")
    assert capsys.readouterr().out.startswith(f"{run}@2 -> {tmp_path / 'out'}: AutoModelForCausalLM.from_pretrained(")


@pytest.mark.parity
def test_transformers_computes_the_same_logits_of_an_export(run, tmp_path):
    torch = others_code("torch")
    import transformers

    from podium.models.attention.packed_attention import causal_attention
    from podium.models.decoder import PassSettings, forward, head_weights
    from podium.models.logprobs import logits_at

    export_run(run, tmp_path / "out", step=None, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, 32, (2, 12)).astype(np.int32)
    model = make_model(read_config(run))
    params, mask, dtype = load_weights(model, Fork(str(run), None)), jnp.tri(12, dtype=bool)[None], jnp.dtype("float32")

    def attend(kv, layer, q, k, v):
        return kv, causal_attention(q, k, v, mask)

    positions = jnp.broadcast_to(jnp.arange(12)[None], (2, 12))
    hidden, _, _ = forward(
        params, tokens, positions, attend, settings=PassSettings(config=model.decoder, rules=model.rules, dtype=dtype)
    )
    ours = np.asarray(logits_at(hidden, head_weights(params, model.rules, dtype), 1.0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_step_that_was_not_saved_is_an_error_that_names_those_that_were(run, tmp_path):
    with pytest.raises(CheckpointError, match="1, 2"):
        export_run(run, tmp_path / "out", step=7, dtype="float32")


def test_a_folder_that_holds_something_is_left_alone(run, tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps("mine"))
    with pytest.raises(ValueError, match=str(tmp_path)):
        export_run(run, tmp_path, step=None, dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[None]:
    """The hub is one on loopback."""
    with fake_hub(tmp_path) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield


def test_an_export_has_a_model_card(run, tmp_path):
    export_run(run, tmp_path / "out", step=1, dtype="float32")
    _, front, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    found = yaml.safe_load(front)
    assert found["tags"] == ["podium", "reinforcement-learning", "grpo"]
    assert found["library_name"] == "transformers" and "base_model" not in found  # a folder that is on no hub
    assert "AutoModelForCausalLM.from_pretrained(THIS)" in text
    assert "trained with grpo on arithmetic for 1 steps" in text and "group_size: 4" in text
    assert "| 2 |" not in text  # the evaluation of other weights


def test_an_export_is_pushed_with_its_card(run, tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    export_run(run, tmp_path / "out", step=None, dtype="float32", push="me/tiny-sums", private=True)
    assert UPLOADED["me/tiny-sums"] == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "uploaded: http://127.0.0.1" in capsys.readouterr().out


def test_a_push_that_the_hub_refuses_says_what_to_do(run, tmp_path, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(PushError, match=r"set HF_TOKEN to a token that may write there.*hf upload me/tiny"):
        export_run(run, tmp_path / "out", step=None, dtype="float32", push="me/tiny")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_push_without_a_network_says_that_the_export_is_complete(run, tmp_path, monkeypatch):
    monkeypatch.setattr("podium.train.export.patiently", lambda action, what: action())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        with pytest.raises(PushError) as caught:
            export_run(run, tmp_path / "out", step=None, dtype="float32", push="me/tiny")
    message = str(caught.value)
    assert message.startswith("--push me/tiny: the hub could not be reached (") and "\n" not in message
    out = tmp_path / "out"
    assert message.endswith(f"the export is complete in {out}; push it later with: hf upload me/tiny {out}")
    assert (tmp_path / "out" / "README.md").is_file()


def test_a_name_that_is_no_repository_is_refused_at_once(run, tmp_path):
    with pytest.raises(UsageError, match="expected USER/NAME"):
        export_run(run, tmp_path / "out", step=None, dtype="float32", push="tiny")
    assert not (tmp_path / "out").exists()
