"""The settings of LoRA (arXiv:2106.09685): small trained matrices beside the frozen ones of the model."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator

from podium.config.errors import Contradiction, nearest
from podium.config.section import Positive, PositiveFloat, Section

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""The matrices of a layer, any of which can have an adapter."""
TARGETS: Mapping[str, tuple[str, ...]] = {
    "all": MATRICES,
    "attention": MATRICES[:4],
    "mlp": MATRICES[4:],
    **{name: (name,) for name in MATRICES},
}
"""What `lora.targets` may name, and the matrices that it stands for."""
FULL_RATE, LORA_RATE = 1e-6, 1e-5
"""Learning rates where none is set; adapters want about ten times as much, whatever their rank
(https://thinkingmachines.ai/blog/lora/; `python -m benches.lora_rates` tries it)."""
APART_RANK = 64
"""The largest rank whose products, in `auto`, are made beside the model's at each token instead of merged into it."""

Base = Literal["bfloat16", "int8"]


class LoraConfig(Section):
    """Adapters: what they are beside, how large they are, and how the model under them is kept."""

    rank: Positive = 32
    """Inner size of the adapters. In RL small ones learn as well as large ones: an episode says little."""
    alpha: PositiveFloat = 32.0
    """What an adapter makes is multiplied by alpha / rank."""
    targets: Annotated[list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)] = ["all"]
    """Matrices that get an adapter: all, attention, mlp, or names of q, k, v, o, gate, up, down."""
    seed: int = 0
    """Seed of the adapters' first factors; the second ones begin at 0, so that the run begins with the model itself."""
    base: Base = "bfloat16"
    """How the frozen matrices of the layers are kept. int8: half the memory, a scale for each output; only where memory
    decides, as it changes the model a little."""
    rollout: Literal["auto", "apart", "merged"] = "auto"
    """How the rollout has the adapters. apart: their thin products beside the frozen model's, which is there once;
    merged: a copy of the model with the adapters added, made anew after every update, and rounded to its number format.
    auto: apart up to rank 64, or beside an int8 base."""
    adapter: str | None = None
    """Folder of an adapter in PEFT's format with which the run begins, instead of new ones."""


def contradictions(lora: LoraConfig) -> Iterator[Contradiction]:
    """What is wrong with the settings of LoRA."""
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
    if lora.base == "int8" and lora.rollout == "merged":
        rule = "merged adds the adapters to a model that is rounded to int8, and the sum would be another model"
        yield Contradiction(
            ("lora.rollout", "lora.base"), f"{rule}; set lora.rollout to apart, or lora.base to bfloat16"
        )


def with_rate(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Settings of a run as written, with the learning rate of adapters where they have `lora` and no rate."""
    train = settings.get("train", {})
    optimizer = train.get("optimizer", {}) if isinstance(train, Mapping) else None
    if not isinstance(train, Mapping) or not isinstance(optimizer, Mapping):
        return settings
    if settings.get("lora") is None or "learning_rate" in optimizer:
        return settings
    return {**settings, "train": {**train, "optimizer": {**optimizer, "learning_rate": LORA_RATE}}}
