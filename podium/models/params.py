"""One declaration per weight, and tables from logical axes to mesh axes. Plain data, no jax.

Initialisation, sharding, file names, checkpoints and the planner's abstract arrays all derive from `param_specs`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from podium.config.lora import ADAPTABLE, MATRICES, NF4_BLOCK
from podium.models.architecture import LAYERS, DecoderConfig, Lora, ModelError, rollout_decoder
from podium.models.blocks.kind import Place
from podium.models.blocks.spec import ParamSpec, ParamSpecs, matrix_outputs, stacked

LORA_A = ".lora_a"
LORA_B = ".lora_b"
SCALE = ".scale"
"""Name suffixes: a matrix's two adapter factors, and its scales if it is stored in fewer bits than bfloat16."""
NF4_CODES = "uint8"
"""The number format of nf4's codes; each byte holds two codes."""
JOIN = "+"
"""Separates the names of matrices that are stored side by side, as in `q+k+v`."""
_PREFIX = re.compile(rf"^{re.escape(LAYERS)}(\d+\.)?")
VOCAB_BLOCK = 128
"""Vocabulary tokens per block of the sampler (`podium.rollout.sampling`); devices split the vocabulary into whole
blocks."""
MeshAxes = str | tuple[str, ...] | None
Dtype = TypeVar("Dtype")
"""A number format: a numpy dtype or its name."""
Stacked = TypeVar("Stacked")


# Training: float32 weights and optimizer state are split over fsdp and sp (and tp), rows over dp and fsdp, and the
# tokens of each row over sp. An activation with the weights' split of the width has its rows over the remaining axes
# ("batch_by_width") and its tokens whole. From there, its rows are split first, with sp's part of the width left in one
# piece because sp is the outer axis ("width_of_rows"), then its tokens. "pieces" is a device's part of the batch.
# Heads of recurrent layers are split over tp in weights ("delta_heads"); a recurrence needs whole rows, so there they
# are split over sp too ("state_heads").
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
    "delta_heads": "tp",
    "state_heads": ("tp", "sp"),
    "experts": "fsdp",
    "expert_width": "sp",
    "expert_mlp": "tp",
}
# During a layer's computation, its weights are split only over tp: the layer asks for the axes "gathered".
GATHERED_AXES: Mapping[str, MeshAxes] = {
    **TRAIN_AXES,
    "batch_by_width": ("dp", "fsdp"),
    "tokens_by_width": "sp",
    "width": None,
    "width_of_rows": None,
    "experts": None,
    "expert_width": None,
}
# Rollout, replicated: every device holds all weights and its own share of the sequences.
ROLLOUT_AXES: Mapping[str, MeshAxes] = {"batch": ("dp", "fsdp", "tp"), "batch_by_width": ("dp", "fsdp", "tp")}
# Rollout in groups of devices (counted by dp) that share one copy of the weights. A group's rows are on all its devices
# for products with weights ("rows"). tp splits key/value heads as far as possible. Over the rest of a group, fsdp, each
# head is split for its projection, and sequences for attention ("batch"), so no device repeats another's attention.
# Sampling uses the logits in place, split by vocabulary.
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
    "delta_heads": ("tp", "fsdp"),
    "state_heads": "tp",
    "experts": ("fsdp", "tp"),  # the order of training, so that a device keeps the experts that it stores
}
# The seed system's two layouts decode from weights split as in training. With sequences over all devices (legacy), each
# layer's weights are gathered for every token; with sequences only over dp (maxtext), all devices of a dp group compute
# the same attention, and products over the split width are summed instead.
ROLLOUT_LAYOUTS: dict[str, Mapping[str, MeshAxes]] = {
    "replicated": ROLLOUT_AXES,
    "tensor": GROUP_AXES,
    "hybrid": GROUP_AXES,
    "legacy": {**TRAIN_AXES, "batch": ("dp", "fsdp", "tp"), "batch_by_width": ("dp", "tp")},
    "maxtext": {**TRAIN_AXES, "batch": "dp"},
}


