"""What `podium plan --json` prints: exactly one object, whose names do not change from one version to the next."""

from collections.abc import Sequence
from typing import Any

from podium.accelerators import GIB
from podium.plan.compare import Answer, Refused
from podium.plan.prices import Cost
from podium.plan.result import Collective, Phase, Seconds
from podium.plan.search import Found
from podium.plan.suggest import Suggestion
from podium.plan.words import step_parts, verdict_line

Object = dict[str, Any]


def plan_object(answer: Answer, suggestions: Sequence[Suggestion] = ()) -> Object:
    """One plan."""
    plan = answer.plan
    composition = plan.composition
    return {
        "verdict": plan.verdict,
        "text": verdict_line(plan),
        "config": plan.config,
        "setting": answer.setting or None,
        "tpu": plan.accelerator,
        "devices": plan.devices,
        "hbm_gib": plan.hbm_bytes / GIB,
        "spare_gib": plan.spare_bytes / GIB,
        "estimate_only": plan.estimate_only,
        "phases": [_phase(phase) for phase in plan.phases],
        "step_seconds": _seconds(plan.step),
        "step_parts": {name: _seconds(time) for name, time in step_parts(plan)},
        "tokens_per_s_per_chip": _seconds(plan.tokens_per_s_per_device),
        "rollout": {
            "prompt_tokens": composition.prompt_tokens,
            "completion_tokens": composition.completion_tokens,
            "decode_steps": composition.decode_steps,
            "mean_context": composition.mean_context,
        },
        "micro_batches": plan.micro_batches,
        "cost": _cost(answer.cost),
        "reason": answer.reason or None,
        "suggestions": [_suggestion(each) for each in suggestions],
        "notes": list(plan.notes),
        "versions": dict(plan.versions),
    }


def comparison_object(answers: Sequence[Answer], refused: Sequence[Refused]) -> Object:
    """Several plans, best first, and what could not be planned."""
    return {
        "plans": [plan_object(answer) for answer in answers],
        "refused": [{"tpu": each.accelerator, "setting": each.setting, "error": each.error} for each in refused],
    }


def search_object(found: Found) -> Object:
    """How a search went; `value` is null where no value fits."""
    best, over = found.best, found.too_large
    return {
        "key": found.key,
        "value": best.value if best else None,
        "too_large": over.value if over else None,
        "proven": found.proven,
        "step": found.range.unit,
        "most": found.range.most,
        "why_most": found.range.why,
        "tried": [
            {"value": each.value, "verdict": each.plan.verdict, "gib": each.plan.worst.bytes / GIB}
            for each in found.tries
        ],
    }


def _phase(phase: Phase) -> Object:
    return {
        "name": phase.name,
        "gib": phase.bytes / GIB,
        "fits": phase.fits,
        "seconds": _seconds(phase.seconds),
        "bound_by": phase.bound_by or None,
        "largest": [{"name": each.name, "shape": each.shape, "gib": each.bytes / GIB} for each in phase.largest],
        "parts_gib": {name: size / GIB for name, size in phase.parts.items()},
        "calls": phase.calls,
        "flops": phase.flops,
        "closed_form_flops": phase.closed_form_flops,
        "collectives": [_collective(each) for each in phase.collectives],
        "compiled": phase.compiled,
        "compile_s": phase.compile_s,
    }


def _collective(each: Collective) -> Object:
    return {
        "kind": each.kind,
        "axes": list(each.axes),
        "group": each.group,
        "overlaps": each.overlaps,
        "calls": each.calls,
        "sent_bytes": each.sent,
    }


def _seconds(time: Seconds | None) -> Object | None:
    return None if time is None else {"value": time.value, "low": time.low, "high": time.high}


def _cost(cost: Cost | None) -> Object | None:
    if cost is None:
        return None
    price = cost.price
    return {
        "steps": cost.steps,
        "chip_hours": _seconds(cost.chip_hours),
        "usd": _seconds(cost.usd),
        "usd_per_chip_hour": price.usd_per_chip_hour if price else None,
        "price_source": price.source if price else None,
        "price_date": price.date if price else None,
    }


def _suggestion(each: Suggestion) -> Object:
    plan = each.plan
    return {
        "key": each.change.key,
        "value": each.change.value,
        "old": each.change.old,
        "compiled": not plan.estimate_only,
        "verdict": plan.verdict,
        "spare_gib": plan.spare_bytes / GIB,
        "step_seconds": _seconds(plan.step),
        "tokens_per_s_per_chip": _seconds(plan.tokens_per_s_per_device),
        "reason": each.reason,
    }
