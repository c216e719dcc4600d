"""Reads and writes YAML 1.2; every value records its line, and `1e-6` is a number.

Scalars are those of YAML 1.2: true and false, null, decimal, hexadecimal and octal integers, floats. PyYAML by default
reads YAML 1.1, in which `1e-6` is text, `no` is false and `12:30` is 750. Duplicate keys, multiple documents and custom
tags are errors. `podium.config.load` interprets the keys.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from podium.config.errors import wrong

_SCALARS = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
}
_TAG = "tag:yaml.org,2002:"
DEEPEST = 40
"""Maximum nesting of sections and lists: more than any setting needs, and within Python's stack."""
MOST_VALUES = 100_000
"""Maximum number of values with aliases expanded: a few hundred bytes of aliases can expand to billions of values."""


Scalar: TypeAlias = bool | int | float | str | None
Plain: TypeAlias = "Scalar | Sequence[Plain] | Mapping[str, Plain]"
"""A value that YAML and JSON can hold."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A value and its origin; mappings and lists contain nodes."""

    value: "Scalar | dict[str, Node] | list[Node]"
    origin: str
    text: str | None = None
    """The unparsed text of a value from the environment or command line, whose type depends on the setting: `7` may be
    text."""

    @classmethod
    def of(cls, value: Plain, origin: str) -> "Node":
        """Make a node from a plain value, giving all its parts the same origin."""
        if isinstance(value, Mapping):
            return cls({key: cls.of(child, origin) for key, child in value.items()}, origin)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return cls([cls.of(child, origin) for child in value], origin)
        return cls(value, origin)

    def plain(self) -> Any:
        """The value without origins, as plain Python objects."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    @property
    def section(self) -> "dict[str, Node]":
        """The items of a mapping; empty for a list or a scalar."""
        return self.value if isinstance(self.value, dict) else {}

    def children(self) -> list[tuple[str | int, "Node"]]:
        """(key or index, child) pairs; empty for a scalar."""
        if isinstance(self.value, dict):
            return list(self.value.items())
        return list(enumerate(self.value)) if isinstance(self.value, list) else []

    def find(self, path: Sequence[str | int]) -> "Node | None":
        """The node at a path of keys and indices, or None if there is none."""
        node: Node | None = self
        for key in path:
            node = dict(node.children()).get(key) if node is not None else None
        return node

    def origins(self, path: str = "") -> dict[str, str]:
        """Map the dotted path of every node below this one to its origin."""
        found: dict[str, str] = {}
        for key, child in self.children():
            inner = f"{path}.{key}" if path else str(key)
            found |= {inner: child.origin} | child.origins(inner)
        return found


class _Loader(yaml.SafeLoader):
    """Parses only YAML 1.2's scalars."""

    yaml_implicit_resolvers: dict = {}


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: object) -> bool:
        """Never write YAML aliases such as `&id001`, which readers would have to resolve."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(_TAG + "str", text, style='"' if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, _pattern, _first)


def read_document(path: Path) -> Node:
    """Read a YAML file that contains a mapping; an empty file is an empty mapping.

    Raises ConfigError if the file cannot be read, does not contain a YAML mapping, or has a duplicate key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        run = path / "config.yaml"
        way_out = f"to continue the run in it, give {run}" if run.is_file() else "name a file"
        raise wrong(str(path), f"is a folder; {way_out}") from None
    except OSError as error:
        raise wrong(str(path), f"cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise wrong(str(path), f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    try:
        root = _compose(text, str(path))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise wrong(f"{path}:{line}", f"not YAML: the character {chr(error.character)!r}; remove it") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise wrong(f"{path}:{line}", f"not YAML: {reason}") from None
    if root is None:
        return Node({}, str(path))
    if not isinstance(root, yaml.MappingNode):
        raise wrong(f"{path}:{root.start_mark.line + 1}", "expected `key: value` lines at the top of the file")
    return _convert(root, str(path), root.start_mark.line + 1, (), itertools.count(1))


def parse_text(text: str, origin: str) -> Node:
    """Parse a value from the environment or command line: a scalar, `[...]` or `{...}`; anything else is text."""
    try:
        root = _compose(text, origin)
    except yaml.YAMLError:
        return Node(text, origin, text)
    if root is None:
        return Node(None, origin, text)
    if isinstance(root, yaml.CollectionNode):
        if not root.flow_style:
            return Node(text, origin, text)
        node = _convert(root, origin, None, (), itertools.count(1))
        return Node(node.value, origin, text)
    assert isinstance(root, yaml.ScalarNode)
    if root.tag.removeprefix(_TAG) not in _SCALARS and root.style is None:
        return Node(text, origin, text)
    return Node(_scalar(root, origin), origin, text)


def dump_value(value: object) -> str:
    """Write a scalar, list or mapping as one line of YAML that reads back as the same value."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _compose(text: str, origin: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, _Loader)
    except RecursionError:  # PyYAML's parser recurses once per level
        raise wrong(origin, f"nested too deep: at most {DEEPEST} sections and lists inside each other") from None


def _convert(
    node: yaml.Node, source: str, line: int | None, parents: tuple[int, ...], count: "itertools.count[int]"
) -> Node:
    """Convert a composed YAML node; `line` is None if the whole value has one origin. `count` numbers all values."""
    origin = source if line is None else f"{source}:{line}"
    if len(parents) > DEEPEST:
        raise wrong(origin, f"nested too deep: at most {DEEPEST} sections and lists inside each other")
    if next(count) > MOST_VALUES:
        raise wrong(source, f"has more than {MOST_VALUES:,} values with its aliases (*name) written out; remove some")
    if id(node) in parents:
        raise wrong(origin, "an alias (*name) is inside its own anchor (&name)")
    inside = (*parents, id(node))
    if isinstance(node, yaml.ScalarNode):
        return Node(_scalar(node, origin), origin)
    if isinstance(node, yaml.SequenceNode):
        items = [_convert(item, source, line and item.start_mark.line + 1, inside, count) for item in node.value]
        return Node(items, origin)
    children: dict[str, Node] = {}
    for key, value in node.value:
        key_line = line and key.start_mark.line + 1
        where = source if line is None else f"{source}:{key_line}"
        if not isinstance(key, yaml.ScalarNode):
            raise wrong(where, "a key must be plain text, not a list or a mapping")
        if key.value in children:
            raise wrong(key.value, "written twice in one section; keep one", children[key.value].origin, where)
        children[key.value] = _convert(value, source, key_line, inside, count)
    return Node(children, origin)


def _scalar(node: yaml.ScalarNode, origin: str) -> Scalar:
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind == "str":
        return text
    if kind not in _SCALARS or not _SCALARS[kind][0].match(text):
        raise wrong(origin, f"{text!r} has the tag {node.tag!r}; write a plain value")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
