"""A decoder's architecture: its numbers, stacks of blocks and adapters, and the rules they keep. No jax.

`podium.models.files.hf_config` reads it from config.json, `podium.models.files.gguf` from GGUF.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from podium.config.attention_blocks import kv_layout
from podium.config.lora import ADAPTABLE, APART_RANK, TARGETS, Base, LoraConfig
from podium.config.rollout_weights import RolloutWeights
from podium.models.blocks.attention import Attention
from podium.models.blocks.choices import ChoiceFormat, choice_format
from podium.models.blocks.experts import DENSE_ROWS, Experts
from podium.models.blocks.kind import Block, Place, Stack, Work, places
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import Rope

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
    """Low-rank adapters of frozen matrices (arXiv:2106.09685): y = xW + scale (xA)B, where A and B are trained."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The layers' matrices that have an adapter, in the order of ADAPTABLE."""
    base: Base = "bfloat16"
    """Storage format of the frozen matrices."""
    merged: bool = False
    """Whether the rollout merges the adapters into the model, rather than computing their products separately."""
    shared: bool = False
    """Whether an unmerged rollout reads the trainer's frozen weights on GPUs too, as they are stored."""

    @property
    def scale(self) -> float:
        """Factor of (xA)B: alpha / rank."""
        return self.alpha / self.rank


