"""The declaration of a model type: a `Family`, of which `podium.models.families` has one for each. No jax.

docs/models.md shows how to add one.
"""

import dataclasses
from collections.abc import Callable, Mapping

from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import Block
from podium.models.files.gguf_metadata import GgufMetadata
from podium.models.files.model_settings import Keys, ModelSettings
from podium.models.files.tensor_layout import FileKind, Layout

Allowed = Mapping[str, tuple[object, ...]]
"""Keys with the values that they may have; the first is that of a missing key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """Every key that a model type's config.json may have, in one of these lists; any other key is an error."""

    reads: Keys
    """Keys that change what the model computes, and that Podium computes, with the values that transformers'
    configuration class gives missing ones."""
    only: Allowed = dataclasses.field(default_factory=dict)
    """Keys that would change what the model computes and must have one of these values, in addition to those of
    `podium.models.files.config_keys.ONLY`."""
    ignored: frozenset[str] = frozenset()
    """Keys that transformers ignores for this type, in addition to those of `IGNORED` there."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other names of keys that are read."""
    packed: tuple[str, ...] = ()
    """Values of `quantization_config.quant_method` for weights that Podium unpacks as it reads them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """A model type with a vision tower, whose text model's settings are in `text_config`."""

    model_type: str
    text_types: tuple[str, ...]
    """Types that the text model may have; the first is the default if `text_config` names none."""
    tied: bool
    """Default of `tie_word_embeddings` in this type's config.json."""
    ignored: frozenset[str]
    """Keys outside `text_config` that concern the vision tower or image tokens."""


def dense_keys_of_gguf(metadata: GgufMetadata, raw: Keys) -> Keys:
    """The keys of config.json for a dense feed-forward in every layer."""
    return {"intermediate_size": metadata.number("feed_forward_length")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufForm:
    """How GGUF files describe a model type and hold its weights."""

    architecture: str
    """llama.cpp's name of the architecture."""
    reads: tuple[str, ...] = ()
    """Keys of the architecture that are read, in addition to those of `podium.models.files.gguf_config.READ`."""
    scalings: tuple[str, ...] = ("none",)
    """The types of rotary scaling that it may have."""
    gating: int | None = None
    """For a mixture of experts, llama.cpp's number of the gating function that it assumes: 1 is a softmax over all
    experts, 3 over the chosen ones."""
    in_pairs: bool = False
    """Whether queries and keys are stored permuted, because llama.cpp rotates adjacent elements of a head."""
    keys: Callable[[GgufMetadata, Keys], Keys] = dense_keys_of_gguf
    """Makes the keys of config.json that not every architecture has, from the metadata and the keys that every
    architecture has."""


def no_own_names(kind: FileKind, block: Block | None) -> Mapping[str, Layout]:
    """The names of a family whose tensors are all called as Llama's."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model type: how its config.json is read and written, what its tensors are called, and known models."""

    model_type: str
    """The value of `model_type` in config.json."""
    models: str
    """What its models are called, for the list of all that Podium trains."""
    transformers_class: str
    """Transformers class that loads an export."""
    scoring_class: str | None = None
    """Beginning of the names of transformers' classes with a head of scores; None: as in `transformers_class`."""
    keys: ConfigKeys
    read: Callable[[ModelSettings], DecoderConfig]
    """Makes the decoder from the checked settings of a config.json, in which every key of `keys.reads` has a value.
    Raises ModelError for settings that it cannot compute."""
    write: Callable[[DecoderConfig], Keys]
    """Makes the keys of config.json from which `read` makes this decoder again, but for `model_type` and
    `architectures`. Raises ModelError for a decoder that they cannot describe."""
    names: Callable[[FileKind, Block | None], Mapping[str, Layout]] = no_own_names
    """The layouts of weights in a kind of files that differ from `NAMES` in `podium.models.files.tensor_layout`: for
    the weights in a layer of this block, or outside layers if the block is None."""
    gguf: GgufForm | None = None
    """None if no GGUF file of this type is read."""
    tower: Tower | None = None
    """A type with a vision tower around this one."""
    predicts_ahead: bool = False
    """Whether files may have layers that predict tokens after the next one (`mtp.`), which are left out."""
    presets: Mapping[str, Keys] = dataclasses.field(default_factory=dict)
    """What the config.json of known models says, by hub id, so that a run can be planned without a network."""

    def scorer(self, suffix: str) -> str:
        """The name of transformers' class with a head of scores, which ends in `suffix`."""
        return (self.scoring_class or self.transformers_class.removesuffix("ForCausalLM")) + suffix
