"""The decoder of most tests: small enough to compile in a second, and with grouped heads."""

from typing import Any

from podium.models.architecture import DecoderConfig, Lora
from podium.models.blocks.attention import Attention
from podium.models.blocks.kind import Block, Stack
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import Rope, RopeScaling


def dense_decoder(
    *,
    model_type: str,
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp_width: int,
    max_positions: int,
    rope_theta: float,
    rope_scaling: RopeScaling | None,
    norm_eps: float,
    tied: bool,
    qkv_bias: bool,
    qk_norm: bool,
    lora: Lora | None = None,
) -> DecoderConfig:
    """A decoder whose layers are all the same, as in Llama, Qwen2 and Qwen3."""
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=Rope(theta=rope_theta, dims=head_dim, scaling=rope_scaling),
        bias=qkv_bias,
        norm=qk_norm,
    )
    block = Block(mixer=attention, feed_forward=Mlp(width=mlp_width))
    return DecoderConfig(
        model_type=model_type,
        vocab=vocab,
        width=width,
        stacks=(Stack(pattern=(block,), repeats=layers),),
        max_positions=max_positions,
        norm_eps=norm_eps,
        tied=tied,
        lora=lora,
    )


def tiny(**changed: Any) -> DecoderConfig:
    """The decoder with other numbers."""
    numbers: dict[str, Any] = {
        "model_type": "llama",
        "vocab": 300,
        "width": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "mlp_width": 48,
        "max_positions": 256,
        "rope_theta": 1e3,
        "rope_scaling": None,
        "norm_eps": 1e-5,
        "tied": True,
        "qkv_bias": False,
        "qk_norm": False,
    }
    return dense_decoder(**numbers | changed)


DECODER = tiny()
