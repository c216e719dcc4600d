"""The metadata of a GGUF file, and the keys that llama.cpp's converter writes for several families. No jax."""

from collections.abc import Iterator

import numpy as np

from podium.models.architecture import MAX_SIZE, real_number, whole_number
from podium.models.files.config_parts import FULL, SLIDING, full_every
from podium.models.files.gguf import GgufHeader
from podium.models.files.model_settings import Keys

MIXTURE = ("expert_count", "expert_feed_forward_length", "expert_used_count")
WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", "rope.scaling.factor")
YARN = (
    "rope.scaling.factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
"""Keys that `mixture_keys`, `layer_types_of_gguf` and `yarn_keys` read, without the architecture's name before them."""


class GgufMetadata:
    """The architecture's metadata in a GGUF file. Its methods raise ModelError for another kind of value."""

    def __init__(self, header: GgufHeader):
        self.where = str(header.path)
        self.name = str(header.metadata.get("general.architecture"))
        self._metadata = header.metadata

    def items(self) -> Iterator[tuple[str, object]]:
        """Yield the architecture's keys, without the prefix of its name, and their values."""
        prefix = f"{self.name}."
        return ((key.removeprefix(prefix), value) for key, value in self._metadata.items() if key.startswith(prefix))

    def is_width_of_values(self, key: str, value: object) -> bool:
        """Whether a key gives attention's values the same width as its keys."""
        width = self.number("embedding_length") // self.number("attention.head_count")
        return key == "attention.value_length" and value == self.number("attention.key_length", width)

    def get(self, key: str, default: object = None) -> object:
        """The value of a key of the architecture."""
        return self._metadata.get(f"{self.name}.{key}", default)

    def number(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A whole number from 1 to `most`."""
        return whole_number(self._metadata, f"{self.name}.{key}", self.where, default, most=most)

    def real(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        return _shortest(real_number(self._metadata, f"{self.name}.{key}", self.where, default))


def mixture_keys(metadata: GgufMetadata, width: str = "moe_intermediate_size") -> Keys:
    """The keys of config.json for a mixture of experts in every layer; `width` is the key of one expert's width."""
    return {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        width: metadata.number("expert_feed_forward_length"),
    }


def layer_types_of_gguf(metadata: GgufMetadata, every: int) -> list[str]:
    """The layers' types: a window in all layers but every n-th, or in those that a list names."""
    pattern = metadata.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        return [SLIDING if slides else FULL for slides in pattern]
    every = metadata.number("attention.sliding_window_pattern", every)
    return list(map(full_every(every, SLIDING), range(metadata.number("block_count"))))


def has_yarn(metadata: GgufMetadata) -> bool:
    """Whether rotary frequencies are scaled by YaRN."""
    return metadata.get("rope.scaling.type") == "yarn"


def yarn_keys(metadata: GgufMetadata) -> Keys:
    """The keys of YaRN. llama.cpp has defaults for the betas, and uses 1 for `mscale`, which GGUF does not store."""
    grown: Keys = {}
    if metadata.get("rope.scaling.yarn_log_multiplier", 0.0):
        grown = {"mscale": 1.0, "mscale_all_dim": metadata.real("rope.scaling.yarn_log_multiplier")}
    return {
        "rope_type": "yarn",
        "factor": metadata.real("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.number("rope.scaling.original_context_length"),
        "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", 1.0),
        **grown,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32; GGUF stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
