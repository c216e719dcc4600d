"""How many numbers a model has on one device: its parameters and the optimizer's state, from the config alone.

The table is `podium.models.decoder.param_specs` without jax; a test holds the two equal.
"""

import dataclasses
import math
from collections.abc import Mapping

from podium.models.architecture import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter, as `podium.models.decoder.param_specs` declares it; layers are stacked."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def weights(decoder: DecoderConfig) -> dict[str, Weight]:
    """All parameters by name."""
    D, F, Q, V, L = decoder.width, decoder.mlp_width, decoder.head_dim, decoder.vocab, decoder.layers
    H, K = decoder.heads, decoder.kv_heads
    layer: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "attention_norm": ((D,), (None,)),
        "q": ((D, H, Q), ("width", "heads", None)),
        "k": ((D, K, Q), ("width", "kv_heads", None)),
        "v": ((D, K, Q), ("width", "kv_heads", None)),
        "o": ((H, Q, D), ("heads", None, "width")),
        "mlp_norm": ((D,), (None,)),
        "gate": ((D, F), ("width", "mlp")),
        "up": ((D, F), ("width", "mlp")),
        "down": ((F, D), ("mlp", "width")),
    }
    if decoder.qkv_bias:
        layer |= {"q_bias": ((H, Q), ("heads", None))}
        layer |= dict.fromkeys(("k_bias", "v_bias"), ((K, Q), ("kv_heads", None)))
    if decoder.qk_norm:
        layer |= dict.fromkeys(("q_norm", "k_norm"), ((Q,), (None,)))
    table = {f"layers.{name}": Weight(shape=(L, *dims), axes=(None, *axes)) for name, (dims, axes) in layer.items()}
    table["embed"] = Weight(shape=(V, D), axes=("vocab", "width"))
    table["final_norm"] = Weight(shape=(D,), axes=(None,))
    return table if decoder.tied else table | {"head": table["embed"]}


def parameter_count(decoder: DecoderConfig) -> int:
    """Parameters of the model; a tied head counts once."""
    return sum(math.prod(weight.shape) for weight in weights(decoder).values())


def local_count(weight: Weight, shards: Mapping[str, int]) -> int:
    """Elements of a parameter on one device, where each logical axis is split into so many parts."""
    return math.prod(-(-dim // shards.get(axis or "", 1)) for dim, axis in zip(weight.shape, weight.axes, strict=True))


def optimizer_count(decoder: DecoderConfig, name: str, shards: Mapping[str, int]) -> int:
    """Float32 numbers of an optimizer's state on one device, but for its counters."""
    table = weights(decoder)
    local = {key: local_count(weight, shards) for key, weight in table.items()}
    if name == "adamw":
        return 2 * sum(local.values())
    if name in ("lion", "sgd"):
        return sum(local.values())
    if name == "muon":  # one moment of what it orthogonalises, Adam's two of the rest
        return sum(count * (1 if _is_hidden_matrix(table[key]) else 2) for key, count in local.items())
    return sum(_factored_count(weight, local[key]) for key, weight in table.items())


def _is_hidden_matrix(weight: Weight) -> bool:
    """Whether Muon orthogonalises it, as `podium.train.optimizer.muon_dimensions` says."""
    return sum(axis is not None for axis in weight.axes) > 1 and "vocab" not in weight.axes


def _factored_count(weight: Weight, local: int) -> int:
    """Adafactor's numbers for a parameter.

    Rows and columns of its two largest dimensions, on every device, if both have 128; else one for each element.
    """
    *rest, second, first = sorted(weight.shape) if len(weight.shape) > 1 else (0, 0)
    if second < 128:
        return local + 2
    return math.prod(rest) * (first + second) + 1
