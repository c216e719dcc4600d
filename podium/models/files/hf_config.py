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
from podium.models.blocks.activation import Activation, Clamped
from podium.models.blocks.attention import Attention, Sharpening
from podium.models.blocks.choices import MAX_EXPERTS
from podium.models.blocks.delta import DeltaNet
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block, Kind, Stack
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import LinearScaling, Rope, RopeScaling, Scaling, YarnScaling
from podium.models.files.config_keys import (
    ACTIVATIONS,
    FAMILIES,
    FULL,
    LINEAR,
    ORIGINAL,
    SHARPENING,
    SLIDING,
    Family,
    Keys,
    check_family,
    rotation,
    settings,
    text_config,
)


def from_hf_config(raw: Keys, where: str) -> DecoderConfig:
    """Read the decoder from a config.json of transformers 4 or 5; `where` is its path, for errors.

    For a model with a vision tower, reads the text model. A missing key has the value that transformers gives it.
    Raises ModelError if the model type or a key is unknown, or a feature is not supported
    (`podium.models.files.config_keys`).
    """
    raw = text_config(raw, where)
    model_type = raw.get("model_type")
    family = check_family(model_type, where)
    if family.like_gpt_oss:
        raw = _without_mxfp4(raw)
    raw = settings(raw, family, where)
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
        rope = rotation(raw, family, layer_type, where)
        return Attention(
            heads=heads,
            kv_heads=number("num_key_value_heads", default=heads),
            head_dim=head_dim,
            rope=_rope(rope, head_dim, where),
            bias=family.qkv_bias,
            out_bias=family.like_gpt_oss,
            sinks=family.like_gpt_oss,
            norm=family.qk_norm,
            gated=family.like_qwen35,
            window=number("sliding_window") if layer_type == SLIDING else None,
            scale_dims=None if scale_dims == head_dim else scale_dims,
            sharpening=_sharpening(rope, where),
        )

    types = _layer_types(raw, family, where)
    routed = _routed_layers(raw, len(types), where) if family.experts else set[int]()
    config = DecoderConfig(
        model_type=str(model_type),
        vocab=number("vocab_size"),
        width=width,
        stacks=stacks_of([block(layer, layer_type) for layer, layer_type in enumerate(types)]),
        max_positions=number("max_position_embeddings"),
        norm_eps=real_number(raw, "rms_norm_eps", where),
        tied=_tied(raw, where),
        norm_offset=1.0 if family.like_gemma or family.like_qwen35 else 0.0,
        wide_norms=family.like_gemma or family.like_gpt_oss or family.like_qwen35,
        embed_scale=math.sqrt(width) if family.like_gemma else 1.0,
    )
    return check_config(config, where)


def _delta_net(raw: Keys, where: str) -> DeltaNet:
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


