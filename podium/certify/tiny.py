"""A tiny clone of a decoder, with all its features, and random weights that all affect its output."""

import dataclasses
import math

import numpy as np

from podium.models.architecture import DecoderConfig, ModelError
from podium.models.blocks.attention import Attention
from podium.models.blocks.delta import DeltaNet
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block, Kind, Stack
from podium.models.blocks.mlp import Mlp
from podium.models.params import ParamSpec, is_adapter, param_specs

SPREAD = 10.0  # times the initial standard deviation, so that predictions and attention are not nearly uniform
TINY_WINDOW = 5  # positions: shorter than most sequences
LONG_WINDOW = 100  # positions: several pages, and pieces that enter the cache at once; shorter than long sequences

Arrays = dict[str, np.ndarray]


def tiny_clone(decoder: DecoderConfig) -> DecoderConfig:
    """Shrink a decoder until it compiles in seconds: width 64 and small windows, with all its features.

    If all layers are of one kind, the clone has two of them; otherwise one of each kind, in order. Raises ModelError if
    the naive form does not compute a layer.
    """
    for place in decoder.places:
        _check_kinds(place.block, decoder)
    blocks = tuple(dict.fromkeys(_tiny_block(place.block) for place in decoder.places))
    repeats = min(decoder.layers, 2) if len(blocks) == 1 else 1
    return dataclasses.replace(
        decoder,
        vocab=min(decoder.vocab, 320),
        width=(width := min(decoder.width, 64)),
        embed_scale=1.0 if decoder.embed_scale == 1 else math.sqrt(width),
        stacks=(Stack(pattern=blocks, repeats=repeats),),
        lora=decoder.lora and dataclasses.replace(decoder.lora, rank=4, alpha=4 * decoder.lora.scale),
    )


def _check_kinds(block: Block, decoder: DecoderConfig) -> None:
    """Raise ModelError for kinds of layers that the naive form does not compute."""
    if not isinstance(block.mixer, Attention | DeltaNet) or not isinstance(block.feed_forward, Mlp | Experts):
        kinds = " and ".join(type(kind).__name__ for kind in block.kinds)
        raise ModelError(f"certify has no naive form of a layer of this {decoder.model_type}: {kinds}")


def _tiny_feed_forward(kind: Kind) -> Kind:
    """The feed-forward with a small width, and few experts."""
    if isinstance(kind, Experts):
        sizes = {"count": 8, "top": 3, "width": 32, "shared": 40}
        return dataclasses.replace(kind, **{name: min(getattr(kind, name), most) for name, most in sizes.items()})
    assert isinstance(kind, Mlp)
    return dataclasses.replace(kind, width=min(kind.width, 96))


def _tiny_block(block: Block) -> Block:
    """Shrink a block's mixer and feed-forward."""
    return dataclasses.replace(
        block, mixer=_tiny_mixer(block.mixer), feed_forward=_tiny_feed_forward(block.feed_forward)
    )


def _tiny_mixer(mixer: Kind) -> Kind:
    """The mixer with few and small heads, and a window shorter than most sequences."""
    if isinstance(mixer, DeltaNet):
        key_heads = next(count for count in (4, 2, 1) if mixer.key_heads % count == 0)  # meshes split them further
        return dataclasses.replace(
            mixer,
            key_heads=key_heads,
            value_heads=key_heads * (mixer.value_heads // mixer.key_heads),
            key_dim=min(mixer.key_dim, 16),
            value_dim=min(mixer.value_dim, 16),
        )
    attention = mixer
    assert isinstance(attention, Attention)
    kv_heads = 2 if attention.kv_heads % 2 == 0 else 1
    head_dim = min(attention.head_dim, 16)
    sharpening = attention.sharpening and dataclasses.replace(attention.sharpening, period=TINY_WINDOW)
    return dataclasses.replace(
        attention,
        heads=kv_heads * (attention.heads // attention.kv_heads),
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=dataclasses.replace(attention.rope, dims=head_dim * attention.rope.dims // attention.head_dim),
        window=attention.window and min(attention.window, TINY_WINDOW),
        scale_dims=attention.scale_dims and head_dim + head_dim // 2,
        sharpening=sharpening,
    )


def with_long_window(decoder: DecoderConfig) -> DecoderConfig:
    """The decoder with windows of LONG_WINDOW positions, where it has windows."""

    def own(mixer: Kind) -> Kind:
        if isinstance(mixer, Attention) and mixer.window:
            return dataclasses.replace(mixer, window=LONG_WINDOW)
        return mixer

    def longer(stack: Stack) -> Stack:
        return dataclasses.replace(
            stack, pattern=tuple(dataclasses.replace(block, mixer=own(block.mixer)) for block in stack.pattern)
        )

    return dataclasses.replace(decoder, stacks=tuple(map(longer, decoder.stacks)))


def random_weights(decoder: DecoderConfig, *, seed: int) -> Arrays:
    """Draw float32 weights that all affect the output: biases are not 0, norm scales not 1, and adapters not 0."""
    random = np.random.default_rng(seed)
    return {
        name: (spec.mean + _spread(name, spec) * random.standard_normal(spec.shape)).astype(np.float32)
        for name, spec in param_specs(decoder).items()
    }


def _spread(name: str, spec: ParamSpec) -> float:
    return 0.1 if is_adapter(name) or not spec.std else SPREAD * spec.std


def other_weights(decoder: DecoderConfig, weights: Arrays) -> Arrays:
    """Weights near the policy's, for a model that it is compared with.

    They are the policy's without its adapters, or without LoRA the policy's with a little noise.
    """
    if decoder.lora is not None:
        return {name: value for name, value in weights.items() if not is_adapter(name)}
    noise = random_weights(decoder, seed=1)
    return {name: value + np.float32(0.02) * noise[name] for name, value in weights.items()}
