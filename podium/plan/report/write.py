"""Writes the settings that a search found as a config."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from podium.config.load import located
from podium.config.show import to_yaml
from podium.files import write_atomically


def write_config(
    path: Path, files: Sequence[str], document: Mapping[str, object], keys: Iterable[str], title: str
) -> None:
    """Write a config that includes `files` and sets the values that `document` has for `keys`.

    Args:
        path: the file to write.
        files: the configs that it includes as its `base`.
        document: all settings, by section.
        keys: dotted paths. For a path into a list, the whole list is written.
        title: a comment at its top.
    """
    settings = nested(dict(_setting(document, key) for key in keys))
    folder = path.parent.resolve()
    bases = [os.path.relpath(located(Path(file)).resolve(), folder) for file in files]
    text = to_yaml(({"base": bases[0] if len(bases) == 1 else bases} if bases else {}) | settings)
    write_atomically(path, f"# {title}\n{text}")


def nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings by dotted path as nested sections."""
    found: dict[str, object] = {}
    sections: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        name, dot, rest = key.partition(".")
        if dot:
            found[name] = sections.setdefault(name, {})
            sections[name][rest] = value
        else:
            found[name] = value
    return found | {name: nested(inner) for name, inner in sections.items()}


def _setting(document: Mapping[str, object], key: str) -> tuple[str, object]:
    """The path and value of a setting; for a path into a list, the path of the list and the whole list."""
    value: object = document
    names = key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(value, Mapping):
            return ".".join(names[:depth]), value
        value = value[name]
    return key, value
