"""Merges settings: defaults < YAML files < environment < `--set`, and records where each was written.

Files merge left to right, each on top of the files that its `base:` names. Sections merge key by key; lists and values
are replaced whole. `PODIUM_ROLLOUT__MAX_NEW_TOKENS=64` and `--set rollout.max_new_tokens=64` set one value each; lists
are set by index (`tasks.0.path`). `podium.config.schema` defines the settings; `podium.config.explain` writes the error
messages.

The environment is parsed here rather than with pydantic-settings, which forgets where a value came from: errors could
not name the variable, or the line of a file.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from podium.config.document import Node, Plain, parse_text, read_document
from podium.config.errors import ConfigError, Problem, wrong
from podium.config.explain import explain
from podium.config.schema import Config, Rule

ENVIRONMENT_PREFIX = "PODIUM_"
SHIPPED = Path(sys.prefix) / "share" / "podium"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The settings of a run, and where each non-default one was written."""

    config: Config
    provenance: Mapping[str, str]
    """Dotted path -> `file:line`, `environment NAME` or `--set key=value`; sections and lists have entries too."""


class Override(NamedTuple):
    """A setting given by a separate command line option, such as `--task`, instead of `--set`."""

    key: str
    """Dotted path."""
    value: Plain
    origin: str


def load(
    files: Sequence[str | Path],
    overrides: Sequence[str | Override],
    environ: Mapping[str, str],
    *,
    rules: Sequence[Rule] = (),
    settled: Callable[[Path, Node], Node] = lambda file, written: written,
) -> Loaded:
    """Load the settings from files, environment and command line.

    `podium.settings` passes the rules of recipes, tasks and layouts; without them only the config's own rules apply.

    Args:
        files: YAML files; later ones win.
        overrides: `key=value` texts of `--set`, or settings with an origin; later ones win, and all win over `environ`.
        environ: usually `os.environ`; variables that start with `PODIUM_` are settings.
        rules: further rules, whose violations are reported together with other errors.
        settled: replaces the settings that a file contains, given the file and these settings.

    Raises ConfigError with all problems.
    """
    tree = Node({}, "default")
    problems: list[Problem] = []
    for file in files:
        with _collecting(problems):
            path = located(Path(file) if isinstance(file, str) else file)
            tree = merge(tree, settled(path, _read_with_bases(path, ())))
    names = sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX))
    settings = [_environment_setting(name, environ[name]) for name in names]
    for override in overrides:
        with _collecting(problems):
            settings.append(_override_setting(override))
    for keys, node in settings:
        with _collecting(problems):
            tree = assign(tree, keys, node)
    if problems:
        raise ConfigError(problems)
    return validate(tree, files, rules=rules)


def located(file: Path) -> Path:
    """The file, or if it does not exist, the config of the same name that is installed with Podium."""
    shipped = SHIPPED / file
    return shipped if file.parts[:1] == ("configs",) and not file.exists() and shipped.is_file() else file


@contextlib.contextmanager
def _collecting(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems.extend(error.problems)


def merge(below: Node, above: Node) -> Node:
    """Merge two layers: mappings key by key; otherwise the upper layer replaces the lower."""
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    children = dict(below.value)
    for key, child in above.value.items():
        children[key] = merge(children[key], child) if key in children else child
    return Node(children, above.origin)


def assign(tree: Node, keys: Sequence[str], leaf: Node, path: str = "") -> Node:
    """Set one value in the tree, creating missing sections on the way."""
    if not keys:
        return leaf
    key, rest = keys[0], keys[1:]
    inner = f"{path}.{key}" if path else key
    if isinstance(tree.value, list):
        if not key.isascii() or not key.isdigit() or int(key) >= len(tree.value):
            raise wrong(inner, _no_such_index(path, len(tree.value)), leaf.origin)
        items = list(tree.value)
        items[int(key)] = assign(items[int(key)], rest, leaf, inner)
        return Node(items, tree.origin)
    children = dict(tree.value) if isinstance(tree.value, dict) else {}
    children[key] = assign(children.get(key, Node({}, leaf.origin)), rest, leaf, inner)
    return Node(children, tree.origin if isinstance(tree.value, dict) else leaf.origin)


def _no_such_index(path: str, length: int) -> str:
    known = f"0 to {length - 1}" if length > 1 else "0" if length else "none: it is empty"
    return f"{path} is a list of {length}, index {known}; to set the whole list write {path}=[...]"


def _environment_setting(name: str, text: str) -> tuple[list[str], Node]:
    keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
    return keys, parse_text(text, f"environment {name}")


def _override_setting(text: str | Override) -> tuple[list[str], Node]:
    if isinstance(text, Override):
        return text.key.split("."), Node.of(text.value, text.origin)
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise wrong(f"--set {text}", "expected key=value, for example --set rollout.max_new_tokens=64")
    return key.strip().split("."), parse_text(value, f"--set {text}")


def _read_with_bases(path: Path, including: tuple[Path, ...]) -> Node:
    """Read a file and merge it over the files in its `base:`, which are relative to it."""
    resolved = path.resolve()
    if resolved in including:
        chain = " -> ".join(str(file) for file in (*including[including.index(resolved) :], resolved))
        raise wrong("base", f"files include each other: {chain}; remove one base:")
    document = read_document(path)
    bases = document.section.get("base")
    if bases is None:
        return document
    given = bases.plain() if isinstance(bases.value, list) else [bases.value]
    names = [name for name in given if isinstance(name, str)]
    if len(names) < len(given):
        raise wrong("base", f"expected a file name or a list of them, got {bases.plain()!r}", bases.origin)
    tree = Node({}, str(path))
    for name in names:
        try:
            tree = merge(tree, _read_with_bases(path.parent / name, (*including, resolved)))
        except ConfigError as error:
            included = f"included at {bases.origin}"
            raise ConfigError(
                [dataclasses.replace(each, origins=(*each.origins, included)) for each in error.problems]
            ) from None
    own = {key: child for key, child in document.section.items() if key != "base"}
    return merge(tree, Node(own, document.origin))


def validate(tree: Node, files: Sequence[str | Path], *, rules: Sequence[Rule] = ()) -> Loaded:
    """Validate a merged tree; see `load` for the arguments. Raises ConfigError with all problems."""
    if files and "name" not in tree.section:
        named = Node(Path(files[-1]).stem, f"name of {files[-1]}")
        tree = Node({**tree.section, "name": named}, tree.origin)
    try:
        config = Config.model_validate(tree.plain(), context=rules)
    except ValidationError as first:
        tree = _with_text_as_typed(tree, first)
        try:
            config = Config.model_validate(tree.plain(), context=rules)
        except ValidationError as error:
            raise ConfigError(explain(error, tree, [str(file) for file in files], rules)) from None
    return Loaded(config=config, provenance=tree.origins())


def _with_text_as_typed(tree: Node, error: ValidationError) -> Node:
    """Replace values from the environment and command line by their text if the schema expects text, as for `--set
    name=7`.
    """
    for detail in error.errors(include_url=False):
        node = tree.find(detail["loc"])
        if detail["type"] == "string_type" and node is not None and node.text is not None:
            tree = assign(tree, [str(key) for key in detail["loc"]], Node(node.text, node.origin))
    return tree
