"""A process of a job from its first moment to its last: who it is, that it is there, how far it is, why it ended.

Under no launcher and alone, a process is told nothing and says nothing.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.job.cluster import Cluster, find_cluster
from podium.job.guard import Guard
from podium.job.records import Report
from podium.job.watchdog import Watchdog

if TYPE_CHECKING:
    from podium.config.schema import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """What a process knows of the job that it is a part of."""

    cluster: Cluster | None
    """All its processes; None: this one alone."""
    report: Report
    watchdog: Watchdog
    guard: Guard | None = None

    @property
    def watched(self) -> bool:
        """Whether somebody waits for this process who cannot see it."""
        return self.cluster is not None or self.report.folder is not None

    def agree(self, config: "Config") -> None:
        """Returns when all workers are there with these settings, this code and one folder of runs.

        Raises:
            GuardError: they are not.
        """
        if self.guard is not None:
            self.guard.agree(identity(config), Path(config.runs_dir))


def alone() -> Member:
    """A process of no job."""
    report = Report(None)
    return Member(cluster=None, report=report, watchdog=Watchdog(report))


@contextlib.contextmanager
def member_of_job(environ: Mapping[str, str]) -> Iterator[Member]:
    """What the environment says of the job; an exception in the block is recorded for who started it.

    Raises:
        ClusterError: this process is alone where it must not be, or cannot reach worker 0.
    """
    folder, worker = environ.get("PODRUN_JOB_DIR"), environ.get("PODRUN_WORKER", "0")
    with Report(Path(folder) if folder else None, worker=int(worker) if worker.isdecimal() else 0) as report:
        watchdog = Watchdog.from_environment(report, environ)
        cluster = find_cluster(environ)
        if cluster is None:
            yield Member(cluster=None, report=report, watchdog=watchdog)
            return
        report.phase("guard")
        with Guard.from_environment(cluster, environ) as guard:
            yield Member(cluster=cluster, report=report, watchdog=watchdog, guard=guard)


def identity(config: "Config") -> dict[str, str]:
    """What must be equal in all processes of a job: every setting, the commit, the versions of packages."""
    from podium.observe.summary import commit, versions

    settings = dict(_leaves(config.model_dump(mode="json")))
    packages = {f"version of {name}": version for name, version in versions().items()}
    return {**settings, "commit": str(commit()), **packages}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and text of every leaf of a tree."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, repr(value)
        return
    for key, inner in items:
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))
