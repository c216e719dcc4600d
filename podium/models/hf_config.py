"""Converts between the config.json of a Hugging Face model and a DecoderConfig, for each supported family. No jax."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from podium.models.architecture import (
    MAX_LAYERS,
    DecoderConfig,
    ModelError,
    check_config,
    real_number,
    scoring_decoder,
    shown,
    whole_number,
)
from podium.models.blocks.activation import Activation, Clamped, Named
from podium.models.blocks.attention import Attention, Sharpening
from podium.models.blocks.choices import MAX_EXPERTS
from podium.models.blocks.delta import DeltaNet
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block, Kind, Stack
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import LinearScaling, Rope, RopeScaling, Scaling, YarnScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Properties that follow from a model type and are not in config.json."""

    transformers_class: str
    """Transformers class that loads an export."""
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: bool = False
    """Whether layers may have a sliding window; `layer_types` says which do, or without it `sliding_pattern`."""
    sliding_pattern: int | None = None
    """Every n-th layer attends to all tokens, and the others to a window; None: all layers have the window, if any."""
    activation: Named = "silu"
    activation_key: str = "hidden_act"
    """The key of the activation in config.json."""
    experts: bool = False
    """Whether layers have a mixture of experts, except those that `mlp_only_layers` and `decoder_sparse_step` leave
    dense."""
    like_gemma: bool = False
    """Whether the family has Gemma's features: norms also after mixer and feed-forward; norm scales stored minus 1;
    embeddings times sqrt(width); a second rotary base for layers with a window; scores divided by the square root of
    `query_pre_attn_scalar`."""
    like_gpt_oss: bool = False
    """Whether the family has gpt-oss's features: sinks; biases of all products; experts of width `intermediate_size`
    with a clamped activation; experts in MXFP4."""
    like_qwen35: bool = False
    """Whether the family has Qwen3.5's features: delta nets in the layers of type `linear_attention`, three in four;
    gated attention in the others; rotation of a quarter of a head; norm scales stored minus 1."""
    neutral: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    """Replaces entries of NEUTRAL."""
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Values of keys that are missing or null in config.json."""


QWEN35: Mapping[str, object] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""What a config.json of Qwen3.5 need not say."""
QWEN35_MOE: Mapping[str, object] = {
    **{key: value for key, value in QWEN35.items() if key != "intermediate_size"},
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""The same of its mixture of experts: the numbers of 35B-A3B."""
FAMILIES: Mapping[str, Family] = {
    "llama": Family(transformers_class="LlamaForCausalLM"),
    "mistral": Family(transformers_class="MistralForCausalLM", windows=True, defaults={"sliding_window": 4096}),
    "ministral": Family(transformers_class="MinistralForCausalLM", windows=True, defaults={"sliding_window": 4096}),
    "ministral3": Family(
        transformers_class="Ministral3ForCausalLM",
        windows=True,
        defaults={
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2": Family(transformers_class="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(transformers_class="Qwen3ForCausalLM", qk_norm=True, defaults={"head_dim": 128}),
    "qwen3_moe": Family(
        transformers_class="Qwen3MoeForCausalLM",
        qk_norm=True,
        experts=True,
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "qwen3_5_text": Family(
        transformers_class="Qwen3_5ForCausalLM",
        qk_norm=True,
        like_qwen35=True,
        neutral={"attn_output_gate": (True,)},
        defaults=QWEN35,
    ),
    "qwen3_5_moe_text": Family(
        transformers_class="Qwen3_5MoeForCausalLM",
        qk_norm=True,
        experts=True,
        like_qwen35=True,
        neutral={"attn_output_gate": (True,), "norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
        defaults=QWEN35_MOE,
    ),
    "gpt_oss": Family(
        transformers_class="GptOssForCausalLM",
        qkv_bias=True,
        windows=True,
        sliding_pattern=2,
        experts=True,
        like_gpt_oss=True,
        neutral={"attention_bias": (True,)},
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "gemma3_text": Family(
        transformers_class="Gemma3ForCausalLM",
        qk_norm=True,
        windows=True,
        sliding_pattern=6,
        activation="gelu_tanh",
        activation_key="hidden_activation",
        like_gemma=True,
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
}
WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Model types with a vision tower, and the type of their text model if its settings, in `text_config`, have none."""
ACTIVATIONS: Mapping[Named, tuple[str, ...]] = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
"""Names of each activation in config.json; the first is written."""
SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"

# Values that config.json may have for features of other decoders; a missing key means the first value.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
}
NOT_YET: Mapping[str, str] = {
    "gemma": "its norms and attention differ from Gemma 3's",
    "gemma2": "it caps scores and logits (attn_logit_softcapping, final_logit_softcapping)",
    "gemma3n": "its layers are of other kinds",
    "qwen3_next": "its delta nets store q, k, v and z of a head fused in one tensor (in_proj_qkvz), unlike Qwen3.5's",
}
"""Unsupported model types that resemble those of FAMILIES, and the reason."""


