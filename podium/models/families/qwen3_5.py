"""Qwen3.5: a gated delta net in three layers of four, gated attention in the fourth; dense, or a mixture. No jax."""

import dataclasses
from collections.abc import Mapping

from podium.models.architecture import MAX_LAYERS, DecoderConfig, ModelError
from podium.models.blocks.attention import Attention
from podium.models.blocks.delta import DeltaNet
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block, Kind
from podium.models.blocks.mlp import Mlp
from podium.models.family import ConfigKeys, Family, GgufForm, Tower, dense_keys_of_gguf
from podium.models.files.config_parts import (
    FULL,
    IMAGES,
    LINEAR,
    LLAMA,
    NO_BIAS,
    SILU,
    attention_of,
    common_keys,
    decoder_of,
    described,
    expert_keys,
    experts_of,
    full_every,
    layer_types,
)
from podium.models.files.gguf_metadata import MIXTURE, GgufMetadata, mixture_keys
from podium.models.files.model_settings import Keys, ModelSettings
from podium.models.files.rotary_keys import rope_parameters, rotation
from podium.models.files.tensor_layout import GGUF_EXPERTS, NAMES, ONE, POST_ATTENTION, FileKind, Layout

READS: Keys = {
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
READS_MOE: Keys = {
    **{key: value for key, value in READS.items() if key != "intermediate_size"},
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
ONLY = {
    **SILU,
    **NO_BIAS,
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu", None),  # of delta nets: two names of one activation
    "mlp_only_layers": ([], None),
}
IGNORED = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
# Attention's gates are stored with the queries head by head. The queries, keys and values of a delta net are one
# tensor, as are the taps of their convolutions.
QUERIES = ("q", "q_gate")
GATED: Mapping[str, Layout] = {
    f"layers.{name}": NAMES["layers.q"]._replace(file="HGQ D", lanes=QUERIES) for name in QUERIES
}
_NET = "model.layers.{}.linear_attn."
_QKV, _TAPS = ("q", "k", "v"), ("q_taps", "k_taps", "v_taps")
_IN = Layout(f"{_NET}in_proj_qkv.weight", "blk.{}.attn_qkv.weight", "DKN", "KN D", joined=_QKV)
_CONV = Layout(f"{_NET}conv1d.weight", "blk.{}.ssm_conv1d.weight", "TKN", "KN 1 T", joined=_TAPS)
DELTA: Mapping[str, Layout] = {
    "layers.q": _IN,
    "layers.k": _IN,
    "layers.v": _IN._replace(ours="DVP", file="VP D"),
    "layers.q_taps": _CONV,
    "layers.k_taps": _CONV,
    "layers.v_taps": _CONV._replace(ours="TVP", file="VP 1 T"),
    "layers.z": Layout(f"{_NET}in_proj_z.weight", "blk.{}.attn_gate.weight", "DVP", "VP D"),
    "layers.a": Layout(f"{_NET}in_proj_a.weight", "blk.{}.ssm_alpha.weight", "DV", "V D"),
    "layers.b": Layout(f"{_NET}in_proj_b.weight", "blk.{}.ssm_beta.weight", "DV", "V D"),
    "layers.log_decay": Layout(f"{_NET}A_log", "blk.{}.ssm_a", "V", "V"),
    "layers.decay_bias": Layout(f"{_NET}dt_bias", "blk.{}.ssm_dt.bias", "V", "V"),
    "layers.out_scale": Layout(f"{_NET}norm.weight", "blk.{}.ssm_norm.weight", "P", "P"),
    "layers.o": Layout(f"{_NET}out_proj.weight", "blk.{}.ssm_out.weight", "VPD", "D VP"),
}
DELTA_GGUF: Mapping[str, Layout] = {
    name: layout._replace(file=layout.file.replace(f" {ONE}", "")) for name, layout in DELTA.items()
}
# All experts of a layer are one tensor, gate's rows before up's; and there is an expert for every token.
OPENING = ("expert_gate", "expert_up")
_EXPERTS = "model.layers.{}.mlp.experts."
_GATE_UP = Layout(f"{_EXPERTS}gate_up_proj", "", "DF", "F D", joined=OPENING, whole=True)
TOGETHER: Mapping[str, Layout] = {
    **{f"layers.{name}": _GATE_UP for name in OPENING},
    "layers.expert_down": Layout(f"{_EXPERTS}down_proj", "", "FD", "D F", whole=True),
}
_SHARED = "model.layers.{}.mlp.shared_expert"
SHARED: Mapping[str, Layout] = {
    "layers.gate": Layout(f"{_SHARED}.gate_proj.weight", "blk.{}.ffn_gate_shexp.weight", "DF", "F D"),
    "layers.up": Layout(f"{_SHARED}.up_proj.weight", "blk.{}.ffn_up_shexp.weight", "DF", "F D"),
    "layers.down": Layout(f"{_SHARED}.down_proj.weight", "blk.{}.ffn_down_shexp.weight", "FD", "D F"),
    "layers.shared_router": Layout(f"{_SHARED}_gate.weight", "blk.{}.ffn_gate_inp_shexp.weight", "DE", "E D"),
}


def names(kind: FileKind, block: Block | None) -> Mapping[str, Layout]:
    """The layouts of a layer's weights that differ from Llama's; weights outside layers do not differ."""
    if block is None:
        return {}
    delta = DELTA_GGUF if kind == "gguf" else DELTA
    mixer = delta if isinstance(block.mixer, DeltaNet) else GATED
    return {"layers.mlp_norm": POST_ATTENTION, **mixer}


def names_moe(kind: FileKind, block: Block | None) -> Mapping[str, Layout]:
    """The layouts of a mixture's weights; in a folder of the kind `apart`, each expert has tensors of its own."""
    experts = {"gguf": GGUF_EXPERTS, "apart": {}}.get(kind, TOGETHER)
    return {**names(kind, block), **SHARED, **experts}


def read(settings: ModelSettings) -> DecoderConfig:
    """Make the dense decoder."""
    return _read(settings, Mlp(width=settings.number("intermediate_size")))


def read_moe(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder with a mixture of experts in every layer, and one that every token goes to."""
    return _read(
        settings,
        dataclasses.replace(experts_of(settings), shared=settings.number("shared_expert_intermediate_size")),
    )


def _read(settings: ModelSettings, feed_forward: Kind) -> DecoderConfig:
    types = layer_types(settings, full_every(settings.number("full_attention_interval"), LINEAR), may_be=(FULL, LINEAR))
    mixers: dict[str, Kind] = {}
    if FULL in types:
        mixers[FULL] = dataclasses.replace(attention_of(settings, rotation(settings)), norm=True, gated=True)
    if LINEAR in types:
        mixers[LINEAR] = _delta_net(settings)
    decoder = decoder_of(settings, [Block(mixer=mixers[each], feed_forward=feed_forward) for each in types])
    return dataclasses.replace(decoder, norm_offset=1.0, wide_norms=True)


def _delta_net(settings: ModelSettings) -> DeltaNet:
    keys, values = settings.number("linear_num_key_heads"), settings.number("linear_num_value_heads")
    if values % keys:
        raise ModelError(
            f"{settings.where}: {values} value heads of the delta nets do not share {keys} key heads evenly"
        )
    return DeltaNet(
        key_heads=keys,
        value_heads=values,
        key_dim=settings.number("linear_key_head_dim"),
        value_dim=settings.number("linear_value_head_dim"),
        taps=settings.number("linear_conv_kernel_dim"),
    )


def write(decoder: DecoderConfig) -> Keys:
    """Make the keys of config.json of the dense decoder."""
    mlp = described(decoder, (block.feed_forward for block in decoder.blocks), Mlp)[0]
    return {**_write(decoder), "intermediate_size": mlp.width}


def write_moe(decoder: DecoderConfig) -> Keys:
    """Make the keys of config.json of the mixture."""
    experts = described(decoder, (block.feed_forward for block in decoder.blocks), Experts)[0]
    return {**_write(decoder), **expert_keys(experts), "shared_expert_intermediate_size": experts.shared}


def _write(decoder: DecoderConfig) -> Keys:
    mixers = described(decoder, (block.mixer for block in decoder.blocks), Attention, DeltaNet)
    attention = next(each for each in mixers if isinstance(each, Attention))
    share = attention.rope.dims / attention.head_dim
    keys = {
        **common_keys(decoder),
        "hidden_act": "silu",
        "rope_parameters": {**rope_parameters(attention), "partial_rotary_factor": share},
    }
    net = next((each for each in mixers if isinstance(each, DeltaNet)), None)
    if net is None:
        return keys
    return {
        **keys,
        "layer_types": [LINEAR if isinstance(each, DeltaNet) else FULL for each in mixers],
        "linear_conv_kernel_dim": net.taps,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_num_key_heads": net.key_heads,
        "linear_num_value_heads": net.value_heads,
    }


def gguf_keys(metadata: GgufMetadata, raw: Keys) -> Keys:
    """Make the keys of config.json of the dense model from a GGUF file's."""
    return {**dense_keys_of_gguf(metadata, raw), **_gguf_keys(metadata)}


def gguf_keys_moe(metadata: GgufMetadata, raw: Keys) -> Keys:
    """Make the keys of config.json of the mixture from a GGUF file's."""
    shared = metadata.number("expert_shared_feed_forward_length")
    return {**mixture_keys(metadata), **_gguf_keys(metadata), "shared_expert_intermediate_size": shared}


def _gguf_keys(metadata: GgufMetadata) -> Keys:
    """Make the keys of both; blocks for multi-token prediction do not count as layers."""
    heads, inner = metadata.number("ssm.time_step_rank"), metadata.number("ssm.inner_size")
    ahead = metadata.number("nextn_predict_layers") if metadata.get("nextn_predict_layers", 0) else 0
    if inner % heads:
        raise ModelError(
            f"{metadata.where}: {metadata.name}.ssm.inner_size {inner} is not a multiple of its {heads} heads"
        )
    dims, head_dim = metadata.number("rope.dimension_count"), metadata.number("attention.key_length")
    return {
        "num_hidden_layers": metadata.number("block_count", most=MAX_LAYERS) - ahead,
        "full_attention_interval": metadata.number("full_attention_interval", 4),
        "partial_rotary_factor": dims / head_dim,
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.number("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": metadata.number("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


NET = (
    "full_attention_interval",
    "nextn_predict_layers",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)
"""Keys of GGUF files that are read."""
QWEN_IMAGES = IMAGES | {"language_model_only", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
PRESET: Keys = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262_144,
}
FAMILIES = (
    Family(
        model_type="qwen3_5_text",
        models="Qwen3.5",
        transformers_class="Qwen3_5ForCausalLM",
        keys=ConfigKeys(reads=READS, only=ONLY, ignored=IGNORED),
        read=read,
        write=write,
        names=names,
        gguf=GgufForm(architecture="qwen35", reads=NET, keys=gguf_keys),
        tower=Tower(model_type="qwen3_5", text_types=("qwen3_5_text",), tied=False, ignored=QWEN_IMAGES),
        predicts_ahead=True,
        presets={"Qwen/Qwen3.5-9B": PRESET},
    ),
    Family(
        model_type="qwen3_5_moe_text",
        models="Qwen3.5",
        transformers_class="Qwen3_5MoeForCausalLM",
        keys=ConfigKeys(
            reads=READS_MOE,
            only={**ONLY, "decoder_sparse_step": (1,)},
            ignored=IGNORED | {"intermediate_size", "norm_topk_prob"},
        ),
        read=read_moe,
        write=write_moe,
        names=names_moe,
        gguf=GgufForm(
            architecture="qwen35moe",
            reads=(*NET, *MIXTURE, "expert_shared_feed_forward_length"),
            gating=1,
            keys=gguf_keys_moe,
        ),
        tower=Tower(model_type="qwen3_5_moe", text_types=("qwen3_5_moe_text",), tied=False, ignored=QWEN_IMAGES),
        predicts_ahead=True,
        presets={"Qwen/Qwen3.5-35B-A3B": PRESET},
    ),
)
