"""The settings of a model's config.json, as a family reads them. No jax."""

import dataclasses
from collections.abc import Mapping

from podium.models.architecture import MAX_SIZE, ModelError, real_number, shown, whole_number

Keys = Mapping[str, object]
"""Keys of a config.json with their values."""
EMPTY = (None, False, {}, [], "")
"""Values with which an unknown key is accepted, because they enable nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A config.json's keys that the model's family reads. All of them are present; their values may be null.

    The methods raise ModelError if a value has another type or range than the method reads.
    """

    model_type: str
    keys: Keys
    where: str
    """The path of the config.json, for errors."""

    def __getitem__(self, key: str) -> object:
        return self.keys[key]

    def number(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A whole number from 1 to `most`, or `default` for null."""
        return whole_number(self.keys, key, self.where, default, most=most)

    def real(self, key: str) -> float:
        """A number above 0."""
        return real_number(self.keys, key, self.where)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self[key]
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} must be true or false, found {shown(value)}")
        return value

    def object(self, key: str) -> Keys:
        """A JSON object; an empty one for null."""
        return json_object(self.keys, key, self.where)


def json_object(raw: Keys, key: str, where: str) -> Keys:
    """Read a setting that is a JSON object; empty if it is null or absent. Raises ModelError for other values."""
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{where}: {key} must be a JSON object or null, found {shown(value)}")
    return value
