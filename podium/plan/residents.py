"""What stays on a device from one program of a run to the next, in bytes by what it is. No jax."""

import math

from podium.models.architecture import DecoderConfig
from podium.models.params import frozen_dtype, frozen_specs, param_specs
from podium.plan.sizes import F32, RunSizes, local_count, offloaded_bytes, optimizer_bytes, rollout_bytes

Parts = dict[str, int]


def frozen_bytes(run: RunSizes) -> int:
    """Bytes of the frozen weights that a device stores in training; none where all weights are trained."""
    sizes = {"bfloat16": 2, "int8": 1, "float32": F32}
    return sum(
        sizes[frozen_dtype(name, run.decoder)] * local_count(spec, run.train_parts)
        for name, spec in frozen_specs(run.decoder).items()
    )


def shares_frozen(run: RunSizes) -> bool:
    """Whether the rollout reads the trainer's frozen weights where they are: both have all of them, in bfloat16."""
    lora, specs = run.decoder.lora, frozen_specs(run.decoder)
    if lora is None or lora.merged or run.rollout_activation == F32:
        return False
    layouts = (run.train_parts, run.rollout_parts)
    return all(local_count(spec, parts) == math.prod(spec.shape) for parts in layouts for spec in specs.values())


def kept_bytes(run: RunSizes) -> int:
    """Bytes of the rollout's own copy of frozen weights, which it keeps while the others are updated."""
    lora = run.decoder.lora
    own = lora is not None and not lora.merged and not shares_frozen(run)
    return rollout_bytes(run, frozen_specs(run.decoder)) if own else 0


def trainers(run: RunSizes) -> Parts:
    """What the trainer holds on a device through every phase."""
    parts = {"parameters": F32 * run.own_count, "optimizer": optimizer_bytes(run) - offloaded_bytes(run)}
    if run.decoder.lora is not None:
        parts["frozen_weights"] = frozen_bytes(run)
    return parts | scorers(run)


def scorers(run: RunSizes) -> Parts:
    """Weights of models that score batches and are not the trainer's own, each counted from its own decoder.

    A scorer that the recipe names by import path loads weights that the planner does not know; it is not counted.
    """
    own = {"reference_weights": run.decoder} if run.spec.recipe.needs_reference and run.decoder.lora is None else {}
    return {name: scorer_bytes(run, decoder) for name, decoder in own.items()}  # under LoRA the reference is frozen


def scorer_bytes(run: RunSizes, decoder: DecoderConfig) -> int:
    """Bytes on a device of a scorer's float32 weights, stored as the trainer's are."""
    return F32 * sum(local_count(spec, run.train_parts) for spec in param_specs(decoder).values())


def residents(run: RunSizes) -> Parts:
    """What stays on a device between an update and the next: the rollout's weights too, which the update is without.

    Frozen ones count once where trainer and rollout have the same.
    """
    shared = frozen_bytes(run) if shares_frozen(run) else 0
    return trainers(run) | {"rollout_weights": run.rollout_weight_bytes - shared}


def in_updates(run: RunSizes) -> Parts:
    """What stays during an update: the trainer's arrays, and the rollout's frozen weights."""
    return trainers(run) | ({"rollout_weights": kept_bytes(run)} if kept_bytes(run) else {})
