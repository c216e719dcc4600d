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
from podium.pods.remote import RemoteError, UnusableError
from podium.pods.rental import DEFAULT_LEASE, seconds
from podium.pods.session import Observation, Session
from podium.pods.slices import NODE_S, DeletedError, SliceError
from podium.pods.world import Clock

Act = Literal["wait", "start", "restart", "replace", "stop", "end"]
WRONG_SETTINGS = 2
RUNNING = "running"
ENDINGS = 1000
"""How often the slice is tried to be deleted in the end, while the network or the API fails."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """How often and how long."""

    restarts: int = 3
    """How often a job may fail on the same machines without a step in between."""
    replacements: int = 20
    """How often machines may be replaced without a step in between."""
    unusable: int = 5
    """How often in a row machines may not answer, or lack something, when a job is to be started."""
    down: bool = True
    """Whether the slice is deleted when the run has ended, however it has."""
    poll_s: float = 10.0
    silence_s: float = 300.0
    """After which some workers that do not answer are given up, where the job has failed on others."""
    ends_s: float = 20.0
    """How long after a failure the other workers may take to end: the cause is known when all have ended."""
    settle_s: float = 90.0
    """How long after SIGTERM a node that is being preempted may still be listed as ready, or a new one not at all."""
    look_s: float = 60.0
    """What one look counts for, at the most: a laptop that slept has not seen anything meanwhile."""
    pauses_s: tuple[float, ...] = (10.0, 30.0, 60.0)
    """Before the first, second and further restarts."""
    no_capacity_s: tuple[float, ...] = (60.0, 120.0, 300.0, 600.0)
    """Before the first, second and further attempts to rent what no zone gave."""
    told_s: float = 3600.0
    """Between two words on machines that are listed as ready and do not answer: they cost money."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What has been tried since the last step."""

    step: int = 0
    restarts: int = 0
    replacements: int = 0
    starts: int = 0
    """How often in a row a start has failed, as in its setup."""
    unusable: int = 0
    refused: int = 0
    """How often in a row no zone gave a slice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do and why; `status` is the exit status of an end."""

    act: Act
    why: str
    status: int = 0


def decide(seen: Observation, counts: Counts, policy: Policy) -> Decision:
    """What to do about an observation."""
    if seen.replacing:
        return Decision(act="replace", why="another slice is being rented")
    if seen.asked_to_stop and not (seen.job and (seen.job.running or seen.job.unheard)):
        if seen.job is not None and seen.job.outcome == "done":
            return Decision(act="end", why="done")
        return Decision(act="end", why="stopped on request; it can be continued", status=STOPPED)
    if seen.asked_to_stop and seen.job and seen.job.running:
        return Decision(act="stop", why="it is to stop on request")
    if seen.slice is None:
        if seen.waited_s < policy.settle_s:
            return Decision(act="wait", why="the slice is not listed")
        return Decision(act="end", why="the slice was deleted, by somebody else than this command", status=1)
    if not seen.slice.alive:
        return _replace(f"the slice is lost ({seen.slice.detail})", counts, policy)
    if seen.slice.state != "ready" or seen.job is None:
        if seen.slice.state == "creating" and seen.waited_s > NODE_S:
            return _replace(
                f"the slice has been {seen.slice.detail} for {seen.waited_s / 60:.0f} minutes", counts, policy
            )
        return Decision(act="wait", why=f"the slice is {seen.slice.detail}")
    return _about_job(seen, seen.job, counts, policy)


def _about_job(seen: Observation, job: JobStatus, counts: Counts, policy: Policy) -> Decision:
    """What to do about a job on machines that are listed as ready."""
    if job.unheard:
        return _about_silence(seen, counts, policy)
    match job.outcome:
        case "none":
            return _restart("no job has been started", counts, policy, 1, act="start")
        case "running" if job.running and not job.silent:
            return Decision(act="wait", why=RUNNING)
        case "running" if job.running:
            return Decision(act="wait", why=f"{_silence(job)}; no worker has failed yet")
        case "done":
            return Decision(act="end", why="done")
        case "stopped" if seen.waited_s < policy.settle_s:
            return Decision(act="wait", why="stopped by SIGTERM; its machines may be about to be preempted")
        case "stopped":
            return _restart("stopped by SIGTERM, and the machines still exist", counts, policy, STOPPED)
        case "guard" if not job.missing:
            why = first_failure(job.workers) or "guard"
            return Decision(act="end", why=f"{why}; not restarted: it would fail again", status=GUARD)
    return _after_failure(seen, job, counts, policy)


