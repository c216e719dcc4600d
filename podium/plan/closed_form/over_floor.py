"""How long a phase's compiled programs take beyond their floor, and which instructions cause it. No jax.

A floor is the time of the closed form's operations or of the bytes of `podium.plan.closed_form.least_bytes`, whichever
is longer. A program's time is the sum over its instructions, without transfers and launches, which have no floor here.
"""

from collections.abc import Iterator, Sequence

from podium.hlo.cost import Peaks, ProgramCost
from podium.hlo.moves import PASSES
from podium.plan.report.formatting import NEGLIGIBLE, number, readable
from podium.plan.request.phase_sizes import F32, RunSizes
from podium.plan.request.step_calls import Call
from podium.plan.result import Move, Phase

FAR = 1.5
"""Ratio of a phase's time to its floor above which a plan says what takes it."""
EXPLAINED = 1 / 3
"""Share of the time beyond the floor from which copies are named as the reason."""
KEPT = 8  # instructions of a phase to keep
SHOWN = 3  # of those, in a sentence
LITTLE = 0.02  # share of a phase's time below which an instruction is not named


def beyond_floor(
    costs: Sequence[tuple[Call, ProgramCost]], run: RunSizes, peaks: Peaks
) -> tuple[float | None, tuple[Move, ...]]:
    """The ratio of a phase's time to its floor, and the instructions other than products that take most of the time.

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
    shares = ((name, seconds[name] / total) for name in order)
    found = (Move(what=name, share=share, computes=name.startswith(PASSES)) for name, share in shares)
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


def copies(phases: Sequence[Phase]) -> Iterator[str]:
    """A sentence for each phase that is far above its floor because of copies."""
    for phase, ratio, moved in _far(phases):
        if _explain(moved, ratio):
            yield f"{phase.name} takes {number(ratio)} times its floor; of its time {_named(moved)}"


def spread(phases: Sequence[Phase]) -> Iterator[str]:
    """A sentence for each phase that is far above its floor for reasons other than copies."""
    for phase, ratio, moved in _far(phases):
        if not _explain(moved, ratio):
            most = f"; of its time {_named(phase.moves)}" if phase.moves else ""
            yield f"{phase.name} takes {number(ratio)} times its floor, which no copies explain{most}"


def _far(phases: Sequence[Phase]) -> Iterator[tuple[Phase, float, list[Move]]]:
    """Phases that take over 1.5 times their floor and over 1 % of the total time, with that ratio, and their copies."""
    step = sum(phase.seconds.value for phase in phases if phase.seconds)
    for phase in phases:
        long = phase.seconds is not None and phase.seconds.value >= NEGLIGIBLE * step
        if long and phase.over_floor is not None and phase.over_floor > FAR:
            yield phase, phase.over_floor, [move for move in phase.moves if not move.computes]


def _explain(moved: Sequence[Move], ratio: float) -> bool:
    return sum(move.share for move in moved) >= EXPLAINED * (1 - 1 / ratio)


def _named(moves: Sequence[Move]) -> str:
    """Instructions with their share of a phase's time: `61% slice of rollout weights bf16[1,2048,11008], ...`."""
    return ", ".join(f"{move.share:.0%} {readable(move.what)}" for move in moves[:SHOWN])
