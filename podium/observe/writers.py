"""Writes a run's metrics: always to metrics.jsonl, and to the services in the config.

metrics.jsonl is authoritative: the run stops if it cannot be written. If a service cannot be reached, the run retries
between steps for half an hour, and then sends what the service has missed. After other errors, the run reports the
service's failure once and continues without it.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import SupportsFloat

from podium.config.schema import MetricsConfig
from podium.observe.records import SampleRecord, read_metrics, step_of
from podium.observe.run_dir import METRICS, RunDir
from podium.observe.services import Service, ServiceError, make_service, service_names, table_rows
from podium.patience import Clock, Patience, fault_of

TIMES_TAKEN = 9.0
"""The next attempt to connect is made after this many times the duration of the last one, so that connecting takes at
most a tenth of the time."""


@dataclasses.dataclass
class _Link:
    """A service, which may be waiting to be reached again."""

    name: str
    first_step: int
    patience: Patience
    service: Service | None = None
    due: float = 0.0
    """Time of the next attempt while the service cannot be reached, in seconds of the clock."""
    missed: list[Callable[[Service], None]] = dataclasses.field(default_factory=list)
    """Actions to perform once the service is reached."""


class MetricWriter:
    """Writes the metrics of a run, with its wall and CPU time so far, to metrics.jsonl and to the services."""

    def __init__(
        self, run: RunDir, metrics: MetricsConfig, *, announce: Callable[[str], None], clock: Clock = time
    ) -> None:
        """Connect the services before anything expensive begins; connects none if another process writes for this run.

        The run's records must already be truncated to the step it continues from. `announce` is called with one line
        for each service that has a web page or has failed.

        Raises:
            ServiceError: a service's package or credentials are missing.
        """
        self._run = run
        self._metrics = metrics
        self._announce = announce
        self._clock = clock
        lines = read_metrics(run.path / METRICS)
        last = lines[-1] if lines else {}
        self._wall_before = last.get("time/wall_s", 0.0)
        self._cpu_before = last.get("time/cpu_s", 0.0)
        self._links: list[_Link] = []
        for name in service_names(metrics) if run.writes else ():
            patience = Patience(name, clock=clock, say=announce)
            self._links.append(_Link(name, step_of(lines[-1]) + 1 if lines else 0, patience))
            self._send(self._links[-1])

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Append a line with metrics by name; values are numbers, numpy scalars, or zero-dimensional arrays.

        `step` is the number of steps done: 0 for the evaluation of the initial model.

        Raises:
            RunFileError: metrics.jsonl cannot be written.
        """
        numbers: dict[str, int | float] = {name: _number(value) for name, value in metrics.items()}
        numbers["time/wall_s"] = self._wall_before + time.monotonic() - self._run.opened
        numbers["time/cpu_s"] = self._cpu_before + sum(os.times()[:4])
        self._run.append(METRICS, {"step": step, **numbers})
        for link in list(self._links):
            self._send(link, lambda service: service.write(step, numbers))

    def write_samples(self, step: int, records: Sequence[SampleRecord]) -> None:
        """Send the services a table of the completions in some lines of samples.jsonl, all from one split."""
        if not records or not self._links:
            return
        name, rows = f"samples/{records[0]['split']}", table_rows(records)
        for link in list(self._links):
            self._send(link, lambda service: service.write_samples(step, name, rows))

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the services, and tell them whether the run failed; a second call does nothing."""
        for link in list(self._links):
            link.due = 0.0
            self._send(link, lambda service: service.close(failed=failed), last=True)
        self._links.clear()

    def _send(self, link: _Link, *actions: Callable[[Service], None], last: bool = False) -> None:
        """Perform the actions that the service has missed and then `actions`, if it can be reached; after other errors
        the service is dropped.

        With `last`, the service is also dropped if it cannot be reached.
        """
        link.missed += actions
        began = self._clock.monotonic()
        if link.service is None and began < link.due:
            return
        try:
            if link.service is None:
                link.service = make_service(link.name, self._run, self._metrics, first_step=link.first_step)
                if url := getattr(link.service, "url", None):
                    self._announce(f"{link.name}: {url}")
            while link.missed:
                link.missed[0](link.service)
                del link.missed[0]
            link.patience.reset()
        except (Exception, SystemExit) as error:  # whatever a third-party package raises: network, server, full disk
            if isinstance(error, ServiceError) and not actions:  # before the first step
                self._links.remove(link)
                self.close()
                raise
            if isinstance(error, Exception) and fault_of(error) == "outage" and link.service is None and not last:
                self._wait(link, error, began)
            else:
                self._drop(link, error)

    def _wait(self, link: _Link, error: Exception, began: float) -> None:
        """Try to reach the service again later, unless it could not be reached for half an hour."""
        now = self._clock.monotonic()
        try:
            pause_s = link.patience.next_s(error, f"{type(error).__name__}: {error}".splitlines()[0])
        except Exception:
            return self._drop(link, error)
        link.due = now + max(pause_s, TIMES_TAKEN * (now - began))

    def _drop(self, link: _Link, error: BaseException) -> None:
        self._links.remove(link)
        self._announce(_failure(link.name, error))

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)


def _failure(name: str, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{name} failed ({reason}); nothing more is sent to it; {METRICS} continues"


def _number(value: SupportsFloat) -> int | float:
    return int(value) if isinstance(value, Integral) else float(value)