def _about_silence(seen: Observation, counts: Counts, policy: Policy) -> Decision:
    """What to do about machines that are ready while none answers: they are kept for as long as a lease, and told."""
    assert seen.slice is not None
    lease_s = seen.slice.lease_s or seconds(DEFAULT_LEASE, "--lease")
    if policy.down and seen.waited_s >= lease_s:
        why = f"no worker has answered for {lease_s / 3600:.3g} h, the length of its lease"
        if seen.asked_to_stop:
            return Decision(act="end", why=f"{why}, and it was to stop", status=STOPPED)
        return _replace(why, counts, policy)
    why = "no worker answers, and the machines are ready: they are kept, as the run may go on; is ssh blocked here?"
    if hours := int(seen.waited_s // policy.told_s):
        silent = f"no worker has answered for {hours * policy.told_s / 3600:.3g} h"
        then = f"after {lease_s / 3600:.3g} h the slice is replaced" if policy.down else "nothing deletes them"
        why = f"{silent}, and the machines are ready and cost money; {then}; podium pod down {seen.slice.name}"
    return Decision(act="wait", why=why)


def _after_failure(seen: Observation, job: JobStatus, counts: Counts, policy: Policy) -> Decision:
    why = first_failure(job.workers) or (_silence(job) if job.silent else "the job runs on no worker")
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
    if counts.unusable >= policy.unusable:
        return _replace(f"{why}, and the machines were unusable {counts.unusable} times", counts, policy)
    tried = counts.starts if act == "start" else counts.restarts
    if tried < policy.restarts:
        return Decision(act=act, why=why)
    if policy.restarts:
        why = f"{why}; {act}ed {tried} times without a new step"
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
    before, waited, looked, said = None, 0.0, clock.monotonic(), ""
    while True:
        seen = _observe(session, clock, say)
        job = seen.job
        state = (seen.slice and seen.slice.detail, job and (job.outcome, job.silent, job.name))
        now = clock.monotonic()
        waited = waited + min(now - looked, policy.look_s) if state == before else 0.0
        before, looked = state, now
        if job is not None:
            session.show(job)
            if job.step > counts.step:
                counts = Counts(step=job.step)
        decision = decide(dataclasses.replace(seen, waited_s=waited), counts, policy)
        if decision.why != said and decision.why != RUNNING:
            say(decision.why if decision.act in ("wait", "end") else f"{decision.act}: {decision.why}")
        said = decision.why
        if decision.act == "wait":
            clock.sleep(policy.poll_s)
            continue
        try:
            if decision.act == "end":
                return _end(decision, session, job, policy, clock, say)
            counts = _act(decision, session, counts, policy, clock, say)
        except DeletedError as error:
            say(f"{error}, by somebody else than this command")
            return 1
        before = None


def _act(
    decision: Decision, session: Session, counts: Counts, policy: Policy, clock: Clock, say: Callable[[str], None]
) -> Counts:
    """Carry out a decision and return the new counts. A failure is printed; the next observation shows it again."""
    restarted = int(decision.act == "restart")
    try:
        if decision.act == "stop":
            session.stop()
            return counts
        if decision.act == "replace":
            session.replace()
            return dataclasses.replace(counts, replacements=counts.replacements + 1, restarts=0, unusable=0, refused=0)
        if decision.act == "restart":
            session.stop()
            clock.sleep(_pause(policy.pauses_s, counts.restarts))
        session.start()
        return dataclasses.replace(counts, unusable=0, starts=0, restarts=counts.restarts + restarted)
    except DeletedError:
        raise
    except UnusableError as error:  # nothing was started, so nothing has failed again
        say(str(error))
        if error.answered or not session.may_run:
            counts = dataclasses.replace(counts, unusable=counts.unusable + 1)
        clock.sleep(_pause(policy.pauses_s, counts.unusable))
    except RemoteError as error:
        say(str(error))
        counts = dataclasses.replace(counts, starts=counts.starts + 1, restarts=counts.restarts + restarted)
        clock.sleep(policy.poll_s)
    except SliceError as error:
        say(str(error))
        clock.sleep(_pause(policy.no_capacity_s, counts.refused))
        counts = dataclasses.replace(counts, refused=counts.refused + 1)
    except GcloudError as error:
        if error.lasting:
            raise
        say(str(error))
        clock.sleep(policy.poll_s)
    return counts


def _pause(pauses_s: tuple[float, ...], times: int) -> float:
    return pauses_s[min(times, len(pauses_s) - 1)]


def _end(
    decision: Decision,
    session: Session,
    job: JobStatus | None,
    policy: Policy,
    clock: Clock,
    say: Callable[[str], None],
) -> int:
    """Leave nothing that runs or costs money, where that is wanted; returns the exit status."""
    for attempt in range(ENDINGS):
        try:
            if policy.down:
                session.give_back()
                say(f"deleted {session.slice.name}; podium pod run --keep leaves it rented")
            elif job is not None and job.outcome in ("failed", "guard"):
                session.stop()  # workers that did not notice the failure
            return decision.status
        except (RemoteError, SliceError, GcloudError) as error:
            say(str(error))
            if not policy.down or (isinstance(error, GcloudError) and error.lasting):
                break
        clock.sleep(_pause(policy.no_capacity_s, attempt))
    if policy.down:
        say(f"{session.slice.name} may still be rented: podium pod down {session.slice.name}")
    return decision.status


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