def check_family(model_type: object, where: str) -> Family:
    """The family of a model type. Raises ModelError for an unsupported type, listing the supported ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = f": {NOT_YET[model_type]}" if isinstance(model_type, str) and model_type in NOT_YET else ""
        raise ModelError(
            f"{where}: model type {shown(model_type)} is not supported{reason}; Podium trains {', '.join(FAMILIES)}"
            " (Llama 2 and 3, SmolLM2, Mistral, Ministral, Qwen2 and 2.5, Qwen3, Qwen3-MoE, Qwen3.5, gpt-oss, Gemma 3)"
        )
    return FAMILIES[model_type]


def from_hf_config(raw: Mapping[str, object], where: str) -> DecoderConfig:
    """Read the decoder from a config.json of transformers 4 or 5; `where` is its path, for errors.

    For a model with a vision tower, reads the text model. Raises ModelError if the model type is unknown, a number is
    missing, or a feature is not supported.
    """
    raw = _text_config(raw, where)
    model_type = raw.get("model_type")
    family = check_family(model_type, where)
    silent = {key for key in family.defaults if raw.get(key) is None and not (key in raw and key in NULLABLE)}
    if family.experts and "num_local_experts" in raw:  # transformers 5 writes it so
        raw = {"num_experts": raw["num_local_experts"], **raw}
        silent -= {"num_experts"}
    if family.like_gpt_oss:
        raw = _without_mxfp4(raw)
        if raw.get("rope_parameters"):  # of transformers 5, with the theta
            silent -= {"rope_scaling"}
    raw = {**raw, **{key: family.defaults[key] for key in silent}}
    neutral = {**NEUTRAL, **family.neutral, family.activation_key: ACTIVATIONS[family.activation]}
    if family.like_qwen35:
        del neutral["partial_rotary_factor"]
    for key, accepted in neutral.items():
        if raw.get(key, accepted[0]) not in accepted:
            raise ModelError(f"{where}: {key} {shown(raw[key])} is not supported; it must be {accepted[0]!r} or absent")
    number = functools.partial(whole_number, raw, where=where)
    width, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = number("head_dim", default=width // heads)
    scale_dims = number("query_pre_attn_scalar") if family.like_gemma else head_dim

    def block(layer: int, layer_type: str) -> Block:
        mixer = _delta_net(raw, where) if layer_type == LINEAR else attention(layer_type)
        after: Kind
        if layer in routed:
            after = _experts(raw, family, where)
        else:
            after = Mlp(width=number("intermediate_size"), activation=family.activation)
        return Block(mixer=mixer, feed_forward=after, norms_behind=family.like_gemma)

    def attention(layer_type: str) -> Attention:
        rope = _rope(raw, layer_type, head_dim, where, partial=family.like_qwen35)
        return Attention(
            heads=heads,
            kv_heads=number("num_key_value_heads", default=heads),
            head_dim=head_dim,
            rope=rope,
            bias=family.qkv_bias,
            out_bias=family.like_gpt_oss,
            sinks=family.like_gpt_oss,
            norm=family.qk_norm,
            gated=family.like_qwen35,
            window=number("sliding_window") if layer_type == SLIDING else None,
            scale_dims=None if scale_dims == head_dim else scale_dims,
            sharpening=_sharpening(raw, where),
        )

    types = _layer_types(raw, family, where)
    routed = _routed_layers(raw, len(types), where) if family.experts else set[int]()
    config = DecoderConfig(
        model_type=str(model_type),
        vocab=number("vocab_size"),
        width=width,
        stacks=stacks_of([block(layer, layer_type) for layer, layer_type in enumerate(types)]),
        max_positions=number("max_position_embeddings"),
        norm_eps=real_number(raw, "rms_norm_eps", where, 1e-6),
        tied=_tied(raw, where),
        norm_offset=1.0 if family.like_gemma or family.like_qwen35 else 0.0,
        wide_norms=family.like_gemma or family.like_gpt_oss or family.like_qwen35,
        embed_scale=math.sqrt(width) if family.like_gemma else 1.0,
    )
    return check_config(config, where)


def _delta_net(raw: Mapping[str, object], where: str) -> DeltaNet:
    """The delta net of a layer."""
    keys, values = (whole_number(raw, f"linear_num_{name}_heads", where) for name in ("key", "value"))
    if values % keys:
        raise ModelError(f"{where}: {values} value heads of the delta nets do not share {keys} key heads evenly")
    return DeltaNet(
        key_heads=keys,
        value_heads=values,
        key_dim=whole_number(raw, "linear_key_head_dim", where),
        value_dim=whole_number(raw, "linear_value_head_dim", where),
        taps=whole_number(raw, "linear_conv_kernel_dim", where),
    )


def _routed_layers(raw: Mapping[str, object], layers: int, where: str) -> set[int]:
    """The layers with a mixture of experts."""
    step, dense = whole_number(raw, "decoder_sparse_step", where), raw.get("mlp_only_layers")
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise ModelError(f"{where}: mlp_only_layers must be a list of layers, found {shown(dense)}")
    return {layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense}


def _without_mxfp4(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The settings without the format of gpt-oss's experts, which the files themselves show."""
    stored = raw.get("quantization_config")
    packed = isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4"
    return {key: value for key, value in raw.items() if not (packed and key == "quantization_config")}


