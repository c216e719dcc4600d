"""The settings of LoRA (arXiv:2106.09685): small trained matrices that are added to the model's frozen ones."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator

from podium.config.errors import Contradiction, nearest
from podium.config.section import Positive, PositiveFloat, Section

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""Matrices of a dense layer that can have an adapter, and whose format `base` sets."""
EXPERTS = ("expert_gate", "expert_up", "expert_down")
"""Matrices of a mixture's experts that can have an adapter; each expert has its own."""
ADAPTABLE = (*MATRICES, *EXPERTS)
TARGETS: Mapping[str, tuple[str, ...]] = {
    "all": MATRICES,
    "attention": MATRICES[:4],
    "mlp": MATRICES[4:],
    "experts": EXPERTS,
    **{name: (name,) for name in ADAPTABLE},
}
"""The values that `lora.targets` may contain, and the matrices that each selects."""
FULL_RATE, LORA_RATE = 1e-6, 1e-5
"""Default learning rates; adapters need about ten times as much, whatever their rank
(https://thinkingmachines.ai/blog/lora/; `python -m benches.lora_rates` tests it)."""
APART_RANK = 64
"""Largest rank for which `lora.rollout: auto` computes the adapters' products at each token instead of merging the
adapters."""

Base = Literal["bfloat16", "int8", "nf4"]
NF4_BLOCK = 64
"""Numbers that share a scale in `nf4`, as in bitsandbytes."""


class LoraConfig(Section):
    """LoRA: the adapters' size and place, and the format of the frozen model."""

    rank: Positive = 32
    """Rank of the adapters. In RL, small ranks suffice: an episode carries little information."""
    alpha: PositiveFloat = 32.0  # TRL: lora_alpha
    """An adapter's output is multiplied by alpha / rank."""
    targets: Annotated[list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)] = ["all"]
    """Matrices that get an adapter: all, attention, mlp, experts, or names of q, k, v, o, gate, up, down, expert_gate,
    expert_up, expert_down. Experts get adapters only if they are named: for a mixture of experts, `all` means
    attention. Routers get none."""
    seed: int = 0
    """Seed of the adapters' first factors; the second factors start at 0, so that the run starts from the model
    itself."""
    base: Base = "bfloat16"
    """Storage format of the layers' frozen matrices, except experts, which stay bfloat16. int8: half the memory, with a
    scale per output. nf4: 0.28 of the memory, with QLoRA's 16 levels (arXiv:2305.14314) and a scale per 64 numbers. Use
    int8 or nf4 only if memory is short: both change the model, nf4 more than int8."""
    rollout: Literal["auto", "apart", "shared", "merged"] = "auto"
    """How the rollout applies the adapters. apart: as separate low-rank products; a GPU keeps a second copy of the
    frozen model, with each layer's matrices laid out for decoding. shared: the same without the second copy, which
    decodes up to three times slower on a GPU. merged: in a copy of the model with the adapters added, which is remade
    after every update and rounded to the rollout's number format. auto: apart up to rank 64, shared if base is int8 or
    nf4."""
    adapter: str | None = None  # verl: lora_adapter_path
    """Folder of an adapter in PEFT's format to start from, instead of new adapters."""


def contradictions(lora: LoraConfig) -> Iterator[Contradiction]:
    """Check the settings of LoRA."""
    if not lora.targets:
        yield Contradiction(("lora.targets",), f"an empty list: nothing would be trained; name {', '.join(TARGETS)}")
    for index, name in enumerate(lora.targets):
        if name not in TARGETS:
            near = nearest(name.removesuffix("_proj"), TARGETS)
            way_out = f"; did you mean {near}?" if near else ""
            yield Contradiction(
                (f"lora.targets.{index}", "lora.targets"),
                f"expected one of {', '.join(TARGETS)}, got {name!r}{way_out}",
            )


def with_rate(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Add LoRA's default learning rate to the settings of a config with `lora` that contain no learning rate."""
    train = settings.get("train", {})
    optimizer = train.get("optimizer", {}) if isinstance(train, Mapping) else None
    if not isinstance(train, Mapping) or not isinstance(optimizer, Mapping):
        return settings
    if "learning_rate" in optimizer:
        return settings
    return {**settings, "train": {**train, "optimizer": {**optimizer, "learning_rate": LORA_RATE}}}
