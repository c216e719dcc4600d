"""Finds the architecture that a config's `model:` names, without its weights. No jax.

The families contain the architectures of models that configs often name, so that runs of these can be planned without
the model's files or a network. `podium.models.files.source` finds the weights.
"""

import functools
from collections.abc import Mapping

from podium.models.architecture import DecoderConfig, ModelError, scoring_decoder
from podium.models.families import FAMILIES
from podium.models.files.folder import read_json
from podium.models.files.hf_config import NO_SCORES, Head, from_hf_config
from podium.models.files.model_settings import Keys
from podium.models.files.source import from_hub, on_disk, read_architecture, resolve

HUB_TIMEOUT_S = 2.0  # how long a plan waits for the hub to send a small file


PRESETS: Mapping[str, Keys] = {
    model: {"model_type": family.model_type, **keys}
    for family in FAMILIES.values()
    for model, keys in family.presets.items()
}
"""What the hub's config.json says of models that the families contain, by hub id."""


@functools.cache
def preset_decoder(model: str) -> DecoderConfig:
    """The architecture of a model in `PRESETS`."""
    return from_hf_config(PRESETS[model], f"the preset {model}")


def find_architecture(model: str, head: Head = "logits") -> DecoderConfig:
    """Find the architecture that a config's `model:` names, with this head, without the weights.

    Looks on this machine's disk, then in `PRESETS`, then on the hub (for one small file). Raises ModelError if the
    model is not found, has an unsupported feature, or lacks the head.
    """
    if (folder := on_disk(model)) is not None:
        return read_architecture(resolve(folder), head)
    if model in PRESETS:
        if head == "own scores":
            raise ModelError(f"{model} {NO_SCORES}")
        decoder = preset_decoder(model)
        return decoder if head == "logits" else scoring_decoder(decoder)
    try:
        folder = from_hub(model, ["config.json"], timeout_s=HUB_TIMEOUT_S)
    except ModelError as error:
        raise ModelError(
            f"{error}; a plan needs only its config.json, and these models need no download: {', '.join(PRESETS)}"
        ) from error
    path = folder / "config.json"
    return from_hf_config(read_json(path), str(path), head)
