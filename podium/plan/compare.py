"""Several plans beside each other: which is best, and why, with the counts behind it."""

import dataclasses
from collections.abc import Sequence

from podium.plan.prices import Cost
from podium.plan.result import Collective, Phase, Plan
from podium.plan.words import gib, limit_gib, number, spoken, transferred

ORDER = ("fits", "too_close", "does_not_fit")
ALIKE = 0.01
"""Steps whose seconds differ by less than this part of them are as fast as each other."""
MUCH = 1.05
"""From this ratio on, counts explain a difference."""
LITTLE = 1e6
"""Bytes per call under which a transfer is not worth a word."""
HOST = "host"
"""The part of a step that is no phase's."""
DOES = {
    "all-gather": "gathers",
    "all-reduce": "sums (all-reduce)",
    "reduce-scatter": "sums (reduce-scatter)",
    "all-to-all": "exchanges",
    "ragged-all-to-all": "exchanges",
    "collective-permute": "hands on",
}
LIMITS = {"compute": "compute", "hbm": "HBM", "ici": "ICI", "latency": "latency"}
PER = {"decode": "token", "update": "micro-batch", "score": "micro-batch"}
"""What a phase's counts are told for; of other phases, a call."""
PLURAL = {"token": "tokens", "micro-batch": "micro-batches", "call": "calls"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, and what stands beside it in a report."""

    plan: Plan
    cost: Cost | None = None
    setting: str = ""
    """What differs from the config, as `rollout.layout=legacy`."""
    reason: str = ""
    """Why it stands where it does among others."""

    @property
    def label(self) -> str:
        """Machine and setting."""
        return f"{self.plan.accelerator} {self.setting}".strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """What cannot be planned, and why."""

    accelerator: str
    setting: str
    error: str

    @property
    def label(self) -> str:
        """Machine and setting."""
        return f"{self.accelerator} {self.setting}".strip()


def by_price(answers: Sequence[Answer]) -> bool:
    """Whether plans can be compared by what they cost: each has a price and seconds."""
    return all(answer.cost is not None and answer.cost.price is not None for answer in answers)


def ranked(answers: Sequence[Answer]) -> list[Answer]:
    """Best first, each with its reason: what fits before what does not, then the cheapest step.

    Cheapest is dollars where every plan has a price, else chip-seconds: of settings on one machine, the fastest.
    """
    priced = by_price(answers)

    def key(answer: Answer) -> tuple[int, float]:
        plan = answer.plan
        price = answer.cost.price.usd_per_chip_hour if priced and answer.cost and answer.cost.price else 1.0
        step = plan.step.value * plan.devices * price if plan.step is not None else float(plan.worst.bytes)
        return ORDER.index(plan.verdict), step

    best, *others = sorted(answers, key=key)
    if not others:
        return [best]
    first = dataclasses.replace(best, reason=f"best: {_reason(best, others[0])}")
    return [first, *(dataclasses.replace(each, reason=_reason(each, best)) for each in others)]


def _reason(answer: Answer, other: Answer) -> str:
    """The difference of two plans; between machines, of their prices too."""
    cost, others_cost = answer.cost and answer.cost.usd, other.cost and other.cost.usd
    text = difference(answer.plan, other.plan)
    if answer.plan.accelerator == other.plan.accelerator or cost is None or others_cost is None:
        return text
    return f"{number(cost.value)} dollars against {number(others_cost.value)}; {text}"


def difference(plan: Plan, other: Plan) -> str:
    """How a plan differs from another where it matters most, in words, with the counts behind it."""
    if plan.verdict != other.verdict or plan.verdict != "fits":
        return _memory_difference(plan, other)
    if plan.step is None or other.step is None or abs(plan.step.value - other.step.value) < ALIKE * other.step.value:
        return "as fast; " + _memory_difference(plan, other)
    names = [HOST, *(phase.name for phase in plan.phases if _phase(other, phase.name))]
    name = max(names, key=lambda name: abs(_seconds(plan, name) - _seconds(other, name)))
    cause = _host_cause(plan, other) if name == HOST else _cause(plan, other, name)
    return f"{name} {number(_seconds(plan, name))} s against {number(_seconds(other, name))}: {cause}"


def _memory_difference(plan: Plan, other: Plan) -> str:
    """What the phase that needs most holds in one plan and in the other."""
    name = max(plan.worst, other.worst, key=lambda phase: phase.bytes).name
    mine, theirs = _phase(plan, name), _phase(other, name)
    if mine is None or theirs is None:
        return f"{plan.worst.name} needs {gib(plan.worst.bytes)} of {limit_gib(plan.hbm_bytes)} GiB"
    parts = sorted(set(mine.parts) | set(theirs.parts))
    part = max(parts, key=lambda part: abs(mine.parts.get(part, 0) - theirs.parts.get(part, 0)))
    return (
        f"{name} needs {gib(mine.bytes)} GiB against {gib(theirs.bytes)}:"
        f" {spoken(part)} {gib(mine.parts.get(part, 0))} against {gib(theirs.parts.get(part, 0))}"
    )


def _phase(plan: Plan, name: str) -> Phase | None:
    return next((phase for phase in plan.phases if phase.name == name), None)


def _seconds(plan: Plan, name: str) -> float:
    phase = _phase(plan, name)
    time = plan.host if name == HOST else phase.seconds if phase is not None else None
    return time.value if time is not None else 0.0


def _host_cause(plan: Plan, other: Plan) -> str:
    calls, others_calls = (sum(phase.calls for phase in each.phases) for each in (plan, other))
    return f"{calls:,.0f} calls against {others_calls:,.0f}"


def _cause(plan: Plan, other: Plan, name: str) -> str:
    """The count that explains a phase's seconds: transfers, operations, calls, or what it waits for."""
    mine, theirs = _phase(plan, name), _phase(other, name)
    assert mine is not None and theirs is not None
    slower = max(mine, theirs, key=lambda phase: phase.seconds.value if phase.seconds else 0.0)
    sent, others_sent = _sent(mine) / _calls(plan, mine), _sent(theirs) / _calls(other, theirs)
    transfers = max(sent, others_sent) > LITTLE and _differ(sent, others_sent)
    if transfers and slower.bound_by in ("ici", "latency"):
        return _transfers(mine, theirs, sent, others_sent)
    if _differ(mine.flops, theirs.flops) and slower.bound_by == "compute":
        return f"{mine.flops / theirs.flops:.2f} times the operations" if theirs.flops else "operations against none"
    calls, others_calls = _calls(plan, mine), _calls(other, theirs)
    if _differ(calls, others_calls):
        return f"{calls:,.0f} {PLURAL[PER.get(name, 'call')]} against {others_calls:,.0f}"
    if transfers:
        return _transfers(mine, theirs, sent, others_sent)
    each = f"{_milliseconds(mine, calls)} ms per {PER.get(name, 'call')} against {_milliseconds(theirs, others_calls)}"
    return f"{each}, bound by {LIMITS[slower.bound_by]}" if slower.bound_by else each


def _milliseconds(phase: Phase, calls: float) -> str:
    return number(1000 * phase.seconds.value / calls) if phase.seconds else "0"


def _transfers(phase: Phase, other: Phase, sent: float, others_sent: float) -> str:
    """As `gathers 4.25 GB per token over ICI, the other none`."""
    unit = PER.get(phase.name, "call")
    if sent <= LITTLE:
        return f"sends nothing over ICI, the other {_verb(other)} {transferred(others_sent)} per {unit}"
    theirs = transferred(others_sent) if others_sent > LITTLE else "none"
    return f"{_verb(phase)} {transferred(sent)} per {unit} over ICI, the other {theirs}"


def _verb(phase: Phase) -> str:
    """What most of a phase's transfers do."""
    return DOES[max(phase.collectives, key=_bytes).kind]


def _bytes(collective: Collective) -> float:
    return collective.sent


def _sent(phase: Phase) -> float:
    return sum(each.sent for each in phase.collectives)


def _calls(plan: Plan, phase: Phase) -> float:
    """How often a phase does what its counts are told for, in a step; a token is a step of all slots."""
    counts = {"decode": plan.composition.decode_steps, "update": plan.micro_batches, "score": plan.micro_batches}
    return float(counts.get(phase.name, phase.calls)) or 1.0


def _differ(one: float, other: float) -> bool:
    return max(one, other) > MUCH * min(one, other)
