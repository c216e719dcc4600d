"""`--on auto`: estimate every machine by the closed form, then compile for the cheapest ones that fit."""

import dataclasses
from collections.abc import Sequence

from podium.accelerators import Accelerator, accelerators
from podium.plan.study import Case, Outcome, Study
from podium.plan.topology import check_compiler

AUTO = "auto"
MOST_DEVICES = 64
RENTED = (1, 2, 4, 8, 16, 32, 64)
"""GPU counts that can be rented."""
COMPILED = 3  # stop once the compiler has confirmed this many machines
MOST_TRIED = 5  # compile for at most this many machines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """The machines that fit a run, cheapest first."""

    outcomes: Sequence[Outcome]
    unsuitable: int  # number of machines that are too small
    refused: int  # number of machines whose devices the settings do not divide over
    not_compiled: Sequence[str]  # why some of the first machines are only estimated

    @property
    def fastest(self) -> Outcome:
        """The machine with the shortest step."""
        return min(self.outcomes, key=lambda each: each.plan.step.value if each.plan.step else float("inf"))


def machines() -> list[Accelerator]:
    """All machines to try, small to large within each kind."""
    found = [each for each in accelerators().values() if each.devices <= MOST_DEVICES]
    return [each for each in found if each.platform == "tpu" or each.devices in RENTED]


def rank(study: Study) -> Ranking:
    """Rank all machines by cost; compile for the cheapest until the compiler confirms three."""
    estimates = study.estimate(Case(machine) for machine in machines())
    planned = [each for each in estimates if each.known is not None]
    fitting = sorted((each for each in planned if each.plan.verdict == "fits"), key=_expense)
    compiled: dict[Case, Outcome] = {}
    missing: dict[str, str] = {}
    for estimate in () if study.fast else fitting[:MOST_TRIED]:
        machine = estimate.case.machine
        try:
            check_compiler(machine)
        except ValueError as error:
            missing[machine.platform] = str(error)
            continue
        compiled[estimate.case] = study.of(estimate.case)
        if sum(each.plan.verdict == "fits" for each in compiled.values()) == COMPILED:
            break
    known = [compiled.get(each.case, each) for each in fitting]
    fits = sorted((each for each in known if each.plan.verdict == "fits"), key=_expense)
    return Ranking(
        outcomes=fits,
        unsuitable=len(planned) - len(fits),
        refused=len(estimates) - len(planned),
        not_compiled=list(missing.values()),
    )


def _expense(outcome: Outcome) -> tuple[bool, float]:
    """Sort key, cheapest first: dollars; machines without a price come last, by device-hours."""
    cost = outcome.cost
    if cost is None:
        return True, float(outcome.plan.worst.bytes)
    return cost.usd is None, cost.usd.value if cost.usd is not None else cost.chip_hours.value
