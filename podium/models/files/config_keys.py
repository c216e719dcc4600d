"""Which keys of a config.json are allowed, for each family. No jax.

Each key is in one of three lists of its family (`ConfigKeys` in `podium.models.family`), which the lists here add to;
any other key is an error. A test compares the lists with transformers' configuration classes, and another changes each
key and compares logits.
"""

from collections.abc import Mapping, Sequence

from podium.models.architecture import ModelError, shown
from podium.models.families import FAMILIES
from podium.models.family import Allowed, Family, Tower
from podium.models.files.model_settings import EMPTY, Keys, ModelSettings

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
    "what transformers returns in addition to logits": (
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
"""Keys for which null has a meaning of its own, even in families where a missing key means something else. In this
order: as many key/value heads as query heads; rotary settings as if missing; the base is in the rotary settings; no
window."""
TOWERS: Mapping[str, Tower] = {family.tower.model_type: family.tower for family in FAMILIES.values() if family.tower}
"""Model types with a vision tower."""
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
            f" ({', '.join(dict.fromkeys(family.models for family in FAMILIES.values()))})"
        )
    return FAMILIES[model_type]


def text_config(raw: Keys, where: str) -> Keys:
    """The settings of the text model: `text_config` if the model has a vision tower, otherwise all of them.

    Raises ModelError if a key outside `text_config` has an unknown effect, or contradicts it.
    """
    tower = TOWERS.get(str(raw.get("model_type")))
    if tower is None:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(
            f"{where}: a {raw['model_type']} needs its text model's settings in text_config, which is missing"
        )
    model_type = text.get("model_type") or tower.text_types[0]
    if model_type not in tower.text_types:
        expected = " or ".join(tower.text_types)
        raise ModelError(
            f"{where}: text_config of a {raw['model_type']} has model type {shown(model_type)}; it must be {expected}"
        )
    family = FAMILIES[model_type]
    said = {**family.keys.reads, **text}
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", tower.tied))
    said["tie_word_embeddings"] = text.get("tie_word_embeddings", tied)
    for key, value in raw.items():
        if key in family.keys.reads and value is not None and value != said[key]:
            raise ModelError(
                f"{where}: {key} is {shown(value)}, and {shown(said[key])} in text_config; one of them must be right:"
                " remove the other"
            )
    own = {"text_config", *tower.ignored, *family.keys.reads}
    check_keys({key: value for key, value in raw.items() if key not in own}, family, where)
    return {**text, "model_type": model_type, "tie_word_embeddings": tied}


def settings_of(raw: Keys, family: Family, where: str) -> ModelSettings:
    """The settings that a family reads from a config.json, with transformers' defaults for missing ones.

    Raises ModelError if a key is unknown, or has an unsupported value.
    """
    aliases = family.keys.aliases
    for alias, key in aliases.items():
        if alias in raw and key in raw and raw[key] != raw[alias]:
            raise ModelError(f"{where}: {alias} {shown(raw[alias])} and {key} {shown(raw[key])} differ; remove one")
    raw = {aliases.get(key, key): value for key, value in raw.items()}
    check_keys(raw, family, where)
    reads = family.keys.reads
    found = {**reads, **{key: value for key, value in raw.items() if key in reads}}
    if "rope_parameters" in found and found["rope_parameters"] is None:
        found["rope_parameters"] = reads["rope_parameters"]
    return ModelSettings(model_type=family.model_type, keys=found, where=where)


def check_keys(raw: Keys, family: Family, where: str) -> None:
    """Raises ModelError if a key of a config.json is unknown, or has a value that is not supported."""
    keys = family.keys
    only = {key: values for key, values in {**ONLY, **keys.only}.items() if key not in keys.reads}
    kind = raw.get("model_type", "model of this type")
    for key, value in raw.items():
        if key in only:
            if value not in only[key] and not _is_packed(key, value, keys.packed):
                wanted = repr(only[key][0])
                raise ModelError(f"{where}: {key} {shown(value)} is not supported; it must be {wanted} or absent")
        elif key in keys.reads:
            if value is None and keys.reads[key] is not None and key not in NULLABLE:
                raise ModelError(
                    f"{where}: {key} must not be null; remove it for transformers' default of a {kind},"
                    f" {shown(keys.reads[key])}"
                )
        elif key not in keys.ignored | IGNORED_BY_ALL and value not in EMPTY:
            raise ModelError(
                f"{where}: {key} {shown(value)} is not supported: Podium does not know whether it changes what a {kind}"
                " computes; remove it from config.json if it changes nothing"
            )


def _is_packed(key: str, value: object, formats: Sequence[str]) -> bool:
    """Whether a key says that weights are packed in one of these formats, which the files themselves say too."""
    return key == "quantization_config" and isinstance(value, Mapping) and value.get("quant_method") in formats
