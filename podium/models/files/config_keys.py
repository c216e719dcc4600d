"""What Podium knows of each model type: its features, and every key that its config.json may have. No jax.

Each key of config.json is in one of three lists of its family; any other key is an error:

- `reads`: it changes what the model computes, and Podium computes that. A missing key has the value that transformers'
  configuration class of the type gives it, which the list holds.
- `only`: it would change what the model computes, and Podium supports only some values, the first of which is the
default.
- `ignored`, or IGNORED for all types: it does not affect what transformers computes with a model of this type.

A test compares the lists with transformers' classes, and another changes each key and compares logits. To add a family,
write its entry of FAMILIES from transformers' configuration class, run both, and see what they name.
`podium.models.files.hf_config` builds the decoder from what a config.json says.
"""

import dataclasses
from collections.abc import Mapping

from podium.models.architecture import ModelError, shown
from podium.models.blocks.activation import Named

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"
Keys = Mapping[str, object]
"""Keys of a config.json with their values."""
Allowed = Mapping[str, tuple[object, ...]]
"""Keys with the values that they may have; the first is that of a missing key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model type: its features that follow from the type alone, and the keys of its config.json."""

    transformers_class: str
    """Transformers class that loads an export."""
    reads: Keys
    """Keys that Podium reads and computes, with their defaults."""
    only: Allowed = dataclasses.field(default_factory=dict)
    """Keys that must have one of these values, in addition to those of ONLY."""
    ignored: frozenset[str] = frozenset()
    """Keys that transformers ignores for this type, in addition to those of IGNORED."""
    qkv_bias: bool = False
    qk_norm: bool = False
    layer_kinds: tuple[str, ...] = ()
    """The types that `layer_types` may contain; (): transformers ignores that key, so it must agree with what the other
    keys imply."""
    activation: Named = "silu"
    experts: bool = False
    """Whether layers have a mixture of experts, except those that `mlp_only_layers` and `decoder_sparse_step` leave
    dense."""
    like_gemma: bool = False
    """Whether the family has Gemma's features: norms also after mixer and feed-forward; norm scales stored minus 1;
    embeddings times sqrt(width); rotary settings for each type of layer; scores divided by the square root of
    `query_pre_attn_scalar`."""
    like_gpt_oss: bool = False
    """Whether the family has gpt-oss's features: sinks; biases of all products; experts of width `intermediate_size`
    with a clamped activation; experts in MXFP4."""
    like_qwen35: bool = False
    """Whether the family has Qwen3.5's features: delta nets in the layers of type `linear_attention`, three in four;
    gated attention in the others; rotation of a quarter of a head; norm scales stored minus 1."""


