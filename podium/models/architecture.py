"""The numbers that make a decoder, from config.json and back. No jax: the config's checks use it.

Where a model lies is `podium.models.source`; what GGUF calls these numbers is `podium.models.gguf`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from podium.config.lora import APART_RANK, MATRICES, TARGETS, Base, LoraConfig


class ModelError(ValueError):
    """A model that cannot be found, is not whole, or has a part that Podium does not compute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretched rotary frequencies (its paper, arXiv:2407.21783, and config.json `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters beside frozen matrices (arXiv:2106.09685): y = xW + scale (xA)B, where A and B are trained."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The layers' matrices that have one, in the order of MATRICES."""
    base: Base = "bfloat16"
    """How the frozen matrices are kept."""
    merged: bool = False
    """The rollout has them added to the model, not beside it."""

    @property
    def scale(self) -> float:
        """What (xA)B is multiplied by."""
        return self.alpha / self.rank


def make_lora(config: LoraConfig | None) -> Lora | None:
    """The adapters that a config means; None: it has none, and trains all weights."""
    if config is None:
        return None
    named = {name for target in config.targets for name in TARGETS[target]}
    apart = config.rollout == "apart" or (
        config.rollout == "auto" and (config.rank <= APART_RANK or config.base != "bfloat16")
    )
    return Lora(
        rank=config.rank,
        alpha=config.alpha,
        targets=tuple(name for name in MATRICES if name in named),
        base=config.base,
        merged=not apart,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of the family of Llama: Llama 2/3, SmolLM2, Qwen2/2.5, Qwen3 differ by these fields alone."""

    model_type: str
    """As config.json says: llama, qwen2, qwen3. An export writes it back."""
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied: bool
    """The head is the embedding, transposed."""
    qkv_bias: bool
    qk_norm: bool
    """RMS norm of each head's query and key before the rotation (Qwen3)."""
    lora: Lora | None = None
    """Adapters that are trained in place of the weights, which are frozen; no part of config.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What a model type fixes and config.json does not say."""

    transformers_class: str
    """Class that loads an export."""
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Where config.json has no head_dim; None: width / heads."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(transformers_class="LlamaForCausalLM"),
    "qwen2": Family(transformers_class="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(transformers_class="Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}

# What config.json may say of features that the decoder does not have; the first value is meant where it is silent.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}


def check_family(model_type: Any, where: str) -> Family:
    """The family of a model type. Raises ModelError where Podium has none, naming those it has."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"{where}: model type {model_type!r} is not supported; Podium trains {', '.join(FAMILIES)}"
            " (Llama 2 and 3, SmolLM2, Qwen2 and 2.5, Qwen3)"
        )
    return FAMILIES[model_type]


def whole_number(settings: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A setting that must be 1 or more; `default` where it is null or absent. Raises ModelError where it is not."""
    value = settings.get(key) if settings.get(key) is not None else default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key} must be a whole number of 1 or more, found {value!r}")
    return value


def check_config(config: DecoderConfig, where: str) -> DecoderConfig:
    """Returns the config. Raises ModelError where its numbers cannot be of one decoder."""
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: {config.heads} query heads do not share {config.kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head size {config.head_dim} is odd; rotary embeddings need an even size")
    return config


def from_hf_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """The decoder that a config.json of transformers 4 or 5 describes; `where` is its path, for errors.

    Raises ModelError where the model type is unknown, a number is missing, or a feature is not supported.
    """
    family = check_family(raw.get("model_type"), where)
    for key, accepted in NEUTRAL.items():
        if raw.get(key, accepted[0]) not in accepted:
            raise ModelError(f"{where}: {key} {raw[key]!r} is not supported; it must be {accepted[0]!r} or absent")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ModelError(f"{where}: layer_types {raw['layer_types']!r}: only full_attention is supported")

    number = functools.partial(whole_number, raw, where=where)

    width, heads = number("hidden_size"), number("num_attention_heads")
    rope_theta, rope_scaling = _rope(raw, where)
    config = DecoderConfig(
        model_type=raw["model_type"],
        vocab=number("vocab_size"),
        width=width,
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=family.head_dim or width // heads),
        mlp_width=number("intermediate_size"),
        max_positions=number("max_position_embeddings"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )
    return check_config(config, where)


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    theta = 10000.0 if raw.get("rope_theta") is None else raw["rope_theta"]
    rope = {"rope_theta": theta, **(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"{where}: rope_parameters {rope!r}: partial or per-layer rotation is not supported")
    if kind == "default":
        return float(rope["rope_theta"]), None
    if kind != "llama3":
        raise ModelError(f"{where}: rope_type {kind!r} is not supported; Podium computes default and llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if key not in rope]:
        raise ModelError(f"{where}: rope_type llama3 needs {', '.join(missing)}")
    factor, low, high, original = (rope[key] for key in keys)
    scaling = RopeScaling(
        factor=float(factor),
        low_freq_factor=float(low),
        high_freq_factor=float(high),
        original_max_positions=int(original),
    )
    return float(rope["rope_theta"]), scaling


def to_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The config.json from which transformers, 4 or 5, makes this decoder."""
    raw: dict[str, Any] = {
        "architectures": [FAMILIES[config.model_type].transformers_class],
        "model_type": config.model_type,
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied,
    }
    if (scaling := config.rope_scaling) is not None:
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return raw
