"""Explains why one plan is better than another, by the counts that differ."""

from typing import NamedTuple

from podium.hlo.collectives import KINDS
from podium.plan.report.formatting import LIMITS, LITTLE, data_size, exact_gib, gib, number, readable
from podium.plan.result import Phase, Plan, part_of

ALIKE = 0.01  # differences below this share of a step's seconds are ignored
MUCH = 1.05  # counts whose ratio is above this explain a difference
HOST = "host"  # the part of a step outside all phases


class _Part(NamedTuple):
    """One part of a step in one plan."""

    seconds: float
    calls: float
    """Number of units (see `_unit`) in a step."""
    flops: float = 0.0
    sent: float = 0.0
    """Bytes that a device sends per unit."""
    verb: str = ""
    """What its largest transfer does, such as `gathers`."""
    limit: str = ""
    """What bounds most of its seconds."""


def difference(plan: Plan, other: Plan) -> str:
    """The most important difference of `plan` from `other`, as a sentence with the counts that cause it."""
    if plan.verdict != other.verdict or plan.verdict != "fits":
        return _memory_difference(plan, other)
    if plan.step is None or other.step is None or abs(plan.step.value - other.step.value) < ALIKE * other.step.value:
        return "as fast; " + _memory_difference(plan, other)
    names = [HOST, *(phase.name for phase in plan.phases if other.find_phase(phase.name))]
    pairs = {name: (_part(plan, name), _part(other, name)) for name in names}
    name = max(pairs, key=lambda name: abs(pairs[name][0].seconds - pairs[name][1].seconds))
    mine, theirs = pairs[name]
    return f"{name} {number(mine.seconds)} s against {number(theirs.seconds)}: {_cause(name, mine, theirs)}"


def _memory_difference(plan: Plan, other: Plan) -> str:
    """Compare the peak memory of two plans that are equally fast."""
    name = max(plan.worst, other.worst, key=lambda phase: phase.bytes).name
    mine, theirs = plan.find_phase(name), other.find_phase(name)
    if mine is None or theirs is None:
        return f"{plan.worst.name} needs {gib(plan.worst.bytes)} of {exact_gib(plan.hbm_bytes)} GiB"
    parts = sorted(set(mine.parts) | set(theirs.parts))
    part = max(parts, key=lambda part: abs(mine.parts.get(part, 0) - theirs.parts.get(part, 0)))
    return (
        f"{name} needs {gib(mine.bytes)} GiB against {gib(theirs.bytes)}:"
        f" {readable(part)} {gib(mine.parts.get(part, 0))} against {gib(theirs.parts.get(part, 0))}"
    )


def _part(plan: Plan, name: str) -> _Part:
    """A phase of a plan, or what its host does."""
    if name == HOST:
        calls = float(sum(phase.calls for phase in plan.phases)) or 1.0
        return _Part(seconds=plan.host.value if plan.host else 0.0, calls=calls)
    phase = plan.phase(name)
    calls, largest = _calls(plan, phase), max(phase.collectives, key=lambda each: each.sent, default=None)
    return _Part(
        seconds=phase.seconds.value if phase.seconds else 0.0,
        calls=calls,
        flops=phase.flops,
        sent=sum(each.sent for each in phase.collectives) / calls,
        verb=KINDS[largest.kind].does if largest else "",
        limit=phase.bound_by,
    )


def _calls(plan: Plan, phase: Phase) -> float:
    """The number of units of a phase in a step; a `token` of decoding is one step of all slots."""
    if phase.name == "decode":
        return float(plan.workload.decode_steps) or 1.0
    if part_of(phase.name) in ("score", "update"):
        return float(plan.micro_batches) or 1.0
    return float(phase.calls) or 1.0


def _unit(name: str) -> str:
    """The unit that the counts of a phase, or of HOST, are divided by."""
    if name == "decode":
        return "token"
    return "micro-batch" if name != HOST and part_of(name) in ("reward", "score", "update") else "call"


def _cause(name: str, mine: _Part, theirs: _Part) -> str:
    """What makes a part of a step slower or faster: the first count that differs enough, in order of precedence."""
    unit = _unit(name)
    limit = max(mine, theirs, key=lambda part: part.seconds).limit
    transfers = max(mine.sent, theirs.sent) > LITTLE and _differ(mine.sent, theirs.sent)
    if transfers and limit in ("ici", "latency"):
        return _transfers(mine, theirs, unit)
    if limit == "compute" and _differ(mine.flops, theirs.flops):
        return f"{mine.flops / theirs.flops:.2f} times the operations" if theirs.flops else "operations against none"
    if name == HOST or _differ(mine.calls, theirs.calls):
        units = "micro-batches" if unit == "micro-batch" else f"{unit}s"
        return f"{mine.calls:,.0f} {units} against {theirs.calls:,.0f}"
    if transfers:
        return _transfers(mine, theirs, unit)
    each, others = (number(1000 * part.seconds / part.calls) for part in (mine, theirs))
    return f"{each} ms per {unit} against {others}" + (f", bound by {LIMITS[limit]}" if limit else "")


def _differ(mine: float, theirs: float) -> bool:
    return max(mine, theirs) > MUCH * min(mine, theirs)


def _transfers(mine: _Part, theirs: _Part, unit: str) -> str:
    """The difference in bytes sent: `gathers 4.25 GB per token between devices, the other gathers none`."""
    if mine.sent <= LITTLE:
        return f"sends nothing between devices, the other {theirs.verb} {data_size(theirs.sent)} per {unit}"
    others = data_size(theirs.sent) if theirs.sent > LITTLE else f"{mine.verb} none"
    return f"{mine.verb} {data_size(mine.sent)} per {unit} between devices, the other {others}"