def _routed_layers(raw: Keys, layers: int, where: str) -> set[int]:
    """The layers with a mixture of experts; all layers, in a family whose config cannot make layers dense."""
    step, dense = whole_number(raw, "decoder_sparse_step", where, 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise ModelError(f"{where}: mlp_only_layers must be a list of layers, found {shown(dense)}")
    return {layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense}


def _without_mxfp4(raw: Keys) -> Keys:
    """The settings without the format of gpt-oss's experts, which is known from the files themselves."""
    stored = raw.get("quantization_config")
    packed = isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4"
    return {key: value for key, value in raw.items() if not (packed and key == "quantization_config")}


def _experts(raw: Keys, family: Family, where: str) -> Experts:
    """The mixture of experts of a layer."""
    activation: Activation = family.activation
    if family.like_gpt_oss:
        alpha, limit = (real_number(raw, f"swiglu_{name}", where) for name in ("alpha", "limit"))
        activation = Clamped(alpha=alpha, limit=limit)
    normalized = raw.get("norm_topk_prob", True)  # for families that do not read it
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


def _tied(raw: Keys, where: str) -> bool:
    tied = raw["tie_word_embeddings"]
    if not isinstance(tied, bool):
        raise ModelError(f"{where}: tie_word_embeddings must be true or false, found {shown(tied)}")
    return tied


def _layer_types(raw: Keys, family: Family, where: str) -> list[str]:
    """The type of each layer: SLIDING or FULL; in Qwen3.5 LINEAR or FULL."""
    layers = whole_number(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    usual = _usual_types(raw, family, layers, where)
    types = raw["layer_types"] or usual
    if not family.layer_kinds and types != usual:
        raise ModelError(
            f"{where}: layer_types {shown(types)}: only {usual[0]} is supported, in every layer; transformers"
            " ignores layer_types in a model of this type"
        )
    types = _checked_types(types, layers, family.layer_kinds or (usual[0],), where)
    if SLIDING in types and raw["sliding_window"] is None:
        raise ModelError(f"{where}: layer_types {shown(types)}: only {FULL} is supported without a sliding_window")
    return types


def _usual_types(raw: Keys, family: Family, layers: int, where: str) -> list[str]:
    """The type of each layer if the config has no `layer_types`."""
    if family.like_qwen35:
        every = whole_number(raw, "full_attention_interval", where)
        return [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
    if family.like_gpt_oss or family.like_gemma:  # every n-th layer attends to all tokens
        every = whole_number(raw, "sliding_window_pattern", where, 2)
        return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    return [FULL if raw.get("sliding_window") is None else SLIDING] * layers


def _checked_types(types: object, layers: int, known: tuple[str, ...], where: str) -> list[str]:
    """Return `layer_types`. Raises ModelError unless it is a list with a known type for each layer."""
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


def _rope(rope: Keys, head_dim: int, where: str) -> Rope:
    """The rotary embedding of rotary settings (`config_keys.rotation`)."""
    share = real_number(rope, "partial_rotary_factor", where, 1.0)
    return Rope(theta=real_number(rope, "rope_theta", where), dims=int(head_dim * share), scaling=_scaling(rope, where))


def _sharpening(rope: Keys, where: str) -> Sharpening | None:
    """The position-dependent scale of the queries; None without one."""
    if not rope.get(SHARPENING):
        return None
    return Sharpening(beta=real_number(rope, SHARPENING, where), period=whole_number(rope, ORIGINAL, where))


def _scaling(rope: Keys, where: str) -> Scaling | None:
    """The scaling of the rotary frequencies; None without one."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
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


def _yarn(rope: Keys, where: str) -> YarnScaling:
    """Read YaRN's settings; the default factor of cosines and sines is the one that transformers computes."""
    factor = real_number(rope, "factor", where)
    given = {key: value for key, value in rope.items() if value not in (None, 0)}  # both mean the default
    factors = {key: value for key, value in rope.items() if value is not None}  # for which 0 is a valid number

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
        length=real_number(factors, "attention_factor", where, length),
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
        "hidden_activation" if family.like_gemma else "hidden_act": ACTIVATIONS[family.activation][0],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }
    raw |= _labels(config, family)
    return raw | _feed_forwards(config) | _windows(config, family) | _ropes(config, family) | _delta_nets(config)


SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
"""Suffixes of transformers' class names for models with a head of scores, without and with a bias."""


NO_SCORES = (
    f"has no head of scores, so it says nothing of an answer; take a reward model: a ...{SEQUENCE} with one label"
)


def scores_of(raw: Keys, where: str) -> Literal["none", "plain", "biased"]:
    """The head of scores that a config.json describes, which gives one score per token. Raises ModelError if it gives
    several.
    """
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


def scorer_from_hf_config(raw: Keys, where: str) -> DecoderConfig:
    """The decoder of a config.json with the head of scores that it describes, or a new one."""
    return scoring_decoder(dataclasses.replace(from_hf_config(raw, where), scores=scores_of(raw, where)))


def reward_model_from_hf_config(raw: Keys, where: str) -> DecoderConfig:
    """The decoder of a reward model's config.json. Raises ModelError if it has no head of scores, or several labels."""
    if scores_of(raw, where) == "none":
        raise ModelError(f"{where}: {_named(raw)} {NO_SCORES}")
    return scorer_from_hf_config(raw, where)


def _named(raw: Keys) -> str:
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
    """The keys of config.json for MLPs and experts."""
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
    if "sliding_window" not in family.reads:
        return {}
    found = [attention.window for attention in _attentions(config)]
    window = next((each for each in found if each is not None), None)
    said: dict[str, object] = {"sliding_window": window}
    if None in found and window is not None:  # some layers have it
        said["layer_types"] = [FULL if each is None else SLIDING for each in found]
    return said


def _ropes(config: DecoderConfig, family: Family) -> dict[str, object]:
    """The keys of config.json for the rotary embedding and the scale of attention scores."""
    attentions = _attentions(config)
    first = attentions[0]
    if family.like_gemma:
        far = next((each.rope for each in attentions if each.window is None), first.rope)
        near = next((each.rope for each in attentions if each.window is not None), first.rope)
        return {
            "rope_theta": far.theta,
            "rope_local_base_freq": near.theta,
            "rope_scaling": _scaling_config(far.scaling),
            "query_pre_attn_scalar": first.scale_dims or first.head_dim,
        }
    scaling = _scaling_config(first.rope.scaling)
    scaled = family.reads["rope_parameters"] is not None  # transformers scales by default
    if family.like_gpt_oss or not (family.like_qwen35 or scaled or isinstance(first.rope.scaling, YarnScaling)):
        return {
            "rope_theta": first.rope.theta,
            "rope_scaling": scaling or ({"rope_type": "default"} if scaled else None),
        }
    # transformers 4 does not know these keys
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": first.rope.theta}
    if (sharpening := first.sharpening) is not None:
        parameters |= {SHARPENING: sharpening.beta, ORIGINAL: sharpening.period}
    if family.like_qwen35:
        parameters["partial_rotary_factor"] = first.rope.dims / first.head_dim
    return {"rope_parameters": parameters}


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
