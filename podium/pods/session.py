"""A run on a slice: observes it and acts on it. `podium.pods.recover` decides which action to take."""

import contextlib
import dataclasses
from collections.abc import Sequence

from podium.job.job_records import NO_JOB, STOPPED
from podium.pods.endings import Endings
from podium.pods.gcloud import GcloudError, Order
from podium.pods.inventory import END, LOST, STARTED, STATE, STOP, Slice
from podium.pods.launch import LOG_BYTES, SETUP, UNDER_WAY, JobStatus, RunSpec, poll, prepare, read_log, start, stop_job
from podium.pods.project import Project
from podium.pods.remote import RemoteError
from podium.pods.slices import TakenError, check_run

TAIL_BYTES = 2**14
"""Bytes to show of a log that has grown by more than one read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """The state of the slice and its workers at one moment."""

    slice: Slice | None
    job: JobStatus | None
    """The job's status; None if the machines cannot be reached."""
    over: int | None = None
    """The exit status with which another command has ended or stopped the run since this session began."""
    stopped_before: bool = False
    """Whether the run was stopped on this slice before this session began; other sessions may be about to delete the
    slice."""
    renting: bool = False
    """Whether this session has no slice yet, or has given up the last one."""
    wanted: bool = False
    """Whether the run is known not to be over, so that a missing slice should be replaced."""
    waited_s: float = 0.0
    """Seconds for which observations have been equal to this one."""


