"""`--on auto`: estimate every machine by the closed form, then compile for the cheapest ones that fit."""

import dataclasses
from collections.abc import Iterable, Sequence

from podium.accelerators import Accelerator, accelerators
from podium.plan.request.topology import check_compiler
from podium.plan.search.study import Case, Outcome, Study

AUTO = "auto"
MOST_DEVICES = 64
RENTED = (1, 2, 4, 8, 16, 32, 64)
"""GPU counts that can be rented."""
COMPILED = 3  # stop once the compiler has confirmed this many machines, the cheapest among them
MOST_TRIED = 8  # compile for at most this many machines


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
    """Rank all machines by cost; compile for the cheapest until the compiler confirms three, the first among them."""
    estimates = study.estimate(Case(machine) for machine in machines())
    planned = [each for each in estimates if each.known is not None]
    known = {each.case: each for each in planned}
    missing: dict[str, str] = {}
    for _ in range(0 if study.fast else MOST_TRIED):
        ranking = _fitting(known.values())
        compiled = [each for each in ranking if not each.plan.estimate_only]
        able = [each for each in ranking if each.case.machine.platform not in missing]
        if len(compiled) >= COMPILED and able and able[0] is compiled[0]:
            break
        case = next((each.case for each in able if each.plan.estimate_only), None)
        if case is None:
            break
        try:
            check_compiler(case.machine)
        except ValueError as error:
            missing[case.machine.platform] = str(error)
            continue
        known[case] = study.of(case)
    fits = _fitting(known.values())
    return Ranking(
        outcomes=fits,
        unsuitable=len(planned) - len(fits),
        refused=len(estimates) - len(planned),
        not_compiled=list(missing.values()),
    )


def _fitting(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that fit, cheapest first."""
    return sorted((each for each in outcomes if each.plan.verdict == "fits"), key=_expense)


def _expense(outcome: Outcome) -> tuple[bool, float]:
    """Sort key, cheapest first: dollars; machines without a price come last, by device-hours."""
    cost = outcome.cost
    if cost is None:
        return True, float(outcome.plan.worst.bytes)
    return cost.usd is None, cost.usd.value if cost.usd is not None else cost.chip_hours.value
