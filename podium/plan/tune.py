"""`--search KEY,KEY`: find the fastest settings that fit, over several keys at once, with few compilations.

Coordinate descent by the closed form until nothing improves; then compile the best results, best first. None of these
settings changes what a run learns.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from podium.plan.knobs import Value
from podium.plan.study import Case, Change, Changes, Outcome, Study, best_first

ROUNDS = 3  # most passes over all settings; the second seldom improves anything


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The combinations of settings that were tried, best first."""

    before: Outcome  # with the config's own values
    tried: tuple[Outcome, ...]  # compiled; if nothing was, the best by the closed form
    estimated: int  # number of combinations estimated by the closed form
    budget: int

    @property
    def best(self) -> Outcome:
        """The fastest combination that fits; if none does, the closest to fitting."""
        return self.tried[0]

    def changed(self, outcome: Outcome) -> list[Change]:
        """The settings of an outcome that differ from the config."""
        return [each for each in outcome.case.changes if each not in self.before.case.changes]


def tune(study: Study, grid: Mapping[str, Sequence[Value]], now: Case, *, budget: int) -> Tuned:
    """Find the best combination of a grid's values.

    Args:
        study: plans the combinations.
        grid: the values of each key to try.
        now: the config's own values of all keys.
        budget: most plans to compile, including the config's own.

    Raises:
        ValueError: the unchanged config cannot be planned.
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
    """Whether a combination that needs no more memory by the closed form failed to fit once compiled."""
    failed = [found[each.case.changes] for each in tried if each.plan.verdict != "fits"]
    return any(each.plan.worst.bytes <= estimate.plan.worst.bytes for each in failed)


def _descend(study: Study, grid: Mapping[str, Sequence[Value]], now: Case) -> dict[Changes, Outcome]:
    """Coordinate descent by the closed form: take the best value of each key in turn until nothing improves."""
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
