"""The job that a training process belongs to, as the process sees it.

A process that no launcher started has no job: nothing is announced, watched or recorded.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from podium.config.show import flat
from podium.files import as_path
from podium.job.cluster import METADATA, Cluster, find_cluster
from podium.job.guard import ARRIVAL_S, Guard
from podium.job.job_records import RECORD, ProgressReport, exit_status
from podium.job.notice import Notice
from podium.job.watchdog import Watchdog
from podium.observe.summary import commit, versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobContext:
    """The role of the current process in its job, if it belongs to one."""

    cluster: Cluster | None
    """All processes of the job; None: this is the only one."""
    report: ProgressReport
    watchdog: Watchdog
    guard: Guard | None = None
    notice: Notice | None = None
    """Google's announcement that this machine will be taken away; None if none is expected, outside of jobs."""

    @property
    def watched(self) -> bool:
        """Whether other machines wait for this process, so that a watchdog is needed."""
        return self.cluster is not None or self.report.folder is not None

    def agree(self, settings: Mapping[str, object]) -> None:
        """Wait until all workers have arrived with the same settings, code and `runs_dir`.

        `settings` are those of `Config.document`. Raises GuardError if the workers differ.
        """
        if self.guard is not None:
            self.guard.agree(identity(settings), as_path(str(settings["runs_dir"])))


def alone() -> JobContext:
    """The context of a process that belongs to no job."""
    report = ProgressReport(None)
    return JobContext(cluster=None, report=report, watchdog=Watchdog(report))


@contextlib.contextmanager
def join_job(environ: Mapping[str, str]) -> Iterator[JobContext]:
    """Join the job that the environment describes; an exception in the block is recorded for the launcher.

    Raises:
        ClusterError: this process is alone and must not be, or cannot reach worker 0.
    """
    folder = environ.get("PODRUN_JOB_DIR")
    worker = environ.get("PODRUN_WORKER", "0")
    report = ProgressReport(Path(folder) if folder else None, worker=int(worker) if worker.isdecimal() else 0)
    try:
        watchdog = Watchdog.from_environment(report, environ)
        cluster = find_cluster(environ)
        guard = None
        with contextlib.ExitStack() as stack:
            if cluster is not None:
                report.phase("guard")
                arrival_s = float(environ.get("PODRUN_ARRIVAL_S", ARRIVAL_S))
                nonce = environ.get("PODRUN_NONCE", "")
                leader = None if report.folder is None else report.folder.parent / "0" / RECORD
                opened = Guard(cluster, arrival_s=arrival_s, nonce=nonce, leader_record=leader)
                guard = stack.enter_context(opened)
            context = JobContext(cluster=cluster, report=report, watchdog=watchdog, guard=guard)
            if context.watched:
                notice = Notice(environ.get("GCE_METADATA_IP", METADATA), announce=report.announce)
                context = dataclasses.replace(context, notice=notice)
            yield context
    except BaseException as error:
        if exit_status(error) != 0:
            report.failed(error)
        raise


def identity(document: Mapping[str, object]) -> dict[str, str]:
    """Everything that must be equal in all processes of a job: settings, commit, and package versions."""
    settings = {key: repr(value) for key, value in flat(document).items()}
    packages = {f"version of {name}": version for name, version in versions().items()}
    return {**settings, "commit": str(commit()), **packages}
