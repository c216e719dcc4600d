"""Qwen3 without mixtures of experts: Llama with norms of queries and keys. No jax."""

import dataclasses
from collections.abc import Mapping

from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import Block
from podium.models.blocks.mlp import Mlp
from podium.models.family import ConfigKeys, Family, GgufForm
from podium.models.files.config_parts import (
    FULL,
    LLAMA,
    NO_BIAS,
    NORMED,
    SILU,
    UNUSED_WINDOW,
    attention_of,
    decoder_of,
    layer_types,
    write_dense,
)
from podium.models.files.model_settings import Keys, ModelSettings
from podium.models.files.rotary_keys import rotation

KEYS = ConfigKeys(
    reads={
        **LLAMA,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    only={**SILU, **NO_BIAS, **NORMED},
    ignored=UNUSED_WINDOW | {"mlp_bias"},
)


def read(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder: all layers are the same."""
    types = layer_types(settings, may_be=(FULL,))
    attention = dataclasses.replace(attention_of(settings, rotation(settings)), norm=True)
    block = Block(mixer=attention, feed_forward=Mlp(width=settings.number("intermediate_size")))
    return decoder_of(settings, [block] * len(types))


LARGE = {"num_key_value_heads": 8, "max_position_embeddings": 40_960, "rope_theta": 1e6}
SMALL = {**LARGE, "tie_word_embeddings": True}
PRESETS: Mapping[str, Keys] = {
    "Qwen/Qwen3-0.6B": {
        **SMALL,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
    },
    "Qwen/Qwen3-1.7B": {
        **SMALL,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
    },
    "Qwen/Qwen3-4B": {
        **SMALL,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
    },
    "Qwen/Qwen3-8B": {
        **LARGE,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12_288,
    },
    "Qwen/Qwen3-32B": {
        **LARGE,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25_600,
    },
}
FAMILIES = (
    Family(
        model_type="qwen3",
        models="Qwen3",
        transformers_class="Qwen3ForCausalLM",
        keys=KEYS,
        read=read,
        write=write_dense,
        gguf=GgufForm(architecture="qwen3"),
        presets=PRESETS,
    ),
)
