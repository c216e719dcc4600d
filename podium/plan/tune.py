"""`--search KEY,KEY`: the fastest settings that fit, over several keys at once, with a few compilations.

The closed form goes through the settings one at a time, again until nothing improves; the best by that are compiled,
best first. None of these settings changes what a run learns.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from podium.plan.knobs import Value
from podium.plan.study import Case, Change, Changes, Outcome, Study, best_first

ROUNDS = 3  # through all settings, at most: the second seldom finds anything


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings that were tried, best first."""

    before: Outcome  # with the values that the config has
    tried: tuple[Outcome, ...]  # compiled, or else the closed form's best
    estimated: int  # how many settings the closed form judged
    budget: int

    @property
    def best(self) -> Outcome:
        """The fastest that fits; if none does, the closest to fitting."""
        return self.tried[0]

    def changed(self, outcome: Outcome) -> list[Change]:
        """The settings of an outcome that differ from the config's."""
        return [each for each in outcome.case.changes if each not in self.before.case.changes]


def tune(study: Study, grid: Mapping[str, Sequence[Value]], now: Case, *, budget: int) -> Tuned:
    """The best settings of a grid.

    Args:
        study: plans them.
        grid: the values of each key that are worth trying.
        now: the config's own values of all keys.
        budget: how many plans may be compiled, that of the config included.

    Raises:
        ValueError: the config as it is cannot be planned.
    """
    found = _descend(study, grid, now)
    likely = best_first(found.values())
    if study.fast:
        before = found[now.changes]
        return Tuned(before=before, tried=tuple(likely[:budget]), estimated=len(likely), budget=budget)
    before = study.of(now)
    tried = [before]
    for estimate in likely:
        changes = estimate.case.changes
        if len(tried) < budget and changes != now.changes and not _hopeless(estimate, tried, found):
            tried.append(study.of(estimate.case))
    return Tuned(before=before, tried=tuple(best_first(tried)), estimated=len(likely), budget=budget)


def _hopeless(estimate: Outcome, tried: Sequence[Outcome], found: Mapping[Changes, Outcome]) -> bool:
    """Whether settings that need no more by the closed form did not fit as compiled."""
    failed = [found[each.case.changes] for each in tried if each.plan.verdict != "fits"]
    return any(each.plan.worst.bytes <= estimate.plan.worst.bytes for each in failed)


def _descend(study: Study, grid: Mapping[str, Sequence[Value]], now: Case) -> dict[Changes, Outcome]:
    """All settings judged by the closed form: the best value of each key in turn, again until nothing improves."""
    found = {now.changes: study.of(now, fast=True)}
    best = now.changes
    for _ in range(ROUNDS):
        start = best
        for place, change in enumerate(now.changes):
            others = [
                (*best[:place], dataclasses.replace(change, value=value), *best[place + 1 :])
                for value in grid[change.key]
            ]
            new = [now.but(*changes) for changes in others if changes not in found]
            found |= {each.case.changes: each for each in study.estimate(new)}
            best = best_first(found.values())[0].case.changes
        if best == start:
            break
    return found
