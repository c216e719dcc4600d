"""Keys of the seed system and of TRL, from YAML tables, and the seed system's rules for reading its files.

`podium.compat.migrate` translates the seed system's values.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from podium.config.document import Node, Scalar, parse_text, read_document
from podium.config.errors import wrong

_BARE = {
    "algo": "algo.name",
    "algo.estimator": "algo.estimator.name",
    "algo.update": "algo.update.name",
    "train.optimizer": "train.optimizer.name",
    "train.optimizer.lr_schedule": "train.optimizer.lr_schedule.type",
}
"""Sections that may also be written as a single value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedKey:
    """A setting of the seed system; the table in `seed_keys.yaml` documents the fields."""

    kind: str = "text"
    default: Scalar = None
    zero: Scalar = None
    also: tuple[str, ...] = ()
    becomes: str | None = None
    why: str = ""
    gone: str = ""


@functools.cache
def seed_keys() -> dict[str, SeedKey]:
    """The seed system's settings, by full name."""
    table = read_document(Path(__file__).with_suffix(".yaml")).plain()
    return {key: SeedKey(**{**fields, "also": tuple(fields.get("also", ()))}) for key, fields in table.items()}


@functools.cache
def trl_keys() -> dict[str, str]:
    """Podium's setting for each of TRL's names."""
    return read_document(Path(__file__).with_name("trl_keys.yaml")).plain()


@functools.cache
def spellings() -> dict[str, str]:
    """The full name of a setting, for every way to write it, flat forms included."""
    return {spelling: key for key, about in seed_keys().items() for spelling in _spellings(key, about)}


def hint(key: str, file: str) -> str | None:
    """How to write a key of TRL or of the seed system in Podium; None for any other key."""
    name = key.rpartition(".")[2]
    if name in trl_keys():
        return f"what TRL calls {name} is {trl_keys()[name]} here"
    if any(spelling == key or spelling.startswith(f"{key}.") for spelling in spellings()):
        return f"it is a key of the seed system; `podium config migrate {file}` translates the whole file"
    return None


def _spellings(key: str, about: SeedKey) -> Iterator[str]:
    section, dot, rest = key.partition(".")
    yield key
    yield from about.also
    if section in ("rollout", "train") and "." not in rest and dot:
        yield f"{section}_{rest}"
        if key != "rollout.mesh_shape":  # its flat form is the mesh of the whole run
            yield rest


def read_seed(path: Path, environ: Mapping[str, str]) -> dict[str, tuple[str, Node]]:
    """Read a file: full name -> (spelling in the file, value). Raises ConfigError if two spellings disagree."""
    found: dict[str, tuple[str, Node]] = {}
    for spelling, node in _leaves(read_document(path), ""):
        key = _BARE.get(spelling) or spellings().get(spelling, spelling)
        node = _expanded(node, environ)
        if key in found and found[key][1].plain() != node.plain():
            other, before = found[key]
            message = f"{node.plain()!r} and {other}: {before.plain()!r} mean the same setting; keep one"
            raise wrong(spelling, message, before.origin, node.origin)
        found[key] = (spelling, node)
    return found


def _leaves(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    for key, child in node.children():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(child.value, dict):
            yield from _leaves(child, inner)
        else:
            yield inner, child


def _expanded(node: Node, environ: Mapping[str, str]) -> Node:
    """Replace `$NAME` and `${NAME}` in a node; unset names become empty, as in the seed system."""
    if not isinstance(node.value, str) or "$" not in node.value:
        return node
    text = re.sub(r"\$(\w+|\{\w+\})", lambda name: environ.get(name[1].strip("{}"), ""), node.value)
    return parse_text(text, node.origin)
