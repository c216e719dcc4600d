"""Keeping a run alive: what is done when machines are taken, a worker fails, or nobody answers.

`decide` is a table without time or network; `keep_alive` looks, decides and acts until the run has ended. Everything
that it must know is asked for each time, so that it may be ended and begun again at any moment, on any laptop.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, Protocol

from podium.job.records import ABORTED, GUARD, STOPPED, first_failure
from podium.pods.gcloud import GcloudError
from podium.pods.inventory import Slice
from podium.pods.launch import View
from podium.pods.remote import RemoteError
from podium.pods.slices import Clock, SliceError

Act = Literal["wait", "start", "restart", "replace", "end"]
WRONG_SETTINGS = 2
RUNNING = "running"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """How often and how long."""

    restarts: int = 3
    """Times that a job may fail on the same machines without a step done in between."""
    replacements: int = 20
    """Times that machines may be replaced without a step done in between."""
    poll_s: float = 10.0
    silence_s: float = 300.0
    """After which workers that do not answer are given up, though their node is said to be ready."""
    ends_s: float = 20.0
    """How long after a failure the other workers may take to end: who failed first is known when all have."""
    settle_s: float = 90.0
    """How long after SIGTERM a node may still be said to be ready that is being taken away."""
    pauses_s: tuple[float, ...] = (10.0, 30.0, 60.0)
    """Before the first, second and further restarts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """One look at the slice and its workers."""

    slice: Slice | None
    view: View | None
    """None: the machines are not there to be asked."""
    waited_s: float = 0.0
    """Since the same was seen first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What has been tried since the last progress."""

    step: int = 0
    restarts: int = 0
    replacements: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, why, and with which exit status if it is the end."""

    act: Act
    why: str
    status: int = 0


def decide(seen: Seen, counts: Counts, policy: Policy) -> Decision:
    """What to do about what was seen."""
    if seen.slice is None or not seen.slice.alive:
        told = seen.slice.told if seen.slice else "gone"
        return _replace(f"the slice is lost ({told})", counts, policy)
    if seen.slice.state != "ready" or seen.view is None:
        return Decision(act="wait", why=f"the slice is {seen.slice.told}")
    view = seen.view
    match view.outcome:
        case "none":
            return _restart("no job has been started", counts, policy, 1, act="start")
        case "running" if not view.silent:
            return Decision(act="wait", why=RUNNING)
        case "running" if seen.waited_s < policy.silence_s:
            return Decision(act="wait", why=f"{_silence(view)}; nobody has failed yet")
        case "done":
            return Decision(act="end", why="done")
        case "stopped" if view.asked_to_stop == view.job:
            return Decision(act="end", why="stopped as asked; it can be continued", status=STOPPED)
        case "stopped" if seen.waited_s < policy.settle_s:
            return Decision(act="wait", why="stopped by SIGTERM; its machines may be about to go")
        case "stopped":
            return _restart("stopped by SIGTERM, and the machines are still there", counts, policy, STOPPED)
        case "guard":
            why = first_failure(view.statuses) or "guard"
            return Decision(act="end", why=f"{why}; never tried again as it is", status=GUARD)
    return _after_failure(seen, view, counts, policy)


def _after_failure(seen: Seen, view: View, counts: Counts, policy: Policy) -> Decision:
    why = first_failure(view.statuses) or _silence(view)
    if view.silent:
        if seen.waited_s < policy.silence_s:
            return Decision(act="wait", why=why)
        return _replace(f"{why}, for {seen.waited_s:.0f} s", counts, policy)
    ends = [status["exit"] for status in view.statuses if status and status["exit"] is not None]
    if len(ends) < len(view.statuses) and seen.waited_s < policy.ends_s:
        return Decision(act="wait", why=why)
    if WRONG_SETTINGS in ends:
        return Decision(act="end", why=why, status=WRONG_SETTINGS)
    causes = [end for end in ends if end not in (0, ABORTED)]
    return _restart(why, counts, policy, causes[0] if causes else 1)


def _silence(view: View) -> str:
    workers = ", ".join(map(str, view.silent))
    return f"worker {workers} does not answer" if len(view.silent) == 1 else f"workers {workers} do not answer"


def _restart(why: str, counts: Counts, policy: Policy, status: int, act: Act = "restart") -> Decision:
    if counts.restarts < policy.restarts:
        return Decision(act=act, why=why)
    if policy.restarts:
        why = f"{why}; {counts.restarts} more starts brought no further step"
    return Decision(act="end", why=why, status=status)


def _replace(why: str, counts: Counts, policy: Policy) -> Decision:
    if counts.replacements < policy.replacements:
        return Decision(act="replace", why=why)
    after = f"replaced {counts.replacements} times without a further step" if policy.replacements else _KEEP_ALIVE
    return Decision(act="end", why=f"{why}; {after}", status=1)


_KEEP_ALIVE = "podium pod run --keep-alive rents another and goes on from the last checkpoint"


class Verbs(Protocol):
    """What `keep_alive` does to the world."""

    def look(self) -> Seen:
        """The slice and its workers, now."""
        ...

    def start(self) -> None:
        """Start the run where it is not running."""
        ...

    def stop(self) -> None:
        """End what is left of its job on all workers that answer."""
        ...

    def replace(self) -> None:
        """Delete the slice and rent another."""
        ...

    def show(self, view: View) -> None:
        """Tell the user how far the run is."""
        ...


def keep_alive(verbs: Verbs, policy: Policy, *, clock: Clock, say: Callable[[str], None]) -> int:
    """Look and act until the run has ended; its exit status."""
    counts = Counts()
    before, since, told = None, clock.time(), ""
    while True:
        seen = _patiently(verbs.look, clock, say)
        state = _state(seen)
        if state != before:
            before, since = state, clock.time()
        seen = dataclasses.replace(seen, waited_s=clock.time() - since)
        if seen.view is not None:
            verbs.show(seen.view)
            if seen.view.step > counts.step:
                counts = Counts(step=seen.view.step)
        decision = decide(seen, counts, policy)
        if decision.why != told and decision.why != RUNNING:
            say(decision.why if decision.act in ("wait", "end") else f"{decision.act}: {decision.why}")
        told = decision.why
        if decision.act == "end":
            if seen.view is not None and seen.view.outcome in ("failed", "guard"):
                _stop_the_others(verbs, say)
            return decision.status
        if decision.act == "wait":
            clock.sleep(policy.poll_s)
        else:
            counts = _act(decision, verbs, counts, policy, clock, say)
            before = None


def _act(
    decision: Decision, verbs: Verbs, counts: Counts, policy: Policy, clock: Clock, say: Callable[[str], None]
) -> Counts:
    """Do it; what has been tried now. A failure to do it is told, and seen again at the next look."""
    try:
        if decision.act == "replace":
            counts = dataclasses.replace(counts, replacements=counts.replacements + 1, restarts=0)
            verbs.replace()
        elif decision.act == "restart":
            pause = policy.pauses_s[min(counts.restarts, len(policy.pauses_s) - 1)]
            counts = dataclasses.replace(counts, restarts=counts.restarts + 1)
            verbs.stop()
            clock.sleep(pause)
        verbs.start()
    except (RemoteError, SliceError, GcloudError) as error:
        if isinstance(error, GcloudError) and not error.transient and error.kind != "unusable":
            raise
        say(str(error))
        clock.sleep(policy.poll_s)
        if decision.act == "start":
            counts = dataclasses.replace(counts, restarts=counts.restarts + 1)
    return counts


def _stop_the_others(verbs: Verbs, say: Callable[[str], None]) -> None:
    """Leave no process behind on workers that did not notice that another has failed."""
    try:
        verbs.stop()
    except (RemoteError, SliceError, GcloudError) as error:
        say(str(error))


def _patiently(look: Callable[[], Seen], clock: Clock, say: Callable[[str], None]) -> Seen:
    """A look, as soon as there is a network to look through: the run does not need the laptop."""
    told = False
    while True:
        try:
            return look()
        except GcloudError as error:
            if not error.transient:
                raise
            if not told:
                say(f"{error.text}; the run goes on without this machine, trying again")
                told = True
        clock.sleep(30.0)


def _state(seen: Seen) -> tuple[object, ...]:
    """What must stay the same for waiting to count."""
    view = seen.view
    return (seen.slice and seen.slice.told, view and (view.outcome, tuple(view.silent), view.job))
