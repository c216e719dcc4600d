"""Decoders whose head gives one score per token: critics and reward models, from and to Hugging Face's folders."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from others_code import others_code
from safetensors.numpy import load_file, save_file
from tiny_models import LOGITS_TOLERANCE, SCORED, WIDTH, error_of_scale, rules_on, tokens_of, write_model

from podium.certify.naive import in_float64, values
from podium.models.architecture import DecoderConfig, ModelError
from podium.models.attention.mask import seen_in_sequence
from podium.models.attention.packed_attention import causal_attention
from podium.models.blocks.kind import At
from podium.models.decoder import PassSettings, forward, token_scores
from podium.models.files.hf import load_params, save_model
from podium.models.files.source import ModelSource, read_architecture, resolve
from podium.models.params import param_specs
from podium.sharding import Params, ShardingRules


def scores_on(rules: ShardingRules, params: Params, config: DecoderConfig, tokens: np.ndarray) -> np.ndarray:
    """The score of every token of whole rows, [B, T]."""

    @jax.jit
    def compute(params: Params, tokens: jax.Array) -> jax.Array:
        places = jnp.arange(tokens.shape[1])

        def attend(kv: Any, at: At, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, jax.Array]:
            return kv, causal_attention(q, k, v, seen_in_sequence(places[:, None], places[None], at.window)[None])

        positions = jnp.broadcast_to(places[None], tokens.shape)
        hidden, _, _ = forward(
            params,
            tokens,
            positions,
            attend,
            settings=PassSettings(config=config, rules=rules, dtype=jnp.dtype("float32")),
        )
        return token_scores(params, hidden, config, rules)

    return np.asarray(compute(params, jnp.asarray(tokens)))


def scores_of(source: ModelSource, tokens: np.ndarray, mesh: str = "auto", devices: int = 1) -> np.ndarray:
    """The scores of a model on disk."""
    config, rules = read_architecture(source, "scores"), rules_on(mesh, devices)
    return scores_on(rules, load_params(source, config, rules), config, tokens)


@pytest.mark.parametrize("case", SCORED)
def test_scores_are_those_of_a_naive_forward_in_float64(case: str, tmp_path: Path):
    source, tokens = write_model(tmp_path, case), tokens_of(case)
    config = read_architecture(source, "scores")
    params = load_params(source, config, rules_on("auto", 1))
    stored = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(params["score"], stored["score.weight"])
    with in_float64():
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in params.items()}
        compute = jax.jit(lambda row: values(wide, row, config))
        expected = np.stack([np.asarray(compute(row)) for row in np.asarray(tokens)])
    found = scores_of(source, tokens)
    assert found.dtype == np.float32
    assert error_of_scale(found, expected) <= LOGITS_TOLERANCE
    if config.scores == "biased":
        without = dict(params, score_bias=jnp.zeros(1))
        apart = found - scores_on(rules_on("auto", 1), without, config, tokens)
        np.testing.assert_allclose(apart, stored["score.bias"][0], atol=1e-5)


def test_scores_are_the_same_on_eight_devices(tmp_path: Path):
    tokens = np.tile(tokens_of("llama_sequence"), (4, 1))
    source = write_model(tmp_path, "llama_sequence")
    found = scores_of(source, tokens, "dp:2,fsdp:2,tp:2", 8)
    np.testing.assert_allclose(found, scores_of(source, tokens), atol=1e-5)


def test_a_language_model_gets_a_new_head_with_the_same_numbers_at_any_time(tmp_path: Path):
    """Of standard deviation 1 / (D + 1); its own head, which is not tied, is left out."""
    source = write_model(tmp_path, "qwen2")
    config = read_architecture(source, "scores")
    assert config.scores == "plain"
    params = load_params(source, config, rules_on("auto", 1))
    assert set(params) == set(param_specs(config))
    assert "head" not in params
    head = np.asarray(params["score"])
    assert head.shape == (1, WIDTH)
    assert 0.5 < head.std() * (WIDTH + 1) < 2
    again = load_params(source, config, rules_on("fsdp:8", 8))
    np.testing.assert_array_equal(again["score"], head)
    half = load_params(source, config, rules_on("auto", 1), jnp.bfloat16)
    assert half["score"].dtype == jnp.bfloat16


@pytest.mark.parametrize("case", SCORED)
def test_an_export_is_read_back_bit_for_bit(case: str, tmp_path: Path):
    source = write_model(tmp_path / "model", case)
    config = read_architecture(source, "scores")
    params = load_params(source, config, rules_on("auto", 1))
    save_model(params, config, None, tmp_path / "export", dtype="float32")
    written = resolve(str(tmp_path / "export"))
    described = json.loads((tmp_path / "export" / "config.json").read_text())
    assert described["architectures"] == SCORED[case]["architectures"]
    assert read_architecture(written, "scores") == config
    found = load_params(written, config, rules_on("auto", 1))
    for name, x in params.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize("changes", [{"id2label": {"0": "A", "1": "B", "2": "C"}}, {"id2label": None}])
def test_several_labels_are_refused_with_their_number(changes: dict[str, Any], tmp_path: Path):
    number = len(changes["id2label"] or "ab")  # transformers has 2 unless told otherwise
    with pytest.raises(ModelError, match=rf"LlamaForSequenceClassification has {number} labels .*; take a model that"):
        read_architecture(write_model(tmp_path, "llama_sequence", **changes), "scores")


def test_a_head_that_the_config_names_and_the_files_lack_is_not_made_up(tmp_path: Path):
    source = write_model(tmp_path, "llama_sequence")
    path = tmp_path / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if name != "score.weight"}, path)
    with pytest.raises(ModelError, match=r"tensor score.weight is missing .*; expected shape \[1, 32\]"):
        load_params(source, read_architecture(source, "scores"), rules_on("auto", 1))


def test_a_head_of_scores_is_multiplied_with_one_row():
    from tiny_decoder import DECODER

    scored = dataclasses.replace(DECODER, scores="plain")
    assert DECODER.active - scored.active == (DECODER.vocab - 1) * DECODER.width


@pytest.mark.parity
@pytest.mark.parametrize("case", SCORED)
def test_transformers_gives_an_export_the_same_scores(case: str, tmp_path: Path):
    """A sequence's score is that of its last token; token classification gives each token one."""
    torch = others_code("torch")
    import transformers

    source, tokens = write_model(tmp_path / "model", case), tokens_of(case)
    config = read_architecture(source, "scores")
    save_model(load_params(source, config, rules_on("auto", 1)), config, None, tmp_path / "export", dtype="float32")
    kind = "ForTokenClassification" if config.scores == "biased" else "ForSequenceClassification"
    loader = getattr(transformers, f"AutoModel{kind}")
    for folder in ("model", "export"):
        model = loader.from_pretrained(tmp_path / folder, dtype=torch.float32).eval()
        model.config.pad_token_id = -1
        with torch.no_grad():
            expected = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()[..., 0]
        found = scores_of(source, tokens)
        assert error_of_scale(found if config.scores == "biased" else found[:, -1], expected) <= LOGITS_TOLERANCE
