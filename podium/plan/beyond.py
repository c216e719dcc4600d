"""What the compiled programs of a phase take beyond their floor, and which of their instructions take it. No jax.

The time of a floor is that of the closed form's operations or of `podium.plan.floor`'s bytes, whichever is longer; that
of a program is the sum over its instructions, without transfers and launches, which have no floor here.
"""

from collections.abc import Iterator, Sequence

from podium.hlo.cost import Peaks, ProgramCost
from podium.plan.calls import Call
from podium.plan.formatting import NEGLIGIBLE, number, readable
from podium.plan.result import Move, Phase, Plan
from podium.plan.sizes import F32, RunSizes

FAR = 1.5
"""Ratio of a phase's time to its floor above which the first lines of a report say so."""
KEPT = 5  # instructions of a phase to keep
SHOWN = 3  # of those, in a line
LITTLE = 0.02  # share of a phase's time below which an instruction is not named


def beyond_floor(
    costs: Sequence[tuple[Call, ProgramCost]], run: RunSizes, peaks: Peaks
) -> tuple[float | None, tuple[Move, ...]]:
    """The ratio of a phase's time to that of its floor, and the instructions without products that take most of it.

    The ratio is None if a step does not run the phase, or if its floor is unknown.
    """
    seconds: dict[str, float] = {}
    total = 0.0
    for call, cost in costs:
        for work in cost.works:
            took = call.calls * work.times * max(work.seconds(peaks))
            total += took
            if work.name:
                seconds[work.name] = seconds.get(work.name, 0.0) + took
    least = sum(_floor_s(call, run, peaks) for call, _ in costs)
    if not least or not total:
        return None, ()
    order = sorted(seconds, key=lambda name: -seconds[name])[:KEPT]
    found = (Move(what=name, share=seconds[name] / total) for name in order)
    return total / least, tuple(move for move in found if move.share >= LITTLE)


def _floor_s(call: Call, run: RunSizes, peaks: Peaks) -> float:
    """The least seconds of all calls of a program in a step; 0 if its closed form is unknown."""
    form = call.closed_form
    if form is None:
        return 0.0
    flops = peaks.flops_f32 if run.activation == F32 else peaks.flops_bf16
    each = max(form.flops / flops, form.least_bytes / peaks.hbm_bandwidth)
    once = max(call.once_flops / flops, form.once_bytes / peaks.hbm_bandwidth)
    return call.repeats * each + call.calls * once


def far_from_floor(plan: Plan) -> Iterator[str]:
    """A sentence for each phase that takes over 1.5 times its floor, and over 1 % of the step."""
    for phase in plan.phases:
        if phase.over_floor is None or phase.over_floor <= FAR or phase.seconds is None or plan.step is None:
            continue
        if phase.seconds.value >= NEGLIGIBLE * plan.step.value:
            yield f"{phase.name} takes {number(phase.over_floor)} times its floor: {_named(phase)}"


def _named(phase: Phase) -> str:
    """The instructions that take most of a phase's time: `61 % is slice of rollout weights bf16[1,2048,11008]`."""
    if not phase.moves:
        return "most of it is in its products"
    return ", ".join(f"{move.share:.0%} of its time is {readable(move.what)}" for move in phase.moves[:SHOWN])
