"""One declaration per weight, and the tables from logical axes to mesh axes. Data alone: no jax.

Initialisation, sharding, names in files, checkpoints and the planner's abstract arrays are readings of `param_specs`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from podium.config.lora import MATRICES
from podium.models.architecture import LAYERS, DecoderConfig, Lora
from podium.models.blocks.spec import ParamSpec, ParamSpecs, matrix_outputs, stacked

LORA_A = ".lora_a"
LORA_B = ".lora_b"
SCALE = ".scale"
"""Endings of names: a matrix's two adapter factors, and the scales of its outputs if it is int8."""
_PREFIX = re.compile(rf"^{re.escape(LAYERS)}(\d+\.)?")
VOCAB_BLOCK = 128
"""Tokens that are drawn from together (`podium.rollout.sampling`); a vocabulary is split between blocks."""
MeshAxes = str | tuple[str, ...] | None
Dtype = TypeVar("Dtype")
"""A number format, as numpy has it or by its name."""


# Training: float32 master weights and optimizer state split over fsdp and sp (and tp); rows over dp and fsdp, and the
# tokens of each row over sp. An activation whose width is split as the weights' is has its rows over the axes that are
# left, "batch_by_width", and its tokens whole. From there it gets its rows first, with a part of the width that is in
# one piece as sp is the outer of the two, "width_of_rows"; then its tokens. "pieces" are a device's part of the batch.
TRAIN_AXES: Mapping[str, MeshAxes] = {
    "batch": ("dp", "fsdp"),
    "batch_by_width": "dp",
    "tokens": "sp",
    "pieces": ("dp", "fsdp", "sp"),
    "vocab": "tp",
    "width": ("sp", "fsdp"),
    "width_of_rows": "sp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
}
# While a layer computes, its weights are whole but for tp: "gathered" is what the layer asks for.
GATHERED_AXES: Mapping[str, MeshAxes] = {
    **TRAIN_AXES,
    "batch_by_width": ("dp", "fsdp"),
    "tokens_by_width": "sp",
    "width": None,
    "width_of_rows": None,
}
# Rollout: every device holds all weights and its own share of the sequences.
ROLLOUT_AXES: Mapping[str, MeshAxes] = {"batch": ("dp", "fsdp", "tp"), "batch_by_width": ("dp", "fsdp", "tp")}
# Rollout in groups of devices (dp counts them) that hold one copy of the weights between them. A group's rows are with
# all of its devices while they meet weights ("rows"). Key/value heads are split over tp as far as they go; over the
# rest of a group, fsdp, each head is split while it is projected, and its sequences while they attend ("batch"): no
# device repeats another's attention. Logits are drawn from where they are, split by the vocabulary.
GROUP_AXES: Mapping[str, MeshAxes] = {
    "batch": ("dp", "fsdp"),
    "rows": "dp",
    "batch_by_width": "dp",
    "vocab": ("tp", "fsdp"),
    "logits": ("tp", "fsdp"),
    "heads": "tp",
    "kv_heads": "tp",
    "cache_heads": "tp",
    "head_dim": "fsdp",
    "mlp": ("tp", "fsdp"),
}
# The two layouts of the seed decode from weights split as in training. With the sequences over all devices
# (legacy), the weights of each layer come over the interconnect for every token; with the sequences over dp alone
# (maxtext), every device of a dp group does all its attention, and sums over the split width come instead.
ROLLOUT_LAYOUTS: dict[str, Mapping[str, MeshAxes]] = {
    "replicated": ROLLOUT_AXES,
    "tensor": GROUP_AXES,
    "hybrid": GROUP_AXES,
    "legacy": {**TRAIN_AXES, "batch": ("dp", "fsdp", "tp"), "batch_by_width": ("dp", "tp")},
    "maxtext": {**TRAIN_AXES, "batch": "dp"},
}


def param_specs(config: DecoderConfig) -> ParamSpecs:
    """All weights of the decoder; the layers of one place in the pattern are stacked on a first dimension [L, ...]."""
    D, V = config.width, config.vocab
    std, out_std = 0.02, 0.02 / math.sqrt(2 * config.layers)  # GPT-2's: residual branches start small
    specs = {"embed": ParamSpec((V, D), ("vocab", "width"), std)}
    for place in config.places:
        one_layer = place.block.specs(D, std=std, out_std=out_std)
        if config.lora is not None:
            one_layer |= _lora_specs(one_layer, config.lora)
        specs |= {place.prefix + name: stacked(spec, len(place.layers)) for name, spec in one_layer.items()}
    specs["final_norm"] = ParamSpec((D,), (None,), 0.0, 1.0)
    if not config.tied:
        specs["head"] = ParamSpec((V, D), ("vocab", "width"), std)
    return specs


