"""Serialises a decoder's architecture to JSON for another process; kinds are named by import path. No jax."""

import dataclasses
from typing import Annotated, TypeAlias

from pydantic import JsonValue, PlainSerializer, PlainValidator

from podium.config.imports import imported
from podium.models.architecture import DecoderConfig

CLASS = "class"


def as_json(value: object) -> JsonValue:
    """Convert a dataclass of numbers, strings, tuples and nested dataclasses to JSON."""
    if dataclasses.is_dataclass(value):
        kind = type(value)
        fields = {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {CLASS: f"{kind.__module__}:{kind.__qualname__}", **fields}
    if isinstance(value, tuple):
        return [as_json(each) for each in value]
    assert value is None or isinstance(value, int | float | str), f"{value!r} in a decoder's declaration"
    return value


def from_json(value: JsonValue) -> object:
    """Convert the result of `as_json` back."""
    if isinstance(value, list):
        return tuple(from_json(each) for each in value)
    if isinstance(value, dict):
        kind = imported(str(value[CLASS]), what="a part of a decoder")
        return kind(**{name: from_json(each) for name, each in value.items() if name != CLASS})
    return value


def _decoder(value: DecoderConfig | JsonValue) -> DecoderConfig:
    found = value if isinstance(value, DecoderConfig) else from_json(value)
    assert isinstance(found, DecoderConfig)
    return found


StoredDecoder: TypeAlias = Annotated[DecoderConfig, PlainValidator(_decoder), PlainSerializer(as_json)]
"""A decoder as a pydantic field."""
