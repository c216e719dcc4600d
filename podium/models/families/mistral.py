"""Mistral, Ministral and Ministral 3: Llama with windows, or with YaRN and queries scaled by position. No jax."""

import dataclasses
from collections.abc import Mapping

from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import Block
from podium.models.blocks.mlp import Mlp
from podium.models.family import ConfigKeys, Family, GgufForm, Tower, dense_keys_of_gguf
from podium.models.files.config_parts import (
    BIASES,
    FULL,
    IMAGES,
    LLAMA,
    SILU,
    SLIDING,
    attention_of,
    attentions,
    decoder_of,
    layer_types,
    window_keys,
    window_of,
    write_dense,
)
from podium.models.files.gguf_metadata import YARN, GgufMetadata, has_yarn, yarn_keys
from podium.models.files.model_settings import Keys, ModelSettings
from podium.models.files.rotary_keys import rope_parameters, rotation, sharpening_of

READS: Keys = {
    **LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
READS_3: Keys = {
    **READS,
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


def read_mistral(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder: every layer has the window, or none."""
    return _windowed(settings, may_be=())


def read_ministral(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder, in which layers have no window if `layer_types` says so."""
    return _windowed(settings, may_be=(FULL, SLIDING))


def read_ministral3(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder: as Mistral's, with queries that are scaled up with their position."""
    return _windowed(settings, may_be=(), grows=True)


def _windowed(settings: ModelSettings, *, may_be: tuple[str, ...], grows: bool = False) -> DecoderConfig:
    usual = FULL if settings["sliding_window"] is None else SLIDING
    types = layer_types(settings, lambda layer: usual, may_be=may_be)
    rope = rotation(settings)
    attention = attention_of(settings, rope)
    if grows:
        attention = dataclasses.replace(attention, sharpening=sharpening_of(rope, settings.where))
    mlp = Mlp(width=settings.number("intermediate_size"))
    blocks = {
        each: Block(mixer=dataclasses.replace(attention, window=window_of(settings, each)), feed_forward=mlp)
        for each in set(types)
    }
    return decoder_of(settings, [blocks[each] for each in types])


def write_windowed(decoder: DecoderConfig) -> Keys:
    """Make the keys of config.json, with the window."""
    return {**write_dense(decoder), **window_keys(decoder)}


def write_ministral3(decoder: DecoderConfig) -> Keys:
    """Make the keys of config.json: transformers uses YaRN unless `rope_parameters` say otherwise."""
    rope = {"rope_parameters": rope_parameters(attentions(decoder)[0])}
    keys = {key: value for key, value in write_windowed(decoder).items() if key not in ("rope_theta", "rope_scaling")}
    return keys | rope


def gguf_keys(metadata: GgufMetadata, raw: Keys) -> Keys:
    """Make the keys of config.json of Ministral 3, which uses YaRN, or of Mistral Small 3, which does not."""
    dense = dense_keys_of_gguf(metadata, raw)
    if not has_yarn(metadata):
        return {**dense, "model_type": "mistral", "sliding_window": None}
    grows = bool(metadata.get("attention.temperature_scale", 0.0))
    beta = {"llama_4_scaling_beta": metadata.real("attention.temperature_scale")} if grows else {}
    return {**dense, "rope_parameters": {"rope_theta": raw["rope_theta"], **yarn_keys(metadata), **beta}}


MISTRAL_7B = {
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
}
PRESETS: Mapping[str, Keys] = {
    "mistralai/Mistral-7B-Instruct-v0.1": {
        **MISTRAL_7B,
        "vocab_size": 32_000,
        "rope_theta": 1e4,
        "sliding_window": 4096,
    },
    "mistralai/Mistral-7B-Instruct-v0.3": MISTRAL_7B,
    "mistralai/Mistral-Nemo-Instruct-2407": {
        **MISTRAL_7B,
        "vocab_size": 131_072,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
    },
    "mistralai/Ministral-8B-Instruct-2410": {
        **MISTRAL_7B,
        "vocab_size": 131_072,
        "num_hidden_layers": 36,
        "intermediate_size": 12_288,
        "head_dim": 128,
        "rope_theta": 1e8,
        "sliding_window": 32_768,
    },
}
FAMILIES = (
    Family(
        model_type="mistral",
        models="Mistral",
        transformers_class="MistralForCausalLM",
        keys=ConfigKeys(reads=READS, only=SILU, ignored=BIASES),
        read=read_mistral,
        write=write_windowed,
        tower=Tower(
            model_type="mistral3",
            text_types=("mistral", "ministral", "ministral3"),
            tied=True,
            ignored=IMAGES
            | {"multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"},
        ),
        presets=PRESETS,
    ),
    Family(
        model_type="ministral",
        models="Ministral",
        transformers_class="MinistralForCausalLM",
        keys=ConfigKeys(reads=READS, only=SILU, ignored=BIASES),
        read=read_ministral,
        write=write_windowed,
    ),
    Family(
        model_type="ministral3",
        models="Ministral 3",
        transformers_class="Ministral3ForCausalLM",
        keys=ConfigKeys(reads=READS_3, only=SILU, ignored=BIASES),
        read=read_ministral3,
        write=write_ministral3,
        gguf=GgufForm(
            architecture="mistral3",
            reads=(*YARN, "attention.temperature_scale"),
            scalings=("none", "yarn"),
            in_pairs=True,
            keys=gguf_keys,
        ),
    ),
)
