"""Llama 2 and 3, and SmolLM2, which has the same layers. No jax."""

from collections.abc import Mapping

from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import Block
from podium.models.blocks.mlp import Mlp
from podium.models.family import ConfigKeys, Family, GgufForm
from podium.models.files.config_parts import LLAMA, NO_BIAS, SILU, attention_of, decoder_of, layer_types, write_dense
from podium.models.files.model_settings import Keys, ModelSettings
from podium.models.files.rotary_keys import rotation


def read(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder: all layers are the same."""
    types = layer_types(settings)
    mlp = Mlp(width=settings.number("intermediate_size"))
    block = Block(mixer=attention_of(settings, rotation(settings)), feed_forward=mlp)
    return decoder_of(settings, [block] * len(types))


SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_3 = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "rope_theta": 5e5,
    "rope_scaling": SCALING,
    "rms_norm_eps": 1e-5,
}
SMALL = {
    **LLAMA_3,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "rope_scaling": {**SCALING, "factor": 32.0},
    "tie_word_embeddings": True,
}
PRESETS: Mapping[str, Keys] = {
    "meta-llama/Llama-3.2-1B-Instruct": SMALL,
    "meta-llama/Llama-3.2-3B-Instruct": {
        **SMALL,
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
    },
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_3,
}
FAMILIES = (
    Family(
        model_type="llama",
        models="Llama 2 and 3, SmolLM2",
        transformers_class="LlamaForCausalLM",
        keys=ConfigKeys(reads=LLAMA, only={**SILU, **NO_BIAS, "mlp_bias": (False,)}),
        read=read,
        write=write_dense,
        gguf=GgufForm(architecture="llama", in_pairs=True),
        presets=PRESETS,
    ),
)
