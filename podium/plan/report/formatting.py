"""Formats the sentences and numbers of a plan for reports, JSON and comparisons."""

import math
from collections.abc import Sequence

from podium.accelerators import GIB
from podium.plan.result import STEP_PARTS, Peak, Phase, Plan, Seconds, part_of, total

NEGLIGIBLE = 0.01  # share of a step below which a part is not mentioned
LITTLE = 1e6  # bytes below which a transfer is not mentioned
LIMITS = {
    "compute": "compute", "hbm": "HBM bandwidth", "ici": "link bandwidth", "latency": "latency", "host": "host copies",
}  # fmt: skip
"""The resources that can bound a phase's time; memory capacity is not one of them."""
VERDICTS = {"fits": "fits", "too_close": "too close to call", "does_not_fit": "does not fit"}


def number(value: float) -> str:
    """A number with at least two digits: 1,234, 12.3, 3.1, 0.35, 0.0031."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 1 or not value:
        return f"{value:.1f}"
    return f"{value:.{1 - math.floor(math.log10(value))}f}"


def with_range(seconds: Seconds) -> str:
    """A figure with its range: `3.1 (2.6-3.7)`."""
    return f"{number(seconds.value)} ({number(seconds.low)}-{number(seconds.high)})"


def share(part: Seconds) -> str:
    """A share with its range: `34 % (30-38)`."""
    return f"{100 * part.value:.0f} % ({100 * part.low:.0f}-{100 * part.high:.0f})"


def duration(time: Seconds) -> str:
    """A time with its unit and range: `3.1 s (2.6-3.7)`, `51 ms (39-81)`."""
    unit, scale = ("s", 1) if time.value >= 0.1 else ("ms", 1000)
    value, low, high = (number(scale * each) for each in (time.value, time.low, time.high))
    return f"{value} {unit} ({low}-{high})"


def gib(size: float) -> str:
    """A size in GiB, without the unit."""
    return f"{size / GIB:.1f}" if abs(size) >= 0.05 * GIB else f"{size / GIB:.2g}"


def exact_gib(size: int) -> str:
    """The memory of a device in GiB, with all known digits: 31.25."""
    return f"{size / GIB:.4g}"


def data_size(size: float) -> str:
    """A number of bytes sent, in powers of ten: `4.25 GB`."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, scale = next(((unit, scale) for unit, scale in units if size >= scale), ("B", 1))
    return f"{size / scale:.3g} {unit}"


def readable(name: str) -> str:
    """The name of a part of memory with spaces."""
    return name.replace("_", " ")


def step_parts(plan: Plan) -> list[tuple[str, Seconds]]:
    """Seconds of each part of a step, in order; parts that take no time are left out."""
    parts = []
    for part in STEP_PARTS:
        times = [each.seconds for each in plan.phases if part_of(each.name) == part and each.seconds is not None]
        if times and any(each.value for each in times):
            parts.append((part, total(times)))
    waited = (("environments", plan.environments), ("host", plan.host))
    return [*parts, *((name, time) for name, time in waited if time is not None and time.value)]


def largest_part(phase: Phase) -> tuple[str, int]:
    """The name and the bytes of the largest part of a phase's memory."""
    return max(phase.parts.items(), key=lambda part: part[1])


def main_parts(phases: Sequence[Phase], most: int) -> list[str]:
    """The largest parts of memory over all phases, at most `most`; parts that occur in more phases come first."""
    largest: dict[str, int] = {}
    for part, size in (item for phase in phases for item in phase.parts.items() if item[1]):
        largest[part] = max(largest.get(part, 0), size)
    shown = sorted(largest, key=lambda part: -largest[part])[:most]
    return sorted(shown, key=lambda part: (-sum(part in phase.parts for phase in phases), -largest[part]))


def verdict_line(plan: Plan) -> str:
    """The plan in one line: whether the run fits, which phase peaks, and the seconds of a step by part."""
    return f"{verdict_head(plan)}; {peak_and_step(plan)}"


def verdict_head(plan: Plan) -> str:
    """Whether the run fits, and by what margin."""
    worst = plan.worst
    needs = f": {worst.name} needs {gib(worst.bytes)} of {exact_gib(plan.hbm_bytes)} GiB"
    made = {"traced": " as traced", "estimated": " by closed-form estimate", "compiled": ""}[plan.made]
    where = f" {plan.accelerator}{made}"
    memory = {
        "fits": f"{where}{',' if made else ''} with {spare(plan)}",
        "too_close": f" on{where}{needs}",
        "does_not_fit": f"{where}{needs}, {spare(plan)}",
    }[plan.verdict]
    return f"{VERDICTS[plan.verdict]}{memory}"


def peak_and_step(plan: Plan) -> str:
    """Which phase has the peak, and the seconds of a step by part."""
    part, size = largest_part(plan.worst)
    return f"peak in {plan.worst.name} ({readable(part)} {gib(size)} GiB); {step_text(plan)}"


def spare(plan: Plan) -> str:
    """The remaining memory: `6.9 GiB to spare`, or `over by 5.2 GiB`."""
    size = gib(abs(plan.spare_bytes))
    return f"{size} GiB to spare" if plan.spare_bytes >= 0 else f"over by {size} GiB"


def step_text(plan: Plan) -> str:
    """The seconds of a step and their parts, longest first."""
    if plan.step is None:
        return "seconds per step unknown"
    parts = sorted(step_parts(plan), key=lambda part: -part[1].value)
    shown = [f"{name} {number(time.value)}" for name, time in parts if time.value >= NEGLIGIBLE * plan.step.value]
    return (
        f"{number(plan.step.value)} s per step ({number(plan.step.low)}-{number(plan.step.high)}): {', '.join(shown)}"
    )


RANGES = "seconds are a calibrated roofline, hence the ranges"


def method_line(plan: Plan) -> str:
    """Which phases of a plan were compiled, which were only traced, and which are estimated."""
    estimated = [phase.name for phase in plan.phases if not (phase.compiled or phase.traced)]
    if len(estimated) == len(plan.phases):
        return f"everything is estimated by the closed form; {RANGES}"
    made = {
        f"compiled for {plan.accelerator}: memory, operations and transfers of": [
            phase.name for phase in plan.phases if phase.compiled
        ],
        "traced, not compiled:": [phase.name for phase in plan.phases if phase.traced],
        "estimated by the closed form:": estimated,
    }
    return "; ".join((*(f"{how} {joined(names)}" for how, names in made.items() if names), RANGES))


def probe_text(peak: Peak, hbm_bytes: int) -> str:
    """The result of a probe: `update needs 30.1 GiB, 1.2 to spare`."""
    spare = hbm_bytes - peak.bytes
    room = "refused by the compiler" if peak.refused else f"{gib(spare)} to spare" if spare >= 0 else "too large"
    return f"{peak.phase} needs {gib(peak.bytes)} of {exact_gib(hbm_bytes)} GiB, {room}"


def joined(names: Sequence[str]) -> str:
    """Join names as `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
