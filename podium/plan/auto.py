"""`podium plan CONFIG --on auto`: every machine there is by the closed form, the cheapest that fit then compiled."""

import dataclasses
from collections.abc import Callable, Sequence

from podium.accelerators import Accelerator, accelerators
from podium.plan.compare import PlanEntry
from podium.plan.formatting import number
from podium.plan.result import Plan
from podium.plan.topology import check_compiler
from podium.prices import HOUR_S

AUTO = "auto"
MOST_DEVICES = 64
RENTED = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that one rents."""
COMPILED, MOST_TRIED, SHOWN = 3, 5, 12

Entry = Callable[[Accelerator, bool], PlanEntry]
"""The plan of a run on a machine, and its cost; by the closed form alone or compiled."""


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Machines that a run fits by what it costs there, the cheapest first."""

    entries: Sequence[PlanEntry]
    unsuitable: int  # machines that it does not fit
    refused: int  # machines over which the config does not divide
    not_compiled: Sequence[str]  # why some of the first are estimates


def machines() -> list[Accelerator]:
    """The machines that are tried, small to large within their kind."""
    found = [each for each in accelerators().values() if each.devices <= MOST_DEVICES]
    return [each for each in found if each.platform == "tpu" or each.devices in RENTED]


def rank(make: Entry, *, fast: bool) -> Ranking:
    """All machines ranked; of those that fit by the closed form, the cheapest three that the compiler confirms.

    `fast` leaves the compiler out.
    """
    entries: list[PlanEntry] = []
    refused = 0
    for machine in machines():
        try:
            entries.append(make(machine, True))
        except ValueError:  # slots or weights that do not divide over so many devices
            refused += 1
    fitting = sorted((each for each in entries if each.plan.verdict == "fits"), key=cost)
    by_name = {each.name: each for each in machines()}
    missing: dict[str, str] = {}
    compiled: list[PlanEntry] = []
    for entry in () if fast else fitting[:MOST_TRIED]:
        machine = by_name[entry.plan.accelerator]
        try:
            check_compiler(machine)
        except ValueError as error:
            missing[machine.platform] = str(error)
            continue
        compiled.append(make(machine, False))
        if sum(each.plan.verdict == "fits" for each in compiled) == COMPILED:
            break
    better = {each.plan.accelerator: each for each in compiled}
    known = [better.get(each.plan.accelerator, each) for each in fitting]
    fits = sorted((each for each in known if each.plan.verdict == "fits"), key=cost)
    return Ranking(fits, len(entries) - len(fits), refused, list(missing.values()))


def cost(entry: PlanEntry) -> tuple[bool, float]:
    """What a run costs, for sorting: dollars, and after all of these device-seconds where there is no price."""
    if entry.cost is None:
        return True, float(entry.plan.worst.bytes)
    usd = entry.cost.usd
    return usd is None, usd.value if usd is not None else entry.cost.chip_hours.value


def hours(plan: Plan, steps: int) -> float:
    """The length of a run."""
    return plan.step.value * steps / HOUR_S if plan.step else 0.0


def headline(found: Ranking) -> str:
    """The cheapest machine and the fastest, in a line."""
    if not found.entries:
        return f"the run fits none of the {found.unsuitable} machines that its settings divide over"
    best = found.entries[0]
    quick = min(found.entries, key=lambda each: each.plan.step.value if each.plan.step else float("inf"))
    text = f"cheapest: {best.plan.accelerator}, {_price(best)}; fastest: {quick.plan.accelerator}, {_price(quick)}"
    others = [f"{found.unsuitable} others do not fit"] * bool(found.unsuitable)
    others += [f"settings do not divide over {found.refused}"] * bool(found.refused)
    return f"{text} (fits {len(found.entries)} machines of up to {MOST_DEVICES} devices; {'; '.join(others)})"


def table(found: Ranking) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The cheapest machines, and the fastest if it is not among them: heads and rows."""
    quick = min(found.entries, key=lambda each: each.plan.step.value if each.plan.step else float("inf"))
    shown = [*found.entries[:SHOWN], *([quick] if quick not in found.entries[:SHOWN] else [])]
    rows = [
        (
            each.plan.accelerator,
            number(each.cost.usd.value) if each.cost and each.cost.usd else "no price",
            number(hours(each.plan, each.cost.steps)) if each.cost else "-",
            number(each.plan.step.value) if each.plan.step else "-",
            each.plan.worst.name,
            number(each.plan.spare_bytes / 2**30),
            "estimate" if each.plan.estimate_only else "compiled",
        )
        for each in shown
    ]
    return ("machine", "dollars", "hours", "s per step", "peak in", "GiB spare", "made by"), tuple(rows)


def _price(entry: PlanEntry) -> str:
    if entry.cost is None:
        return "seconds unknown"
    usd = f"{number(entry.cost.usd.value)} dollars" if entry.cost.usd else "price unknown"
    return f"{usd} and {number(hours(entry.plan, entry.cost.steps))} hours for {entry.cost.steps} steps"
