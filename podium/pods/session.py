"""A run on a slice: what can be observed of it and done to it. `podium.pods.recover` decides what is done."""

import contextlib
import dataclasses

from podium.job.records import NO_JOB
from podium.pods.gcloud import GcloudError
from podium.pods.inventory import Slice
from podium.pods.launch import JobStatus, RunSpec, launch, poll, read_log, stop_job
from podium.pods.options import Rent
from podium.pods.project import Project
from podium.pods.remote import RemoteError
from podium.pods.rental import rent_again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """The slice and its workers at one moment."""

    slice: Slice | None
    job: JobStatus | None
    """None: the machines cannot be asked."""
    waited_s: float = 0.0
    """Since the first observation with the same state."""


class Session:
    """A run on a slice, which may be replaced by another slice."""

    def __init__(self, project: Project, tpu_slice: Slice, rent: Rent, spec: RunSpec) -> None:
        """`rent` is for replacements."""
        self.slice, self._project, self._rent, self._spec = tpu_slice, project, rent, spec
        self._shown: dict[str, int] = {}  # job -> bytes of its log
        self._job: str | None = None

    def observe(self) -> Observation:
        """The slice and its workers, now."""
        now = self._project.slices.now(self.slice)
        if now is None or now.state != "ready":
            return Observation(slice=now, job=None)
        if self._job is None:  # other jobs are ignored
            return Observation(slice=now, job=JobStatus(workers=[NO_JOB] * len(now.addresses)))
        try:
            return Observation(slice=now, job=poll(self._project.remote(now), self._job))
        except GcloudError as error:
            if error.kind != "unusable":  # the node has ended since
                raise
            return Observation(slice=now, job=None)

    def start(self) -> None:
        """Start the run where it is not running."""
        project = self._project
        self._job = launch(project.remote(self.slice), self._spec, clock=project.clock, say=project.say)

    def stop(self) -> None:
        """End what is left of the job, on all workers."""
        if self._job is not None:
            stop_job(self._project.remote(self.slice), self._job, remember=False)

    def replace(self) -> None:
        """Delete the slice and rent another like it."""
        self._job = None
        self.slice = rent_again(self._project.slices, self.slice, self._rent)

    def show(self, job: JobStatus) -> None:
        """Print new lines of worker 0's log; if its machine is gone, the next observation shows it."""
        first = job.workers[0] or NO_JOB
        name, offset, before = first["job"], self._shown.get(first["job"], 0), -1
        with contextlib.suppress(RemoteError, GcloudError):
            while before < offset < first["log_bytes"]:
                before = offset
                text, offset = read_log(self._project.remote(self.slice), 0, name, offset)
                self._project.answer(text, end="")
                self._shown[name] = offset
