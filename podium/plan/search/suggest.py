"""The changes that most help a run that fits, without changing what it learns; each comes with its own plan."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from podium.plan.result import Plan
from podium.plan.search.compare_plans import difference
from podium.plan.search.study import Case, Change, Outcome, Study, best_first, helps

MOST_CANDIDATES = 4  # most changes that are compiled
SHOWN = 3  # most changes that a report names
QUICK_S = 60.0  # if compiling takes fewer seconds than this, the best change is compiled without being asked


def suggestions(
    study: Study,
    changes: Iterable[Change],
    plan: Plan,
    now: Case,
    *,
    compile_all: bool | None,
    compile_s: Callable[[Change], float],
) -> list[Outcome]:
    """Find the changes that help most, best first.

    Compiles all changes that the closed form finds helpful if requested; otherwise only the best one, and only if
    compiling is quick.

    Args:
        study: plans the changes.
        changes: the candidates.
        plan: the plan of the unchanged run, which fits.
        now: the unchanged run.
        compile_all: whether to compile all of them; None: decide as above.
        compile_s: seconds that compiling a change takes.
    """
    estimated = study.of(now, fast=True).plan
    likely = _promising(study, (now.but(change) for change in changes), estimated)
    if not study.fast and compile_all:
        return _helping([study.of(each.case) for each in likely], plan)
    guessed = _helping(likely, estimated)
    if study.fast or not guessed or compile_s(guessed[0].case.changes[0]) > QUICK_S:
        return guessed
    return [*_helping([study.of(guessed[0].case)], plan), *guessed[1:]]


def _promising(study: Study, cases: Iterable[Case], estimated: Plan) -> list[Outcome]:
    """The cases that help most by the closed form, best first; invalid cases are left out."""
    helping = [each for each in best_first(study.estimate(cases)) if helps(each.plan, estimated)]
    return helping[:MOST_CANDIDATES]


def _helping(outcomes: Sequence[Outcome], before: Plan) -> list[Outcome]:
    """The outcomes that help, best first, each with the plan it improves on, made by the same method."""
    better = [each for each in best_first(outcomes) if helps(each.plan, before)]
    return [dataclasses.replace(each, before=before, reason=difference(each.plan, before)) for each in better[:SHOWN]]
