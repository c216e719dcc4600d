"""docs/plan.schema.json against what `podium plan --json` really prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from podium.plan.report.json_answer import comparison_object, plan_object
from podium.plan.search.study import Outcome, RunCost
from tests.plan.made_plans import outcome, plan, seconds
from tools.plan_schema import plan_schema

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def problems(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Where a value is not what a schema says, of the keywords that ours has."""
    if reference := schema.get("$ref"):
        return problems(value, SCHEMA["$defs"][reference.rpartition("/")[2]], path)
    if choices := schema.get("anyOf"):
        found = [problems(value, each, path) for each in choices]
        return [] if [] in found else min(found, key=len)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{path}: {value!r} is none of {schema['enum']}"]
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(isinstance(value, KINDS[kind]) for kind in kinds):
        return [f"{path}: {value!r} is no {schema['type']}"]
    if isinstance(value, list):
        return [each for i, item in enumerate(value) for each in problems(item, schema["items"], f"{path}/{i}")]
    if not isinstance(value, dict):
        return []
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
    found = [f"{path}: {name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, item in value.items():
        if name not in properties and rest is None and properties:
            found.append(f"{path}: {name} is not in the schema")
        elif known := properties.get(name, rest):
            found += problems(item, known, f"{path}/{name}")
    return found


def entry(**changes: Any) -> Outcome:
    cost = RunCost(
        steps=100,
        chip_hours=seconds(2.0),
        usd=seconds(9.0),
        usd_per_chip_hour=4.76,
        price_source="a list",
        price_date="2026-03-10",
    )
    return outcome(plan(**changes), cost=cost)


def test_the_schema_is_that_of_the_plans_today():
    assert plan_schema() == SCHEMA, "run python -m tools.plan_schema > docs/plan.schema.json"


@pytest.mark.parametrize("changes", [{}, {"step": None, "host": None, "tokens_per_s_per_chip": None}])
def test_a_plan_is_what_the_schema_says(changes):
    value = json.loads(json.dumps(plan_object(entry(**changes))))
    assert problems(value, SCHEMA) == []
    several = json.loads(json.dumps(comparison_object([entry(**changes)], [outcome(None, error="b")])))
    assert problems(several, SCHEMA) == []


def test_what_is_wrong_is_found():
    value = json.loads(json.dumps(plan_object(entry())))
    del value["verdict"]
    value["phases"][0]["bound_by"] = "magic"
    found = problems(value, SCHEMA["$defs"]["Plan"])
    assert found[0] == ": verdict is missing" and "'magic' is none of" in found[1]
