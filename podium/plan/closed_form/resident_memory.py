"""The bytes that stay on a device between the programs of a run, by kind of array. No jax."""

import collections
import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from podium.models.params import frozen_dtype, frozen_specs, is_adapter, rollout_dtype, rollout_specs
from podium.plan.request.phase_sizes import (
    F32,
    ITEMSIZES,
    RunSizes,
    local_count,
    offloaded_bytes,
    optimizer_bytes,
    rollout_bytes,
)

Parts = dict[str, int]
Stage = Literal["sync", "rollout", "update"]
"""Parts of a step. sync: new weights for the rollout; rollout: with grading by models; update: with scoring."""
STEP: tuple[Stage, ...] = ("sync", "rollout", "update")


class Resident(NamedTuple):
    """Arrays that stay on a device between programs."""

    name: str
    """The kind of array."""
    bytes: int
    stages: tuple[Stage, ...] = STEP
    """The stages in which the arrays exist."""


def held(table: Iterable[Resident], stage: Stage, arguments: Mapping[str, int] | None = None) -> Parts:
    """Bytes by kind that stay on a device in a stage, without those among a program's `arguments` (bytes by kind)."""
    found: collections.Counter[str] = collections.Counter()
    for name, size, stages in table:
        if stage in stages:
            found[name] += size
    found.subtract(arguments or {})
    return dict(found)


def frozen_bytes(run: RunSizes) -> int:
    """Bytes of frozen weights that a device stores in training; 0 if all weights are trained."""
    return sum(
        ITEMSIZES[frozen_dtype(name, run.decoder)] * local_count(spec, run.train_parts)
        for name, spec in frozen_specs(run.decoder).items()
    )


def shares_frozen(run: RunSizes) -> bool:
    """Whether the rollout reads the trainer's frozen weights directly: both hold all of them, in one format."""
    lora, specs = run.decoder.lora, frozen_specs(run.decoder)
    if lora is None or lora.merged or run.rollout_activation == F32 or (run.platform == "gpu" and not lora.shared):
        return False
    if any(rollout_dtype(name, run.decoder, "bfloat16") != frozen_dtype(name, run.decoder) for name in specs):
        return False
    layouts = (run.train_parts, run.rollout_parts)
    return all(local_count(spec, parts) == math.prod(spec.shape) for parts in layouts for spec in specs.values())


def kept_bytes(run: RunSizes) -> int:
    """Bytes of the rollout's own copy of frozen weights, which it keeps during updates."""
    lora = run.decoder.lora
    own = lora is not None and not lora.merged and not shares_frozen(run)
    specs = {name: spec for name, spec in rollout_specs(run.decoder, 1).items() if not is_adapter(name)}
    return rollout_bytes(run, specs) if own else 0


def residents(run: RunSizes, stage: Stage) -> Parts:
    """Bytes that stay on a device in a stage, by kind, by the closed form.

    Frozen weights that trainer and rollout share count once, as the trainer's.
    """
    lora, kept = run.decoder.lora, kept_bytes(run)
    shared = frozen_bytes(run) if shares_frozen(run) else 0
    table = [
        Resident("parameters", F32 * run.own_count),
        Resident("optimizer", optimizer_bytes(run) - offloaded_bytes(run)),
        *([] if lora is None else [Resident("frozen_weights", frozen_bytes(run))]),
        *(Resident(name, size) for name, size in scorers(run).items()),
        Resident("rollout_weights", run.rollout_weight_bytes - shared, ("sync", "rollout")),
        *([Resident("rollout_weights", kept, ("update",))] if kept else []),
        Resident("kv_cache", run.cache_bytes, ("rollout",)),
    ]
    return held(table, stage)


def scorers(run: RunSizes) -> Parts:
    """Bytes by kind of the models other than the policy, by their decoders; including the optimizer's state if trained.

    A scorer given by import path is not counted, because the planner does not know its weights.
    """
    found: collections.Counter[str] = collections.Counter()
    for role in run.spec.roles.values():
        if role.weights == "policy_base":  # already counted, as the policy's
            continue
        own = run.of(role)
        found[f"{role.kind}_weights"] += frozen_bytes(own) + F32 * own.own_count
        if role.learning is not None:
            found[f"{role.kind}_optimizer"] += optimizer_bytes(own) - offloaded_bytes(own)
    return dict(found)
