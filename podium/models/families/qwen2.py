"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values. No jax."""

import dataclasses
from collections.abc import Mapping

from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import Block
from podium.models.blocks.mlp import Mlp
from podium.models.family import ConfigKeys, Family, GgufForm
from podium.models.files.config_parts import (
    BIASES,
    FULL,
    LLAMA,
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
        "max_position_embeddings": 32_768,
    },
    only=SILU,
    ignored=BIASES | UNUSED_WINDOW | {"dual_chunk_attention_config"},  # of vLLM's attention
)


def read(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder: all layers are the same."""
    types = layer_types(settings, may_be=(FULL,))
    attention = dataclasses.replace(attention_of(settings, rotation(settings)), bias=True)
    block = Block(mixer=attention, feed_forward=Mlp(width=settings.number("intermediate_size")))
    return decoder_of(settings, [block] * len(types))


SMALL = {"num_key_value_heads": 2, "rope_theta": 1e6, "tie_word_embeddings": True}
PRESETS: Mapping[str, Keys] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **SMALL,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **SMALL,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
    },
    "Qwen/Qwen2.5-3B-Instruct": {
        **SMALL,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "intermediate_size": 11_008,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "intermediate_size": 18_944,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
    },
}
FAMILIES = (
    Family(
        model_type="qwen2",
        models="Qwen2 and 2.5",
        transformers_class="Qwen2ForCausalLM",
        keys=KEYS,
        read=read,
        write=write_dense,
        gguf=GgufForm(architecture="qwen2"),
        presets=PRESETS,
    ),
)
