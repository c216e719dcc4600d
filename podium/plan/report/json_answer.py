"""The object that `podium plan --json` prints; its field names are stable across versions.

Objects mirror the dataclasses of a plan, with fields renamed by `NAMES` and memory in GiB.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from podium.accelerators import GIB
from podium.plan.report.advice import advice_line
from podium.plan.report.formatting import step_parts, verdict_line
from podium.plan.result import Plan
from podium.plan.search.fit import Fitted
from podium.plan.search.largest import Largest
from podium.plan.search.study import Outcome

Object = dict[str, Any]
NAMES = {
    "accelerator": "tpu",
    "bytes": "gib",
    "hbm_bytes": "hbm_gib",
    "spare_bytes": "spare_gib",
    "low_bytes": "low_gib",
    "high_bytes": "high_gib",
    "parts": "parts_gib",
    "sent": "sent_bytes",
    "step": "step_seconds",
    "workload": "rollout",
    "rollout_rate": "rollout_tokens_per_s_per_chip",
    "full_slots_rate": "full_slots_tokens_per_s_per_chip",
}
"""Names in the object of fields of the plan's dataclasses, where they differ."""
ROLLOUT = ("prompt_tokens", "prefill_tokens", "completion_tokens", "decode_steps", "slot_utilisation", "mean_context")
"""The workload's fields that the object includes."""


def plan_object(
    entry: Outcome,
    suggestions: Sequence[Outcome] | None = None,
    longest: Plan | None = None,
    fitted: Fitted | None = None,
) -> Object:
    """One plan as an object; arguments are those of `plan_sections`, with `fitted` also if the run fits."""
    plan = entry.plan
    found = as_object(plan)
    del found["host"], found["environments"]  # listed among the parts of the step
    found["rollout"] = {name: getattr(plan.workload, name) for name in ROLLOUT}
    return found | {
        "advice": advice_line(plan, suggestions, fitted if plan.verdict != "fits" else None),
        "text": verdict_line(plan),
        "setting": entry.setting or None,
        "step_parts": {name: dataclasses.asdict(time) for name, time in step_parts(plan)},
        "cost": as_object(entry.cost) if entry.cost else None,
        "reason": entry.reason or None,
        "suggestions": [_suggestion(each) for each in suggestions or ()],
        "step_seconds_if_longest": as_object(longest.step) if longest and longest.step else None,
        **({"fit": fit_object(fitted)} if fitted else {}),
    }


def comparison_object(entries: Sequence[Outcome], refused: Sequence[Outcome] = ()) -> Object:
    """Several plans, best first, then the cases that could not be planned."""
    errors = [{"tpu": each.case.machine.name, "setting": each.setting, "error": each.error} for each in refused]
    return {"plans": [plan_object(each) for each in entries], "refused": errors}


def search_object(found: Largest) -> Object:
    """The result of a search; `value` is null if no value fits."""
    return {
        "value": found.best,
        "with_room": found.with_room,
        "too_large": found.too_large,
        "key": found.key,
        "proven": found.proven,
        "step": found.range.unit,
        "most": found.range.most,
        "why_most": found.range.why,
        "tried": [{"value": value} | as_object(peak) for value, peak in found.tried.items()],
    }


def fit_object(found: Fitted) -> Object:
    """The fastest settings that fit; `settings` is null if nothing fits."""
    best = found.best
    return {
        "settings": _values(best) if best else None,
        "changes_what_is_learned": [change.key for change in found.learned],
        "verdict": best.plan.verdict if best else "does_not_fit",
        "step_seconds": as_object(best.plan.step) if best and best.plan.step else None,
        "compiled": best is not None and not best.plan.estimate_only,
        "estimated": found.estimated,
        "tried": [
            {
                "settings": {change.key: change.value for change in each.changes},
                "phase": each.phase,
                "gib": each.bytes / GIB,
                "fits": each.fits,
                "step_seconds": each.seconds,
                "made_by": each.made_by,
            }
            for each in found.tried
        ],
        "others": [{"settings": _values(each), "verdict": each.plan.verdict} for each in found.others],
    }


def _values(outcome: Outcome) -> Object:
    return {change.key: change.value for change in outcome.case.changes}


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def as_object(value: Dataclass) -> Object:
    """Convert a dataclass to an object, nested dataclasses included, renaming fields by `NAMES`."""
    return dataclasses.asdict(
        value, dict_factory=lambda fields: {NAMES.get(name, name): _plain(name, each) for name, each in fields}
    )


def _plain(name: str, value: object) -> object:
    if name == "parts" and isinstance(value, Mapping):
        return {part: size / GIB for part, size in value.items()}
    if name.endswith("bytes") and isinstance(value, int | float):
        return value / GIB
    return None if name == "bound_by" and not value else value


def _suggestion(outcome: Outcome) -> Object:
    (change,) = outcome.case.changes
    found = as_object(outcome.plan)
    kept = {name: found[name] for name in ("verdict", "spare_gib", "step_seconds", "tokens_per_s_per_chip")}
    compiled = not outcome.plan.estimate_only
    changed = {"key": change.key, "value": change.value, "old": change.old}
    return changed | kept | {"compiled": compiled, "reason": outcome.reason}
