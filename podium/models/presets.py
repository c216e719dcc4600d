"""The numbers of models that configs often name, so that a run can be planned without the model or a network.

Each is what the model's own config.json says on the Hugging Face hub; their parameters add up to what their makers
publish (a test counts them). No jax. Weights come from `podium.models.source` alone.
"""

from collections.abc import Mapping
from typing import Any

from podium.models.architecture import DecoderConfig, ModelError, RopeScaling, from_hf_config
from podium.models.source import from_hub, on_disk, read_architecture, read_json, resolve

_QWEN25: Mapping[str, Any] = {
    "model_type": "qwen2",
    "vocab": 151936,
    "kv_heads": 2,
    "max_positions": 32768,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "norm_eps": 1e-6,
    "tied": True,
    "qkv_bias": True,
    "qk_norm": False,
}
_QWEN3: Mapping[str, Any] = {
    **_QWEN25,
    "model_type": "qwen3",
    "kv_heads": 8,
    "head_dim": 128,
    "max_positions": 40960,
    "qkv_bias": False,
    "qk_norm": True,
}
_LLAMA3: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab": 128256,
    "kv_heads": 8,
    "max_positions": 131072,
    "rope_theta": 5e5,
    "norm_eps": 1e-5,
    "qkv_bias": False,
    "qk_norm": False,
}


def _stretched(factor: float) -> RopeScaling:
    return RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


PRESETS: Mapping[str, DecoderConfig] = {
    "Qwen/Qwen2.5-0.5B-Instruct": DecoderConfig(**_QWEN25, width=896, layers=24, heads=14, head_dim=64, mlp_width=4864),
    "Qwen/Qwen2.5-1.5B-Instruct": DecoderConfig(
        **_QWEN25, width=1536, layers=28, heads=12, head_dim=128, mlp_width=8960
    ),
    "Qwen/Qwen2.5-3B-Instruct": DecoderConfig(
        **_QWEN25, width=2048, layers=36, heads=16, head_dim=128, mlp_width=11008
    ),
    "Qwen/Qwen2.5-7B-Instruct": DecoderConfig(
        **{**_QWEN25, "vocab": 152064, "kv_heads": 4, "tied": False},
        width=3584,
        layers=28,
        heads=28,
        head_dim=128,
        mlp_width=18944,
    ),
    "Qwen/Qwen3-0.6B": DecoderConfig(**_QWEN3, width=1024, layers=28, heads=16, mlp_width=3072),
    "Qwen/Qwen3-1.7B": DecoderConfig(**_QWEN3, width=2048, layers=28, heads=16, mlp_width=6144),
    "Qwen/Qwen3-4B": DecoderConfig(**_QWEN3, width=2560, layers=36, heads=32, mlp_width=9728),
    "Qwen/Qwen3-8B": DecoderConfig(**{**_QWEN3, "tied": False}, width=4096, layers=36, heads=32, mlp_width=12288),
    "meta-llama/Llama-3.2-1B-Instruct": DecoderConfig(
        **_LLAMA3,
        rope_scaling=_stretched(32.0),
        tied=True,
        width=2048,
        layers=16,
        heads=32,
        head_dim=64,
        mlp_width=8192,
    ),
    "meta-llama/Llama-3.2-3B-Instruct": DecoderConfig(
        **_LLAMA3,
        rope_scaling=_stretched(32.0),
        tied=True,
        width=3072,
        layers=28,
        heads=24,
        head_dim=128,
        mlp_width=8192,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": DecoderConfig(
        **_LLAMA3,
        rope_scaling=_stretched(8.0),
        tied=False,
        width=4096,
        layers=32,
        heads=32,
        head_dim=128,
        mlp_width=14336,
    ),
}
"""By hub id."""


def find_architecture(model: str) -> DecoderConfig:
    """The decoder that `model:` of a config names, without its weights.

    From this machine's disk, else from `PRESETS`, else from the hub, of which one small file is asked for.

    Raises:
        ModelError: it is in none of them, or has a part that Podium does not compute.
    """
    if (folder := on_disk(model)) is not None:
        return read_architecture(resolve(folder))
    if model in PRESETS:
        return PRESETS[model]
    try:
        folder = from_hub(model, ["config.json"])
    except ModelError as error:
        raise ModelError(
            f"{error}; its config.json is enough for a plan, and these models are known without: {', '.join(PRESETS)}"
        ) from error
    path = folder / "config.json"
    return from_hf_config(read_json(path), str(path))
