"""Plans several configurations of one run and compares them; every result about more than one plan is built on this.

A case is a machine plus changes to the run's settings. A study plans cases, by the closed form or with the compiler,
and returns an outcome for each. Its callers decide which cases to try, in which order, and what to report: the changes
that help most (`suggest`), the fastest settings that fit (`tune`), the cheapest machine (`auto`), or a comparison
(`compare`). The largest value that fits (`search`) needs only the memory of cases, which `probe` finds. No jax here.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from podium.accelerators import Accelerator, accelerators
from podium.config.document import dump_value
from podium.config.load import Override
from podium.plan.result import Plan, Seconds
from podium.prices import HOUR_S, Price

ORDER = ("fits", "too_close", "does_not_fit")
BETTER = 0.99
"""Smallest improvement worth reporting: a share of a step's seconds, or of the memory if the run does not fit."""


Value = int | float | str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A new value for one setting."""

    key: str
    value: Value
    old: Value = None  # the run's current value; None: unset, or unknown
    written: bool = False  # whether `value` is the text that the user wrote, as after --set

    def __str__(self) -> str:
        """The change in the form of `--set`."""
        return f"{self.key}={shown(self.value)}"

    @property
    def override(self) -> str | Override:
        """The change as the config loader takes it."""
        return str(self) if self.written else Override(self.key, self.value, f"podium plan, {self}")


Changes = tuple[Change, ...]


def shown(value: Value) -> str:
    """A value as after `--set`: `null`, `true`, 8, or a text."""
    return value if isinstance(value, str) else dump_value(value)


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration to try: a machine and changes to the run."""

    machine: Accelerator
    changes: Changes = ()

    def but(self, *changes: Change) -> "Case":
        """A copy of the case with its changes replaced by these."""
        return Case(self.machine, changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCost:
    """The cost of some steps of a run, excluding compilation, evaluations and checkpoints."""

    steps: int
    chip_hours: Seconds  # hours times chips
    usd: Seconds | None = None  # US dollars; None: the price list has no such chip
    usd_per_chip_hour: float | None = None
    price_source: str | None = None
    price_date: str | None = None


def cost_of(plan: Plan, steps: int, prices: Mapping[str, Price]) -> RunCost | None:
    """The cost of `steps` steps; None if the plan has no seconds."""
    if plan.step is None:
        return None
    chip_hours = plan.step * (steps * plan.devices / HOUR_S)
    machine = accelerators().get(plan.accelerator)  # a CPU is in no table
    price = prices.get(machine.generation) if machine else None
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
    """The plan of a case, or the reason why it could not be planned."""

    case: Case
    known: Plan | None = None  # None: it cannot be planned
    error: str = ""
    cost: RunCost | None = None
    before: Plan | None = None  # the plan without the changes, made by the same method
    reason: str = ""  # why it has its place in a ranking, or what the changes improve

    @property
    def plan(self) -> Plan:
        """The plan of a case; must not be used if planning failed."""
        assert self.known is not None, self.error
        return self.known

    @property
    def setting(self) -> str:
        """The changes in the form of `--set`, such as `rollout.layout=legacy`."""
        return " ".join(map(str, self.case.changes))

    @property
    def label(self) -> str:
        """The machine and the changes, as text."""
        return f"{self.case.machine.name} {self.setting}".strip()


class Planner(Protocol):
    """Plans one case."""

    def __call__(self, case: Case, *, fast: bool) -> Plan:
        """Plan a case, only by the closed form if `fast`. Raises ValueError if the case is invalid."""
        ...


def no_cost(case: Case, plan: Plan) -> RunCost | None:
    """Return None: the cost if no steps and prices are given."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Plans cases of one run."""

    planner: Planner
    fast: bool = False  # whether to use only the closed form
    cost: Callable[[Case, Plan], RunCost | None] = no_cost

    def estimate(self, cases: Iterable[Case]) -> list[Outcome]:
        """The outcome of each case by the closed form; an invalid case gets its error."""
        return [self._outcome(case, fast=True) for case in cases]

    def decide(self, cases: Iterable[Case]) -> list[Outcome]:
        """The outcome of each case by the compiler, or by the closed form if the study is `fast`."""
        return [self._outcome(case, fast=self.fast) for case in cases]

    def of(self, case: Case, *, fast: bool = False) -> Outcome:
        """The outcome of a case that is expected to be valid.

        Raises:
            ValueError: the case contradicts itself or does not fit its machine.
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
    """Sort key, best first: plans that fit by their seconds, then the others by their memory."""
    plan = outcome.plan
    if plan.verdict == "fits" and plan.step is not None:
        return ORDER.index(plan.verdict), plan.step.value
    return ORDER.index(plan.verdict), float(plan.worst.bytes)


def best_first(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that have a plan, best first."""
    return sorted((each for each in outcomes if each.known is not None), key=rank_of)


def helps(changed: Plan, plan: Plan) -> bool:
    """Whether a change helps: the run now fits, is closer to fitting, or still fits and is faster."""
    if changed.verdict != plan.verdict:
        return ORDER.index(changed.verdict) < ORDER.index(plan.verdict)
    if plan.verdict != "fits":
        return changed.worst.bytes < BETTER * plan.worst.bytes
    return changed.step is not None and plan.step is not None and changed.step.value < BETTER * plan.step.value
