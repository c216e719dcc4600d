"""Several configurations of one run, judged alike: every answer about more than one plan is made of these.

A case is a machine and changes to the run's settings. A study plans cases, by the closed form or with the compiler,
and gives an outcome for each. Its readers decide what to try, in which order, and what to report: the changes that help
most (`suggest`), the fastest settings that fit (`tune`), the cheapest machine (`auto`), and a comparison (`compare`).
The largest value that fits (`search`) needs only the memory of cases, which `probe` finds. No jax here.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from podium.accelerators import Accelerator, find_accelerator
from podium.config.load import Override
from podium.plan.result import Plan, Seconds
from podium.prices import HOUR_S, Price

ORDER = ("fits", "too_close", "does_not_fit")
BETTER = 0.99
"""Share of a step's seconds, or of the memory where a run does not fit, below which a change is worth naming."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One setting with another value."""

    key: str
    value: int | str
    old: int | str | None = None  # the value that the run has; None: unknown
    written: bool = False  # whether `value` is text that the user wrote, as after --set

    def __str__(self) -> str:
        """The change as the command line takes it."""
        return f"{self.key}={self.value}"

    @property
    def override(self) -> str | Override:
        """The change as the loader of settings takes it."""
        return str(self) if self.written else Override(self.key, self.value, f"podium plan, {self}")


Changes = tuple[Change, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration to try: the run with changes, on a machine."""

    machine: Accelerator
    changes: Changes = ()

    def but(self, *changes: Change) -> "Case":
        """The same case with these changes instead of its own."""
        return Case(self.machine, changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCost:
    """The cost of the steps of a run; compiling, evaluations and checkpoints are not in it."""

    steps: int
    chip_hours: Seconds  # hours, times chips
    usd: Seconds | None = None  # US dollars; None: the list has no price of this kind of chip
    usd_per_chip_hour: float | None = None
    price_source: str | None = None
    price_date: str | None = None


def cost_of(plan: Plan, steps: int, prices: Mapping[str, Price]) -> RunCost | None:
    """The cost of a number of steps; None if the plan has no seconds."""
    if plan.step is None:
        return None
    chip_hours = plan.step * (steps * plan.devices / HOUR_S)
    price = prices.get(find_accelerator(plan.accelerator).generation)
    if price is None:
        return RunCost(steps=steps, chip_hours=chip_hours)
    return RunCost(
        steps=steps,
        chip_hours=chip_hours,
        usd=chip_hours * price.usd_per_chip_hour,
        usd_per_chip_hour=price.usd_per_chip_hour,
        price_source=price.source,
        price_date=price.date,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The plan of a case, or why it cannot be planned."""

    case: Case
    known: Plan | None = None  # None: it cannot be planned
    error: str = ""
    cost: RunCost | None = None
    before: Plan | None = None  # the plan without the changes, made in the same way
    reason: str = ""  # why it stands where it does among others, or what the changes improve

    @property
    def plan(self) -> Plan:
        """The plan of a case that could be planned."""
        assert self.known is not None, self.error
        return self.known

    @property
    def setting(self) -> str:
        """The changes as the command line takes them, as `rollout.layout=legacy`."""
        return " ".join(map(str, self.case.changes))

    @property
    def label(self) -> str:
        """Machine and changes."""
        return f"{self.case.machine.name} {self.setting}".strip()


class Planner(Protocol):
    """Plans one case."""

    def __call__(self, case: Case, *, fast: bool) -> Plan:
        """The plan, by the closed form alone if `fast`. Raises ValueError if the case cannot be planned."""
        ...


def no_cost(case: Case, plan: Plan) -> RunCost | None:
    """The cost where nothing is said about steps and prices."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Plans cases of one run."""

    planner: Planner
    fast: bool = False  # whether the closed form is all that may answer
    cost: Callable[[Case, Plan], RunCost | None] = no_cost

    def estimate(self, cases: Iterable[Case]) -> list[Outcome]:
        """The outcome of each case by the closed form; of one that contradicts itself or its machine, the error."""
        return [self._outcome(case, fast=True) for case in cases]

    def decide(self, cases: Iterable[Case]) -> list[Outcome]:
        """The outcome of each case by the compiler, or by the closed form if nothing else may answer."""
        return [self._outcome(case, fast=self.fast) for case in cases]

    def of(self, case: Case, *, fast: bool = False) -> Outcome:
        """The outcome of a case that must be right.

        Raises:
            ValueError: it contradicts itself or its machine.
        """
        plan = self.planner(case, fast=fast or self.fast)
        return Outcome(case=case, known=plan, cost=self.cost(case, plan))

    def _outcome(self, case: Case, *, fast: bool) -> Outcome:
        try:
            return self.of(case, fast=fast)
        except ValueError as error:  # a ConfigError, or slots, heads or a mesh that do not divide over the devices
            text = "; ".join(line.strip() for line in str(error).splitlines()) or repr(error)
            return Outcome(case=case, error=text)


def rank_of(outcome: Outcome) -> tuple[int, float]:
    """For sorting, best first: plans that fit by their seconds, others by their memory."""
    plan = outcome.plan
    if plan.verdict == "fits" and plan.step is not None:
        return ORDER.index(plan.verdict), plan.step.value
    return ORDER.index(plan.verdict), float(plan.worst.bytes)


def best_first(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that have a plan, best first."""
    return sorted((each for each in outcomes if each.known is not None), key=rank_of)


def helps(changed: Plan, plan: Plan) -> bool:
    """Whether a change is an improvement: the run fits, or is closer to fitting, or still fits and is faster."""
    if changed.verdict != plan.verdict:
        return ORDER.index(changed.verdict) < ORDER.index(plan.verdict)
    if plan.verdict != "fits":
        return changed.worst.bytes < BETTER * plan.worst.bytes
    return changed.step is not None and plan.step is not None and changed.step.value < BETTER * plan.step.value
