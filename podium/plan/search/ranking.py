"""Orders outcomes, each with the reason for its place: values of a setting, machines, or single changes. No jax.

The closed form says which plans are worth compiling; the order is then of what the compiler says.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from podium.accelerators import Accelerator, accelerators
from podium.plan.report.formatting import number
from podium.plan.request.candidate import Case
from podium.plan.request.topology import check_compiler
from podium.plan.result import Plan
from podium.plan.search.reasons import difference
from podium.plan.search.study import Outcome, Study
from podium.plan.search.tunable_settings import candidates

ORDER = ("fits", "too_close", "does_not_fit")
BETTER = 0.99
"""Smallest improvement worth reporting: a share of a step's seconds, or of the memory if the run does not fit."""


def by_price(outcomes: Sequence[Outcome]) -> bool:
    """Whether plans can be compared by price: each has a price and seconds."""
    return all(each.cost is not None and each.cost.usd is not None for each in outcomes)


def _expense(outcome: Outcome, *, priced: bool) -> tuple[int, bool, float]:
    """Sort key, best first: verdict, then the dollars of a step if `priced`, otherwise its chip-seconds.

    With `priced`, machines without a price come last. Plans without seconds are ordered by memory.
    """
    plan = outcome.plan
    usd = outcome.cost.usd if priced and outcome.cost is not None else None
    if usd is not None:
        return ORDER.index(plan.verdict), False, usd.value
    amount = plan.step.value * outcome.case.machine.chips if plan.step is not None else float(plan.worst.bytes)
    return ORDER.index(plan.verdict), True, amount


# --compare: several values and machines


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes best first, each with the reason for its place: plans that fit come first, then the cheaper step.

    The cost is in dollars if every plan has a price, otherwise in chip-seconds, so on one machine the fastest wins.
    """
    priced = by_price(outcomes)
    best, *others = sorted(outcomes, key=lambda each: _expense(each, priced=priced))
    if not others:
        return [best]
    first = dataclasses.replace(best, reason=f"best: {_reason(best, others[0])}")
    return [first, *(dataclasses.replace(each, reason=_reason(each, best)) for each in others)]


def _reason(outcome: Outcome, other: Outcome) -> str:
    """How a plan differs from another; between machines, also by price."""
    cost, others_cost = outcome.cost and outcome.cost.usd, other.cost and other.cost.usd
    text = difference(outcome.plan, other.plan)
    if outcome.plan.accelerator == other.plan.accelerator or cost is None or others_cost is None:
        return text
    return f"{number(cost.value)} dollars against {number(others_cost.value)}; {text}"


# --on auto: all machines

AUTO = "auto"
MOST_DEVICES = 64
RENTED = (1, 2, 4, 8, 16, 32, 64)
"""GPU counts that can be rented."""
CONFIRMED = 3  # stop once traces or the compiler have confirmed this many machines, the cheapest among them
MOST_TRIED = 8  # trace or compile for at most this many machines


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
    """All machines to try, small to large within each kind: those for which programs can be compiled."""
    found = [each for each in accelerators().values() if each.devices <= MOST_DEVICES and each.compiled]
    return [each for each in found if each.platform == "tpu" or each.devices in RENTED]


def rank_machines(study: Study) -> Ranking:
    """Rank all machines by cost; trace or compile for the cheapest until three are confirmed, the first among them."""
    estimates = study.outcomes([Case(machine) for machine in machines()], closed_form=True)
    planned = [each for each in estimates if each.known is not None]
    known = {each.case: each for each in planned}
    missing: dict[str, str] = {}
    for _ in range(0 if study.by == "closed_form" else MOST_TRIED):
        ranking = _fitting(known.values())
        confirmed = [each for each in ranking if not _guessed(each)]
        able = [each for each in ranking if each.case.machine.platform not in missing]
        if len(confirmed) >= CONFIRMED and able and able[0] is confirmed[0]:
            break
        case = next((each.case for each in able if _guessed(each)), None)
        if case is None:
            break
        try:
            if not study.fast:
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


def _guessed(outcome: Outcome) -> bool:
    """Whether the plan is the closed form's alone."""
    return outcome.plan.made == "estimated"


def _fitting(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that fit, cheapest first."""
    fits = [each for each in outcomes if each.plan.verdict == "fits"]
    return sorted(fits, key=lambda each: _expense(each, priced=True))


# --suggest: single changes of a run that fits

MOST_CANDIDATES = 4  # most changes that are compiled
SHOWN = 3  # most changes that a report names
QUICK_S = 60.0  # if compiling takes fewer seconds than this, the best change is compiled without being asked


def suggestions(study: Study, now: Outcome, *, compile_all: bool | None) -> list[Outcome]:
    """Find the changes that help most, best first.

    Compiles all changes that the closed form finds helpful if requested; otherwise only the best one, and only if
    compiling is quick.

    Args:
        study: plans the changes.
        now: the unchanged run, which fits.
        compile_all: whether to compile all of them; None: decide as above.
    """
    estimated = study.of(now.case, closed_form=True).plan
    cases = [now.case.but(change) for change in candidates(study.run(now.case))]
    tried = [each for each in study.outcomes(cases, closed_form=True) if each.known is not None]
    likely = [each for each in sorted(tried, key=_rank) if helps(each.plan, estimated)][:MOST_CANDIDATES]
    if not study.fast and compile_all:
        return _helping([study.of(each.case) for each in likely], now.plan)
    guessed = _helping(likely, estimated)
    if study.fast or not guessed or _compile_s(study, guessed[0].case, now) > QUICK_S:
        return guessed
    return [*_helping([study.of(guessed[0].case)], now.plan), *guessed[1:]]


def _helping(outcomes: Iterable[Outcome], before: Plan) -> list[Outcome]:
    """The outcomes that help, best first, each with the plan it improves on, made by the same method."""
    better = [each for each in sorted(outcomes, key=_rank) if helps(each.plan, before)]
    return [dataclasses.replace(each, before=before, reason=difference(each.plan, before)) for each in better[:SHOWN]]


def _rank(outcome: Outcome) -> tuple[int, float]:
    """Sort key of plans on one machine, best first: those that fit by their seconds, the others by their memory."""
    plan = outcome.plan
    if plan.verdict == "fits" and plan.step is not None:
        return ORDER.index(plan.verdict), plan.step.value
    return ORDER.index(plan.verdict), float(plan.worst.bytes)


def helps(changed: Plan, plan: Plan) -> bool:
    """Whether a change helps: the run now fits, is closer to fitting, or still fits and is faster."""
    if changed.verdict != plan.verdict:
        return ORDER.index(changed.verdict) < ORDER.index(plan.verdict)
    if plan.verdict != "fits":
        return changed.worst.bytes < BETTER * plan.worst.bytes
    return changed.step is not None and plan.step is not None and changed.step.value < BETTER * plan.step.value


def _compile_s(study: Study, case: Case, now: Outcome) -> float:
    """Seconds that the compiler took, in the current run, for the phases that a case changes."""
    moved = study.moved([now.case, case])
    return sum(phase.compile_s or 0.0 for phase in now.plan.phases if phase.name in moved)