def _lora_specs(layer: ParamSpecs, lora: Lora) -> ParamSpecs:
    """What LoRA adds to a layer: two factors beside each target, and scales where the matrices are int8.

    The first factor is split as the matrix's inputs are, the second as its outputs; the second begins at 0. Each matrix
    of a stack has factors of its own.
    """
    found = {}
    for name in (name for name in MATRICES if name in layer):
        spec = layer[name]
        shape = spec.shape
        axes = spec.axes
        lead = spec.stacked
        first = matrix_outputs(spec)
        if name in lora.targets:
            std = 1 / math.sqrt(math.prod(shape[lead:first]))
            found[name + LORA_A] = ParamSpec((*shape[:first], lora.rank), (*axes[:first], "rank"), std, stacked=lead)
            found[name + LORA_B] = ParamSpec(
                (*shape[:lead], lora.rank, *shape[first:]), (*axes[:lead], "rank", *axes[first:]), 0.0, stacked=lead
            )
        if lora.base == "int8":
            found[name + SCALE] = ParamSpec(
                (*shape[:lead], *shape[first:]), (*axes[:lead], *axes[first:]), 0.0, 1.0, stacked=lead
            )
    return found


def own_name(name: str) -> str:
    """A layer's weight by the name that its kind gives it: `layers.q` and `layers.3.q` are `q`."""
    return _PREFIX.sub("", name)


def is_adapter(name: str) -> bool:
    """Whether a parameter is a factor of an adapter."""
    return name.endswith((LORA_A, LORA_B))


def trained_specs(config: DecoderConfig) -> ParamSpecs:
    """The weights that updates change: all, or with LoRA the adapters."""
    return {name: spec for name, spec in param_specs(config).items() if config.lora is None or is_adapter(name)}


def frozen_specs(config: DecoderConfig) -> ParamSpecs:
    """The weights that no update changes: none, or with LoRA the model's own."""
    return {name: spec for name, spec in param_specs(config).items() if config.lora and not is_adapter(name)}


def count(specs: ParamSpecs) -> int:
    """Numbers of all these weights."""
    return sum(math.prod(spec.shape) for spec in specs.values())


def frozen_dtype(name: str, config: DecoderConfig) -> str:
    """The number format in which a frozen weight is kept."""
    if config.lora is None or config.lora.base == "bfloat16":
        return "bfloat16"
    return "float32" if name.endswith(SCALE) else "int8" if own_name(name) in MATRICES else "bfloat16"


def rollout_dtype(name: str, config: DecoderConfig, dtype: Dtype) -> Dtype | str:
    """The number format in which the rollout has a weight: `dtype`, but for int8 and its scales."""
    if config.lora is None or config.lora.base == "bfloat16":
        return dtype
    kept = frozen_dtype(name, config)
    return dtype if kept == "bfloat16" else kept


def rollout_specs(config: DecoderConfig, parts: int) -> ParamSpecs:
    """The weights as the rollout has them: the vocabulary padded to whole blocks where it is split into `parts`.

    Adapters are among them unless the rollout has them merged.
    """
    block = VOCAB_BLOCK * parts if parts > 1 else 1
    lora = None if config.lora and config.lora.merged else config.lora
    return param_specs(dataclasses.replace(config, vocab=-(-config.vocab // block) * block, lora=lora))


def axis_parts(axes: Mapping[str, MeshAxes], mesh: Mapping[str, int]) -> dict[str, int]:
    """Into how many parts each logical axis is split on a mesh of these sizes."""
    return {axis: math.prod(mesh[name] for name in mesh_axis_names(names)) for axis, names in axes.items()}


def mesh_axis_names(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes that split a logical axis, as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def indivisible(specs: ParamSpecs, parts: Callable[[str], int]) -> Iterator[tuple[str, str, int]]:
    """Each dimension that its logical axis, split in `parts(axis)`, does not split evenly: parameter, axis and size."""
    for name, spec in specs.items():
        for dim, axis in zip(spec.shape, spec.axes, strict=True):
            if axis is not None and dim % parts(axis):
                yield name, axis, dim
