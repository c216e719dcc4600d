"""Keeps a run alive when machines are preempted, a worker fails, or no worker answers.

`decide` is a pure function, without time or network; `Keeper` observes, decides and acts until the run has ended.
Neither stores any state, so the command can be stopped and restarted at any time, on any laptop.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from podium.job.job_records import ABORTED, GUARD, STOPPED, first_failure, listed
from podium.patience import Clock, Patience, fault_in
from podium.pods.gcloud import GcloudError
from podium.pods.launch import JobStatus, SetupError
from podium.pods.remote import RemoteError, UnusableError
from podium.pods.rental import DEFAULT_LEASE, seconds
from podium.pods.session import Observation, Session
from podium.pods.slices import NODE_S, DeletedError, PendingError, RefusedError, SliceError, TakenError

Act = Literal["wait", "rent", "start", "restart", "replace", "stop", "end"]
WRONG_SETTINGS = 2
RUNNING = "running"
ENDINGS = 1000
"""Maximum attempts to delete the slice at the end, while lists still show it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits on attempts and times."""

    restarts: int = 3
    """Maximum failures of a job on the same machines without a new step."""
    replacements: int = 20
    """Maximum replacements of the machines without a new step."""
    unusable: int = 5
    """Maximum consecutive starts on machines that do not respond or lack something."""
    down: bool | None = None
    """Whether the slice is deleted at the end of the run, successful or not; None: delete it unless `podium pod up`
    rented it."""
    poll_s: float = 10.0
    silence_s: float = 300.0
    """Seconds after which silent workers count as lost, if the job has failed on others."""
    ends_s: float = 20.0
    """Seconds that the other workers may take to end after a failure; the cause is known once all have ended."""
    settle_s: float = 90.0
    """Seconds for which lists may still show a preempted node as ready, or not yet show a new one."""
    observation_s: float = 60.0
    """Maximum seconds that count as waiting time between two observations, because a sleeping laptop observes
    nothing."""
    pauses_s: tuple[float, ...] = (10.0, 30.0, 60.0)
    """Seconds before the first, second, and further restarts."""
    no_capacity_s: tuple[float, ...] = (60.0, 120.0, 300.0, 600.0)
    """Seconds before the first, second, and further attempts to rent after all zones have refused."""
    reminder_s: float = 3600.0
    """Seconds between reminders that machines do not answer and cost money."""


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
    """Consecutive attempts in which all zones refused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """An action and its reason; `status` is the exit status if the action is `end`."""

    act: Act
    why: str
    status: int = 0


def decide(seen: Observation, counts: Counts, policy: Policy) -> Decision:
    """Choose the action for an observation. Pure: no time, no network."""
    if seen.over is not None and (other := _about_end(seen, seen.over)):
        return other
    if seen.slice is None:
        return _without_slice(seen, policy)
    if seen.slice.state == "deleting":
        return Decision(act="wait", why="the slice is being deleted, but not by this command")
    if seen.slice.doomed:
        return Decision(act="replace", why="another command has abandoned the slice")
    if not seen.slice.alive:
        return _replace(f"the slice is lost ({seen.slice.detail})", counts, policy)
    if seen.slice.state != "ready" or seen.job is None:
        if seen.slice.state == "creating" and seen.waited_s > NODE_S:
            return _replace(
                f"the slice has been {seen.slice.detail} for {seen.waited_s / 60:.0f} minutes", counts, policy
            )
        return Decision(act="wait", why=f"the slice is {seen.slice.detail}")
    if seen.stopped_before and not seen.job.unheard:
        why = "the run was stopped there before this command"
        return Decision(act="stop" if seen.job.running else "replace", why=why)
    return _about_job(seen, seen.job, counts, policy)


def _without_slice(seen: Observation, policy: Policy) -> Decision:
    """Choose the action if the lists show no slice."""
    if seen.renting:
        return Decision(act="rent", why="machines are needed")
    if seen.waited_s < policy.settle_s:
        return Decision(act="wait", why="the slice is not listed")
    why = "the slice was deleted, but not by this command"
    if seen.wanted:
        return Decision(act="rent", why=f"{why}, and the run is not over")
    return Decision(act="end", why=why, status=1)


