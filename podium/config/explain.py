"""Turns pydantic's validation errors into errors with the key, the value, the rule, the origin and the way out.

The rule of a setting comes from the JSON schema, its description from the field's docstring. Contradictions between
settings are reported together with invalid values, unless they involve a setting that is itself invalid.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, cast

from pydantic import JsonValue, ValidationError
from pydantic_core import ErrorDetails

from podium.config.document import Node, dump_value, parse_text
from podium.config.errors import Contradiction, Problem, nearest
from podium.config.hints import hint_for
from podium.config.schema import Config, Rule

Location = tuple[int | str, ...]
Schema = TypedDict(
    "Schema",
    {
        "$defs": "dict[str, Schema]",
        "$ref": str,
        "additionalProperties": "Schema | bool",
        "anyOf": "list[Schema]",
        "default": JsonValue,
        "description": str,
        "enum": list[JsonValue],
        "exclusiveMaximum": float,
        "exclusiveMinimum": float,
        "items": "Schema",
        "maximum": float,
        "minItems": int,
        "minimum": float,
        "pattern": str,
        "properties": "dict[str, Schema]",
        "required": list[str],
        "type": str,
    },
    total=False,
)
"""A node of the JSON schema that pydantic writes."""


def config_schema() -> Schema:
    """The JSON schema of a config."""
    return cast(Schema, Config.model_json_schema())


def explain(error: ValidationError, tree: Node, files: Sequence[str], rules: Sequence[Rule]) -> list[Problem]:
    """Convert an error of `Config.model_validate(tree.plain(), context=rules)` to problems with their origins.

    `files` are the config files; a missing setting is reported for the last one.
    """
    schema = config_schema()
    details = [each for each in error.errors(include_url=False) if each["type"] != "contradiction"]
    problems = [_field_problem(each, tree, schema, files) for each in details]
    wrong = {dotted(each["loc"]) for each in details}
    for found in _contradictions(error, tree, rules):
        if not any(_overlap(key, bad) for key in found.keys + found.needs for bad in wrong):
            problems.append(_contradiction_problem(found, tree))
    return problems


def dotted(location: Location) -> str:
    """A path of keys and indices in the dotted form of the command line."""
    return ".".join(str(key) for key in location)


def setting_paths(schema: Schema) -> list[Location]:
    """Paths of all sections and settings in the schema, with the first task standing for all tasks."""
    return list(_paths(schema, schema, ()))


def _paths(node: Schema, schema: Schema, path: Location) -> Iterator[Location]:
    for key, child in node.get("properties", {}).items():
        inner = _resolve(child, schema)
        yield (*path, key)
        yield from _paths(inner, schema, (*path, key))
        if "items" in inner:
            yield from _paths(_resolve(inner["items"], schema), schema, (*path, key, 0))


def _contradictions(error: ValidationError, tree: Node, rules: Sequence[Rule]) -> list[Contradiction]:
    """The broken rules; if some fields are invalid, those are set to their defaults before the rules are checked."""
    details = error.errors(include_url=False)
    if any(each["type"] != "contradiction" for each in details):
        try:
            Config.model_validate(_repaired(tree.plain(), [each["loc"] for each in details]), context=rules)
        except ValidationError as rest:
            details = rest.errors(include_url=False)
        else:
            return []
    return [found for each in details for found in each.get("ctx", {}).get("contradictions", [])]


def _repaired(plain: dict[str, Any], wrong: Sequence[Location]) -> dict[str, Any]:
    """The settings without the invalid ones, and with placeholders for the two required ones."""
    for location in wrong:
        parent, keys = plain, [str(key) for key in location]
        while len(keys) > 1 and isinstance(parent.get(keys[0]), dict):
            parent = parent[keys.pop(0)]
        parent.pop(keys[0], None)
    return {"model": "demo", "tasks": [{"name": "arithmetic"}]} | plain


def _overlap(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def _contradiction_problem(found: Contradiction, tree: Node) -> Problem:
    written = tree.origins()
    keys = [key for key in found.keys if key in written]
    origins = [f"{written[key]} ({key})" for key in keys] if len(keys) > 1 else [written[key] for key in keys]
    return Problem(key=found.keys[0], message=found.message, origins=tuple(origins), about=found.about)


def _field_problem(detail: ErrorDetails, tree: Node, schema: Schema, files: Sequence[str]) -> Problem:
    location, kind = detail["loc"], detail["type"]
    key, node = dotted(location), tree.find(location)
    origins = (node.origin,) if node is not None else ()
    if kind == "extra_forbidden":
        return Problem(key=key, message=f"unknown key; {_way_out(location, schema, files)}", origins=origins)
    if kind == "missing":
        *section, last = location
        message = f"missing, and it has no default; add `{last}: ...`"
        inside = tree.find(section)
        origins = (inside.origin,) if section and inside is not None else tuple(files[-1:])
    else:
        rule = rule_text(_at(location, schema) or Schema(), schema)
        if kind == "finite_number":
            rule = rule.replace("a number", "a finite number")
        message = f"expected {rule}, got {_shown(detail['input'])}{_hint(detail)}"
    return Problem(key=key, message=message, origins=origins, about=_about(location, schema))


def _hint(detail: ErrorDetails) -> str:
    value, kind = detail["input"], detail["type"]
    if kind == "literal_error" and isinstance(value, str):
        choices = [choice.strip("'") for choice in detail.get("ctx", {})["expected"].replace(" or ", ", ").split(", ")]
        near = nearest(value, choices)
        return f"; did you mean {near}?" if near else ""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and kind.endswith("_type") and not isinstance(parse_text(value, "").value, str):
        return "; remove the quotes"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f'; write "{dump_value(value)}" with quotes'
    if value is None:
        return "; write a value, or remove the key for the default"
    return ""


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool | int | float):
        return "nothing (null)" if value is None else dump_value(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _way_out(location: Location, schema: Schema, files: Sequence[str]) -> str:
    *parents, last = location
    key = str(last)
    if "." in key:
        first, _, rest = key.partition(".")
        return f"dots are for the command line; in a file write `{first}:` and under it `{rest}:`"
    if hint := hint_for(dotted(location), files[-1] if files else "OLD.yaml"):
        return hint
    siblings = list((_at(tuple(parents), schema) or Schema()).get("properties", {}))
    paths = setting_paths(schema)
    if near := nearest(key, siblings):
        return f"did you mean {dotted((*parents, near))}?"
    elsewhere = [dotted(path) for path in paths if path[-1] == key]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    leaves = {str(path[-1]): dotted(path) for path in paths}
    if near := nearest(key, leaves, cutoff=0.8):
        return f"did you mean {leaves[near]}?"
    return f"the keys here are {', '.join(sorted(siblings))}"


def _resolve(node: Schema, schema: Schema) -> Schema:
    """Resolve a schema node: follow `$ref`, and reduce `X | None` to X."""
    if "anyOf" in node:
        choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
        return _resolve(choices[0], schema)
    if "$ref" in node:
        return schema.get("$defs", {})[node["$ref"].rpartition("/")[2]]
    return node


def _at(location: Location, schema: Schema) -> Schema | None:
    """The resolved schema node at a path; None if there is no such setting."""
    node = schema
    for key in location:
        if isinstance(key, int):
            child = node.get("items")
        else:
            child = node.get("properties", {}).get(key) or node.get("additionalProperties")
        if child is None or isinstance(child, bool):
            return None
        node = _resolve(child, schema)
    return node


def _about(location: Location, schema: Schema) -> str | None:
    *section, last = location
    parent = _at(tuple(section), schema) or Schema()
    return parent.get("properties", {}).get(str(last), Schema()).get("description")


def rule_text(node: Schema, schema: Schema) -> str:
    """Describe the values that a JSON schema node allows, such as `a whole number of at least 1`."""
    node = _resolve(node, schema)
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    kind = node.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(node)
    if kind == "array":
        inner = rule_text(node.get("items", Schema()), schema)
        count = node.get("minItems")
        least = f" with at least {count} element{'s'[: count != 1]}" if count else ""
        return f"a list{least}, each {inner}"
    if kind == "object" and "properties" in node:
        return "a section (`key: value` lines)"
    if kind == "object":
        inner = node.get("additionalProperties")
        return "a section" + (
            "" if inner is None or isinstance(inner, bool) else f" whose values are each {rule_text(inner, schema)}"
        )
    return {"boolean": "true or false", "string": "text"}.get(str(kind), "a value")


def _bounds(node: Schema) -> str:
    low = node.get("minimum")
    high = node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {_number(low)} to {_number(high)}"
    if above is not None:
        return f" above {_number(above)}" + (f" and at most {_number(high)}" if high is not None else "")
    if low is not None:
        return f" of at least {_number(low)}" + (f" and below {_number(below)}" if below is not None else "")
    return ""


def _number(value: float) -> str:
    return f"{value:g}"