@functools.lru_cache(maxsize=256)
def param_specs(config: DecoderConfig) -> ParamSpecs:
    """All weights of the decoder; layers at one place in the pattern are stacked along a first dimension [L, ...]."""
    D, V = config.width, config.vocab
    std, out_std = 0.02, 0.02 / math.sqrt(2 * config.layers)  # as in GPT-2: residual branches start small
    specs = {"embed": ParamSpec((V, D), ("vocab", "width"), std)}
    for place in config.places:
        one_layer = place.block.specs(D, std=std, out_std=out_std)
        one_layer = {name: _shifted(name, spec, config.norm_offset) for name, spec in one_layer.items()}
        groups = joined_groups(one_layer, config)
        if config.lora is not None:
            one_layer |= _lora_specs(one_layer, config.lora)
        one_layer = _side_by_side(one_layer, groups)
        specs |= {place.prefix + name: stacked(spec, len(place.layers)) for name, spec in one_layer.items()}
    specs["final_norm"] = _shifted("final_norm", ParamSpec((D,), (None,), 0.0, 1.0), config.norm_offset)
    if config.scores != "none":  # near 0, as in OpenRLHF: new scores do not disturb the first updates
        specs["score"] = ParamSpec((1, D), (None, "width"), 1 / (D + 1))
        if config.scores == "biased":
            specs["score_bias"] = ParamSpec((1,), (None,), 0.0)
    elif not config.tied:
        specs["head"] = ParamSpec((V, D), ("vocab", "width"), std)
    return specs


def _shifted(name: str, spec: ParamSpec, offset: float) -> ParamSpec:
    """Lower a norm scale's initial value by the offset that the decoder adds to it; other weights are unchanged."""
    return spec._replace(mean=spec.mean - offset) if name.endswith("_norm") else spec


def _lora_specs(layer: ParamSpecs, lora: Lora) -> ParamSpecs:
    """LoRA's part of a layer: two factors per target matrix, and codes and scales if matrices are stored in fewer bits.

    The first factor is split like the matrix's inputs, the second like its outputs; the second starts at 0. Each matrix
    of a stack has its own factors.
    """
    found: dict[str, ParamSpec] = {}
    for name in (name for name in ADAPTABLE if name in layer):
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
        if lora.base == "int8" and name in MATRICES:
            found[name + SCALE] = ParamSpec(
                (*shape[:lead], *shape[first:]), (*axes[:lead], *axes[first:]), 0.0, 1.0, stacked=lead
            )
        if lora.base == "nf4" and name in MATRICES:
            found |= _nf4_specs(name, spec)
    return found