def _about_end(seen: Observation, status: int) -> Decision | None:
    """Choose the action if another command has stopped or ended the run; None if neither happened."""
    if seen.job and seen.job.running:
        return Decision(act="stop", why="stopping on request")
    if seen.job and seen.job.unheard:
        return None
    if seen.job and seen.job.outcome == "done":
        return Decision(act="end", why="done")
    why = "stopped on request; it can be continued" if status == STOPPED else "another command has ended the run"
    return Decision(act="end", why=why, status=status)


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
    """Choose the action for machines that are ready but do not respond; they are kept for the length of a lease."""
    assert seen.slice is not None
    idle_s = seen.slice.idle_s or seconds(DEFAULT_LEASE, "--lease")
    if policy.down is not False and seen.waited_s >= idle_s:
        why = f"no worker has answered for {idle_s / 3600:.3g} h, the length of its lease"
        if seen.over is not None:
            return Decision(act="end", why=f"{why}, and the run was asked to stop", status=seen.over)
        return _replace(why, counts, policy)
    why = (
        "no worker answers, but the machines are ready; they are kept, because the run may continue; is ssh blocked "
        "here?"
    )
    if hours := int(seen.waited_s // policy.reminder_s):
        silent = f"no worker has answered for {hours * policy.reminder_s / 3600:.3g} h"
        then = (
            f"after {idle_s / 3600:.3g} h the slice is replaced" if policy.down is not False else "nothing deletes them"
        )
        why = f"{silent}, although the machines are ready and cost money; {then}; podium pod down {seen.slice.name}"
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


class Keeper:
    """Observes a run and acts on it."""

    def __init__(self, session: Session, policy: Policy, *, clock: Clock, say: Callable[[str], None]) -> None:
        self._session = session
        self._policy = policy
        self._clock = clock
        self._say = say
        self._counts = Counts()
        google = "Google (the run continues without this machine)"
        self._observing = Patience(google, clock=clock, say=say)
        self._acting = Patience(google, clock=clock, say=say)
        self._setting_up = Patience("what the setup needs", clock=clock, say=say)

    def keep(self) -> int:
        """Observe and act until the run has ended; returns its exit status.

        Raises:
            GcloudError: gcloud is unusable on this machine, or has failed for half an hour; the run may still continue.
        """
        before = None
        waited_s = 0.0
        observed = self._clock.monotonic()
        said = ""
        while True:
            seen = self._observe()
            job = seen.job
            state = (seen.slice and seen.slice.detail, job and (job.outcome, job.silent, job.name))
            now = self._clock.monotonic()
            waited_s = waited_s + min(now - observed, self._policy.observation_s) if state == before else 0.0
            before = state
            observed = now
            if job is not None:
                self._session.show(job)
                if job.step > self._counts.step:
                    self._counts = Counts(step=job.step)
            decision = decide(dataclasses.replace(seen, waited_s=waited_s), self._counts, self._policy)
            if decision.why != said and decision.why != RUNNING:
                self._say(decision.why if decision.act in ("wait", "end") else f"{decision.act}: {decision.why}")
            said = decision.why
            if decision.act == "wait":
                self._clock.sleep(self._policy.poll_s)
                continue
            if decision.act == "end":
                return self._end(decision, seen)
            if (status := self._act(decision, seen)) is not None:
                return status
            before = None

    def _observe(self) -> Observation:
        """Observe the run, waiting until gcloud works: the run does not need this machine."""
        while True:
            try:
                seen = self._session.observe()
            except GcloudError as error:
                error.wait_out(self._observing, for_ever=True)
            else:
                self._observing.reset()
                return seen

    def _act(self, decision: Decision, seen: Observation) -> int | None:
        """Execute a decision; returns an exit status if nothing is left to follow.

        A failure is printed; the next observation will show its effect.
        """
        try:
            self._do(decision)
        except (DeletedError, TakenError) as error:
            if isinstance(error, DeletedError) and seen.wanted:
                return None  # the next observation tells whether the run is over
            self._say(f"{error}; this command rents nothing")
            return 1
        except GcloudError as error:
            if not error.gone:
                error.wait_out(self._acting, for_ever=True)
        except PendingError as error:
            error.cause.wait_out(self._acting, for_ever=True)
        except (RemoteError, SliceError) as error:
            self._say(str(error))
            if isinstance(error, RefusedError) and error.final:
                return 1
            self._clock.sleep(self._count(error, decision))
        else:
            self._acting.reset()
        return None

    def _do(self, decision: Decision) -> None:
        """Execute a decision and count it."""
        counts = self._counts
        if decision.act == "stop":
            self._session.stop()
            return
        if decision.act == "rent":
            self._session.rent()
            self._counts = dataclasses.replace(counts, refused=0)
            return
        if decision.act == "replace":
            self._session.replace()
            self._counts = dataclasses.replace(
                counts, replacements=counts.replacements + 1, restarts=0, unusable=0, starts=0
            )
            return
        restarts = counts.restarts
        if decision.act == "restart":
            self._session.stop()
            self._clock.sleep(_pause(self._policy.pauses_s, restarts))
            restarts += 1
        self._session.start()
        self._setting_up.reset()
        self._counts = dataclasses.replace(counts, unusable=0, starts=0, restarts=restarts)

    def _count(self, error: RemoteError | SliceError, decision: Decision) -> float:
        """Count a failure; returns the seconds to wait before the next observation."""
        counts, policy = self._counts, self._policy
        match error:
            case UnusableError():  # no job was started, so this is not another failure of the run
                if error.answered or not self._session.may_run:
                    counts = dataclasses.replace(counts, unusable=counts.unusable + 1)
                pause_s = _pause(policy.pauses_s, counts.unusable)
            case SetupError():
                try:
                    if fault_in(str(error)) in ("disk", "login", "denied"):
                        raise error  # any other may pass: on machines like these the same setup has succeeded before
                    pause_s = self._setting_up.next_s(error)
                except SetupError:
                    pause_s, counts = 0.0, dataclasses.replace(counts, starts=policy.restarts, restarts=policy.restarts)
            case RemoteError():
                restarts = counts.restarts + (decision.act == "restart")
                counts = dataclasses.replace(counts, starts=counts.starts + 1, restarts=restarts)
                pause_s = policy.poll_s
            case SliceError():
                pause_s = _pause(policy.no_capacity_s, counts.refused)
                counts = dataclasses.replace(counts, refused=counts.refused + 1)
        self._counts = counts
        return pause_s

    def _end(self, decision: Decision, seen: Observation) -> int:
        """Delete the slice if requested, or stop workers that are still running; returns the exit status."""
        title = self._session.title
        if self._policy.down is False or (self._session.lasting and not self._policy.down):
            if seen.job is not None and seen.job.outcome in ("failed", "guard"):
                try:  # some workers may not have noticed that the job failed
                    self._session.stop()
                except (RemoteError, GcloudError) as error:
                    self._say(str(error))
            if seen.slice is not None:
                self._say(f"{seen.slice.name} is still rented; podium pod down {title} deletes it")
            return decision.status
        what = f"Google ({title} may still be rented, and costs money: podium pod down {title} deletes it)"
        ending = Patience(what, clock=self._clock, say=self._say)
        for attempt in range(ENDINGS):
            try:
                if self._session.give_back(decision.status, told=seen.over is not None):
                    self._say(f"deleted {title}; podium pod run --keep leaves it rented")
                return decision.status
            except GcloudError as error:
                error.wait_out(ending, for_ever=True)
            except (RemoteError, SliceError) as error:
                self._say(str(error))
                self._clock.sleep(_pause(self._policy.no_capacity_s, attempt))
        self._say(f"{title} may still be rented and cost money; podium pod down {title} deletes it")
        return decision.status


def _pause(pauses_s: tuple[float, ...], times: int) -> float:
    return pauses_s[min(times, len(pauses_s) - 1)]
