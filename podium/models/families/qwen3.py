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


def preset(*, width: int, layers: int, heads: int, mlp: int, tied: bool) -> Keys:
    """The config.json of a Qwen3."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": mlp,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


PRESETS: Mapping[str, Keys] = {
    "Qwen/Qwen3-0.6B": preset(width=1024, layers=28, heads=16, mlp=3072, tied=True),
    "Qwen/Qwen3-1.7B": preset(width=2048, layers=28, heads=16, mlp=6144, tied=True),
    "Qwen/Qwen3-4B": preset(width=2560, layers=36, heads=32, mlp=9728, tied=True),
    "Qwen/Qwen3-8B": preset(width=4096, layers=36, heads=32, mlp=12_288, tied=False),
    "Qwen/Qwen3-32B": preset(width=5120, layers=64, heads=64, mlp=25_600, tied=False),
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