def make_lora(config: LoraConfig | None) -> Lora | None:
    """The adapters of a config; None if it has none and trains all weights."""
    if config is None:
        return None
    named = {name for target in config.targets for name in TARGETS[target]}
    how = config.rollout
    if how == "auto":
        how = "shared" if config.base != "bfloat16" else "apart" if config.rank <= APART_RANK else "merged"
    return Lora(
        rank=config.rank,
        alpha=config.alpha,
        targets=tuple(name for name in ADAPTABLE if name in named),
        base=config.base,
        merged=how == "merged",
        shared=how == "shared",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: embedding, stacks of blocks (`podium.models.blocks`), final norm, head."""

    model_type: str
    """Model type in config.json, one of FAMILIES in `podium.models.files.config_keys`; exports write it back."""
    vocab: int
    width: int
    stacks: tuple[Stack, ...]
    """The layers, in order."""
    max_positions: int
    norm_eps: float
    tied: bool
    """Whether the head is the transposed embedding."""
    scores: Literal["none", "plain", "biased"] = "none"
    """Whether the head gives one score per token instead of logits; biased: with a
    bias."""
    lora: Lora | None = None
    """Adapters that are trained in place of the weights, which are frozen. config.json does not contain this
    setting."""
    norm_offset: float = 0.0
    """Offset that every norm adds to its stored scale (Gemma: 1)."""
    wide_norms: bool = False
    """Whether norms multiply with their scale in float32 and round once (Gemma, gpt-oss); others round before too."""
    embed_scale: float = 1.0
    """Factor of the embeddings, in the number format of the products (Gemma: the square root of the width)."""
    joined: bool = False
    """Whether a layer's matrices that multiply the same input are stored side by side
    (`podium.models.params.joined_groups`)."""
    rollout_weights: RolloutWeights = "dtype"
    """The format in which a rollout stores the layers' matrices, as `rollout.weights` says; `rollout_decoder` is the
    decoder that follows from it."""
    int8_products: bool = False
    """Whether matrices stored in int8 are multiplied as integers, with activations rounded to int8 for each token."""

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

    def dense_layers(self) -> list[tuple[Attention, Mlp]]:
        """Attention and feed-forward of each layer, in order. Raises ModelError if a layer has other kinds."""
        found: list[tuple[Attention, Mlp]] = []
        for layer, block in enumerate(self.blocks):
            mixer, after = block.kinds
            if not isinstance(mixer, Attention) or not isinstance(after, Mlp):
                kinds = f"{type(mixer).__name__} and {type(after).__name__}"
                raise ModelError(f"layer {layer} of this {self.model_type} is {kinds}, not Attention and Mlp")
            found.append((mixer, after))
        return found

    @property
    def blocks(self) -> list[Block]:
        """The block of each layer, in order."""
        found = {layer: place.block for place in self.places for layer in place.layers}
        return [found[layer] for layer in sorted(found)]

    @property
    def routed(self) -> tuple[tuple[Place, Experts], ...]:
        """The places with a mixture of experts."""
        pairs = ((place, place.block.feed_forward) for place in self.places)
        return tuple((place, kind) for place, kind in pairs if isinstance(kind, Experts))

    @property
    def choices(self) -> int:
        """Number of choices that the routers make for each token, over all layers; 0 without a mixture of experts."""
        return sum(len(place.layers) * kind.top for place, kind in self.routed)

    @property
    def choice_format(self) -> ChoiceFormat:
        """Number format in which choices are recorded."""
        return choice_format(max((kind.count for _, kind in self.routed), default=0))

    def total(self, count: Callable[[Work], int]) -> int:
        """Sum a field of `Work` over all layers."""
        return sum(len(place.layers) * count(place.block.work(self.width)) for place in self.places)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct attention windows of the layers, ascending; None (full attention) comes last."""
        works = [place.block.work(self.width) for place in self.places]
        return tuple(sorted({each.window for each in works if each.pair}, key=lambda window: window or math.inf))

    def attention_layers(self) -> Iterator[tuple[int, Attention]]:
        """Yield (number of layers, attention) for each place with attention."""
        for place in self.places:
            if isinstance(place.block.mixer, Attention):
                yield len(place.layers), place.block.mixer

    @property
    def outputs(self) -> int:
        """Numbers that the head gives for each token: one per token of the vocabulary, or a single score."""
        return self.vocab if self.scores == "none" else 1

    @property
    def active(self) -> int:
        """Number of matrix elements that each token is multiplied with, in layers and head."""
        return self.total(lambda work: work.active) + self.outputs * self.width

    @property
    def stored(self) -> int:
        """Number of matrix elements in layers and head, with those of all experts; `active` counts only a token's
        experts.
        """
        return self.total(lambda work: work.total) + self.outputs * self.width

    def multiplied(self, rows: int) -> int:
        """Number of matrix elements by which each token is multiplied in a decode step of `rows` tokens.

        All experts count if the step has so few tokens that it computes every expert.
        """
        return self.stored if self.routed and rows <= DENSE_ROWS else self.active

    def cached(self, platform: str, tokens: int = 1) -> int:
        """Elements of the keys and values, over all layers, that a sequence's next query attends to.

        They are counted as the cache of a jax platform (cpu, gpu, tpu) stores them, for a sequence of `tokens` tokens.
        """

        def of_layer(work: Work) -> int:
            return work.kv_heads * kv_layout(work.head_dim, platform).numbers * min(tokens, work.window or tokens)

        return self.total(of_layer)

    def sizes(self, axis: str) -> set[int]:
        """The sizes of all dimensions of layer weights that have this logical axis."""
        specs = (spec for place in self.places for spec in place.block.specs(self.width, std=0.0, out_std=0.0).values())
        return {size for spec in specs for size, own in zip(spec.shape, spec.axes, strict=True) if own == axis}

    def _of_attention(self, name: str) -> int:
        """Return the value of this field, which all attention layers must share.

        Raises ModelError if it differs between them, or if there are no attention layers.
        """
        found = {getattr(attention, name) for _, attention in self.attention_layers()}
        if len(found) != 1:
            raise ModelError(
                f"the attention layers of this {self.model_type} differ in their number of {name}: {found}"
            )
        return found.pop()


def with_lora(decoder: DecoderConfig, config: LoraConfig | None) -> DecoderConfig:
    """The decoder with a config's adapters, on those of the target matrices that the decoder has.

    Raises ModelError if it has no matrix of a named target, such as the MLP of a mixture of experts.
    """
    lora = make_lora(config)
    if lora is None or config is None:
        return dataclasses.replace(decoder, lora=lora)
    width = decoder.width
    own = {name for block in decoder.blocks for name in block.specs(width, std=0.0, out_std=0.0)} & set(ADAPTABLE)
    for target in config.targets:
        if not own & set(TARGETS[target]):
            experts = "; its experts have adapters if targets name experts" if decoder.routed else ""
            raise ModelError(
                f"lora.targets: this {decoder.model_type} has no matrix {target} to which an adapter can be added"
                f"{experts}; name {', '.join(name for name in ADAPTABLE if name in own)}, or attention"
            )
    targets = tuple(name for name in lora.targets if name in own)
    return dataclasses.replace(decoder, lora=dataclasses.replace(lora, targets=targets))


def frozen_decoder(decoder: DecoderConfig, base: Base) -> DecoderConfig:
    """The decoder of a model that is never trained, with the layers' matrices stored in `base`: without adapters."""
    return dataclasses.replace(decoder, lora=Lora(rank=1, alpha=1.0, targets=(), base=base))


def rollout_decoder(decoder: DecoderConfig) -> DecoderConfig:
    """The decoder of the rollout's weights: without adapters that it merges, and with matrices in its own format."""
    if decoder.lora is not None and decoder.lora.merged:
        decoder = dataclasses.replace(decoder, lora=None)
    if decoder.rollout_weights == "dtype":
        return decoder
    lora = frozen_decoder(decoder, "int8").lora if decoder.lora is None else decoder.lora
    return dataclasses.replace(
        decoder,
        lora=lora and dataclasses.replace(lora, base="int8"),
        rollout_weights="dtype",
        int8_products=decoder.rollout_weights == "w8a8",
    )


def scoring_decoder(decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with a head that computes one number per token; a decoder with such a head is kept
    unchanged.
    """
    own = dataclasses.replace(decoder, rollout_weights="dtype")
    return own if decoder.scores != "none" else dataclasses.replace(own, scores="plain", lora=None)


def with_layers(decoder: DecoderConfig, layers: int) -> DecoderConfig:
    """A copy with another number of layers. Raises ModelError if the number is not a multiple of the pattern."""
    stack, *others = decoder.stacks
    if others or layers % len(stack.pattern):
        raise ModelError(f"this {decoder.model_type} cannot have {layers} layers: its stacks repeat other patterns")
    return dataclasses.replace(decoder, stacks=(dataclasses.replace(stack, repeats=layers // len(stack.pattern)),))


def unrolled(decoder: DecoderConfig) -> DecoderConfig:
    """The same decoder as a single stack without repeats, so that each layer has its own arrays instead of stacked
    ones.
    """
    return dataclasses.replace(decoder, stacks=(Stack(pattern=tuple(decoder.blocks), repeats=1),))


def shown(value: object) -> str:
    """Text of a value from a model's files for an error message: at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, or deeply nested lists
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def whole_number(
    settings: Mapping[str, object], key: str, where: str, default: int | None = None, *, most: int = MAX_SIZE
) -> int:
    """Read an integer from 1 to `most`, or `default` if it is null or absent. Raises ModelError for other values."""
    value = settings.get(key) if settings.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"{where}: {key} must be a whole number from 1 to {most}, found {shown(value)}")
    return value


def real_number(settings: Mapping[str, object], key: str, where: str, default: float | None = None) -> float:
    """Read a finite number above 0, or `default` if it is absent. Raises ModelError for other values.

    Null is an error here, because transformers cannot compute with it; for a size, null means the family's default.
    """
    value = settings.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{where}: {key} must be a number above 0, found {shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ModelError(f"{where}: {key} must be a number above 0, found one above 1e308") from error


def check_config(config: DecoderConfig, where: str) -> DecoderConfig:
    """Return the config. Raises ModelError if its numbers are inconsistent."""
    if config.norm_eps >= 1:
        raise ModelError(f"{where}: the norms' epsilon is {config.norm_eps:g}; it must be below 1, such as 1e-5")
    if any(rope.theta < 1 for rope in config.ropes):
        raise ModelError(f"{where}: the base of rotary embeddings must be at least 1, such as 10000")
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: {config.heads} query heads do not share {config.kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head size {config.head_dim} is odd; rotary embeddings need an even size")
    if odd := [rope.dims for rope in config.ropes if rope.dims % 2 or not 0 < rope.dims <= config.head_dim]:
        raise ModelError(
            f"{where}: rotation of {odd[0]} of {config.head_dim} elements of a head; it must be an even part"
        )
    return config
