"""Explains why one plan is better than another, by the counts that differ."""

from podium.hlo.collectives import KINDS
from podium.plan.report.formatting import LIMITS, LITTLE, data_size, exact_gib, gib, number, readable
from podium.plan.result import Phase, Plan, part_of

ALIKE = 0.01  # differences below this share of a step's seconds are ignored
MUCH = 1.05  # counts whose ratio is above this explain a difference
HOST = "host"  # the part of a step outside all phases


def difference(plan: Plan, other: Plan) -> str:
    """The most important difference of `plan` from `other`, as a sentence with the counts that cause it."""
    if plan.verdict != other.verdict or plan.verdict != "fits":
        return _memory_difference(plan, other)
    if plan.step is None or other.step is None or abs(plan.step.value - other.step.value) < ALIKE * other.step.value:
        return "as fast; " + _memory_difference(plan, other)
    names = [HOST, *(phase.name for phase in plan.phases if other.find_phase(phase.name))]
    pairs = {name: (_Part(plan, name), _Part(other, name)) for name in names}
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


class _Part:
    """One part of a step in one plan: a phase, or what the host does."""

    def __init__(self, plan: Plan, name: str) -> None:
        phase = plan.find_phase(name)
        time, transfers = (plan.host, ()) if phase is None else (phase.seconds, phase.collectives)
        self.seconds = time.value if time else 0.0
        self.calls = _calls(plan, phase)
        self.flops = phase.flops if phase else 0.0
        self.sent = sum(each.sent for each in transfers) / self.calls
        """Bytes that a device sends per unit."""
        largest = max(transfers, key=lambda each: each.sent, default=None)
        self.verb = KINDS[largest.kind].does if largest else ""
        """What its largest transfer does, such as `gathers`."""
        self.limit = phase.bound_by if phase else ""
        """What bounds most of its seconds."""


def _calls(plan: Plan, phase: Phase | None) -> float:
    """The number of units (see `_unit`) of a phase in a step, or of all calls; a `token` of decoding is one step of all
    slots.
    """
    if phase is None:
        return float(sum(each.calls for each in plan.phases)) or 1.0
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
