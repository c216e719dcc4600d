"""gpt-oss: sinks, windows in every other layer, biases of all products, a mixture of clamped experts. No jax."""

import dataclasses
from collections.abc import Mapping

from podium.models.architecture import DecoderConfig, ModelError
from podium.models.blocks.activation import Clamped
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block
from podium.models.family import ConfigKeys, Family, GgufForm
from podium.models.files.config_parts import (
    FULL,
    LLAMA,
    SLIDING,
    attention_of,
    attentions,
    common_keys,
    decoder_of,
    described,
    experts_of,
    full_every,
    layer_types,
    window_keys,
    window_of,
)
from podium.models.files.gguf_metadata import (
    MIXTURE,
    WINDOWS,
    YARN,
    GgufMetadata,
    has_yarn,
    layer_types_of_gguf,
    mixture_keys,
    yarn_keys,
)
from podium.models.files.model_settings import Keys, ModelSettings
from podium.models.files.rotary_keys import rotation, scaling_keys
from podium.models.files.tensor_layout import GGUF_EXPERTS, POST_ATTENTION, FileKind, Layout

KEYS = ConfigKeys(
    reads={
        **LLAMA,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    only={"attention_bias": (True,)},
    ignored=frozenset(
        {
            "decoder_sparse_step",
            "experts_per_token",
            "hidden_act",
            "initial_context_length",
            "mlp_only_layers",
            "norm_topk_prob",
        }
    ),
    aliases={"num_local_experts": "num_experts"},
    packed=("mxfp4",),
)
# One tensor holds the experts of a layer, in which gate and up alternate. In MXFP4, the numbers that share a scale come
# last, so its matrices are transposed.
OPENING = ("expert_gate", "expert_up")
OPENING_BIAS = ("expert_gate_bias", "expert_up_bias")
_EXPERTS = "model.layers.{}.mlp.experts."
_OPENING = Layout(f"{_EXPERTS}gate_up_proj", "", "DF", "D FG", lanes=OPENING, whole=True)
_OPENING_BIAS = Layout(f"{_EXPERTS}gate_up_proj_bias", "", "F", "FG", lanes=OPENING_BIAS, whole=True)
NAMES: Mapping[str, Layout] = {
    "layers.mlp_norm": POST_ATTENTION,
    "layers.o_bias": Layout("model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias", "D", "D"),
    "layers.sinks": Layout("model.layers.{}.self_attn.sinks", "blk.{}.attn_sinks.weight", "H", "H"),
    "layers.router": Layout("model.layers.{}.mlp.router.weight", "blk.{}.ffn_gate_inp.weight", "DE", "E D"),
    "layers.router_bias": Layout("model.layers.{}.mlp.router.bias", "blk.{}.ffn_gate_inp.bias", "E", "E"),
    **{f"layers.{name}": _OPENING for name in OPENING},
    **{f"layers.{name}": _OPENING_BIAS for name in OPENING_BIAS},
    "layers.expert_down": Layout(f"{_EXPERTS}down_proj", "", "FD", "F D", whole=True),
    "layers.expert_down_bias": Layout(f"{_EXPERTS}down_proj_bias", "", "D", "D", whole=True),
}
NAMES_MXFP4: Mapping[str, Layout] = {
    **{f"layers.{name}": _OPENING._replace(file="FG D") for name in OPENING},
    "layers.expert_down": NAMES["layers.expert_down"]._replace(file="D F"),
}


def names(kind: FileKind, block: Block | None) -> Mapping[str, Layout]:
    """The layouts of weights in a kind of files."""
    return {**NAMES, **(NAMES_MXFP4 if kind == "mxfp4" else GGUF_EXPERTS if kind == "gguf" else {})}


def read(settings: ModelSettings) -> DecoderConfig:
    """Make the decoder: every other layer attends to all tokens."""
    types = layer_types(settings, full_every(2, SLIDING), may_be=(FULL, SLIDING))
    attention = attention_of(settings, rotation(settings))
    experts = dataclasses.replace(
        experts_of(settings, "intermediate_size"),
        activation=Clamped(alpha=settings.real("swiglu_alpha"), limit=settings.real("swiglu_limit")),
        bias=True,
    )
    blocks = {
        each: Block(
            mixer=dataclasses.replace(
                attention, bias=True, out_bias=True, sinks=True, window=window_of(settings, each)
            ),
            feed_forward=experts,
        )
        for each in set(types)
    }
    return dataclasses.replace(decoder_of(settings, [blocks[each] for each in types]), wide_norms=True)


def write(decoder: DecoderConfig) -> Keys:
    """Make the keys of config.json: transformers uses YaRN unless `rope_scaling` says otherwise."""
    experts = described(decoder, (block.feed_forward for block in decoder.blocks), Experts)[0]
    rope, activation = attentions(decoder)[0].rope, experts.activation
    assert isinstance(activation, Clamped), f"the experts of a {decoder.model_type} are clamped"
    return {
        **common_keys(decoder),
        "hidden_act": "silu",
        "intermediate_size": experts.width,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top,
        "swiglu_alpha": activation.alpha,
        "swiglu_limit": activation.limit,
        "attention_bias": True,
        **window_keys(decoder),
        "rope_theta": rope.theta,
        "rope_scaling": scaling_keys(rope.scaling) or {"rope_type": "default"},
    }


def gguf_keys(metadata: GgufMetadata, raw: Keys) -> Keys:
    """Make the keys of config.json from a GGUF file's. That YaRN does not round its range is in no file."""
    if metadata.real("rope.freq_base_swa", base := metadata.real("rope.freq_base")) != base:
        raise ModelError(
            f"{metadata.where}: gpt-oss.rope.freq_base_swa: only one rotary base for all layers is supported"
        )
    return {
        **mixture_keys(metadata, "intermediate_size"),
        "layer_types": layer_types_of_gguf(metadata, 2),
        "sliding_window": metadata.number("attention.sliding_window"),
        "rope_scaling": {**yarn_keys(metadata), "truncate": False} if has_yarn(metadata) else {"rope_type": "default"},
    }


PRESETS: Mapping[str, Keys] = {
    "openai/gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": {},
}
FAMILIES = (
    Family(
        model_type="gpt_oss",
        models="gpt-oss",
        transformers_class="GptOssForCausalLM",
        keys=KEYS,
        read=read,
        write=write,
        names=names,
        gguf=GgufForm(
            architecture="gpt-oss",
            reads=(*MIXTURE, *WINDOWS, *YARN),
            scalings=("none", "yarn"),
            gating=3,
            keys=gguf_keys,
        ),
        presets=PRESETS,
    ),
)
