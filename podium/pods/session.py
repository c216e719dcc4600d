"""A run on a slice: observes it and acts on it. `podium.pods.recover` decides which action to take."""

import contextlib
import dataclasses
from typing import Literal

from podium.job.job_records import NO_JOB
from podium.pods.gcloud import GcloudError
from podium.pods.inventory import END, RUN, STOP, Slice, label_text
from podium.pods.launch import LOG_BYTES, JobStatus, RunSpec, poll, prepare, read_log, start, stop_job
from podium.pods.options import Rent
from podium.pods.project import Project
from podium.pods.remote import RemoteError
from podium.pods.rental import renew_lease, same_again
from podium.pods.slices import TakenError

TAIL_BYTES = 2**14
"""Bytes to show of a log that has grown by more than one read."""
ANNOUNCE_S = 30.0
"""Seconds before the slice is deleted in which other commands can read that the run has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """The state of the slice and its workers at one moment."""

    slice: Slice | None
    job: JobStatus | None
    """None: the machines cannot be reached."""
    asked_to_stop: bool = False
    """Whether `podium pod stop` was run since this session began."""
    replacing: bool = False
    """Whether this session is replacing the slice and has no new one yet."""
    taken: str = ""
    """Who uses the slice or its name now, if it is not this run."""
    ended: int | None = None
    """The run's exit status, if another command has announced its end since this session began."""
    waited_s: float = 0.0
    """Seconds since observations have been the same as this one."""


