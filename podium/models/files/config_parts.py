"""The parts of a config.json that several families share: keys with their defaults, layers read and written. No jax."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from podium.models.architecture import MAX_LAYERS, DecoderConfig, ModelError, shown
from podium.models.blocks.attention import Attention
from podium.models.blocks.choices import MAX_EXPERTS
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block, Kind, Stack
from podium.models.files.model_settings import Keys, ModelSettings
from podium.models.files.rotary_keys import rope_keys, rope_of

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"
ROPE: Keys = {
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
}
"""The rotary embedding, in the keys of transformers 5 and 4."""
LLAMA: Keys = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "layer_types": None,
    **ROPE,
}
"""The keys that a Llama reads, which most families have."""
SILU = {"hidden_act": ("silu", "swish")}
NO_BIAS = {"attention_bias": (False,)}
NORMED = {"use_qk_norm": (True,)}
"""For a family that normalises queries and keys regardless of this key."""
BIASES = frozenset({"attention_bias", "mlp_bias"})
UNUSED_WINDOW = frozenset({"sliding_window", "max_window_layers"})
"""Keys that only apply if `use_sliding_window` is true."""
IMAGES = frozenset({"vision_config", "image_token_id", "image_token_index"})
"""Keys of a model with a vision tower, outside the text model's."""
K = TypeVar("K")


def layer_types(
    settings: ModelSettings, usual: Callable[[int], str] = lambda layer: FULL, *, may_be: tuple[str, ...] = ()
) -> list[str]:
    """The type of each layer: what `layer_types` says, or `usual` makes of its number.

    `may_be` are the types that `layer_types` may contain; (): transformers ignores that key in a model of this type, so
    it must agree with `usual`. Raises ModelError for other types, and for a window without `sliding_window`.
    """
    layers, where = settings.number("num_hidden_layers", most=MAX_LAYERS), settings.where
    expected = [usual(layer) for layer in range(layers)]
    types = settings["layer_types"] or expected
    if not may_be and types != expected:
        raise ModelError(
            f"{where}: layer_types {shown(types)}: only {expected[0]} is supported, in every layer; transformers"
            " ignores layer_types in a model of this type"
        )
    known = may_be or (expected[0],)
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        rule = f"there must be one for each of the {layers} layers, {' or '.join(known)}"
        raise ModelError(f"{where}: layer_types {shown(types)}: {rule}")
    if SLIDING in types and settings["sliding_window"] is None:
        raise ModelError(f"{where}: layer_types {shown(types)}: only {FULL} is supported without a sliding_window")
    return types


def full_every(every: int, other: str) -> Callable[[int], str]:
    """Types of layers of which each `every`-th attends to all tokens: for `layer_types`."""
    return lambda layer: other if (layer + 1) % every else FULL


def window_of(settings: ModelSettings, layer_type: str) -> int | None:
    """The window of a layer of this type; None: all tokens."""
    return settings.number("sliding_window") if layer_type == SLIDING else None


def attention_of(settings: ModelSettings, rotation: Keys) -> Attention:
    """Attention with grouped heads, as Llama has it."""
    heads = settings.number("num_attention_heads")
    head_dim = settings.number("head_dim", settings.number("hidden_size") // heads)
    return Attention(
        heads=heads,
        kv_heads=settings.number("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope_of(rotation, head_dim, settings.where),
    )


def experts_of(settings: ModelSettings, width: str = "moe_intermediate_size") -> Experts:
    """A mixture of experts whose gates sum to 1; `width` is the key of one expert's width."""
    count = settings.number("num_experts", most=MAX_EXPERTS)
    return Experts(
        count=count,
        top=settings.number("num_experts_per_tok", most=count),
        width=settings.number(width),
        normalized=True,
    )


def decoder_of(settings: ModelSettings, layers: Sequence[Block]) -> DecoderConfig:
    """The decoder with these layers, and with embedding and head as Llama has them."""
    return DecoderConfig(
        model_type=settings.model_type,
        vocab=settings.number("vocab_size"),
        width=settings.number("hidden_size"),
        stacks=stacks_of(layers),
        max_positions=settings.number("max_position_embeddings"),
        norm_eps=settings.real("rms_norm_eps"),
        tied=settings.flag("tie_word_embeddings"),
    )


def stacks_of(blocks: Sequence[Block]) -> tuple[Stack, ...]:
    """Group layers into stacks: the shortest pattern that all layers repeat, then what is left of a partial repeat.

    With a period of 6, 26 layers become a stack of 4 repeats, and the last 2 layers are grouped in the same way.
    """
    length = next(n for n in range(1, len(blocks) + 1) if all(a == b for a, b in zip(blocks, blocks[n:], strict=False)))
    repeats, left = divmod(len(blocks), length)
    whole = Stack(pattern=tuple(blocks[:length]), repeats=repeats)
    return (whole, *stacks_of(blocks[-left:])) if left else (whole,)


def described(decoder: DecoderConfig, kinds: Iterable[Kind], *known: type[K]) -> list[K]:
    """The mixers or feed-forwards of all layers. Raises ModelError for one that is not of the `known` kinds."""
    found: list[K] = []
    for layer, kind in enumerate(kinds):
        if not isinstance(kind, known):
            names = " or ".join(each.__name__ for each in known)
            raise ModelError(
                f"layer {layer} of this {decoder.model_type} is {type(kind).__name__}, and its config.json can only"
                f" describe {names}"
            )
        found.append(kind)
    return found


def attentions(decoder: DecoderConfig) -> list[Attention]:
    """The attention of each layer. Raises ModelError if a layer has another mixer."""
    return described(decoder, (block.mixer for block in decoder.blocks), Attention)


def common_keys(decoder: DecoderConfig) -> dict[str, object]:
    """The keys of config.json that do not depend on the kinds of the layers, beyond the sizes of their heads."""
    return {
        "vocab_size": decoder.vocab,
        "hidden_size": decoder.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "max_position_embeddings": decoder.max_positions,
        "rms_norm_eps": decoder.norm_eps,
        "tie_word_embeddings": decoder.tied,
    }


def write_dense(decoder: DecoderConfig) -> Keys:
    """All keys of config.json of a decoder whose layers are as Llama's. Raises ModelError if one has other kinds."""
    attention, mlp = decoder.dense_layers()[0]
    return {
        **common_keys(decoder),
        "hidden_act": "silu",
        "intermediate_size": mlp.width,
        **rope_keys(attention),
    }


def expert_keys(experts: Experts) -> dict[str, object]:
    """The keys of config.json for a mixture of experts."""
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top,
        "moe_intermediate_size": experts.width,
    }


def window_keys(decoder: DecoderConfig) -> Mapping[str, object]:
    """The keys of config.json for sliding windows."""
    found = [attention.window for attention in attentions(decoder)]
    window = next((each for each in found if each is not None), None)
    mixed: Keys = {"layer_types": [FULL if each is None else SLIDING for each in found]}
    return {"sliding_window": window, **(mixed if window is not None and None in found else {})}
