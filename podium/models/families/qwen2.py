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


def preset(*, width: int, layers: int, heads: int, mlp: int, **other: object) -> Keys:
    """The config.json of a Qwen2.5 with 2 key/value heads and tied embeddings, unless `other` keys differ."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "intermediate_size": mlp,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **other,
    }


LARGE: Keys = {"vocab_size": 152_064, "num_key_value_heads": 4, "tie_word_embeddings": False}
PRESETS: Mapping[str, Keys] = {
    "Qwen/Qwen2.5-0.5B-Instruct": preset(width=896, layers=24, heads=14, mlp=4864),
    "Qwen/Qwen2.5-1.5B-Instruct": preset(width=1536, layers=28, heads=12, mlp=8960),
    "Qwen/Qwen2.5-3B-Instruct": preset(width=2048, layers=36, heads=16, mlp=11_008),
    "Qwen/Qwen2.5-7B-Instruct": preset(width=3584, layers=28, heads=28, mlp=18_944, **LARGE),
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
