"""Runs of families whose layers have windows: they are continued bit for bit, and learn."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from tiny_runs import RISE, assert_same_run, config_of, first_and_last, learn, make_config

from podium.certify.tiny import random_weights
from podium.models.files.hf import save_model
from podium.models.files.hf_config import from_hf_config
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")

GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_act": None,
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}
SHORT: dict[str, Any] = {
    "steps": 2,
    "tasks": [{"name": "arithmetic", "rewards": {"correct": 1.0, "length": 1.0}}],  # lengths differ
    "grading": {"overlong_buffer_tokens": 2},
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 1},
    "rollout": {"page_tokens": 2},
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "sliding_window": 8,
    "num_hidden_layers": 3,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
}
QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
QWEN35_MOE: dict[str, Any] = {
    **QWEN35,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MISTRAL: dict[str, Any] = {"model_type": "mistral", "sliding_window": 4}


@pytest.fixture(scope="module")
def family_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the folder of a tiny random model of a family, with the tokenizer of `tiny_model`."""

    def make(name: str, said: dict[str, Any], seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("families") / name
        config = json.loads((tiny_model / "config.json").read_text()) | said
        decoder = from_hf_config(config, name)
        weights = {param: jnp.asarray(value) for param, value in random_weights(decoder, seed=seed).items()}
        save_model(weights, decoder, None, folder, dtype="float32")
        for file in tiny_model.iterdir():
            if not (folder / file.name).exists():
                shutil.copy(file, folder)
        return folder

    return make


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma", GEMMA),
        ("qwen3_moe", QWEN3_MOE),
        ("qwen3_5", QWEN35),
        ("qwen3_5_moe", QWEN35_MOE),
        ("gpt_oss", GPT_OSS | {"sliding_window": 4}),
        ("mistral", MISTRAL),
    ],
)
def test_a_run_of_a_family_with_windows_is_continued_bit_for_bit(name, said, family_model, tmp_path):
    model = family_model(name, said)
    assert train(make_config(model, tmp_path / "whole", **SHORT), plain=True) == 0
    assert train(make_config(model, tmp_path / "parts", **{**SHORT, "steps": 1}), plain=True) == 0
    assert train(config_of(tmp_path / "parts" / "run", steps=2), plain=True) == 0
    assert_same_run(tmp_path / "parts" / "run", tmp_path / "whole" / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said", "seed"),
    [
        (name, said, seed)
        for name, said in (
            ("gemma", GEMMA),
            ("mistral", MISTRAL | {"sliding_window": 8}),
            ("qwen3_moe", QWEN3_MOE),
            ("gpt_oss", GPT_OSS),
            ("qwen3_5", QWEN35),
            ("qwen3_5_moe", QWEN35_MOE),
        )
        for seed in range(3)
    ],
)
def test_a_tiny_model_of_a_family_learns(name, said, seed, family_model, tmp_path):
    """With the recipes' entropy bonus of 0.01, Gemma with seed 1 settles on one answer."""
    shutil.copytree(family_model(name, said, seed), tmp_path / "model")
    first, last = first_and_last(learn("grpo", tmp_path, steps=80, entropy_bonus=0.05))
    assert last - first >= RISE
