"""Finds the architecture that a config's `model:` names, without its weights. No jax.

The families have that of models that configs often name, so that a run of these can be planned without the model or a
network. `podium.models.files.source` finds the weights.
"""

import dataclasses
from collections.abc import Callable, Mapping

from podium.config.lora import LoraConfig
from podium.config.rollout_weights import RolloutWeights
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig, ModelError, scoring_decoder, with_lora
from podium.models.families import FAMILIES
from podium.models.files.folder import read_json
from podium.models.files.hf_config import (
    NO_SCORES,
    from_hf_config,
    reward_model_from_hf_config,
    scorer_from_hf_config,
)
from podium.models.files.source import (
    ModelSource,
    from_hub,
    on_disk,
    read_architecture,
    read_reward_model,
    read_scorer,
    resolve,
)

HUB_TIMEOUT_S = 2.0  # how long a plan waits for the hub to send a small file


PRESETS: Mapping[str, DecoderConfig] = {
    model: from_hf_config({"model_type": family.model_type, **keys}, f"the preset {model}")
    for family in FAMILIES.values()
    for model, keys in family.presets.items()
}
"""The models that the families know, by hub id: each as in its config.json there."""


def find_architecture(model: str) -> DecoderConfig:
    """Find the architecture that a config's `model:` names, without the weights.

    Looks on this machine's disk, then in `PRESETS`, then on the hub (for one small file). Raises ModelError if the
    model is not found, or has an unsupported feature.
    """
    return _found(model, read_architecture, from_hf_config)


def find_scorer(model: str) -> DecoderConfig:
    """Like `find_architecture` for a model that scores tokens: with its own head of scores, or with a new one."""
    return scoring_decoder(_found(model, read_scorer, scorer_from_hf_config))


def find_reward_model(model: str) -> DecoderConfig:
    """Like `find_architecture` for a reward model. Also raises ModelError if the model has no head of scores."""
    found = _found(model, read_reward_model, reward_model_from_hf_config)
    if found.scores == "none":  # one of `PRESETS`
        raise ModelError(f"{model} {NO_SCORES}")
    return found


def _found(
    model: str,
    read: Callable[[ModelSource], DecoderConfig],
    parse: Callable[[Mapping[str, object], str], DecoderConfig],
) -> DecoderConfig:
    if (folder := on_disk(model)) is not None:
        return read(resolve(folder))
    if model in PRESETS:
        return PRESETS[model]
    try:
        folder = from_hub(model, ["config.json"], timeout_s=HUB_TIMEOUT_S)
    except ModelError as error:
        raise ModelError(
            f"{error}; a plan needs only its config.json, and these models need no download: {', '.join(PRESETS)}"
        ) from error
    path = folder / "config.json"
    return parse(read_json(path), str(path))


def find_decoder(config: Config) -> DecoderConfig:
    """The decoder of a run including its adapters; otherwise like `find_architecture`."""
    return decoder_of_run(find_architecture(config.model), config.lora, config.rollout.weights)


def decoder_of_run(decoder: DecoderConfig, lora: LoraConfig | None, rollout_weights: RolloutWeights) -> DecoderConfig:
    """A model's decoder with a run's adapters, and the format of its rollout's weights.

    Raises ModelError if it has no matrix of a target of the adapters.
    """
    return dataclasses.replace(with_lora(decoder, lora), rollout_weights=rollout_weights)
