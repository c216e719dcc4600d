"""Converts between the config.json of a Hugging Face model and a DecoderConfig, as its family says. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from podium.models.architecture import DecoderConfig, ModelError, check_config, scoring_decoder, shown
from podium.models.families import FAMILIES
from podium.models.files.config_keys import check_family, settings_of, text_config
from podium.models.files.model_settings import Keys

Head = Literal["logits", "scores", "own scores"]
"""The head that a model is wanted with: a language model's, or one score for each token, which may be a new one if the
model has none, or must be its own, as a reward model's."""
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
"""Suffixes of transformers' class names for models with a head of scores, without and with a bias."""
NO_SCORES = (
    f"has no head of scores, so it says nothing of an answer; take a reward model: a ...{SEQUENCE} with one label"
)


def from_hf_config(raw: Keys, where: str, head: Head = "logits") -> DecoderConfig:
    """Read the decoder from a config.json of transformers 4 or 5; `where` is its path, for errors.

    For a model with a vision tower, reads the text model. A missing key has the value that transformers gives it.
    Raises ModelError if the model type or a key is unknown, a feature is not supported
    (`podium.models.files.config_keys`), or the model's head of scores has several labels, or is missing.
    """
    scores = "none" if head == "logits" else scores_of(raw, where)
    if head == "own scores" and scores == "none":
        raise ModelError(f"{where}: {_named(raw)} {NO_SCORES}")
    text = text_config(raw, where)
    family = check_family(text.get("model_type"), where)
    decoder = check_config(family.read(settings_of(text, family, where)), where)
    return decoder if head == "logits" else scoring_decoder(dataclasses.replace(decoder, scores=scores))


def to_hf_config(config: DecoderConfig) -> dict[str, object]:
    """Make the config.json from which transformers 4 or 5 builds this decoder."""
    family = FAMILIES[config.model_type]
    described = {
        "architectures": [family.transformers_class],
        "model_type": config.model_type,
        **family.write(config),
    }
    if config.scores == "none":
        return described
    named = family.scorer(SEQUENCE if config.scores == "plain" else TOKEN)
    return {**described, "architectures": [named], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def scores_of(raw: Keys, where: str) -> Literal["none", "plain", "biased"]:
    """The head of scores that a config.json describes, which gives one score per token. Raises ModelError if it gives
    several.
    """
    named = raw.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if not architecture.endswith((SEQUENCE, TOKEN)):
        return "none"
    labels = raw.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else raw.get("num_labels", 2)  # transformers' default is 2
    if count != 1:
        raise ModelError(
            f"{where}: {architecture} has {shown(count)} labels (id2label, num_labels), and a score is one number;"
            " take a model that was trained with num_labels=1"
        )
    return "plain" if architecture.endswith(SEQUENCE) else "biased"


def _named(raw: Keys) -> str:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else f"this {shown(raw.get('model_type'))} model"
