"""Keeping a run alive: what to do when machines are preempted, a worker fails, or nobody answers.

`decide` is a table without time or network; `keep_alive` observes, decides and acts until the run has ended. It asks
for everything each time, so it may be stopped and started again at any moment, on any laptop.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from podium.job.records import ABORTED, GUARD, STOPPED, first_failure, listed
from podium.pods.gcloud import GcloudError
from podium.pods.launch import JobStatus
from podium.pods.remote import RemoteError
from podium.pods.session import Observation, Session
from podium.pods.slices import Clock, SliceError

Act = Literal["wait", "start", "restart", "replace", "end"]
WRONG_SETTINGS = 2
RUNNING = "running"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """How often and how long."""

    restarts: int = 3
    """How often a job may fail on the same machines without a step in between."""
    replacements: int = 20
    """How often machines may be replaced without a step in between."""
    poll_s: float = 10.0
    silence_s: float = 300.0
    """After which workers that do not answer are given up, although their node is listed as ready."""
    ends_s: float = 20.0
    """How long after a failure the other workers may take to end: the cause is known when all have ended."""
    settle_s: float = 90.0
    """How long after SIGTERM a node that is being preempted may still be listed as ready."""
    pauses_s: tuple[float, ...] = (10.0, 30.0, 60.0)
    """Before the first, second and further restarts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What has been tried since the last step."""

    step: int = 0
    restarts: int = 0
    replacements: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do and why; `status` is the exit status of an end."""

    act: Act
    why: str
    status: int = 0


def decide(seen: Observation, counts: Counts, policy: Policy) -> Decision:
    """What to do about an observation."""
    if seen.slice is None or not seen.slice.alive:
        detail = seen.slice.detail if seen.slice else "gone"
        return _replace(f"the slice is lost ({detail})", counts, policy)
    if seen.slice.state != "ready" or seen.job is None:
        return Decision(act="wait", why=f"the slice is {seen.slice.detail}")
    job = seen.job
    match job.outcome:
        case "none":
            return _restart("no job has been started", counts, policy, 1, act="start")
        case "running" if not job.silent:
            return Decision(act="wait", why=RUNNING)
        case "running" if seen.waited_s < policy.silence_s:
            return Decision(act="wait", why=f"{_silence(job)}; no worker has failed yet")
        case "done":
            return Decision(act="end", why="done")
        case "stopped" if job.asked_to_stop == job.name:
            return Decision(act="end", why="stopped on request; it can be continued", status=STOPPED)
        case "stopped" if seen.waited_s < policy.settle_s:
            return Decision(act="wait", why="stopped by SIGTERM; its machines may be about to be preempted")
        case "stopped":
            return _restart("stopped by SIGTERM, and the machines still exist", counts, policy, STOPPED)
        case "guard":
            why = first_failure(job.workers) or "guard"
            return Decision(act="end", why=f"{why}; not restarted: it would fail again", status=GUARD)
    return _after_failure(seen, job, counts, policy)


def _after_failure(seen: Observation, job: JobStatus, counts: Counts, policy: Policy) -> Decision:
    why = first_failure(job.workers) or _silence(job)
    if job.silent:
        if seen.waited_s < policy.silence_s:
            return Decision(act="wait", why=why)
        return _replace(f"{why}, for {seen.waited_s:.0f} s", counts, policy)
    ends = [status["exit"] for status in job.workers if status and status["exit"] is not None]
    if len(ends) < len(job.workers) and seen.waited_s < policy.ends_s:
        return Decision(act="wait", why=why)
    if WRONG_SETTINGS in ends:
        return Decision(act="end", why=why, status=WRONG_SETTINGS)
    causes = [end for end in ends if end not in (0, ABORTED)]
    return _restart(why, counts, policy, causes[0] if causes else 1)


def _silence(job: JobStatus) -> str:
    return f"{listed(job.silent)} {'does' if len(job.silent) == 1 else 'do'} not answer"


def _restart(why: str, counts: Counts, policy: Policy, status: int, act: Act = "restart") -> Decision:
    if counts.restarts < policy.restarts:
        return Decision(act=act, why=why)
    if policy.restarts:
        why = f"{why}; restarted {counts.restarts} times without a new step"
    return Decision(act="end", why=why, status=status)


def _replace(why: str, counts: Counts, policy: Policy) -> Decision:
    if counts.replacements < policy.replacements:
        return Decision(act="replace", why=why)
    after = "podium pod run --keep-alive rents another and continues from the last checkpoint"
    if policy.replacements:
        after = f"replaced {counts.replacements} times without a new step"
    return Decision(act="end", why=f"{why}; {after}", status=1)


def keep_alive(session: Session, policy: Policy, *, clock: Clock, say: Callable[[str], None]) -> int:
    """Observe and act until the run has ended; returns its exit status."""
    counts = Counts()
    before, since, said = None, clock.time(), ""
    while True:
        seen = _observe(session, clock, say)
        job = seen.job
        state = (seen.slice and seen.slice.detail, job and (job.outcome, job.silent, job.name))
        if state != before:  # the waiting time counts while this is the same
            before, since = state, clock.time()
        seen = dataclasses.replace(seen, waited_s=clock.time() - since)
        if job is not None:
            session.show(job)
            if job.step > counts.step:
                counts = Counts(step=job.step)
        decision = decide(seen, counts, policy)
        if decision.why != said and decision.why != RUNNING:
            say(decision.why if decision.act in ("wait", "end") else f"{decision.act}: {decision.why}")
        said = decision.why
        if decision.act == "end":
            if job is not None and job.outcome in ("failed", "guard"):
                try:  # workers that did not notice the failure
                    session.stop()
                except (RemoteError, SliceError, GcloudError) as error:
                    say(str(error))
            return decision.status
        if decision.act == "wait":
            clock.sleep(policy.poll_s)
        else:
            counts = _act(decision, session, counts, policy, clock, say)
            before = None


def _act(
    decision: Decision, session: Session, counts: Counts, policy: Policy, clock: Clock, say: Callable[[str], None]
) -> Counts:
    """Carry out a decision and return the new counts. A failure is printed; the next observation shows it again."""
    try:
        if decision.act == "replace":
            counts = dataclasses.replace(counts, replacements=counts.replacements + 1, restarts=0)
            session.replace()
        elif decision.act == "restart":
            pause = policy.pauses_s[min(counts.restarts, len(policy.pauses_s) - 1)]
            counts = dataclasses.replace(counts, restarts=counts.restarts + 1)
            session.stop()
            clock.sleep(pause)
        session.start()
    except (RemoteError, SliceError, GcloudError) as error:
        if isinstance(error, GcloudError) and error.lasting:
            raise
        say(str(error))
        clock.sleep(policy.poll_s)
        if decision.act == "start":
            counts = dataclasses.replace(counts, restarts=counts.restarts + 1)
    return counts


def _observe(session: Session, clock: Clock, say: Callable[[str], None]) -> Observation:
    """An observation, as soon as the network allows one: the run does not need the laptop."""
    said = False
    while True:
        try:
            return session.observe()
        except GcloudError as error:
            if not error.transient:
                raise
            if not said:
                say(f"{error.text}; the run continues without this machine; retrying")
            said = True
        clock.sleep(30.0)