def _experts(raw: Mapping[str, object], family: Family, where: str) -> Experts:
    """The mixture of experts of a layer."""
    activation: Activation = family.activation
    if family.like_gpt_oss:
        alpha, limit = (real_number(raw, f"swiglu_{name}", where) for name in ("alpha", "limit"))
        activation = Clamped(alpha=alpha, limit=limit)
    normalized = raw.get("norm_topk_prob")
    if not isinstance(normalized, bool):
        raise ModelError(f"{where}: norm_topk_prob must be true or false, found {shown(normalized)}")
    count = whole_number(raw, "num_experts", where, most=MAX_EXPERTS)
    return Experts(
        count=count,
        top=whole_number(raw, "num_experts_per_tok", where, most=count),
        width=whole_number(raw, "intermediate_size" if family.like_gpt_oss else "moe_intermediate_size", where),
        normalized=normalized,
        activation=activation,
        bias=family.like_gpt_oss,
        shared=whole_number(raw, "shared_expert_intermediate_size", where) if family.like_qwen35 else 0,
    )


NULLABLE = ("sliding_window",)
"""Settings whose null has a meaning of its own and is not replaced by the default."""


def _tied(raw: Mapping[str, object], where: str) -> bool:
    tied = raw.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise ModelError(f"{where}: tie_word_embeddings must be true or false, found {shown(tied)}")
    return bool(tied)


def _text_config(raw: Mapping[str, object], where: str) -> Mapping[str, object]:
    """The settings of the text model: `text_config` if the model has a vision tower, otherwise all of them."""
    text_type = WRAPPERS.get(str(raw.get("model_type")))
    if text_type is None:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"{where}: a {raw['model_type']} has its text model's numbers in text_config; there is none")
    whole = {key: raw.get(key) for key in ("quantization_config", "tie_word_embeddings")}
    return {"model_type": text_type, **whole, **text}


