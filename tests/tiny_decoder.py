"""The decoder of most tests: small enough to compile in a second, and with grouped heads."""

from typing import Any

from podium.models.architecture import DecoderConfig, dense_decoder


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