IGNORED: Mapping[str, tuple[str, ...]] = {
    "names and versions, which describe the files": (
        "_commit_hash", "_name_or_path", "architectures", "finetuning_task", "is_llama_config", "model_max_length",
        "max_sequence_length", "model_name", "model_type", "name_or_path", "task_specific_params",
        "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
    ),
    "code in the repository, which is not run, as in transformers without trust_remote_code": (
        "auto_map", "custom_pipelines",
    ),
    "the number format of the files, which the files themselves say": ("dtype", "torch_dtype", "use_bfloat16"),
    "which kernel computes, not what": (
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled", "attn_implementation",
        "experts_implementation", "pretraining_tp", "torchscript",
    ),
    "what transformers returns beside logits": (
        "keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "output_router_logits",
        "return_dict", "tie_last_hidden_states", "use_return_dict",
    ),
    "labels and losses of heads; `podium.models.files.hf_config.scores_of` reads those of a head of scores": (
        "_num_labels", "id2label", "label2id", "loss_type", "num_labels", "problem_type", "router_aux_loss_coef",
    ),
    "dropout, which Podium does not train with": ("attention_dropout", "classifier_dropout", "hidden_dropout"),
    "weights before training": ("initializer_factor", "initializer_range"),
    "memory of decoding": ("cache_implementation", "use_cache"),
    "chunks of an encoder's feed-forward": ("chunk_size_feed_forward",),
    "special tokens, which `podium.models.text.tokenizer` reads": (
        "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "prefix", "sep_token_id",
        "tokenizer_class",
    ),
    "how transformers generates": (
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
        "min_p", "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
    ),
}  # fmt: skip
"""Keys that do not affect what transformers computes with any of these types, grouped by reason."""
IGNORED_BY_ALL = frozenset(key for keys in IGNORED.values() for key in keys)
ONLY: Allowed = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "use_sliding_window": (False, None),
}
"""Keys that must have one of these values in every type that does not read them."""
NULLABLE = ("num_key_value_heads", "rope_parameters", "rope_theta", "sliding_window")
"""Keys whose null has its own meaning, in a family in which a missing key means something else: as many heads as
queries have, rotary settings as if missing, a base that the rotary settings have, no window."""
EMPTY = (None, False, {}, [], "")
"""Values with which an unknown key is accepted, because they enable nothing."""
ROPE: Keys = {
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
}
"""The rotary embedding, in the keys of transformers 5 and 4."""
LLAMA: Keys = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "layer_types": None,
    **ROPE,
}
MISTRAL: Keys = {
    **LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
MINISTRAL3: Keys = {
    **MISTRAL,
    "vocab_size": 131_072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
QWEN2: Keys = {
    **LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
QWEN3_MOE: Keys = {
    **QWEN2,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
QWEN35: Keys = {
    **LLAMA,
    "vocab_size": 248_320,
    "intermediate_size": 12_288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN35_MOE: Keys = {
    **{key: value for key, value in QWEN35.items() if key != "intermediate_size"},
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
GPT_OSS: Keys = {
    **LLAMA,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
GEMMA3: Keys = {
    **LLAMA,
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
ACTIVATIONS: Mapping[Named, tuple[str, ...]] = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
"""Names of each activation in config.json; the first is written."""
SILU: Allowed = {"hidden_act": ACTIVATIONS["silu"]}
NO_BIAS: Allowed = {"attention_bias": (False,)}
NORMED: Allowed = {"use_qk_norm": (True,)}
"""For a family that normalises queries and keys regardless of this key."""
OUTPUT_GATES: Allowed = {"attn_output_gate": (True,), "output_gate_type": ("swish", "silu", None)}
"""Output gates of attention and of delta nets; for the latter, two names of the same activation are allowed."""
BIASES = frozenset({"attention_bias", "mlp_bias"})
UNUSED_WINDOW = frozenset({"sliding_window", "max_window_layers"})
"""Keys that only apply if `use_sliding_window` is true."""
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        transformers_class="LlamaForCausalLM",
        reads=LLAMA,
        only={**SILU, **NO_BIAS, "mlp_bias": (False,)},
    ),
    "mistral": Family(transformers_class="MistralForCausalLM", reads=MISTRAL, only=SILU, ignored=BIASES),
    "ministral": Family(
        transformers_class="MinistralForCausalLM",
        reads=MISTRAL,
        only=SILU,
        ignored=BIASES,
        layer_kinds=(FULL, SLIDING),
    ),
    "ministral3": Family(transformers_class="Ministral3ForCausalLM", reads=MINISTRAL3, only=SILU, ignored=BIASES),
    "qwen2": Family(
        transformers_class="Qwen2ForCausalLM",
        reads=QWEN2,
        only=SILU,
        ignored=BIASES | UNUSED_WINDOW | {"dual_chunk_attention_config"},  # of vLLM's attention
        qkv_bias=True,
        layer_kinds=(FULL,),
    ),
    "qwen3": Family(
        transformers_class="Qwen3ForCausalLM",
        reads={**QWEN2, "head_dim": 128},
        only={**SILU, **NO_BIAS, **NORMED},
        ignored=frozenset({"mlp_bias"}) | UNUSED_WINDOW,
        qk_norm=True,
        layer_kinds=(FULL,),
    ),
    "qwen3_moe": Family(
        transformers_class="Qwen3MoeForCausalLM",
        reads=QWEN3_MOE,
        only={**SILU, **NO_BIAS, **NORMED},
        ignored=frozenset({"mlp_bias"}) | UNUSED_WINDOW,
        qk_norm=True,
        experts=True,
    ),
    "qwen3_5_text": Family(
        transformers_class="Qwen3_5ForCausalLM",
        reads=QWEN35,
        only={**SILU, **NO_BIAS, **OUTPUT_GATES, "mlp_only_layers": ([], None)},
        ignored=frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
        qk_norm=True,
        layer_kinds=(FULL, LINEAR),
        like_qwen35=True,
    ),
    "qwen3_5_moe_text": Family(
        transformers_class="Qwen3_5MoeForCausalLM",
        reads=QWEN35_MOE,
        only={
            **SILU,
            **NO_BIAS,
            **OUTPUT_GATES,
            "mlp_only_layers": ([], None),
            "decoder_sparse_step": (1,),
        },
        ignored=frozenset(
            {
                "intermediate_size",
                "mamba_ssm_dtype",
                "mtp_num_hidden_layers",
                "mtp_use_dedicated_embeddings",
                "norm_topk_prob",
            }
        ),
        qk_norm=True,
        layer_kinds=(FULL, LINEAR),
        experts=True,
        like_qwen35=True,
    ),
    "gpt_oss": Family(
        transformers_class="GptOssForCausalLM",
        reads=GPT_OSS,
        only={"attention_bias": (True,)},
        ignored=frozenset(
            {
                "decoder_sparse_step",
                "experts_per_token",
                "hidden_act",
                "initial_context_length",
                "mlp_only_layers",
                "norm_topk_prob",
            }
        ),
        qkv_bias=True,
        layer_kinds=(FULL, SLIDING),
        experts=True,
        like_gpt_oss=True,
    ),
    "gemma3_text": Family(
        transformers_class="Gemma3ForCausalLM",
        reads=GEMMA3,
        only={
            **NO_BIAS,
            "hidden_activation": ACTIVATIONS["gelu_tanh"],
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        ignored=frozenset({"_sliding_window_pattern", "hidden_act", "mlp_bias"}),
        qk_norm=True,
        activation="gelu_tanh",
        layer_kinds=(FULL, SLIDING),
        like_gemma=True,
    ),
}
ALIASES: Mapping[str, tuple[str, str]] = {
    "gpt_oss": ("num_local_experts", "num_experts"),
    "qwen3_moe": ("num_local_experts", "num_experts"),
}
"""Another name that a model type has for a key that it reads, and the key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A model type with a vision tower, whose text model's settings are in `text_config`."""

    text_types: tuple[str, ...]
    """Types that the text model may have; the first is the default if `text_config` names none."""
    tied: bool
    """Default of `tie_word_embeddings` in this type's config.json."""
    ignored: frozenset[str]
    """Keys outside `text_config` that concern the vision tower or image tokens."""


IMAGES = frozenset({"vision_config", "image_token_id", "image_token_index"})
QWEN_IMAGES = IMAGES | {"language_model_only", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        text_types=("gemma3_text",),
        tied=True,
        ignored=IMAGES | {"boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "mm_tokens_per_image"},
    ),
    "mistral3": Wrapper(
        text_types=("mistral", "ministral", "ministral3"),
        tied=True,
        ignored=IMAGES
        | {"multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"},
    ),
    "qwen3_5": Wrapper(text_types=("qwen3_5_text",), tied=False, ignored=QWEN_IMAGES),
    "qwen3_5_moe": Wrapper(text_types=("qwen3_5_moe_text",), tied=False, ignored=QWEN_IMAGES),
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


def text_config(raw: Keys, where: str) -> Keys:
    """The settings of the text model: `text_config` if the model has a vision tower, otherwise all of them.

    Raises ModelError if a key outside `text_config` has an unknown effect, or contradicts it.
    """
    wrapper = WRAPPERS.get(str(raw.get("model_type")))
    if wrapper is None:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(
            f"{where}: a {raw['model_type']} needs its text model's settings in text_config, which is missing"
        )
    model_type = text.get("model_type") or wrapper.text_types[0]
    if model_type not in wrapper.text_types:
        expected = " or ".join(wrapper.text_types)
        raise ModelError(
            f"{where}: text_config of a {raw['model_type']} has model type {shown(model_type)}; it must be {expected}"
        )
    family = FAMILIES[model_type]
    said = {**family.reads, **text}
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", wrapper.tied))
    said["tie_word_embeddings"] = text.get("tie_word_embeddings", tied)
    for key, value in raw.items():
        if key in family.reads and value is not None and value != said[key]:
            raise ModelError(
                f"{where}: {key} is {shown(value)}, and {shown(said[key])} in text_config; one of them must be right:"
                " remove the other"
            )
    own = {"text_config", *wrapper.ignored, *family.reads}
    check_keys({key: value for key, value in raw.items() if key not in own}, family, where)
    return {**text, "model_type": model_type, "tie_word_embeddings": tied}


def settings(raw: Keys, family: Family, where: str) -> Keys:
    """The settings that a family reads from a config.json, with transformers' defaults for missing ones.

    Raises ModelError if a key is unknown, or has an unsupported value.
    """
    raw = _without_alias(raw, where)
    check_keys(raw, family, where)
    found = {**family.reads, **{key: value for key, value in raw.items() if key in family.reads}}
    if found["rope_parameters"] is None:
        found["rope_parameters"] = family.reads["rope_parameters"]
    return found


def check_keys(raw: Keys, family: Family, where: str) -> None:
    """Raises ModelError if a key of a config.json is unknown, or has a value that is not supported."""
    only = {key: values for key, values in {**ONLY, **family.only}.items() if key not in family.reads}
    kind = raw.get("model_type", "model of this type")
    for key, value in raw.items():
        if key in only:
            if value not in only[key]:
                wanted = repr(only[key][0])
                raise ModelError(f"{where}: {key} {shown(value)} is not supported; it must be {wanted} or absent")
        elif key in family.reads:
            if value is None and family.reads[key] is not None and key not in NULLABLE:
                raise ModelError(
                    f"{where}: {key} must not be null; remove it for transformers' default of a {kind},"
                    f" {shown(family.reads[key])}"
                )
        elif key not in family.ignored | IGNORED_BY_ALL and value not in EMPTY:
            raise ModelError(
                f"{where}: {key} {shown(value)} is not supported: Podium does not know whether it changes what a {kind}"
                " computes; remove it from config.json if it changes nothing"
            )


def _without_alias(raw: Keys, where: str) -> Keys:
    """A config.json with aliases renamed to the keys that its family reads."""
    alias, key = ALIASES.get(str(raw.get("model_type")), ("", ""))
    if alias not in raw:
        return raw
    if key in raw and raw[key] != raw[alias]:
        raise ModelError(f"{where}: {alias} {shown(raw[alias])} and {key} {shown(raw[key])} differ; remove one")
    return {**{name: value for name, value in raw.items() if name != alias}, key: raw[alias]}


ORIGINAL = "original_max_position_embeddings"
SHARPENING = "llama_4_scaling_beta"
ROPE_IGNORED = ("finetuned", "max_position_embeddings", "mrope_interleaved", "mrope_section")
"""Keys of rotary settings that do not affect text: comments, and how Qwen splits the positions of images."""
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "linear": ("factor",),
    "yarn": ("factor", ORIGINAL),
}
"""The supported types of frequency scaling, and the keys that each requires."""
SCALING_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
"""The optional keys of each type of frequency scaling."""


def rotation(found: Keys, family: Family, layer_type: str, where: str) -> Keys:
    """The rotary settings of layers of this type, as transformers resolves them, from `settings`.

    transformers 5 writes them into `rope_parameters`, for each type of layers if they differ (Gemma 3); version 4 into
    `rope_theta` and `rope_scaling`, with `rope_local_base_freq` for Gemma's layers with a window. Where there are both,
    `rope_scaling` counts. Raises ModelError if a key is unknown, a required one is missing, or the type of scaling is
    not supported.
    """
    scaling, parameters = _object(found, "rope_scaling", where), _object(found, "rope_parameters", where)
    theta = found["rope_theta"]
    if family.like_gemma:
        if flat := [key for key in parameters if key not in (FULL, SLIDING)]:
            raise ModelError(
                f"{where}: rope_parameters of this model type has an object each for {FULL} and {SLIDING};"
                f" {', '.join(flat)} is outside of these objects"
            )
        if "type" in scaling and "rope_type" not in scaling:
            raise ModelError(
                f"{where}: rope_scaling of this model type has rope_type, and no type, which versions of transformers"
                f" understand differently; write rope_type {shown(scaling['type'])}"
            )
        of_type = _object(parameters, layer_type, where)
        rope = dict(of_type) if layer_type == SLIDING else {**of_type, **scaling}
        theta = found["rope_local_base_freq"] if layer_type == SLIDING else theta
    else:
        rope = dict(scaling or parameters)
    rope.setdefault("rope_theta", theta)
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if ORIGINAL in SCALINGS.get(str(kind), ()):
        if found[ORIGINAL] is not None and not family.like_gemma:
            rope[ORIGINAL] = found[ORIGINAL]
        rope.setdefault(ORIGINAL, found["max_position_embeddings"])
    if "partial_rotary_factor" in found:
        rope.setdefault("partial_rotary_factor", found["partial_rotary_factor"])
    if SHARPENING not in _object(family.reads, "rope_parameters", where):
        rope.pop(SHARPENING, None)  # only Ministral 3 computes with it
    _check_rotation(rope, family, where)
    return rope


def _check_rotation(rope: Keys, family: Family, where: str) -> None:
    """Raises ModelError if rotary settings have an unknown type or key, or lack one."""
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ModelError(f"{where}: rope_type {shown(kind)} is not supported; Podium computes {', '.join(SCALINGS)}")
    if missing := [key for key in SCALINGS[kind] if key not in rope]:
        raise ModelError(f"{where}: rope_type {kind} needs {', '.join(missing)}")
    if not family.like_qwen35 and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{where}: partial_rotary_factor {shown(rope['partial_rotary_factor'])} is not supported; it must be 1.0 or"
            " absent"
        )
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", ORIGINAL, SHARPENING, *ROPE_IGNORED}
    known |= {*SCALINGS[kind], *SCALING_OPTIONS.get(kind, ())}
    if family.like_gemma and rope.get("truncate") is not True:
        known -= {"truncate"}  # transformers looks for it outside of the settings of a type of layers
    for key, value in rope.items():
        asks = value not in EMPTY or key == "truncate"  # false is a valid value
        if key not in known and asks:
            raise ModelError(
                f"{where}: {key} {shown(value)} of rotary embeddings is not supported with rope_type {kind}: Podium"
                " does not know whether it changes what the model computes; remove it if it changes nothing"
            )


def _object(raw: Keys, key: str, where: str) -> Keys:
    """Read a setting that is a JSON object; empty if it is null or absent. Raises ModelError for other values."""
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{where}: {key} must be a JSON object or null, found {shown(value)}")
    return value
