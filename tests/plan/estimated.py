"""Small settings and models that are planned."""

from collections.abc import Mapping
from typing import Any

from tiny_decoder import dense_decoder

from podium.accelerators import GIB, Accelerator
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig
from podium.plan.closed_form.estimate import PhaseEstimate, estimate, score_phase
from podium.plan.request.phase_sizes import RunSizes

CPU = Accelerator(name="cpu", generation="cpu", devices=8, hosts=1, hbm_bytes=GIB)


def decoder(**changed: Any) -> DecoderConfig:
    numbers: dict[str, Any] = {
        "model_type": "qwen2",
        "vocab": 32,
        "width": 16,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "mlp_width": 24,
        "max_positions": 4096,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "norm_eps": 1e-6,
        "tied": True,
        "qkv_bias": False,
        "qk_norm": False,
    }
    return dense_decoder(**numbers | changed)


SMALL = decoder()
QWEN_3B = decoder(
    vocab=151936, width=2048, layers=36, heads=16, kv_heads=2, head_dim=128, mlp_width=11008, qkv_bias=True
)
QWEN_7B = decoder(
    vocab=152064, width=3584, layers=28, heads=28, kv_heads=4, head_dim=128, mlp_width=18944, qkv_bias=True, tied=False
)
QWEN3_8B = decoder(
    vocab=151936, width=4096, layers=36, heads=32, kv_heads=8, head_dim=128, mlp_width=12288, qk_norm=True, tied=False
)


def config(**changed: Any) -> Config:
    settings: dict[str, Any] = {
        "model": "none",
        "tasks": [{"name": "arithmetic"}],
        "prompts_per_step": 2,
        "group_size": 8,
        "rollout": {
            "max_prompt_tokens": 8,
            "max_new_tokens": 8,
            "slots": 16,
            "prefill_rows": 8,
            "refill_steps": 2,
            "page_tokens": 16,
        },
        "train": {"rows_per_device": 2, "head_chunk_tokens": 16},
    }
    settings |= changed
    return Config.model_validate({**settings, "rollout": {"layout": "replicated", **settings["rollout"]}})


TINY: dict[str, Any] = {
    "model": "none",
    "tasks": [{"name": "arithmetic"}],
    "prompts_per_step": 4,
    "group_size": 4,
    "rollout": {"max_prompt_tokens": 32, "max_new_tokens": 8, "slots": 16, "prefill_rows": 8},
    "algorithm": {"kl": "k3", "kl_coef": 0.1},
    "train": {"rows_per_device": 1},
}


def tiny_config(*changes: Mapping[str, Any], **more: Any) -> Config:
    """TINY with changes, section by section, later ones over earlier ones."""
    settings = TINY
    for each in (*changes, more):
        merged = {key: {**settings.get(key, {}), **value} for key, value in each.items() if isinstance(value, dict)}
        settings = {**settings, **each, **merged}
    return Config.model_validate(settings)


def phase(run: RunSizes, name: str) -> PhaseEstimate:
    return {each.name: each for each in (*estimate(run), score_phase(run))}[name]
