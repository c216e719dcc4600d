"""What Mistral and Gemma 3 have that Llama has not: windows by layer, rings in the engine, a vision tower beside."""

import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import CASES, error_of_scale, hf_config, hf_tensors, rules_on, write_model

from podium.certify.naive import in_float64, logits
from podium.certify.tiny import random_weights, tiny_clone
from podium.config.schema import RolloutConfig
from podium.config.sizes import table_pages
from podium.models.architecture import ModelError
from podium.models.blocks.rope import LinearScaling
from podium.models.files.hf import load_params
from podium.models.files.hf_config import from_hf_config, to_hf_config
from podium.models.files.source import ModelSource, read_architecture
from podium.models.params import ROLLOUT_AXES
from podium.models.presets import preset_decoder
from podium.rollout.cache_layout import kept_places
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.sharding import ShardingRules, make_mesh

pytestmark = pytest.mark.usefixtures("whole_slots")

GEMMA = "google/gemma-3-4b-it"


def windows_of(model: str) -> list[int | None]:
    return [attention.window for attention, _ in preset_decoder(model).dense_layers()]


def test_five_layers_of_gemma_in_six_have_a_window_and_their_own_rotation():
    near, far = (preset_decoder(GEMMA).dense_layers()[layer][0] for layer in (4, 5))
    assert windows_of(GEMMA) == (5 * [1024] + [None]) * 5 + 4 * [1024]
    assert (near.rope.theta, near.rope.scaling) == (1e4, None)
    assert (far.rope.theta, far.rope.scaling) == (1e6, LinearScaling(factor=8.0))


def test_all_layers_of_the_first_mistral_have_a_window_and_those_of_later_ones_none():
    assert set(windows_of("mistralai/Mistral-7B-Instruct-v0.1")) == {4096}
    assert set(windows_of("mistralai/Mistral-7B-Instruct-v0.3")) == {None}
    assert set(windows_of("mistralai/Ministral-8B-Instruct-2410")) == {32768}


def test_what_a_config_of_a_mistral_does_not_say_is_transformers_default():
    said = {key: value for key, value in hf_config("mistral").items() if key != "sliding_window"}
    assert {attention.window for attention, _ in from_hf_config(said, "config.json").dense_layers()} == {4096}


def test_rings_make_the_cache_of_a_long_sequence_of_gemma_small():
    """Of 8,192 tokens, against keys and values of all layers for every token."""
    rollout = RolloutConfig(max_prompt_tokens=1024, max_new_tokens=7168, slots=32, prefill_rows=1)
    pages = table_pages(rollout)
    kept = kept_places(preset_decoder(GEMMA), rollout)
    assert sum(each.layers * (each.ring or pages) for each in kept) <= 0.3 * 34 * pages


PIECE = RolloutConfig(max_prompt_tokens=24, max_new_tokens=8, slots=4, refill_steps=3, prefill_rows=2, page_tokens=2)


@pytest.mark.parametrize(
    "model",
    [
        "google/gemma-3-27b-it",
        pytest.param("mistralai/Mistral-7B-Instruct-v0.1", marks=pytest.mark.long),  # its windows are as Gemma's
        "openai/gpt-oss-20b",
        "Qwen/Qwen3.5-9B",
    ],
)
def test_the_sampler_s_log_probabilities_are_those_of_plain_float64(model: str):
    """Prompts longer than the rings, shared by completions, in pieces and pages that end anywhere."""
    decoder = tiny_clone(preset_decoder(model))
    weights = random_weights(decoder, seed=0)
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), ROLLOUT_AXES)
    engine = RolloutEngine(Device(PIECE, decoder, rules, dtype=jnp.dtype("float32")), None)
    assert any(each.ring or each.states for each in kept_places(decoder, PIECE))
    engine.load({name: jnp.asarray(value) for name, value in weights.items()})
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(0, decoder.vocab, length).tolist()) for length in (1, 4, 11, 23)]
    sampling = SamplingParams(max_new_tokens=8)
    answers, _ = engine.generate(
        [Request(prompt=prompt, sampling=sampling, seed=1, completions=2) for prompt in prompts]
    )
    with in_float64():
        wide = {name: jnp.asarray(value, jnp.float64) for name, value in weights.items()}
        compute = jax.jit(lambda tokens: jax.nn.log_softmax(logits(wide, tokens, decoder), axis=-1))
        for prompt, group in zip(prompts, answers, strict=True):
            for completion in group:
                drawn = completion.tokens
                tokens = np.zeros(PIECE.max_prompt_tokens + PIECE.max_new_tokens, np.int32)
                tokens[: len(prompt) + len(drawn)] = [*prompt, *drawn]
                found = np.asarray(compute(tokens))[np.arange(len(drawn)) + len(prompt) - 1, drawn]
                assert error_of_scale(completion.full_logprobs, found) <= 1e-5


def wrapped(folder: Path, case: str, wrapper: str, prefix: str) -> ModelSource:
    """A case as the text model of a folder with a vision tower."""
    write_model(folder, case)
    (folder / "config.json").write_text(json.dumps({"model_type": wrapper, "text_config": hf_config(case)}))
    own = "model." if prefix.startswith("model.") else ""
    tensors = {
        prefix + name.removeprefix(own) if name.startswith(own) else name: value
        for name, value in hf_tensors(case).items()
    }
    vision = {"vision_tower.a.weight": np.ones(3, np.float32), "multi_modal_projector.b": np.ones(2, np.float32)}
    save_file(tensors | vision, folder / "model.safetensors")
    return ModelSource("folder", folder, case)


@pytest.mark.parametrize(
    ("case", "wrapper", "prefix"),
    [
        ("gemma3_tied", "gemma3", "language_model."),
        ("gemma3_tied", "gemma3", "model.language_model."),
        ("mistral", "mistral3", "language_model."),
        ("ministral3", "mistral3", "language_model."),
        ("qwen3_5", "qwen3_5", "model.language_model."),
        ("qwen3_5_moe", "qwen3_5_moe", "model.language_model."),
    ],
)
def test_the_text_model_is_taken_out_of_one_with_a_vision_tower(case, wrapper, prefix, tmp_path, caplog):
    source = wrapped(tmp_path / "whole", case, wrapper, prefix)
    plain = write_model(tmp_path / "text", case)
    config, rules = read_architecture(source), rules_on("auto", 1)
    assert config == read_architecture(plain)
    with caplog.at_level(logging.WARNING):
        found = load_params(source, config, rules)
    assert "2 tensors of its vision tower are left out" in caplog.text
    for name, value in load_params(plain, config, rules).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_quantised_model_with_a_vision_tower_is_refused():
    raw = {"model_type": "mistral3", "text_config": hf_config("ministral3"), "quantization_config": {"quant": "fp8"}}
    with pytest.raises(ModelError, match=r"quantization_config .* is not supported"):
        from_hf_config(raw, "config.json")


@pytest.mark.parametrize(
    "case", [case for case in CASES if any(each in case for each in ("gemma", "stral", "oss", "qwen3_5"))]
)
def test_an_export_s_config_is_read_as_the_same_decoder(case: str):
    config = from_hf_config(hf_config(case), case)
    assert from_hf_config(to_hf_config(config), case) == config
