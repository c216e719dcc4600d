"""The changes that help a run most without changing what it learns, each shown by a plan of its own."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from podium.config.lora import LoraConfig
from podium.plan.compare import difference
from podium.plan.result import Plan
from podium.plan.study import Case, Change, Outcome, Study, best_first, helps

MOST_CANDIDATES = 4  # changes that are compiled to find those that help most
SHOWN = 3  # changes that a report names
QUICK_S = 60.0  # seconds of compilation below which the best change is compiled without being asked


def suggestions(
    study: Study,
    changes: Iterable[Change],
    plan: Plan,
    now: Case,
    *,
    compile_all: bool | None,
    compile_s: Callable[[Change], float],
    adapters: bool,
) -> list[Outcome]:
    """The changes that help most, best first.

    All that the closed form likes are compiled if that is asked for or the run does not fit; else only the best one,
    and only if that is quick.

    Args:
        study: plans the changes.
        changes: those worth trying.
        plan: of the run as it is.
        now: the run as it is.
        compile_all: whether compiling was asked for.
        compile_s: seconds that compiling a change takes.
        adapters: whether LoRA may be suggested, where the run does not fit and no other change makes it fit.
    """
    estimated = study.of(now, fast=True).plan
    likely = _promising(study, (now.but(change) for change in changes), estimated)
    if adapters and estimated.verdict != "fits" and not any(each.plan.verdict == "fits" for each in likely):
        rank = Change(key="lora.rank", value=LoraConfig.model_fields["rank"].default, old="all weights")
        likely = [*_promising(study, [now.but(rank)], estimated), *likely][:MOST_CANDIDATES]
    if not study.fast and (compile_all or plan.verdict != "fits"):
        return _helping([study.of(each.case) for each in likely], plan)
    guessed = _helping(likely, estimated)
    if study.fast or not guessed or compile_s(guessed[0].case.changes[0]) > QUICK_S:
        return guessed
    return [*_helping([study.of(guessed[0].case)], plan), *guessed[1:]]


def _promising(study: Study, cases: Iterable[Case], estimated: Plan) -> list[Outcome]:
    """The cases that help most by the closed form, best first; those that contradict the config are left out."""
    helping = [each for each in best_first(study.estimate(cases)) if helps(each.plan, estimated)]
    return helping[:MOST_CANDIDATES]


def _helping(outcomes: Sequence[Outcome], before: Plan) -> list[Outcome]:
    """The best of some outcomes, each with what it improves on a plan that was made in the same way."""
    better = [each for each in best_first(outcomes) if helps(each.plan, before)]
    return [dataclasses.replace(each, before=before, reason=difference(each.plan, before)) for each in better[:SHOWN]]
