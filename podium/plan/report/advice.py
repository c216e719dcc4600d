"""The first line of a report: whether the run fits, what dominates its step, and the most helpful change."""

import shlex
from collections.abc import Sequence

from podium.plan.report.formatting import LIMITS, number, readable, spare, verdict_head
from podium.plan.result import Plan
from podium.plan.search.fit import Fitted
from podium.plan.search.study import Outcome

MUCH = 0.25  # share of a step taken by the longest phase, above which idle slots are mentioned


def advice_line(plan: Plan, trials: Sequence[Outcome] | None, fitted: Fitted | None = None) -> str:
    """One line of advice about a plan.

    Args:
        plan: the plan of the unchanged run.
        trials: changes that help, best first; None if no changes were tried.
        fitted: the settings that fit, if the run does not and they were searched.
    """
    head, because = verdict_head(plan), _where(plan)
    if fitted is not None:
        return f"{head}. {because}: {fit_advice(fitted)}"
    if trials is None:
        return ". ".join(filter(None, (head, because)))
    if not trials:
        return f"{head}. {because}; no change that was tried makes it better" if because else head
    best = trials[0]
    return f"{head}. {because + ': ' if because else ''}--set {best.setting} {effect(best)}"


def fit_advice(found: Fitted) -> str:
    """The settings that fit, as options of the command, with their effect: `--set train.remat=offload fits, ...`."""
    if found.best is None:
        return "none of the settings that were tried fits"
    plan = found.best.plan
    settings = options(found.best)
    learned = f" (changes what is learned: {', '.join(map(str, found.learned))})" if found.learned else ""
    return f"{settings}{learned} {_fitting(plan)}" if settings else f"the settings as they are: {_fitting(plan)}"


def options(outcome: Outcome) -> str:
    """The changes of an outcome as options of the command."""
    return " ".join(f"--set {shlex.quote(str(each))}" for each in outcome.case.changes)


def _fitting(plan: Plan) -> str:
    """Whether changed settings fit: `fits, 6.9 GiB to spare, 3.1 s per step (compiled)`."""
    fits = {"fits": "fits", "too_close": "is too close to call", "does_not_fit": "does not fit"}[plan.verdict]
    step = f", {number(plan.step.value)} s per step" if plan.step else ""
    return f"{fits}, {spare(plan)}{step} ({plan.made})"


def effect(outcome: Outcome) -> str:
    """The effect of a change to a run that fits, and its source: `makes a step 2.1 s instead of 5.8 (compiled)`.

    What the closed form estimates is a share, because the plan beside it may have a trace's seconds.
    """
    plan, before = outcome.plan, outcome.before
    assert before is not None
    if plan.step is None or before.step is None:
        return f"leaves {spare(plan)} ({plan.made})"
    after, now = number(plan.step.value), number(before.step.value)
    if plan.made == "estimated" or after == now:
        return f"makes a step {1 - plan.step.value / before.step.value:.0%} shorter ({plan.made})"
    return f"makes a step {after} s instead of {now} ({plan.made})"


def _where(plan: Plan) -> str:
    """If the run fits, the phase that takes most of a step and why; otherwise the largest arrays of the phase with the
    peak.
    """
    if plan.verdict != "fits":
        parts = sorted(plan.worst.parts.items(), key=lambda part: -part[1])[:2]
        held = " and ".join(f"{readable(name)} {size / 2**30:.1f}" for name, size in parts)
        return f"Most of {plan.worst.name} is {held} GiB"
    timed = [phase for phase in plan.phases if phase.seconds is not None]
    if plan.step is None or not timed:
        return ""
    longest = max(timed, key=lambda phase: phase.seconds.value if phase.seconds else 0.0)
    assert longest.seconds is not None
    share = longest.seconds.value / plan.step.value
    bound = f", bound by {LIMITS[longest.bound_by]}" if longest.bound_by else ""
    busy = ""
    if longest.name == "decode" and share > MUCH and plan.slots:
        busy = f", with slots {plan.workload.slots_busy(plan.slots):.0%} busy"
    return f"{share:.0%} of a step is {longest.name}{bound}{busy}"
