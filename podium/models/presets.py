"""Architectures of models that configs often name, so that a run can be planned without the model or a network.

Each is as in the model's config.json on the Hugging Face hub; a test checks the parameter counts against the published
ones. No jax. `podium.models.files.source` finds the weights.
"""

import dataclasses
from collections.abc import Callable, Mapping

from podium.config.lora import LoraConfig
from podium.config.rollout_weights import RolloutWeights
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig, ModelError, dense_decoder, scoring_decoder, with_lora
from podium.models.blocks.rope import RopeScaling
from podium.models.files.folder import read_json
from podium.models.files.hf_config import (
    NO_SCORES,
    from_hf_config,
    reward_model_from_hf_config,
    scorer_from_hf_config,
)
from podium.models.files.source import (
    ModelSource,
    from_hub,
    on_disk,
    read_architecture,
    read_reward_model,
    read_scorer,
    resolve,
)

HUB_TIMEOUT_S = 2.0  # how long a plan waits for the hub to send a small file


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
    """Settings that all models of a family share."""

    model_type: str
    vocab: int
    kv_heads: int
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool


_QWEN25 = _Family(
    model_type="qwen2",
    vocab=151936,
    kv_heads=2,
    max_positions=32768,
    rope_theta=1e6,
    rope_scaling=None,
    norm_eps=1e-6,
    tied=True,
    qkv_bias=True,
    qk_norm=False,
)
_QWEN25_LARGE = dataclasses.replace(_QWEN25, vocab=152064, kv_heads=4, tied=False)
_QWEN3 = dataclasses.replace(_QWEN25, model_type="qwen3", kv_heads=8, max_positions=40960, qkv_bias=False, qk_norm=True)
_QWEN3_LARGE = dataclasses.replace(_QWEN3, tied=False)
_STRETCHED = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
_LLAMA32 = _Family(
    model_type="llama",
    vocab=128256,
    kv_heads=8,
    max_positions=131072,
    rope_theta=5e5,
    rope_scaling=_STRETCHED,
    norm_eps=1e-5,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
)
_LLAMA31 = dataclasses.replace(_LLAMA32, rope_scaling=dataclasses.replace(_STRETCHED, factor=8.0), tied=False)