def _nf4_specs(name: str, spec: ParamSpec) -> ParamSpecs:
    """The codes [..., in / 2, out...] of a matrix, two in a byte, and the scale [..., in / 64, out...] of each block.

    A block is 64 neighbours along the last input dimension. Raises ModelError if that is not a multiple of 64.
    """
    dim = matrix_outputs(spec) - 1
    size = spec.shape[dim]
    if size % NF4_BLOCK:
        raise ModelError(
            f"{name}: nf4 stores blocks of {NF4_BLOCK} numbers along a matrix's inputs, and this model has {size}"
            " there; set base to int8 or bfloat16"
        )
    return {
        name: spec._replace(shape=_with_size(spec.shape, dim, size // 2)),
        name + SCALE: spec._replace(shape=_with_size(spec.shape, dim, size // NF4_BLOCK), std=0.0, mean=1.0),
    }


class Group(NamedTuple):
    """Matrices of a layer that are stored side by side, as one."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Size of each matrix along the first output dimension, along which they are stored side by side."""
    outputs: int
    """Number of output dimensions: that dimension and those after it; also of scales and second factors."""
    axis: str | None
    """The logical axis of the dimension along which they are stored side by side."""

    @property
    def whole(self) -> str:
        """The name under which they are stored."""
        return JOIN.join(self.names)


def joined_groups(layer: ParamSpecs, config: DecoderConfig) -> tuple[Group, ...]:
    """The groups of a layer's matrices that the decoder stores side by side, if it is `joined`.

    Matrices of different number formats are stored apart.
    """
    members: dict[str, list[str]] = {}
    for name, spec in layer.items() if config.joined else ():
        if spec.group is not None:
            members.setdefault(spec.group, []).append(name)
    found: list[Group] = []
    for names in members.values():
        if len({frozen_dtype(name, config) for name in names}) == 1:
            first = layer[names[0]]
            dim = matrix_outputs(first)
            others = {_widened(layer[name], dim, 0).shape for name in names}
            assert len(others) == 1, f"{names} have one group, and differ in more than their first output dimension"
            sizes = tuple(layer[name].shape[dim] for name in names)
            found.append(Group(tuple(names), sizes, len(first.shape) - dim, first.axes[dim]))
    return tuple(found)


def _side_by_side(layer: ParamSpecs, groups: Sequence[Group]) -> ParamSpecs:
    """A layer's weights, with each group joined into one weight.

    The adapters of a group become one adapter of the joined matrix: the first factors lie side by side too, and the
    second factors form a block-diagonal matrix.
    """
    found = dict(layer)
    for group in groups:
        own = [found.pop(name) for name in group.names]
        found[group.whole] = _whole(own[0], group)
        factors = [found.pop(name + LORA_A) for name in group.names if name + LORA_A in layer]
        seconds = [found.pop(name + LORA_B) for name in group.names if name + LORA_B in layer]
        scales = [found.pop(name + SCALE) for name in group.names if name + SCALE in layer]
        if factors:
            rank = sum(spec.shape[-1] for spec in factors)
            found[group.whole + LORA_A] = _widened(factors[0], len(factors[0].shape) - 1, rank)
            found[group.whole + LORA_B] = _whole(_widened(seconds[0], 0, rank), group)
        if scales:
            found[group.whole + SCALE] = _whole(scales[0], group)
    return found


def _whole(spec: ParamSpec, group: Group) -> ParamSpec:
    """The spec of one of a group's weights, with the outputs of the whole group."""
    return _widened(spec, len(spec.shape) - group.outputs, sum(group.sizes))


def _widened(spec: ParamSpec, dim: int, size: int) -> ParamSpec:
    """The spec with another size of one dimension."""
    return spec._replace(shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """The shape with another size of dimension `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def own_name(name: str) -> str:
    """A layer weight's name within its kind: `layers.q` and `layers.3.q` are `q`."""
    return _PREFIX.sub("", name)


def place_weights(params: Mapping[str, Stacked], place: Place) -> dict[str, Stacked]:
    """The stacked weights of the layers at a place, under the names of their kinds."""
    return {name.removeprefix(place.prefix): x for name, x in params.items() if name.startswith(place.prefix)}


def is_adapter(name: str) -> bool:
    """Whether a parameter is a factor of an adapter."""
    return name.endswith((LORA_A, LORA_B))


def trained_specs(config: DecoderConfig) -> ParamSpecs:
    """The weights that updates change: all of them, or with LoRA only the adapters."""
    return {name: spec for name, spec in param_specs(config).items() if config.lora is None or is_adapter(name)}


def frozen_specs(config: DecoderConfig) -> ParamSpecs:
    """The weights that never change: none, or with LoRA the model's own."""
    return {name: spec for name, spec in param_specs(config).items() if config.lora and not is_adapter(name)}


def count(specs: ParamSpecs) -> int:
    """Total number of elements of these weights."""
    return sum(math.prod(spec.shape) for spec in specs.values())


def frozen_dtype(name: str, config: DecoderConfig) -> str:
    """The number format in which a frozen weight is stored."""
    if config.lora is None or config.lora.base == "bfloat16":
        return "bfloat16"
    if name.endswith(SCALE):
        return "float32"
    codes = "int8" if config.lora.base == "int8" else NF4_CODES
    return codes if all(part in MATRICES for part in own_name(name).split(JOIN)) else "bfloat16"


def rollout_dtype(name: str, config: DecoderConfig, dtype: Dtype) -> Dtype | str:
    """The number format of a weight in the rollout: `dtype`, except for matrices kept as codes, and their scales."""
    kept = frozen_dtype(name, rollout_decoder(config))
    return dtype if kept == "bfloat16" else kept


def rollout_specs(config: DecoderConfig, parts: int) -> ParamSpecs:
    """The rollout's weights; if the vocabulary is split into `parts`, it is padded to whole blocks.

    Includes adapters unless the rollout merges them.
    """
    block = VOCAB_BLOCK * parts if parts > 1 else 1
    return param_specs(dataclasses.replace(rollout_decoder(config), vocab=-(-config.vocab // block) * block))


def axis_parts(axes: Mapping[str, MeshAxes], mesh: Mapping[str, int]) -> dict[str, int]:
    """Number of parts into which each logical axis is split on a mesh of these sizes."""
    return {axis: math.prod(mesh[name] for name in mesh_axis_names(names)) for axis, names in axes.items()}


def mesh_axis_names(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes that split a logical axis, as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def indivisible(specs: ParamSpecs, parts: Callable[[str], int]) -> Iterator[tuple[str, str, int]]:
    """Yield (parameter, axis, size) for each dimension that `parts(axis)` does not divide."""
    for name, spec in specs.items():
        for dim, axis in zip(spec.shape, spec.axes, strict=True):
            if axis is not None and dim % parts(axis):
                yield name, axis, dim
