"""One declaration per weight, and the tables from logical axes to mesh axes. Data alone: no jax.

Initialisation, sharding, names in files, checkpoints and the planner's abstract arrays are readings of `param_specs`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from podium.models.architecture import DecoderConfig

LAYERS = "layers."
MeshAxes = str | tuple[str, ...] | None


class ParamSpec(NamedTuple):
    """One weight: its shape, the logical axis of each dimension, and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # looked up in ShardingRules
    std: float  # of the initial normal; 0: constant
    mean: float = 0.0


ParamSpecs = dict[str, ParamSpec]

# Training: float32 master weights and optimizer state split over fsdp (and tp); the batch over dp and fsdp.
# An activation whose width is split as the weights' is has its batch over the axes that are left: "batch_by_width".
TRAIN_AXES: Mapping[str, MeshAxes] = {
    "batch": ("dp", "fsdp"),
    "batch_by_width": "dp",
    "vocab": "tp",
    "width": "fsdp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
}
# While a layer computes, its weights are whole but for tp: "gathered" is what the layer asks for.
GATHERED_AXES: Mapping[str, MeshAxes] = {**TRAIN_AXES, "batch_by_width": ("dp", "fsdp"), "width": None}
# Rollout: every device holds all weights and its own share of the sequences.
ROLLOUT_AXES: Mapping[str, MeshAxes] = {"batch": ("dp", "fsdp", "tp"), "batch_by_width": ("dp", "fsdp", "tp")}
# The two layouts of the seed system decode from weights split as in training. With the sequences over all devices
# (legacy), the weights of each layer come over the interconnect for every token; with the sequences over dp alone
# (maxtext), every device of a dp group does all its attention, and sums over the split width come instead.
ROLLOUT_LAYOUTS: Mapping[str, Mapping[str, MeshAxes]] = {
    "replicated": ROLLOUT_AXES,
    "legacy": {**TRAIN_AXES, "batch": ("dp", "fsdp", "tp"), "batch_by_width": ("dp", "tp")},
    "maxtext": {**TRAIN_AXES, "batch": "dp"},
}


def param_specs(config: DecoderConfig) -> ParamSpecs:
    """All weights of the decoder; those of the layers are stacked on a first dimension [L, ...]."""
    D, F, Q, V = config.width, config.mlp_width, config.head_dim, config.vocab
    H, K = config.heads, config.kv_heads
    std, out_std = 0.02, 0.02 / math.sqrt(2 * config.layers)  # GPT-2's: residual branches start small
    one_layer = {
        "attention_norm": ParamSpec((D,), (None,), 0.0, 1.0),
        "q": ParamSpec((D, H, Q), ("width", "heads", None), std),
        "k": ParamSpec((D, K, Q), ("width", "kv_heads", None), std),
        "v": ParamSpec((D, K, Q), ("width", "kv_heads", None), std),
        "o": ParamSpec((H, Q, D), ("heads", None, "width"), out_std),
        "mlp_norm": ParamSpec((D,), (None,), 0.0, 1.0),
        "gate": ParamSpec((D, F), ("width", "mlp"), std),
        "up": ParamSpec((D, F), ("width", "mlp"), std),
        "down": ParamSpec((F, D), ("mlp", "width"), out_std),
    }
    if config.qkv_bias:
        one_layer["q_bias"] = ParamSpec((H, Q), ("heads", None), 0.0)
        one_layer["k_bias"] = ParamSpec((K, Q), ("kv_heads", None), 0.0)
        one_layer["v_bias"] = ParamSpec((K, Q), ("kv_heads", None), 0.0)
    if config.qk_norm:
        one_layer["q_norm"] = ParamSpec((Q,), (None,), 0.0, 1.0)
        one_layer["k_norm"] = ParamSpec((Q,), (None,), 0.0, 1.0)
    specs = {"embed": ParamSpec((V, D), ("vocab", "width"), std)}
    for name, spec in one_layer.items():
        specs[LAYERS + name] = ParamSpec((config.layers, *spec.shape), (None, *spec.axes), spec.std, spec.mean)
    specs["final_norm"] = ParamSpec((D,), (None,), 0.0, 1.0)
    if not config.tied:
        specs["head"] = ParamSpec((V, D), ("vocab", "width"), std)
    return specs