def _preset(family: _Family, width: int, layers: int, heads: int, head_dim: int, mlp: int) -> DecoderConfig:
    return dense_decoder(
        model_type=family.model_type,
        vocab=family.vocab,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=family.kv_heads,
        head_dim=head_dim,
        mlp_width=mlp,
        max_positions=family.max_positions,
        rope_theta=family.rope_theta,
        rope_scaling=family.rope_scaling,
        norm_eps=family.norm_eps,
        tied=family.tied,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _mistral(width: int, layers: int, mlp: int, vocab: int, other: Mapping[str, object]) -> DecoderConfig:
    """Make a Mistral decoder from settings of its config.json; all have 32 query heads and 8 key/value heads."""
    said = {
        "model_type": "mistral",
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": mlp,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    }
    return from_hf_config({**said, **other}, "podium/models/presets.py")


def _gemma3(width: int, layers: int, mlp: int, heads: tuple[int, int], other: Mapping[str, object]) -> DecoderConfig:
    """Make a Gemma 3 text decoder from settings of its config.json; `heads` are (query heads, key/value heads)."""
    said = {
        "model_type": "gemma3_text",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": mlp,
    }
    return from_hf_config({**said, **other}, "podium/models/presets.py")


def _qwen3_moe(
    width: int, layers: int, experts: int, heads: tuple[int, int], other: Mapping[str, object]
) -> DecoderConfig:
    """Make a Qwen3-MoE from settings of its config.json; `experts` is the width of one, `heads` are (query, key)
    heads.
    """
    said = {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "moe_intermediate_size": experts,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    }
    return from_hf_config({**said, **other}, "podium/models/presets.py")


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    """Make a gpt-oss from settings of its config.json."""
    said = {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "intermediate_size": 2880,
        "attention_bias": True,
    }
    return from_hf_config(said, "podium/models/presets.py")


def _qwen35(other: Mapping[str, object]) -> DecoderConfig:
    """Make a Qwen3.5 from settings of its config.json that differ from those of 9B."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    said = {"model_type": "qwen3_5_text", "rope_parameters": rope, "max_position_embeddings": 262_144}
    return from_hf_config({**said, **other}, "podium/models/presets.py")


def _qwen35_moe(other: Mapping[str, object]) -> DecoderConfig:
    """Make a Qwen3.5 mixture of experts from settings of its config.json that differ from those of 35B-A3B."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    said = {"model_type": "qwen3_5_moe_text", "rope_parameters": rope, "max_position_embeddings": 262_144}
    return from_hf_config({**said, **other}, "podium/models/presets.py")


_GEMMA3_SMALL: Mapping[str, object] = {"vocab_size": 262_144, "max_position_embeddings": 32768, "sliding_window": 512}
_GEMMA3_LARGE: Mapping[str, object] = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
PRESETS: Mapping[str, DecoderConfig] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _preset(_QWEN25, 896, 24, 14, 64, 4864),
    "Qwen/Qwen2.5-1.5B-Instruct": _preset(_QWEN25, 1536, 28, 12, 128, 8960),
    "Qwen/Qwen2.5-3B-Instruct": _preset(_QWEN25, 2048, 36, 16, 128, 11008),
    "Qwen/Qwen2.5-7B-Instruct": _preset(_QWEN25_LARGE, 3584, 28, 28, 128, 18944),
    "Qwen/Qwen3-0.6B": _preset(_QWEN3, 1024, 28, 16, 128, 3072),
    "Qwen/Qwen3-1.7B": _preset(_QWEN3, 2048, 28, 16, 128, 6144),
    "Qwen/Qwen3-4B": _preset(_QWEN3, 2560, 36, 32, 128, 9728),
    "Qwen/Qwen3-8B": _preset(_QWEN3_LARGE, 4096, 36, 32, 128, 12288),
    "Qwen/Qwen3-32B": _preset(_QWEN3_LARGE, 5120, 64, 64, 128, 25600),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 768, (32, 4), {}),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _qwen3_moe(
        2048, 48, 768, (32, 4), {"max_position_embeddings": 262_144, "rope_theta": 1e7}
    ),
    "Qwen/Qwen3.5-9B": _qwen35({}),
    "Qwen/Qwen3.5-35B-A3B": _qwen35_moe({}),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "meta-llama/Llama-3.2-1B-Instruct": _preset(_LLAMA32, 2048, 16, 32, 64, 8192),
    "meta-llama/Llama-3.2-3B-Instruct": _preset(_LLAMA32, 3072, 28, 24, 128, 8192),
    "meta-llama/Llama-3.1-8B-Instruct": _preset(_LLAMA31, 4096, 32, 32, 128, 14336),
    "mistralai/Mistral-7B-Instruct-v0.1": _mistral(4096, 32, 14336, 32000, {"rope_theta": 1e4, "sliding_window": 4096}),
    "mistralai/Mistral-7B-Instruct-v0.3": _mistral(4096, 32, 14336, 32768, {}),
    "mistralai/Mistral-Nemo-Instruct-2407": _mistral(
        5120, 40, 14336, 131_072, {"head_dim": 128, "max_position_embeddings": 131_072}
    ),
    "mistralai/Ministral-8B-Instruct-2410": _mistral(
        4096, 36, 12288, 131_072, {"head_dim": 128, "rope_theta": 1e8, "sliding_window": 32768}
    ),
    "google/gemma-3-270m-it": _gemma3(640, 18, 2048, (4, 1), _GEMMA3_SMALL),
    "google/gemma-3-1b-it": _gemma3(1152, 26, 6912, (4, 1), _GEMMA3_SMALL),
    "google/gemma-3-4b-it": _gemma3(2560, 34, 10240, (8, 4), _GEMMA3_LARGE),
    "google/gemma-3-12b-it": _gemma3(3840, 48, 15360, (16, 8), _GEMMA3_LARGE),
    "google/gemma-3-27b-it": _gemma3(
        5376, 62, 21504, (32, 16), {**_GEMMA3_LARGE, "head_dim": 128, "query_pre_attn_scalar": 168}
    ),
}
"""By hub id."""


def find_architecture(model: str) -> DecoderConfig:
    """Find the architecture that a config's `model:` names, without the weights.

    Looks on this machine's disk, then in `PRESETS`, then on the hub (for one small file). Raises ModelError if the
    model is not found, or has an unsupported feature.
    """
    return _found(model, read_architecture, from_hf_config)


def find_scorer(model: str) -> DecoderConfig:
    """Like `find_architecture` for a model that scores tokens: with its own head of scores, or with a new one."""
    return scoring_decoder(_found(model, read_scorer, scorer_from_hf_config))


def find_reward_model(model: str) -> DecoderConfig:
    """Like `find_architecture` for a reward model. Also raises ModelError if the model has no head of scores."""
    found = _found(model, read_reward_model, reward_model_from_hf_config)
    if found.scores == "none":  # one of `PRESETS`
        raise ModelError(f"{model} {NO_SCORES}")
    return found


def _found(
    model: str,
    read: Callable[[ModelSource], DecoderConfig],
    parse: Callable[[Mapping[str, object], str], DecoderConfig],
) -> DecoderConfig:
    if (folder := on_disk(model)) is not None:
        return read(resolve(folder))
    if model in PRESETS:
        return PRESETS[model]
    try:
        folder = from_hub(model, ["config.json"], timeout_s=HUB_TIMEOUT_S)
    except ModelError as error:
        raise ModelError(
            f"{error}; a plan needs only its config.json, and these models need no download: {', '.join(PRESETS)}"
        ) from error
    path = folder / "config.json"
    return parse(read_json(path), str(path))


def find_decoder(config: Config) -> DecoderConfig:
    """The decoder of a run including its adapters; otherwise like `find_architecture`."""
    return decoder_of_run(find_architecture(config.model), config.lora, config.rollout.weights)


def decoder_of_run(decoder: DecoderConfig, lora: LoraConfig | None, rollout_weights: RolloutWeights) -> DecoderConfig:
    """A model's decoder with a run's adapters, and the format of its rollout's weights.

    Raises ModelError if it has no matrix of a target of the adapters.
    """
    return dataclasses.replace(with_lora(decoder, lora), rollout_weights=rollout_weights)
