"""Writes settings as YAML that loads again (`podium config show`, migration), and the JSON schema of config files."""

from collections.abc import Iterable, Iterator, Mapping

from podium.config.document import dump_value
from podium.config.schema import Config


def to_yaml(settings: Mapping[str, object], comments: Mapping[str, str] | None = None) -> str:
    """Write plain settings as block YAML, one per line; `comments` maps dotted paths to comments, which are appended to
    the lines.
    """
    return "".join(f"{line}\n" for line in _mapping(settings, comments or {}, "", ""))


def flat(tree: object, key: str = "") -> dict[str, object]:
    """The leaves of nested mappings by dotted key, as in `--set`; a list is a leaf unless it contains mappings."""
    if isinstance(tree, list) and tree and all(isinstance(each, Mapping) for each in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping) or not tree:
        return {key: tree}
    found: dict[str, object] = {}
    for part, value in tree.items():
        found |= flat(value, f"{key}.{part}" if key else str(part))
    return found


def _mapping(settings: Mapping[str, object], comments: Mapping[str, str], path: str, indent: str) -> Iterator[str]:
    for key, value in settings.items():
        inner = f"{path}.{key}" if path else str(key)
        name = f"{indent}{dump_value(key)}:"
        if isinstance(value, Mapping) and value:
            yield name
            yield from _mapping(value, comments, inner, f"{indent}  ")
        elif isinstance(value, list) and any(isinstance(item, Mapping) and item for item in value):
            yield name
            for index, item in enumerate(value):
                yield from _item(item, comments, f"{inner}.{index}", f"{indent}  ")
        else:
            yield _line(f"{name} {dump_value(value)}", comments.get(inner))


def _item(value: object, comments: Mapping[str, str], path: str, indent: str) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield _line(f"{indent}- {dump_value(value)}", comments.get(path))
        return
    lines = _mapping(value, comments, path, f"{indent}  ")
    yield f"{indent}- {next(lines).lstrip()}"
    yield from lines


def _line(text: str, comment: str | None) -> str:
    return f"{text}  # {' '.join(comment.split())}" if comment else text


def file_schema(names: Mapping[str, Iterable[str]], importable: Iterable[str] = ()) -> dict[str, object]:
    """The JSON schema of a config file. No key is required, because files may include others.

    `names` lists the allowed values of text settings by dotted path; settings in `importable` also accept an import
    path.
    """
    schema = Config.model_json_schema()
    for path, values in names.items():
        *sections, name = path.split(".")
        owner = schema
        for section in sections:
            owner = schema["$defs"][owner["properties"][section]["$ref"].rpartition("/")[2]]
        field = owner["properties"][name]
        kinds: list[dict[str, object]] = [{"enum": list(values)}]
        if path in importable:
            kinds.append({"type": "string", "pattern": ":"})
        if field.get("default", "") is None:
            kinds.append({"type": "null"})
        rule = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        owner["properties"][name] = dict(sorted({**field, **rule}.items()))
    texts = {"type": "string"}
    base = {
        "anyOf": [texts, {"type": "array", "items": texts}],
        "description": "Files, relative to this one, whose settings this file overrides.",
    }
    schema["properties"] = {"base": base} | schema["properties"]
    schema.pop("required")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
