"""A decoder's architecture, read from config.json and written back. No jax, because config checks use it.

`podium.models.source` finds the model's files; `podium.models.gguf` reads these numbers from GGUF.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from podium.config.attention import kv_layout
from podium.config.lora import APART_RANK, MATRICES, TARGETS, Base, LoraConfig
from podium.models.blocks.attention import Attention
from podium.models.blocks.kind import Block, Place, Stack, Work, places
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import Rope, RopeScaling

LAYERS = "layers."
"""Prefix of the names of all layers' weights."""
MAX_SIZE = 2**31 - 1
"""Largest number that a model's description may give; products of two still fit into 64 bits."""
MAX_LAYERS = 10_000
"""Largest number of layers. A larger one means a damaged file, and its weights' names would fill the memory."""


class ModelError(ValueError):
    """A model that cannot be found, is incomplete, or has a feature that Podium does not support."""

    exit_status = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters beside frozen matrices (arXiv:2106.09685): y = xW + scale (xA)B, where A and B are trained."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The layers' matrices that have an adapter, in the order of MATRICES."""
    base: Base = "bfloat16"
    """Storage format of the frozen matrices."""
    merged: bool = False
    """Whether the rollout merges the adapters into the model, rather than computing their products separately."""

    @property
    def scale(self) -> float:
        """Factor of (xA)B: alpha / rank."""
        return self.alpha / self.rank


def make_lora(config: LoraConfig | None) -> Lora | None:
    """The adapters of a config; None if it has none and trains all weights."""
    if config is None:
        return None
    named = {name for target in config.targets for name in TARGETS[target]}
    apart = config.rollout == "apart" or (
        config.rollout == "auto" and (config.rank <= APART_RANK or config.base != "bfloat16")
    )
    return Lora(
        rank=config.rank,
        alpha=config.alpha,
        targets=tuple(name for name in MATRICES if name in named),
        base=config.base,
        merged=not apart,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: embedding, stacks of blocks (`podium.models.blocks`), final norm, head."""

    model_type: str
    """As in config.json: llama, qwen2, qwen3. Written back on export."""
    vocab: int
    width: int
    stacks: tuple[Stack, ...]
    """The layers, in order."""
    max_positions: int
    norm_eps: float
    tied: bool
    """Whether the head is the transposed embedding."""
    lora: Lora | None = None
    """Adapters to train while all other weights are frozen; not part of config.json."""

    @functools.cached_property
    def places(self) -> tuple[Place, ...]:
        """All places in the stacks' patterns, with the layers at each."""
        return places(self.stacks, LAYERS)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(len(place.layers) for place in self.places)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary embeddings of all layers."""
        kinds = (kind for place in self.places for kind in place.block.kinds)
        return tuple(dict.fromkeys(rope for kind in kinds for rope in kind.ropes))

    @property
    def heads(self) -> int:
        """Number of query heads, if it is the same in every attention layer."""
        return self._of_attention("heads")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, if it is the same in every attention layer."""
        return self._of_attention("kv_heads")

    @property
    def head_dim(self) -> int:
        """Elements per head, if it is the same in every attention layer."""
        return self._of_attention("head_dim")

    @property
    def dense_layer(self) -> tuple[Attention, Mlp]:
        """The attention and MLP of a dense decoder. Raises ModelError if layers differ or are of other kinds."""
        block, *others = {place.block for place in self.places}
        if not others and isinstance(block.mixer, Attention) and isinstance(block.feed_forward, Mlp):
            return block.mixer, block.feed_forward
        raise ModelError(f"the layers of this {self.model_type} are not all dense layers of one kind")

    def total(self, count: Callable[[Work], int]) -> int:
        """Sum a field of `Work` over all layers."""
        return sum(len(place.layers) * count(place.block.work(self.width)) for place in self.places)

    def attention_layers(self) -> Iterator[tuple[int, Attention]]:
        """Yield (number of layers, attention) for each place with attention."""
        for place in self.places:
            if isinstance(place.block.mixer, Attention):
                yield len(place.layers), place.block.mixer

    @property
    def active(self) -> int:
        """Number of matrix elements that each token is multiplied with, in layers and head."""
        return self.total(lambda work: work.active) + self.vocab * self.width

    def cached(self, platform: str) -> int:
        """Elements that a cache stores per token on a jax platform (cpu, gpu, tpu), over all layers."""
        return self.total(lambda work: work.kv_heads * kv_layout(work.head_dim, platform).numbers)

    def sizes(self, axis: str) -> set[int]:
        """The sizes of all dimensions of layer weights that have this logical axis."""
        specs = (spec for place in self.places for spec in place.block.specs(self.width, std=0.0, out_std=0.0).values())
        return {size for spec in specs for size, own in zip(spec.shape, spec.axes, strict=True) if own == axis}

    def _of_attention(self, name: str) -> int:
        """A field on which all attention layers agree. Raises ModelError if they differ, or if there are none."""
        found = {getattr(attention, name) for _, attention in self.attention_layers()}
        if len(found) != 1:
            raise ModelError(
                f"the attention layers of this {self.model_type} do not have one number of {name}: {found}"
            )
        return found.pop()


def dense_decoder(
    *,
    model_type: str,
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp_width: int,
    max_positions: int,
    rope_theta: float,
    rope_scaling: RopeScaling | None,
    norm_eps: float,
    tied: bool,
    qkv_bias: bool,
    qk_norm: bool,
    lora: Lora | None = None,
) -> DecoderConfig:
    """Make a decoder with identical dense layers: covers Llama 2/3, SmolLM2, Qwen2/2.5 and Qwen3."""
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=Rope(theta=rope_theta, dims=head_dim, scaling=rope_scaling),
        bias=qkv_bias,
        norm=qk_norm,
    )
    block = Block(mixer=attention, feed_forward=Mlp(width=mlp_width))
    return DecoderConfig(
        model_type=model_type,
        vocab=vocab,
        width=width,
        stacks=(Stack(pattern=(block,), repeats=layers),),
        max_positions=max_positions,
        norm_eps=norm_eps,
        tied=tied,
        lora=lora,
    )


