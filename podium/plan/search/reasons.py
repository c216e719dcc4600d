"""Explains why one plan is better than another, by the counts that differ."""

from collections.abc import Callable, Sequence

from podium.hlo.collectives import KINDS
from podium.plan.report.formatting import LIMITS, LITTLE, data_size, exact_gib, gib, number, readable
from podium.plan.result import Plan, part_of

ALIKE = 0.01  # differences below this share of a step's seconds are ignored
MUCH = 1.05  # counts whose ratio is above this explain a difference
HOST = "host"  # the part of a step outside all phases


def difference(plan: Plan, other: Plan) -> str:
    """The most important difference of `plan` from `other`, as a sentence with the counts that cause it."""
    if plan.verdict != other.verdict or plan.verdict != "fits":
        return _memory_difference(plan, other)
    if plan.step is None or other.step is None or abs(plan.step.value - other.step.value) < ALIKE * other.step.value:
        return "as fast; " + _memory_difference(plan, other)
    pairs = [_Pair(plan, other, name) for name in (HOST, *(phase.name for phase in plan.phases))]
    pair = max((each for each in pairs if each.comparable), key=lambda each: abs(each.seconds[0] - each.seconds[1]))
    cause = next(text for applies, text in CAUSES if applies(pair))
    return f"{pair.name} {number(pair.seconds[0])} s against {number(pair.seconds[1])}: {cause(pair)}"


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


class _Pair:
    """One part of a step in two plans; in each pair of figures, the first is of `plan` and the second of `other`."""

    def __init__(self, plan: Plan, other: Plan, name: str) -> None:
        self.name = name
        self.unit = _unit(name)
        plans = plan, other
        self.phases = [each.find_phase(name) for each in plans]
        self.comparable = name == HOST or None not in self.phases
        times = [
            each.host if name == HOST else phase and phase.seconds
            for each, phase in zip(plans, self.phases, strict=True)
        ]
        self.seconds = [time.value if time else 0.0 for time in times]
        known = [phase for phase in self.phases if phase is not None]
        self.calls = [_calls(each, name) for each in plans]
        self.flops = [phase.flops for phase in known]
        self.sent = [
            sum(each.sent for each in phase.collectives) / n for phase, n in zip(known, self.calls, strict=False)
        ]
        slower = max(known, key=lambda phase: phase.seconds.value if phase.seconds else 0.0, default=None)
        self.limit = slower.bound_by if slower else ""

    @property
    def transfers_differ(self) -> bool:
        """Whether the bytes sent per call differ enough to explain the difference."""
        return self.name != HOST and max(self.sent) > LITTLE and _differ(self.sent)

    def verb(self, which: int) -> str:
        """A verb for the phase's largest transfer, such as `gathers`; `which` selects the plan."""
        phase = self.phases[which]
        assert phase is not None
        return KINDS[max(phase.collectives, key=lambda each: each.sent).kind].does


def _calls(plan: Plan, name: str) -> float:
    """The number of units of a part (see `_unit`) in a step; a `token` of decoding is one step of all slots."""
    if name == HOST:
        return float(sum(phase.calls for phase in plan.phases)) or 1.0
    if name == "decode":
        return float(plan.workload.decode_steps) or 1.0
    if part_of(name) in ("score", "update"):
        return float(plan.micro_batches) or 1.0
    phase = plan.find_phase(name)
    return float(phase.calls if phase else 0) or 1.0


def _unit(name: str) -> str:
    """The unit that the counts of a phase, or of HOST, are divided by."""
    if name == "decode":
        return "token"
    return "micro-batch" if name != HOST and part_of(name) in ("reward", "score", "update") else "call"


def _differ(figures: Sequence[float]) -> bool:
    return max(figures) > MUCH * min(figures)


def _calls_cause(pair: _Pair) -> str:
    unit = "micro-batches" if pair.unit == "micro-batch" else f"{pair.unit}s"
    return f"{pair.calls[0]:,.0f} {unit} against {pair.calls[1]:,.0f}"


def _operations_cause(pair: _Pair) -> str:
    mine, theirs = pair.flops
    return f"{mine / theirs:.2f} times the operations" if theirs else "operations against none"


def _transfers_cause(pair: _Pair) -> str:
    """The difference in bytes sent: `gathers 4.25 GB per token between devices, the other gathers none`."""
    sent, others_sent = pair.sent
    if sent <= LITTLE:
        return f"sends nothing between devices, the other {pair.verb(1)} {data_size(others_sent)} per {pair.unit}"
    theirs = data_size(others_sent) if others_sent > LITTLE else f"{pair.verb(0)} none"
    return f"{pair.verb(0)} {data_size(sent)} per {pair.unit} between devices, the other {theirs}"


def _time_cause(pair: _Pair) -> str:
    mine, theirs = (number(1000 * time / calls) for time, calls in zip(pair.seconds, pair.calls, strict=True))
    return f"{mine} ms per {pair.unit} against {theirs}" + (f", bound by {LIMITS[pair.limit]}" if pair.limit else "")


CAUSES: Sequence[tuple[Callable[[_Pair], bool], Callable[[_Pair], str]]] = (
    (lambda pair: pair.name == HOST, _calls_cause),
    (lambda pair: pair.transfers_differ and pair.limit in ("ici", "latency"), _transfers_cause),
    (lambda pair: pair.limit == "compute" and _differ(pair.flops), _operations_cause),
    (lambda pair: _differ(pair.calls), _calls_cause),
    (lambda pair: pair.transfers_differ, _transfers_cause),
    (lambda pair: True, _time_cause),
)
"""Causes that can make a part of a step slower, in order of precedence, each with the function that describes it."""
