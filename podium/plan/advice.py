"""The first line of a report: whether the run fits, what dominates its step, and the most helpful change."""

from collections.abc import Sequence

from podium.plan.formatting import LIMITS, number, readable, spare, verdict_head
from podium.plan.result import Plan
from podium.plan.study import Outcome

MUCH = 0.25  # share of a step taken by the longest phase, above which idle slots are mentioned


def advice_line(plan: Plan, trials: Sequence[Outcome] | None) -> str:
    """One line of advice about a plan.

    Args:
        plan: the plan of the unchanged run.
        trials: changes that help, best first; None if no changes were tried.
    """
    head, because = verdict_head(plan), _where(plan)
    if trials is None:
        return ". ".join(filter(None, (head, because)))
    if not trials:
        return f"{head}. {because}; no change that was tried makes it better" if because else head
    best = trials[0]
    return f"{head}. {because + ': ' if because else ''}--set {best.setting} {effect(best)}"


def effect(outcome: Outcome) -> str:
    """The effect of a change, and how it was obtained: `makes a step 2.1 s instead of 5.8 (compiled)`."""
    plan, before = outcome.plan, outcome.before
    assert before is not None
    made = "estimated" if plan.estimate_only else "compiled"
    if before.verdict != "fits":
        fits = {"fits": "fits", "too_close": "is too close to call", "does_not_fit": "does not fit either"}[
            plan.verdict
        ]
        step = f", {number(plan.step.value)} s per step" if plan.step else ""
        return f"{fits}, {spare(plan)}{step} ({made})"
    if plan.step is None or before.step is None:
        return f"leaves {spare(plan)} ({made})"
    after, now = number(plan.step.value), number(before.step.value)
    if after == now:
        return f"makes a step {1 - plan.step.value / before.step.value:.0%} shorter ({made})"
    return f"makes a step {after} s instead of {now} ({made})"


def _where(plan: Plan) -> str:
    """If the run fits, the phase that takes most of a step and why; if not, the largest arrays of the peak phase."""
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