class Session:
    """A run on a slice, which may be replaced by another slice."""

    def __init__(
        self, project: Project, spec: RunSpec, order: Order, zones: Sequence[str], endings: Endings, *, fresh: bool
    ) -> None:
        """Set the run, and the order for its slices; `fresh`: rent the first slice, because no existing one was
        named.

        Raises TakenError if the named slice was rented for another run.
        """
        self.slice: Slice | None = None
        self.title = order.name
        self._project = project
        self._spec = spec
        self.order = order
        self.zones = zones
        self._endings = endings
        self._shown: dict[str, int] = {}  # job -> bytes of its log
        self._job: str | None = None
        endings.begin()
        found = project.slices.titled(order.name)
        self._first = found[0] if found else None  # a stop in its label was before this command
        if not fresh and self._first is not None:
            check_run(self._first, order)
            self.slice = self._first

    @property
    def may_run(self) -> bool:
        """Whether a job may be running on machines that do not respond, because one was started there."""
        return self.slice is not None and bool(self.slice.mark)

    @property
    def lasting(self) -> bool:
        """Whether the slice was rented by the user with `podium pod up`; such a slice is not deleted while it
        is alive.
        """
        return self.slice is not None and self.slice.run is None

    def observe(self) -> Observation:
        """Observe the slice and its workers."""
        if self._job is not None:
            self._project.note("until the run has ended, with the log of worker 0:")
        now = self._now()
        if now is None:
            over = self._endings.status()
            renting = self.slice is None
            return Observation(slice=None, job=None, over=over, renting=renting, wanted=self._endings.known)
        over = self._over(now)
        before = over is None and now.run is not None and now.mark.startswith(STOP)
        seen = Observation(slice=now, job=None, over=over, stopped_before=before)
        if now.state != "ready" or (now.doomed and seen.over is None):
            return seen
        none = JobStatus(workers=[NO_JOB] * len(now.addresses))
        if self._job is None and not now.mark:
            return dataclasses.replace(seen, job=none)
        try:
            job = poll(self._project.remote(now), self._job)
        except GcloudError as error:
            if not error.gone:
                raise
            return seen
        if self._job is None:
            self._job = self._found(job)
        return dataclasses.replace(seen, job=job if self._job is not None or job.unheard else none)

    def rent(self) -> None:
        """Rent a slice, or find a slice that another laptop has rented for this run, and wait until it is ready."""
        self._job = None
        self.slice = self._project.slices.up(self.order, self.zones, over=lambda: self._endings.status() is not None)

    def start(self) -> None:
        """Start the run on workers that do not run it, unless the run was stopped or lost the slice meanwhile."""
        project = self._project
        assert self.slice is not None
        job, needed = prepare(project.remote(self.slice), self._spec)
        project.note("unless podium pod stop was given meanwhile:")
        now = self._now()
        if needed and now is not None and not now.mark:
            project.slices.label(now, {STATE: STARTED})
        first = next(iter(project.slices.titled(self.title)), None)
        now = self._now()
        if now is None or (first is not None and first.name != now.name):
            self.slice = first if first is not None and first.run in (None, self.order.run) else None
            return
        stopped = now.run is not None and now.mark.startswith(STOP)
        if now.doomed or stopped or self._over(now) is not None or self._endings.status() is not None:
            return
        if needed:
            start(project.remote(now), self._spec, job)
        self._job = job

    def stop(self) -> None:
        """Ask the job to save and end on all workers that still run it."""
        if self._job is not None and self.slice is not None:
            stop_job(self._project.remote(self.slice), self._job)

    def replace(self) -> None:
        """Delete the slice, unless another command has the run going on there again; the next action is to rent another
        or to find that one. Raises TakenError if the slice is alive and was rented by the user.
        """
        assert self.slice is not None
        if self.lasting and self.slice.alive:
            name = self.slice.name
            raise TakenError(f"{name} was rented by podium pod up and is kept: podium pod down {name} deletes it")

        def used(listed: Slice) -> bool:
            job = poll(self._project.remote(listed))
            return job.running and not job.silent

        self._project.slices.give_up(self.slice, LOST, used=used)
        self.slice, self._job = None, None

    def give_back(self, status: int, *, told: bool) -> bool:
        """Delete the slice at the end of the run; returns whether there was a slice.

        Unless already `told`, the run's exit status is first recorded for other commands that keep the run alive.
        """
        if not told:
            self._endings.add(status, self._project.world.random_word("WORD"))
        return self.slice is not None and self._project.slices.give_up(self.slice, f"{END}{status}")

    def show(self, job: JobStatus) -> None:
        """Print new lines of worker 0's log. Errors are ignored: if the machine was lost, the next observation will
        show it.
        """
        first = job.workers[0] or NO_JOB
        name = first["job"]
        size = first["log_bytes"]
        offset = self._shown.get(name, 0)
        if size <= offset or self.slice is None:
            return
        skipped = size - TAIL_BYTES - offset if size - offset > LOG_BYTES else 0
        with contextlib.suppress(RemoteError, GcloudError):
            text, self._shown[name] = read_log(self._project.remote(self.slice), 0, name, offset + skipped)
            if skipped:
                text = text.partition("\n")[2]
                self._project.say(f"[{skipped / 1e6:.1f} MB of the log are left out: podium pod logs --all]")
            self._project.answer(text, end="")

    def _now(self) -> Slice | None:
        """The run's slice as listed now, or the slice with which another laptop has replaced it; None if none is
        listed.
        """
        if self.slice is None:
            return None
        slices = self._project.slices
        now = slices.now(self.slice)
        if now is None and (others := slices.titled(self.title)) and others[0].run == self.order.run:
            now = others[0]
            self._job = None  # restart counting attempts
        self.slice = now or self.slice
        return now

    def _found(self, job: JobStatus) -> str | None:
        """The run's job that another command has started, if it is in progress; setups do not count."""
        names = [each["job"] for each in job.workers if each and each["state"] in UNDER_WAY]
        ours = (name for name in names if not name.startswith(SETUP) and self._spec.attempt(name) is not None)
        return next(ours, None)

    def _over(self, now: Slice) -> int | None:
        """The exit status in the slice's label, if it was set after this session began."""
        before = self._first.mark if self._first is not None and self._first.name == now.name else ""
        status = None
        if now.mark.startswith(STOP) and now.mark != before:
            status = STOPPED
        elif now.mark.startswith(END) and not before.startswith((STOP, END)):
            status = int(now.mark.removeprefix(END))
        if status is not None:
            self._endings.heard = status
        return status
