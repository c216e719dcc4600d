"""docs/plan.schema.json, from the dataclasses of a plan: `python -m tools.plan_schema > docs/plan.schema.json`."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

from podium.files import to_json
from podium.plan.report.json_answer import NAMES, ROLLOUT
from podium.plan.request.workload import Workload
from podium.plan.result import Plan, Seconds
from podium.plan.search.study import RunCost

SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean"}
TIME = {"$ref": "#/$defs/Seconds"}


def plan_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of what `podium plan --json` prints: one plan, or several."""
    plan = _object(Plan)
    cost = _object(RunCost)
    refused = _closed({name: {"type": "string"} for name in ("tpu", "setting", "error")})
    properties = plan["properties"]
    del properties["host"], properties["environments"]
    fields = properties["rollout"]["properties"]
    properties["rollout"] = _closed({name: fields.get(name) or _of_property(Workload, name) for name in ROLLOUT})
    properties |= {
        "advice": {"type": "string"},
        "text": {"type": "string"},
        "setting": {"type": ["string", "null"]},
        "step_parts": {"type": "object", "additionalProperties": TIME},
        "cost": {"anyOf": [cost, {"type": "null"}]},
        "reason": {"type": ["string", "null"]},
        "suggestions": {"type": "array", "items": {"type": "object"}},
        "step_seconds_if_longest": {"anyOf": [TIME, {"type": "null"}]},
    }
    one = {"$ref": "#/$defs/Plan"}
    several = _closed({"plans": {"type": "array", "items": one}, "refused": {"type": "array", "items": refused}})
    several["required"] = ["plans"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "podium plan --json",
        "description": "One plan; with several machines or settings, or --on auto, an object with plans, best first."
        " A plan of --search has the object search too; one of --fit, or of a run that does not fit, the object fit."
        " Memory is in GiB, times are in seconds.",
        "anyOf": [one, several],
        "$defs": {"Seconds": _object(Seconds), "Plan": plan | {"required": sorted(properties)}},
    }


def _object(kind: type) -> dict[str, Any]:
    """A dataclass under the names that its fields have in an answer."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return _closed({NAMES.get(name, name): _field(name, hint) for name, hint in fields.items()})


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": sorted(properties)}


def _of_property(kind: type, name: str) -> dict[str, Any]:
    return _type(typing.get_type_hints(getattr(kind, name).fget)["return"])


def _field(name: str, hint: Any) -> dict[str, Any]:
    if name == "parts":
        return {"type": "object", "additionalProperties": {"type": "number"}}
    if name.endswith("bytes"):
        return {"type": "number"}
    if name == "bound_by":
        return {"enum": [*filter(None, typing.get_args(hint)), None]}
    return _type(hint)


def _type(hint: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if hint is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(each) for each in inner]}
    if origin in (tuple, Sequence):
        return {"type": "array", "items": _type(inner[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _type(inner[1])}
    return TIME if hint is Seconds else _object(hint)


if __name__ == "__main__":
    print(to_json(plan_schema(), indent=2))