def with_layers(decoder: DecoderConfig, layers: int) -> DecoderConfig:
    """A copy with another number of layers. Raises ModelError if the number is not a multiple of the pattern."""
    stack, *others = decoder.stacks
    if others or layers % len(stack.pattern):
        raise ModelError(f"this {decoder.model_type} cannot have {layers} layers: its stacks repeat other patterns")
    return dataclasses.replace(decoder, stacks=(dataclasses.replace(stack, repeats=layers // len(stack.pattern)),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Properties that follow from a model type and are not in config.json."""

    transformers_class: str
    """Transformers class that loads an export."""
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Default if config.json has no head_dim; None: width / heads."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(transformers_class="LlamaForCausalLM"),
    "qwen2": Family(transformers_class="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(transformers_class="Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}

# Values that config.json may have for features of other decoders; a missing key means the first value.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}


def check_family(model_type: object, where: str) -> Family:
    """The family of a model type. Raises ModelError for an unsupported type, listing the supported ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"{where}: model type {shown(model_type)} is not supported; Podium trains {', '.join(FAMILIES)}"
            " (Llama 2 and 3, SmolLM2, Qwen2 and 2.5, Qwen3)"
        )
    return FAMILIES[model_type]


def shown(value: object) -> str:
    """Text of a value from a model's files for an error message: at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, a list in a list in a list ...
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def whole_number(
    settings: Mapping[str, Any], key: str, where: str, default: int | None = None, *, most: int = MAX_SIZE
) -> int:
    """Read an integer from 1 to `most`, or `default` if it is null or absent. Raises ModelError for other values."""
    value = settings.get(key) if settings.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"{where}: {key} must be a whole number from 1 to {most}, found {shown(value)}")
    return value


def real_number(settings: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """Read a finite number above 0, or `default` if it is absent. Raises ModelError for other values.

    Null is an error here, because transformers cannot compute with it; for a size, null means the family's default.
    """
    value = settings.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{where}: {key} must be a number above 0, found {shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ModelError(f"{where}: {key} must be a number above 0, found one beyond 1e308") from error


def check_config(config: DecoderConfig, where: str) -> DecoderConfig:
    """Return the config. Raises ModelError if its numbers are inconsistent."""
    if config.norm_eps >= 1:
        raise ModelError(f"{where}: an epsilon of {config.norm_eps:g} in the norms; it must be below 1, as 1e-5 is")
    if any(rope.theta < 1 for rope in config.ropes):
        raise ModelError(f"{where}: the base of rotary embeddings must be 1 or more, as 10000 is")
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: {config.heads} query heads do not share {config.kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head size {config.head_dim} is odd; rotary embeddings need an even size")
    return config


def from_hf_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read the decoder from a config.json of transformers 4 or 5; `where` is its path, for errors.

    Raises ModelError if the model type is unknown, a number is missing, or a feature is not supported.
    """
    family = check_family(raw.get("model_type"), where)
    for key, accepted in NEUTRAL.items():
        if raw.get(key, accepted[0]) not in accepted:
            raise ModelError(f"{where}: {key} {shown(raw[key])} is not supported; it must be {accepted[0]!r} or absent")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ModelError(f"{where}: layer_types {shown(kinds)}: only full_attention is supported")

    number = functools.partial(whole_number, raw, where=where)

    width, heads = number("hidden_size"), number("num_attention_heads")
    rope_theta, rope_scaling = _rope(raw, where)
    config = dense_decoder(
        model_type=raw["model_type"],
        vocab=number("vocab_size"),
        width=width,
        layers=number("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=family.head_dim or width // heads),
        mlp_width=number("intermediate_size"),
        max_positions=number("max_position_embeddings"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=real_number(raw, "rms_norm_eps", where, 1e-6),
        tied=_tied(raw, where),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )
    return check_config(config, where)


def _tied(raw: Mapping[str, Any], where: str) -> bool:
    tied = raw.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise ModelError(f"{where}: tie_word_embeddings must be true or false, found {shown(tied)}")
    return bool(tied)


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope: dict[str, Any] = {"rope_theta": 10000.0 if raw.get("rope_theta") is None else raw["rope_theta"]}
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key) or {}
        if not isinstance(part, dict):
            raise ModelError(f"{where}: {key} must be a JSON object or null, found {shown(part)}")
        rope |= part
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"{where}: rope_parameters {shown(rope)}: partial or per-layer rotation is not supported")
    theta = real_number(rope, "rope_theta", where)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{where}: rope_type {shown(kind)} is not supported; Podium computes default and llama3")
    original = "original_max_position_embeddings"
    if missing := [key for key in ("factor", "low_freq_factor", "high_freq_factor", original) if key not in rope]:
        raise ModelError(f"{where}: rope_type llama3 needs {', '.join(missing)}")
    scaling = RopeScaling(
        factor=real_number(rope, "factor", where),
        low_freq_factor=real_number(rope, "low_freq_factor", where),
        high_freq_factor=real_number(rope, "high_freq_factor", where),
        original_max_positions=whole_number(rope, original, where),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        raise ModelError(f"{where}: low_freq_factor {low:g} must be below high_freq_factor, which is {high:g}")
    return theta, scaling


def to_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The config.json from which transformers 4 or 5 constructs this decoder."""
    attention, mlp = config.dense_layer
    raw: dict[str, Any] = {
        "architectures": [FAMILIES[config.model_type].transformers_class],
        "model_type": config.model_type,
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": mlp.width,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": attention.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied,
    }
    if (scaling := attention.rope.scaling) is not None:
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return raw
