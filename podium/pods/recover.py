"""Keeps a run alive when machines are preempted, a worker fails, or no worker answers.

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
"""Most attempts to delete the slice in the end, while the network or the API fails."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits on attempts and times."""

    restarts: int = 3
    """Most failures of a job on the same machines without a step in between."""
    replacements: int = 20
    """Most replacements of the machines without a step in between."""
    unusable: int = 5
    """Most starts in a row at which machines do not answer or lack something."""
    down: bool = True
    """Whether the slice is deleted at the end of the run, successful or not."""
    poll_s: float = 10.0
    silence_s: float = 300.0
    """Seconds after which silent workers count as lost, if the job has failed on others."""
    ends_s: float = 20.0
    """Seconds that the other workers may take to end after a failure: the cause is known when all have ended."""
    settle_s: float = 90.0
    """Seconds for which a node may still be listed as ready after its preemption, or a new one not at all."""
    observation_s: float = 60.0
    """Most seconds that count as waited between two observations: a laptop that slept observed nothing."""
    pauses_s: tuple[float, ...] = (10.0, 30.0, 60.0)
    """Before the first, second and further restarts."""
    no_capacity_s: tuple[float, ...] = (60.0, 120.0, 300.0, 600.0)
    """Before the first, second and further attempts to rent what no zone gave."""
    reminder_s: float = 3600.0
    """Seconds between reminders that machines do not answer, and cost money."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Attempts since the last step."""

    step: int = 0
    restarts: int = 0
    replacements: int = 0
    starts: int = 0
    """Failed starts in a row, for example in the setup."""
    unusable: int = 0
    refused: int = 0
    """Attempts in a row at which all zones refused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """An action and its reason; `status` is the exit status of an end."""

    act: Act
    why: str
    status: int = 0


def decide(seen: Observation, counts: Counts, policy: Policy) -> Decision:
    """Choose the action for an observation."""
    if seen.replacing:
        return Decision(act="replace", why="another slice is being rented")
    if seen.asked_to_stop and not (seen.job and (seen.job.running or seen.job.unheard)):
        if seen.job is not None and seen.job.outcome == "done":
            return Decision(act="end", why="done")
        return Decision(act="end", why="stopped on request; it can be continued", status=STOPPED)
    if seen.asked_to_stop and seen.job and seen.job.running:
        return Decision(act="stop", why="stopping on request")
    if seen.slice is None:
        if seen.waited_s < policy.settle_s:
            return Decision(act="wait", why="the slice is not listed")
        return Decision(act="end", why="the slice was deleted, but not by this command", status=1)
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
    """Choose the action for a job on machines that are listed as ready."""
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
    """Choose the action for machines that are ready but do not answer; they are kept for the length of a lease."""
    assert seen.slice is not None
    lease_s = seen.slice.lease_s or seconds(DEFAULT_LEASE, "--lease")
    if policy.down and seen.waited_s >= lease_s:
        why = f"no worker has answered for {lease_s / 3600:.3g} h, the length of its lease"
        if seen.asked_to_stop:
            return Decision(act="end", why=f"{why}, and the run was asked to stop", status=STOPPED)
        return _replace(why, counts, policy)
    why = (
        "no worker answers, but the machines are ready: they are kept, since the run may continue; is ssh blocked here?"
    )
    if hours := int(seen.waited_s // policy.reminder_s):
        silent = f"no worker has answered for {hours * policy.reminder_s / 3600:.3g} h"
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
    before = None
    waited_s = 0.0
    observed = clock.monotonic()
    said = ""
    while True:
        seen = _observe(session, clock, say)
        job = seen.job
        state = (seen.slice and seen.slice.detail, job and (job.outcome, job.silent, job.name))
        now = clock.monotonic()
        waited_s = waited_s + min(now - observed, policy.observation_s) if state == before else 0.0
        before = state
        observed = now
        if job is not None:
            session.show(job)
            if job.step > counts.step:
                counts = Counts(step=job.step)
        decision = decide(dataclasses.replace(seen, waited_s=waited_s), counts, policy)
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
            say(f"{error}, but not by this command")
            return 1
        before = None


def _act(
    decision: Decision, session: Session, counts: Counts, policy: Policy, clock: Clock, say: Callable[[str], None]
) -> Counts:
    """Carry out a decision and return the new counts. A failure is printed; the next observation shows it again."""
    try:
        if decision.act == "stop":
            session.stop()
            return counts
        if decision.act == "replace":
            session.replace()
            return dataclasses.replace(counts, replacements=counts.replacements + 1, restarts=0, unusable=0, refused=0)
        return _start(decision, session, counts, policy, clock)
    except (RemoteError, SliceError, GcloudError) as error:
        if isinstance(error, DeletedError) or (isinstance(error, GcloudError) and error.lasting):
            raise
        say(str(error))
        counts, pause_s = _after_error(error, decision, session, counts, policy)
        clock.sleep(pause_s)
        return counts


def _start(decision: Decision, session: Session, counts: Counts, policy: Policy, clock: Clock) -> Counts:
    """Start the run, or stop it and start it again after a pause."""
    restarts = counts.restarts
    if decision.act == "restart":
        session.stop()
        clock.sleep(_pause(policy.pauses_s, restarts))
        restarts += 1
    session.start()
    return dataclasses.replace(counts, unusable=0, starts=0, restarts=restarts)


def _after_error(
    error: RemoteError | SliceError | GcloudError, decision: Decision, session: Session, counts: Counts, policy: Policy
) -> tuple[Counts, float]:
    """The new counts, and the seconds to wait before the next observation."""
    match error:
        case UnusableError():  # nothing was started, so the run has not failed again
            if error.answered or not session.may_run:
                counts = dataclasses.replace(counts, unusable=counts.unusable + 1)
            return counts, _pause(policy.pauses_s, counts.unusable)
        case RemoteError():
            restarts = counts.restarts + (decision.act == "restart")
            return dataclasses.replace(counts, starts=counts.starts + 1, restarts=restarts), policy.poll_s
        case SliceError():
            pause_s = _pause(policy.no_capacity_s, counts.refused)
            return dataclasses.replace(counts, refused=counts.refused + 1), pause_s
    return counts, policy.poll_s


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
    """Delete the slice if that is wanted, or stop workers that still run; returns the exit status."""
    for attempt in range(ENDINGS):
        try:
            if policy.down:
                if session.give_back():
                    say(f"deleted {session.slice.name}; podium pod run --keep leaves it rented")
            elif job is not None and job.outcome in ("failed", "guard"):
                session.stop()  # some workers may not have noticed the failure
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
    """Observe as soon as the network allows it: the run does not need this machine."""
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
