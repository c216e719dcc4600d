"""Gemma 3: windows in five layers of six, norms on both sides of mixer and feed-forward, scaled embeddings. No jax."""

import dataclasses
import math
from collections.abc import Mapping

from podium.models.architecture import DecoderConfig, ModelError, shown
from podium.models.blocks.kind import Block
from podium.models.blocks.mlp import Mlp
from podium.models.family import ConfigKeys, Family, GgufForm, Tower, dense_keys_of_gguf
from podium.models.files.config_parts import (
    FULL,
    IMAGES,
    LLAMA,
    NO_BIAS,
    SLIDING,
    attention_of,
    common_keys,
    decoder_of,
    full_every,
    layer_types,
    window_keys,
    window_of,
)
from podium.models.files.gguf_metadata import WINDOWS, GgufMetadata, layer_types_of_gguf
from podium.models.files.model_settings import Keys, ModelSettings, json_object
from podium.models.files.rotary_keys import completed, scaling_keys
from podium.models.files.tensor_layout import Layout

LAYERS_27B = 62
KEYS = ConfigKeys(
    reads={
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
    },
    only={
        **NO_BIAS,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    ignored=frozenset({"_sliding_window_pattern", "hidden_act", "mlp_bias"}),
)
NAMES: Mapping[str, Layout] = {
    "layers.attention_out_norm": Layout(
        "model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight", "D", "D"
    ),
    "layers.mlp_norm": Layout("model.layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight", "D", "D"),
    "layers.mlp_out_norm": Layout(
        "model.layers.{}.post_feedforward_layernorm.weight", "blk.{}.post_ffw_norm.weight", "D", "D"
    ),
}
"""`post_attention_layernorm` is another norm than Llama's."""


def read(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder: layers with a window have another rotary base, and scores have a scale of their own."""
    every = settings.number("sliding_window_pattern")
    types = layer_types(settings, full_every(every, SLIDING), may_be=(FULL, SLIDING))
    mlp = Mlp(width=settings.number("intermediate_size"), activation="gelu_tanh")
    blocks: dict[str, Block] = {}
    for each in set(types):
        attention = attention_of(settings, _rotation(settings, each))
        scale = settings.number("query_pre_attn_scalar")
        attention = dataclasses.replace(
            attention,
            norm=True,
            window=window_of(settings, each),
            scale_dims=None if scale == attention.head_dim else scale,
        )
        blocks[each] = Block(mixer=attention, feed_forward=mlp, norms_behind=True)
    decoder = decoder_of(settings, [blocks[each] for each in types])
    return dataclasses.replace(decoder, norm_offset=1.0, wide_norms=True, embed_scale=math.sqrt(decoder.width))


def _rotation(settings: ModelSettings, layer_type: str) -> Keys:
    """The rotary settings of the layers of a type.

    transformers 5 stores them in `rope_parameters`, by type; version 4 in `rope_local_base_freq` for layers with a
    window, and in `rope_scaling` for the others.
    """
    scaling, parameters = settings.object("rope_scaling"), settings.object("rope_parameters")
    if flat := [key for key in parameters if key not in (FULL, SLIDING)]:
        raise ModelError(
            f"{settings.where}: rope_parameters of this model type has an object each for {FULL} and {SLIDING};"
            f" {', '.join(flat)} is outside of these objects"
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise ModelError(
            f"{settings.where}: rope_scaling of this model type has rope_type, and no type, which versions of"
            f" transformers understand differently; write rope_type {shown(scaling['type'])}"
        )
    near = layer_type == SLIDING
    of_type = json_object(parameters, layer_type, settings.where)
    rope = of_type if near else {**of_type, **scaling}
    # transformers looks for truncate outside of the settings of a type of layers.
    unread = frozenset[str]() if rope.get("truncate") is True else frozenset({"truncate"})
    return completed(rope, settings, theta=settings["rope_local_base_freq" if near else "rope_theta"], unread=unread)


def write(decoder: DecoderConfig) -> Keys:
    """Make the keys of config.json, in those of transformers 4."""
    layers = decoder.dense_layers()
    attention, mlp = layers[0]
    far = next((each.rope for each, _ in layers if each.window is None), attention.rope)
    near = next((each.rope for each, _ in layers if each.window is not None), attention.rope)
    return {
        **common_keys(decoder),
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": mlp.width,
        **window_keys(decoder),
        "rope_theta": far.theta,
        "rope_local_base_freq": near.theta,
        "rope_scaling": scaling_keys(far.scaling),
        "query_pre_attn_scalar": attention.scale_dims or attention.head_dim,
    }


def gguf_keys(metadata: GgufMetadata, raw: Keys) -> Keys:
    """Make the keys of config.json from a GGUF file's.

    Two of them are not in every file but fixed in llama.cpp's code: the rotary base of layers with a window, and the
    scale of scores of the 27B model.
    """
    largest = raw["num_hidden_layers"] == LAYERS_27B
    factor = metadata.get("rope.scaling.factor")
    scaling = metadata.get("rope.scaling.type", "linear" if factor else "none")  # as in llama.cpp
    return {
        **dense_keys_of_gguf(metadata, raw),
        "layer_types": layer_types_of_gguf(metadata, 6),
        "sliding_window": metadata.get("attention.sliding_window"),
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", 1e4),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling, "factor": factor},
        "query_pre_attn_scalar": (
            metadata.number("embedding_length") // metadata.number("attention.head_count")
            if largest
            else raw["head_dim"]
        ),
    }


SMALL: Keys = {"vocab_size": 262_144, "max_position_embeddings": 32_768, "sliding_window": 512}
LARGE: Keys = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


PRESETS: Mapping[str, Keys] = {
    "google/gemma-3-270m-it": {
        **SMALL,
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "intermediate_size": 2048,
        "num_key_value_heads": 1,
    },
    "google/gemma-3-1b-it": {
        **SMALL,
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "intermediate_size": 6912,
        "num_key_value_heads": 1,
    },
    "google/gemma-3-4b-it": {
        **LARGE,
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "intermediate_size": 10_240,
        "num_key_value_heads": 4,
    },
    "google/gemma-3-12b-it": {
        **LARGE,
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "intermediate_size": 15_360,
        "num_key_value_heads": 8,
    },
    "google/gemma-3-27b-it": {
        **LARGE,
        "hidden_size": 5376,
        "num_hidden_layers": LAYERS_27B,
        "num_attention_heads": 32,
        "intermediate_size": 21_504,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
    },
}
FAMILIES = (
    Family(
        model_type="gemma3_text",
        models="Gemma 3",
        transformers_class="Gemma3ForCausalLM",
        scoring_class="Gemma3Text",
        keys=KEYS,
        read=read,
        write=write,
        names=lambda kind, block: NAMES,
        gguf=GgufForm(architecture="gemma3", reads=WINDOWS, scalings=("none", "linear"), keys=gguf_keys),
        tower=Tower(
            model_type="gemma3",
            text_types=("gemma3_text",),
            tied=True,
            ignored=IMAGES
            | {"boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "mm_tokens_per_image"},
        ),
        presets=PRESETS,
    ),
)