def _layer_types(raw: Mapping[str, object], family: Family, where: str) -> list[str]:
    """The type of each layer: SLIDING or FULL; in Qwen3.5 LINEAR or FULL."""
    layers = whole_number(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    if family.like_qwen35:
        every = whole_number(raw, "full_attention_interval", where)
        types = raw.get("layer_types") or [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
        return _checked_types(types, layers, (FULL, LINEAR), where)
    windows, pattern = family.windows and raw.get("sliding_window") is not None, None
    if family.sliding_pattern is not None:
        given = "sliding_window_pattern" if "sliding_window_pattern" in raw else "_sliding_window_pattern"
        pattern = whole_number(raw, given, where, family.sliding_pattern)
    full = [not windows or (pattern is not None and (layer + 1) % pattern == 0) for layer in range(layers)]
    types = raw.get("layer_types") or [FULL if each else SLIDING for each in full]
    if not isinstance(types, list) or (not windows and any(kind != FULL for kind in types)):
        reason = "without a sliding_window" if family.windows else "of this model type"
        raise ModelError(f"{where}: layer_types {shown(types)}: only {FULL} is supported {reason}")
    return _checked_types(types, layers, (FULL, SLIDING), where)


def _checked_types(types: object, layers: int, known: tuple[str, str], where: str) -> list[str]:
    """Return `layer_types`. Raises ModelError if it is not a list of a known type for each layer."""
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        rule = f"there must be one for each of the {layers} layers, {' or '.join(known)}"
        raise ModelError(f"{where}: layer_types {shown(types)}: {rule}")
    return types


def stacks_of(blocks: Sequence[Block]) -> tuple[Stack, ...]:
    """Group layers into stacks: the shortest pattern that all layers repeat, then what is left of a partial repeat.

    With a period of 6, 26 layers become a stack of 4 repeats, and the last 2 layers are grouped in the same way.
    """
    length = next(n for n in range(1, len(blocks) + 1) if all(a == b for a, b in zip(blocks, blocks[n:], strict=False)))
    repeats, left = divmod(len(blocks), length)
    whole = Stack(pattern=tuple(blocks[:length]), repeats=repeats)
    if not left:
        return (whole,)
    rest = stacks_of(blocks[-left:])
    return (whole, *rest)


def _rope(raw: Mapping[str, object], layer_type: str, head_dim: int, where: str, *, partial: bool = False) -> Rope:
    """Read the rotary embedding of layers of this type; with `partial`, it may rotate the first part of a head.

    transformers 5 stores it in `rope_parameters`, separately for each layer type if they differ; earlier versions in
    `rope_theta` and `rope_scaling`, with `rope_local_base_freq` for layers with a window.
    """
    parameters, scaling = _object(raw, "rope_parameters", where), _object(raw, "rope_scaling", where)
    theta = 10000.0 if raw.get("rope_theta") is None else raw["rope_theta"]
    if "rope_local_base_freq" in raw and layer_type == SLIDING:
        theta, scaling = raw["rope_local_base_freq"], {}
    if layer_type in parameters:
        parameters = _object(parameters, layer_type, where)
    rope = {"rope_theta": theta, **scaling, **parameters}
    dims = head_dim
    if partial:
        share = real_number(
            {"partial_rotary_factor": raw.get("partial_rotary_factor"), **rope}, "partial_rotary_factor", where
        )
        dims = int(head_dim * share)
        rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(
            f"{where}: rope_parameters {shown(rope)}: partial rotation, or that of layers other than {layer_type},"
            " is not supported"
        )
    return Rope(theta=real_number(rope, "rope_theta", where), dims=dims, scaling=_scaling(rope, where))


def _object(raw: Mapping[str, object], key: str, where: str) -> Mapping[str, object]:
    """Read a setting that is a JSON object; empty if it is null or absent. Raises ModelError for other values."""
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{where}: {key} must be a JSON object or null, found {shown(value)}")
    return value


def _sharpening(raw: Mapping[str, object], where: str) -> Sharpening | None:
    """Read the position-dependent scale of the queries; None if there is none."""
    rope = {**_object(raw, "rope_scaling", where), **_object(raw, "rope_parameters", where)}
    if not rope.get("llama_4_scaling_beta"):
        return None
    period = whole_number(rope, ORIGINAL, where)
    return Sharpening(beta=real_number(rope, "llama_4_scaling_beta", where), period=period)


ORIGINAL = "original_max_position_embeddings"
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "linear": ("factor",),
    "yarn": ("factor", ORIGINAL),
}
"""The supported types of frequency scaling, and the keys that each requires."""


def _scaling(rope: Mapping[str, object], where: str) -> Scaling | None:
    """Read the scaling of the rotary frequencies; None if there is none. Raises ModelError if it is not supported."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in SCALINGS:
        supported = ", ".join(("default", *SCALINGS))
        raise ModelError(f"{where}: rope_type {shown(kind)} is not supported; Podium computes {supported}")
    if missing := [key for key in SCALINGS[kind] if key not in rope]:
        raise ModelError(f"{where}: rope_type {kind} needs {', '.join(missing)}")
    if kind == "linear":
        return LinearScaling(factor=real_number(rope, "factor", where))
    if kind == "yarn":
        return _yarn(rope, where)
    scaling = RopeScaling(
        factor=real_number(rope, "factor", where),
        low_freq_factor=real_number(rope, "low_freq_factor", where),
        high_freq_factor=real_number(rope, "high_freq_factor", where),
        original_max_positions=whole_number(rope, ORIGINAL, where),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        raise ModelError(f"{where}: low_freq_factor {low:g} must be below high_freq_factor, which is {high:g}")
    return scaling


def _yarn(rope: Mapping[str, object], where: str) -> YarnScaling:
    """Read YaRN's settings; the default factor of cosines and sines is the one that transformers computes."""
    factor = real_number(rope, "factor", where)
    given = {key: value for key, value in rope.items() if value not in (None, 0)}  # both mean the default

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    length = grown(1.0)
    if "mscale" in given and "mscale_all_dim" in given:
        length = grown(real_number(given, "mscale", where)) / grown(real_number(given, "mscale_all_dim", where))
    fast, slow = real_number(given, "beta_fast", where, 32.0), real_number(given, "beta_slow", where, 1.0)
    if fast <= slow:
        raise ModelError(f"{where}: beta_fast {fast:g} must be above beta_slow, which is {slow:g}")
    return YarnScaling(
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_positions=whole_number(rope, ORIGINAL, where),
        length=real_number(given, "attention_factor", where, length),
        truncate=bool(rope.get("truncate", True)),
    )


def to_hf_config(config: DecoderConfig) -> dict[str, object]:
    """Make the config.json from which transformers 4 or 5 builds this decoder."""
    family = FAMILIES[config.model_type]
    attention = _attentions(config)[0]
    raw: dict[str, object] = {
        "architectures": [family.transformers_class],
        "model_type": config.model_type,
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        family.activation_key: ACTIVATIONS[family.activation][0],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }
    raw |= _labels(config, family)
    return raw | _feed_forwards(config) | _windows(config, family) | _ropes(config, family) | _delta_nets(config)


SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
"""Ends of the names of transformers' classes with a head of scores: without and with a bias."""


NO_SCORES = (
    f"has no head of scores, so it says nothing of an answer; take a reward model: a ...{SEQUENCE} with one label"
)


def scores_of(raw: Mapping[str, object], where: str) -> Literal["none", "plain", "biased"]:
    """Which head of scores a config.json describes: one per token. Raises ModelError if it has several."""
    named = raw.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if not architecture.endswith((SEQUENCE, TOKEN)):
        return "none"
    labels = raw.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else raw.get("num_labels", 2)  # transformers' default is 2
    if count != 1:
        raise ModelError(
            f"{where}: {architecture} has {shown(count)} labels (id2label, num_labels), and a score is one number;"
            " take a model that was trained with num_labels=1"
        )
    return "plain" if architecture.endswith(SEQUENCE) else "biased"


def scorer_from_hf_config(raw: Mapping[str, object], where: str) -> DecoderConfig:
    """The decoder of a config.json with the head of scores that it describes, or a new one."""
    return scoring_decoder(dataclasses.replace(from_hf_config(raw, where), scores=scores_of(raw, where)))


def reward_model_from_hf_config(raw: Mapping[str, object], where: str) -> DecoderConfig:
    """The decoder of a reward model's config.json. Raises ModelError if it has no head of scores, or several labels."""
    if scores_of(raw, where) == "none":
        raise ModelError(f"{where}: {_named(raw)} {NO_SCORES}")
    return scorer_from_hf_config(raw, where)


def _named(raw: Mapping[str, object]) -> str:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else f"this {shown(raw.get('model_type'))} model"


def _labels(config: DecoderConfig, family: Family) -> dict[str, object]:
    """The keys of a decoder whose head gives scores; {} for logits."""
    if config.scores == "none":
        return {}
    end = SEQUENCE if config.scores == "plain" else TOKEN
    named = family.transformers_class.replace("Gemma3For", "Gemma3TextFor").replace("ForCausalLM", end)
    return {"architectures": [named], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _attentions(config: DecoderConfig) -> list[Attention]:
    """The layers with attention. Raises ModelError where a layer's mixer cannot be described."""
    found = [block.mixer for block in config.blocks]
    for layer, mixer in enumerate(found):
        if not isinstance(mixer, Attention | DeltaNet):
            raise ModelError(f"layer {layer} of this {config.model_type} is {type(mixer).__name__}, not Attention")
    return [mixer for mixer in found if isinstance(mixer, Attention)]


def _delta_nets(config: DecoderConfig) -> dict[str, object]:
    """The keys of config.json for delta nets; empty without them."""
    mixers = [block.mixer for block in config.blocks]
    net = next((mixer for mixer in mixers if isinstance(mixer, DeltaNet)), None)
    if net is None:
        return {}
    return {
        "layer_types": [LINEAR if isinstance(mixer, DeltaNet) else FULL for mixer in mixers],
        "linear_conv_kernel_dim": net.taps,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_num_key_heads": net.key_heads,
        "linear_num_value_heads": net.value_heads,
    }


def _feed_forwards(config: DecoderConfig) -> dict[str, object]:
    """What config.json says of MLPs and experts."""
    kinds = [block.feed_forward for block in config.blocks]
    dense = {layer: kind for layer, kind in enumerate(kinds) if isinstance(kind, Mlp)}
    experts = [kind for kind in kinds if isinstance(kind, Experts)]
    if len(dense) + len(experts) < len(kinds):
        names = ", ".join(sorted({type(kind).__name__ for kind in kinds}))
        raise ModelError(f"this {config.model_type} has feed-forwards that config.json cannot describe: {names}")
    if not experts:
        return {"intermediate_size": dense[0].width}
    first = experts[0]
    if isinstance(first.activation, Clamped):  # gpt-oss
        return {
            "intermediate_size": first.width,
            "num_local_experts": first.count,
            "num_experts_per_tok": first.top,
            "swiglu_alpha": first.activation.alpha,
            "swiglu_limit": first.activation.limit,
            "attention_bias": True,
        }
    if first.shared:
        return {
            "num_experts": first.count,
            "num_experts_per_tok": first.top,
            "moe_intermediate_size": first.width,
            "shared_expert_intermediate_size": first.shared,
        }
    width = next(iter(dense.values())).width if dense else first.top * first.width  # transformers wants a number
    return {
        "intermediate_size": width,
        "num_experts": first.count,
        "num_experts_per_tok": first.top,
        "moe_intermediate_size": first.width,
        "norm_topk_prob": first.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
    }


def _windows(config: DecoderConfig, family: Family) -> dict[str, object]:
    """The keys of config.json for sliding windows; empty for families without windows."""
    if not family.windows:
        return {}
    found = [attention.window for attention in _attentions(config)]
    window = next((each for each in found if each is not None), None)
    said: dict[str, object] = {"sliding_window": window}
    if None in found and window is not None:  # some layers have it; "mistral" has no layer_types
        said["layer_types"] = [FULL if each is None else SLIDING for each in found]
    return said


def _ropes(config: DecoderConfig, family: Family) -> dict[str, object]:
    """The keys of config.json for the rotary embedding and the scale of attention scores."""
    attentions = _attentions(config)
    first = attentions[0]
    if (
        isinstance(first.rope.scaling, YarnScaling) and not family.like_gpt_oss
    ):  # transformers 4 does not know the keys of some of them
        parameters = {"rope_theta": first.rope.theta, **(_scaling_config(first.rope.scaling) or {})}
        sharpening = first.sharpening
        return {"rope_parameters": parameters | ({"llama_4_scaling_beta": sharpening.beta} if sharpening else {})}
    if family.like_qwen35:
        scaling = _scaling_config(first.rope.scaling) or {"rope_type": "default"}
        share = first.rope.dims / first.head_dim
        return {"rope_parameters": {**scaling, "rope_theta": first.rope.theta, "partial_rotary_factor": share}}
    if not family.like_gemma:
        return {"rope_theta": first.rope.theta, "rope_scaling": _scaling_config(first.rope.scaling)}
    far = next((each.rope for each in attentions if each.window is None), first.rope)
    near = next((each.rope for each in attentions if each.window is not None), first.rope)
    return {
        "rope_theta": far.theta,
        "rope_local_base_freq": near.theta,
        "rope_scaling": _scaling_config(far.scaling),
        "query_pre_attn_scalar": first.scale_dims or first.head_dim,
    }


def _scaling_config(scaling: Scaling | None) -> dict[str, object] | None:
    """The value of `rope_scaling` in config.json."""
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, YarnScaling):
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_max_positions,
            "attention_factor": scaling.length,
            "truncate": scaling.truncate,
        }
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
