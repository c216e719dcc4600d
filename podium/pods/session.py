"""A run on a slice: observes it and acts on it. `podium.pods.recover` decides which action to take."""

import contextlib
import dataclasses
from typing import Literal

from podium.job.records import NO_JOB
from podium.pods.gcloud import GcloudError
from podium.pods.inventory import RUN, STOP, Slice, label_text
from podium.pods.launch import LOG_BYTES, JobStatus, RunSpec, poll, prepare, read_log, start, stop_job
from podium.pods.options import Rent
from podium.pods.project import Project
from podium.pods.remote import RemoteError
from podium.pods.rental import renew_lease, same_again

TAIL_BYTES = 2**14
"""Bytes that are shown of a log that has grown by more than can be read at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """The slice and its workers at one moment."""

    slice: Slice | None
    job: JobStatus | None
    """None: the machines cannot be reached at all."""
    asked_to_stop: bool = False
    """Whether `podium pod stop` was given since this session began."""
    replacing: bool = False
    """Whether this session has begun to replace the slice and has no other one yet."""
    waited_s: float = 0.0
    """Seconds for which observations have been like this."""


class Session:
    """A run on a slice, which may be replaced by another slice."""

    def __init__(self, project: Project, tpu_slice: Slice, rent: Rent, spec: RunSpec) -> None:
        """Set the run and its slice; `rent` is for replacements."""
        self.slice = tpu_slice
        self._project = project
        self._rent = rent
        self._spec = spec
        self._shown: dict[str, int] = {}  # job -> bytes of its log
        self._job: str | None = None
        self._stop_before = tpu_slice.labels.get(STOP)  # an earlier stop, which this command overrides
        self._run_before = tpu_slice.labels.get(RUN)  # perhaps another run's, which has ended
        self._replacing: Literal["no", "deleting", "renting"] = "no"

    @property
    def may_run(self) -> bool:
        """Whether a job may be running on machines that do not answer, since one was started there."""
        return RUN in self.slice.labels

    @property
    def replacing(self) -> bool:
        """Whether the slice is being replaced, so nothing is running."""
        return self._replacing != "no"

    def observe(self) -> Observation:
        """The slice and its workers, now."""
        if self._job is not None:
            self._project.note("until the run has ended, with the log of worker 0:")
        now = self._now()
        seen = Observation(slice=now, job=None, asked_to_stop=self._asked(now), replacing=self.replacing)
        if now is None or now.state != "ready" or self.replacing:
            return seen
        with contextlib.suppress(GcloudError):  # half of the lease is left, and the next observation tries again
            renew_lease(self._project.slices, now, self._rent)
        if self._job is None:  # other jobs are ignored
            return dataclasses.replace(seen, job=JobStatus(workers=[NO_JOB] * len(now.addresses)))
        try:
            return dataclasses.replace(seen, job=poll(self._project.remote(now), self._job))
        except GcloudError as error:
            if error.kind != "unusable":  # the node has ended since it was listed
                raise
            return seen

    def start(self) -> None:
        """Start the run on workers where it is not running, unless it was asked to stop meanwhile."""
        project = self._project
        self._job, needed = prepare(project.remote(self.slice), self._spec, clock=project.clock, say=project.say)
        project.note("unless podium pod stop was given meanwhile:")
        if needed and not self._asked(self._now()):
            project.slices.label(self.slice, {RUN: label_text(self._job)})
            start(project.remote(self.slice), self._spec, self._job, say=project.say)

    def stop(self) -> None:
        """Have the job save and end on all workers that still run it."""
        if self._job is not None:
            project = self._project
            stop_job(project.remote(self.slice), self._job, clock=project.clock, say=project.say)

    def replace(self) -> None:
        """Delete the slice and rent another like it; after a failure, the next call continues."""
        slices = self._project.slices
        if not self.replacing:
            lost = self.slice
            now = self._now()
            if self._asked(now) or (now is not None and now.alive and now.created != lost.created):
                return  # another laptop has replaced it already
            self._job, self._replacing = None, "deleting"
        order, zones = same_again(slices, self.slice, self._rent)
        if self._replacing == "deleting":
            slices.down(self.slice.name)
            self._replacing = "renting"
        self.slice = slices.up(order, zones)
        self._replacing = "no"

    def give_back(self) -> bool:
        """Delete the slice, unless another run was started there meanwhile; returns whether it was deleted."""
        now = self._now()
        job = now.labels.get(RUN) if now is not None else None
        if job not in (None, self._run_before) and not job.startswith(label_text(self._spec.prefix)):
            self._project.say(f"{self.slice.name} is kept: {job} was started there meanwhile")
            return False
        self._project.slices.down(self.slice.name)
        return True

    def show(self, job: JobStatus) -> None:
        """Print new lines of worker 0's log; if its machine is gone, the next observation shows it."""
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
        """The slice as it is listed now; None if it is not listed."""
        now = self._project.slices.now(self.slice)
        self.slice = now or self.slice
        return now

    def _asked(self, now: Slice | None) -> bool:
        return now is not None and now.labels.get(STOP) not in (None, self._stop_before)
