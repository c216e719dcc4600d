"""What `podium plan --json` prints: exactly one object, whose names do not change from one version to the next.

Objects are the dataclasses of a plan, field by field, under the names of `NAMES`; memory is in GiB there.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from podium.accelerators import GIB
from podium.plan.compare import PlanEntry, Refused
from podium.plan.formatting import step_parts, verdict_line
from podium.plan.search import SearchResult, Trial

Object = dict[str, Any]
NAMES = {
    "accelerator": "tpu",
    "bytes": "gib",
    "hbm_bytes": "hbm_gib",
    "spare_bytes": "spare_gib",
    "parts": "parts_gib",
    "sent": "sent_bytes",
    "step": "step_seconds",
    "tokens_per_s_per_device": "tokens_per_s_per_chip",
    "workload": "rollout",
}
"""What fields are called in an object, where that differs."""
ROLLOUT = ("prompt_tokens", "completion_tokens", "decode_steps", "mean_context")  # what an object has of the workload


def plan_object(entry: PlanEntry, suggestions: Sequence[Trial] = ()) -> Object:
    """One plan."""
    plan = entry.plan
    found = as_object(plan)
    del found["host"]  # it is among the parts of the step
    found["rollout"] = {name: found["rollout"][name] for name in ROLLOUT}
    return found | {
        "text": verdict_line(plan),
        "setting": entry.setting or None,
        "step_parts": {name: dataclasses.asdict(time) for name, time in step_parts(plan)},
        "cost": as_object(entry.cost) if entry.cost else None,
        "reason": entry.reason or None,
        "suggestions": [_suggestion(each) for each in suggestions],
    }


def comparison_object(entries: Sequence[PlanEntry], refused: Sequence[Refused]) -> Object:
    """Several plans, best first, and what could not be planned."""
    return {"plans": [plan_object(each) for each in entries], "refused": [as_object(each) for each in refused]}


def search_object(found: SearchResult) -> Object:
    """How a search went; `value` is null where no value fits."""
    best, over = found.best, found.too_large
    return {
        "key": found.key,
        "value": best.change.value if best else None,
        "too_large": over.change.value if over else None,
        "proven": found.proven,
        "step": found.range.unit,
        "most": found.range.most,
        "why_most": found.range.why,
        "tried": [
            {"value": each.change.value, "verdict": each.plan.verdict, "gib": each.plan.worst.bytes / GIB}
            for each in found.trials
        ],
    }


def as_object(value: Any) -> Object:
    """A dataclass, and those in it, with the names that objects have."""
    return dataclasses.asdict(
        value, dict_factory=lambda fields: {NAMES.get(name, name): _plain(name, each) for name, each in fields}
    )


def _plain(name: str, value: Any) -> Any:
    if name == "parts":
        return {part: size / GIB for part, size in value.items()}
    if name.endswith("bytes"):
        return value / GIB
    return None if name == "bound_by" and not value else value


def _suggestion(trial: Trial) -> Object:
    found = as_object(trial.plan)
    kept = {name: found[name] for name in ("verdict", "spare_gib", "step_seconds", "tokens_per_s_per_chip")}
    return as_object(trial.change) | kept | {"compiled": not trial.plan.estimate_only, "reason": trial.reason}