class Session:
    """A run on a slice, which may be replaced by another slice."""

    def __init__(self, project: Project, tpu_slice: Slice, rent: Rent, spec: RunSpec) -> None:
        """Set the run and its slice; `rent` is used for replacements."""
        self.slice = tpu_slice
        self._project = project
        self._rent = rent
        self._spec = spec
        self._shown: dict[str, int] = {}  # job -> bytes of its log
        self._job: str | None = None
        self._stop_before = tpu_slice.labels.get(STOP)  # an earlier stop, which this command overrides
        self._end_before = tpu_slice.labels.get(END)
        self._run = label_text(spec.prefix)
        self._run_before = tpu_slice.run if tpu_slice.started else None  # perhaps another run, which has ended by now
        self._taken = ""
        self._replacing: Literal["no", "deleting", "renting"] = "no"

    @property
    def may_run(self) -> bool:
        """Whether a job may be running on machines that do not answer, since one was started there."""
        return self.slice.started

    @property
    def replacing(self) -> bool:
        """Whether the slice is being replaced, so nothing is running."""
        return self._replacing != "no"

    def observe(self) -> Observation:
        """Observe the slice and its workers."""
        if self._job is not None:
            self._project.note("until the run has ended, with the log of worker 0:")
        now = self._now()
        seen = Observation(
            slice=now,
            job=None,
            asked_to_stop=self._asked(now),
            replacing=self.replacing,
            taken=self._taken,
            ended=self._ended(now),
        )
        if now is None or now.state != "ready" or self.replacing:
            return seen
        if not self._taken:
            with contextlib.suppress(GcloudError):  # half of the lease is left, and the next observation tries again
                renew_lease(self._project.slices, now, self._rent)
        none = JobStatus(workers=[NO_JOB] * len(now.addresses))
        if self._job is None and not now.started:
            return dataclasses.replace(seen, job=none)
        try:
            job = poll(self._project.remote(now), self._job)
            return dataclasses.replace(seen, job=job if self._job is not None or job.unheard else none)
        except GcloudError as error:
            if not error.gone:
                raise
            return seen

    def start(self) -> None:
        """Start the run on workers that do not run it, unless it was stopped or lost the slice meanwhile."""
        project = self._project
        remote = project.remote(self.slice)
        self._job, needed = prepare(remote, self._spec, clock=project.clock, say=project.say, claim=self._claim)
        project.note("unless podium pod stop was given meanwhile:")
        now = self._now()
        if needed and now is not None and not self._taken and not self._asked(now):
            project.slices.label(now, {RUN: label_text(self._job)})
            start(project.remote(now), self._spec, self._job, say=project.say)

    def stop(self) -> None:
        """Ask the job to save and end on all workers that still run it."""
        if self._job is not None:
            project = self._project
            stop_job(project.remote(self.slice), self._job, clock=project.clock, say=project.say)

    def replace(self) -> None:
        """Delete the slice and rent another like it; if this fails, the next call continues.

        Raises TakenError if another run has rented a slice with its name meanwhile.
        """
        slices = self._project.slices
        if not self.replacing:
            lost = self.slice
            now = self._now()
            if self._taken or self._asked(now) or not self.slice.is_same(lost):
                return  # another laptop has replaced it already
            if not self._own(now) and self.slice.alive:
                raise TakenError(
                    f"{lost.name} is kept: {self.slice.run} was started there; podium pod down {lost.name}"
                )
            self._job, self._replacing = None, "deleting"
        order, zones = same_again(slices, self.slice, self._rent, self._spec.prefix)
        if self._replacing == "deleting":
            slices.delete([self.slice])
            self._replacing = "renting"
        rented = slices.up(order, zones)
        self._replacing = "no"
        if rented.run != self._run:
            raise TakenError(
                f"{rented.name} in {rented.zone} was rented meanwhile for {rented.run or 'something else'}; the same "
                "command with another --slice continues this run"
            )
        self.slice = rented

    def give_back(self, status: int) -> bool:
        """Announce the run's exit status and delete the slice, unless another run has it; returns whether it did.

        Other commands that keep the run alive read the status and end with it.
        """
        slices = self._project.slices
        now = self._now()
        if self._own(now) and now is not None and now.state == "ready":
            with contextlib.suppress(GcloudError):
                slices.label(now, {END: f"{self._run}-{slices.clock.time():.0f}-{status}"})
            slices.clock.sleep(ANNOUNCE_S)
            now = self._now()
        if now is None:
            return False
        if not self._own(now):
            user = self._taken or f"{self.slice.run} was started there"
            self._project.say(f"{self.slice.name} is kept: {user}; podium pod down {self.slice.name} deletes it")
            return False
        slices.delete([now])
        return True

    def show(self, job: JobStatus) -> None:
        """Print new lines of worker 0's log. Errors are ignored: if the machine is gone, the next observation finds
        out.
        """
        first = job.workers[0] or NO_JOB
        name = first["job"]
        size = first["log_bytes"]
        offset = self._shown.get(name, 0)
        if size <= offset:
            return
        skipped = size - TAIL_BYTES - offset if size - offset > LOG_BYTES else 0
        with contextlib.suppress(RemoteError, GcloudError):
            text, self._shown[name] = read_log(self._project.remote(self.slice), 0, name, offset + skipped)
            if skipped:
                text = text.partition("\n")[2]
                self._project.say(f"[{skipped / 1e6:.1f} MB of the log are left out: podium pod logs --all]")
            self._project.answer(text, end="")

    def _now(self) -> Slice | None:
        """The run's slice as listed now, or another one with its name (`_taken`); None if it is not listed.

        If another laptop has replaced the slice, this session switches to the replacement.
        """
        slices = self._project.slices
        now = slices.now(self.slice)
        if now is None and not self.replacing:  # perhaps replaced in another zone
            now = next((each for each in slices.find(self.slice.name) if each.alive and each.run == self._run), None)
        self._taken = ""
        if now is None:
            return None
        if now.is_same(self.slice):
            if now.run not in (None, self._run, self._run_before):
                self._taken = f"{now.run} was started there" if now.started else f"it was rented for {now.run}"
        elif now.run == self._run:
            self._job = None  # attempts are counted again
        else:
            self._taken = f"another slice of its name was rented for {now.run or 'something else'}"
            return now
        self.slice = now
        return now

    def _own(self, now: Slice | None) -> bool:
        """Whether the slice belongs to this run alone, or is no longer listed."""
        return not self._taken and (now is None or now.run in (None, self._run))

    def _claim(self) -> None:
        """Label a slice whose earlier run has ended, so that no other command takes or deletes it.

        Raises RemoteError if that run was started again since this session last listed the slice.
        """
        if self.slice.run != self._run:
            before = self.slice.labels.get(RUN)
            now = self._now()
            if now is not None and now.labels.get(RUN) != before:
                raise RemoteError(f"{now.name} is busy with job {now.labels.get(RUN)}, which has just been started")
            self._project.slices.label(self.slice, {RUN: label_text(f"{self._spec.prefix}0")})

    def _asked(self, now: Slice | None) -> bool:
        """Whether this run was asked to stop since this session began."""
        return now is not None and self._own(now) and now.labels.get(STOP) not in (None, self._stop_before)

    def _ended(self, now: Slice | None) -> int | None:
        """The exit status that another command has announced."""
        announced = now.labels.get(END) if now is not None else None
        if announced is None or announced == self._end_before or not announced.startswith(f"{self._run}-"):
            return None
        return int(announced.rpartition("-")[2])
