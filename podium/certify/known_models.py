"""Checks how architectures are read from config.json and from GGUF files, against what models' cards say."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from podium.certify.check_result import Check
from podium.models.architecture import DecoderConfig
from podium.models.blocks.attention import Attention
from podium.models.blocks.experts import Experts
from podium.models.files.gguf import GgufHeader, GgufTensor
from podium.models.files.gguf_config import read_config
from podium.models.files.hf_config import from_hf_config
from podium.models.presets import PRESETS


class Facts(NamedTuple):
    """What a model's card says."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    tied: bool = False
    bias: bool = False
    norm: bool = False
    windows: tuple[int, int] | None = None
    """Positions that layers with a window see, and the number of these layers."""
    experts: tuple[int, int, bool] | None = None
    """Number of experts, how many a token is sent to, and whether the shares of these add up to 1."""


KNOWN: Mapping[str, Facts] = {
    "Qwen/Qwen2.5-0.5B-Instruct": Facts(24, 896, 14, 2, 64, theta=1e6, tied=True, bias=True),
    "Qwen/Qwen2.5-3B-Instruct": Facts(36, 2048, 16, 2, 128, theta=1e6, tied=True, bias=True),
    "Qwen/Qwen2.5-7B-Instruct": Facts(28, 3584, 28, 4, 128, theta=1e6, bias=True),
    "Qwen/Qwen3-0.6B": Facts(28, 1024, 16, 8, 128, theta=1e6, tied=True, norm=True),
    "Qwen/Qwen3-8B": Facts(36, 4096, 32, 8, 128, theta=1e6, norm=True),
    "Qwen/Qwen3-30B-A3B": Facts(48, 2048, 32, 4, 128, theta=1e6, norm=True, experts=(128, 8, True)),
    "meta-llama/Llama-3.2-1B-Instruct": Facts(16, 2048, 32, 8, 64, theta=5e5, tied=True),
    "meta-llama/Llama-3.1-8B-Instruct": Facts(32, 4096, 32, 8, 128, theta=5e5),
    "mistralai/Mistral-7B-Instruct-v0.1": Facts(32, 4096, 32, 8, 128, theta=1e4, windows=(4096, 32)),
    "mistralai/Mistral-7B-Instruct-v0.3": Facts(32, 4096, 32, 8, 128, theta=1e6),
    "openai/gpt-oss-20b": Facts(24, 2880, 64, 8, 64, theta=1.5e5, bias=True, windows=(128, 12), experts=(32, 4, True)),
    "openai/gpt-oss-120b": Facts(
        36, 2880, 64, 8, 64, theta=1.5e5, bias=True, windows=(128, 18), experts=(128, 4, True)
    ),
}
IN_GGUF: Mapping[str, float] = {
    "block_count": 3,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "context_length": 512,
    "rope.freq_base": 5e5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": 96,
}
OF_EXPERTS: Mapping[str, object] = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 48}
GGUF_FILES: Mapping[str, Facts] = {
    "llama": Facts(3, 64, 4, 2, 32, theta=5e5, tied=True),
    "qwen2": Facts(3, 64, 4, 2, 32, theta=5e5, tied=True, bias=True),
    "qwen3": Facts(3, 64, 4, 2, 32, theta=5e5, tied=True, norm=True),
    "qwen3moe": Facts(3, 64, 4, 2, 32, theta=5e5, tied=True, norm=True, experts=(8, 3, True)),
}
"""Made-up files of these architectures, with the settings of IN_GGUF, and OF_EXPERTS for mixtures."""


def architectures_check() -> Check:
    """Count the facts about models that are read wrongly."""
    wrong = sum(_wrong(from_hf_config(PRESETS[model], model), facts) for model, facts in KNOWN.items())
    wrong += sum(_wrong(_from_gguf(name, bool(facts.experts)), facts) for name, facts in GGUF_FILES.items())
    alias = from_hf_config({"model_type": "qwen3_moe", "num_local_experts": 24, "num_experts_per_tok": 5}, "alias")
    return Check(
        name="architectures",
        claim="layers, heads, windows and experts of known models are those of their cards, from config.json and GGUF",
        difference=float(wrong + ((_facts(alias).experts or ())[:2] != (24, 5))),
        bar=0,
    )


def _wrong(decoder: DecoderConfig, facts: Facts) -> int:
    return sum(found != known for found, known in zip(_facts(decoder), facts, strict=True))


def _facts(decoder: DecoderConfig) -> Facts:
    """What was read."""
    attentions = [
        (mixer, len(each.layers)) for each in decoder.places if isinstance(mixer := each.block.mixer, Attention)
    ]
    windows = [(mixer.window, number) for mixer, number in attentions if mixer.window]
    routed = [block.feed_forward for block in decoder.blocks if isinstance(block.feed_forward, Experts)]
    first = attentions[0][0]
    return Facts(
        layers=decoder.layers,
        width=decoder.width,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        theta=first.rope.theta,
        tied=decoder.tied,
        bias=first.bias,
        norm=first.norm,
        windows=(windows[0][0], sum(number for _, number in windows)) if windows else None,
        experts=(routed[0].count, routed[0].top, routed[0].normalized) if routed else None,
    )


def _from_gguf(name: str, experts: bool) -> DecoderConfig:
    """The architecture of a made-up GGUF file, whose embedding is tied."""
    settings = {**IN_GGUF, **(OF_EXPERTS if experts else {})}
    metadata = {"general.architecture": name, **{f"{name}.{key}": value for key, value in settings.items()}}
    tensors = {"token_embd.weight": GgufTensor(shape=(100, 64), type=0, offset=0)}
    return read_config(GgufHeader(path=Path("made-up.gguf"), metadata=metadata, tensors=tensors))
