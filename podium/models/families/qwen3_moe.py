"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer, or in some. No jax."""

import dataclasses
from collections.abc import Mapping

from podium.models.architecture import DecoderConfig, ModelError, shown
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block
from podium.models.blocks.mlp import Mlp
from podium.models.family import ConfigKeys, Family, GgufForm
from podium.models.files.config_parts import (
    LLAMA,
    NO_BIAS,
    NORMED,
    SILU,
    UNUSED_WINDOW,
    attention_of,
    attentions,
    common_keys,
    decoder_of,
    described,
    expert_keys,
    experts_of,
    layer_types,
)
from podium.models.files.gguf_metadata import MIXTURE, GgufMetadata, mixture_keys
from podium.models.files.model_settings import Keys, ModelSettings
from podium.models.files.rotary_keys import rope_keys, rotation
from podium.models.files.tensor_layout import GGUF_EXPERTS

KEYS = ConfigKeys(
    reads={
        **LLAMA,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    only={**SILU, **NO_BIAS, **NORMED},
    ignored=UNUSED_WINDOW | {"mlp_bias"},
    aliases={"num_local_experts": "num_experts"},
)


def read(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder: `decoder_sparse_step` and `mlp_only_layers` leave layers without experts."""
    types = layer_types(settings)
    attention = dataclasses.replace(attention_of(settings, rotation(settings)), norm=True)
    step, dense = settings.number("decoder_sparse_step", 1), settings["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise ModelError(f"{settings.where}: mlp_only_layers must be a list of layers, found {shown(dense)}")
    routed = [(layer + 1) % step == 0 and layer not in dense for layer in range(len(types))]
    blocks: dict[bool, Block] = {}
    if True in routed:
        experts = dataclasses.replace(experts_of(settings), normalized=settings.flag("norm_topk_prob"))
        blocks[True] = Block(mixer=attention, feed_forward=experts)
    if False in routed:
        blocks[False] = Block(mixer=attention, feed_forward=Mlp(width=settings.number("intermediate_size")))
    return decoder_of(settings, [blocks[each] for each in routed])


def write(decoder: DecoderConfig) -> Keys:
    """Make the keys of config.json; without dense layers, `intermediate_size` is only a number for transformers."""
    kinds = described(decoder, (block.feed_forward for block in decoder.blocks), Mlp, Experts)
    dense = {layer: kind.width for layer, kind in enumerate(kinds) if isinstance(kind, Mlp)}
    experts = next((kind for kind in kinds if isinstance(kind, Experts)), None)
    keys = {**common_keys(decoder), "hidden_act": "silu", **rope_keys(attentions(decoder)[0])}
    if experts is None:
        return {**keys, "intermediate_size": dense[0]}
    return {
        **keys,
        "intermediate_size": next(iter(dense.values()), experts.top * experts.width),
        **expert_keys(experts),
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
    }


def gguf_keys(metadata: GgufMetadata, raw: Keys) -> Keys:
    """Make the keys of config.json for the mixture, from a GGUF file's."""
    return {**mixture_keys(metadata), "norm_topk_prob": True}


QWEN3_30B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
PRESETS: Mapping[str, Keys] = {
    "Qwen/Qwen3-30B-A3B": QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {**QWEN3_30B, "max_position_embeddings": 262_144, "rope_theta": 1e7},
}
FAMILIES = (
    Family(
        model_type="qwen3_moe",
        models="Qwen3-MoE",
        transformers_class="Qwen3MoeForCausalLM",
        keys=KEYS,
        read=read,
        write=write,
        names=lambda kind, block: GGUF_EXPERTS if kind == "gguf" else {},
        gguf=GgufForm(architecture="qwen3moe", reads=MIXTURE, gating=1, keys=gguf_keys),
        presets=PRESETS,
    ),
)
