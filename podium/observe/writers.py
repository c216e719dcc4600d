"""Writes a run's metrics: always to metrics.jsonl, and to the services in the config.

metrics.jsonl is authoritative: the run stops if it cannot be written. If a service fails, the run reports it once and
continues without it.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import SupportsFloat

from podium.config.schema import MetricsConfig
from podium.observe.records import SampleRecord, read_metrics, step_of
from podium.observe.run_dir import METRICS, RunDir
from podium.observe.services import Service, ServiceError, make_service, service_names, table_rows


class MetricWriter:
    """Writes the metrics of a run, with its wall and CPU time so far, to metrics.jsonl and to the services."""

    def __init__(self, run: RunDir, metrics: MetricsConfig, *, announce: Callable[[str], None]):
        """Connect the services before anything expensive begins; connects none if another process writes for this run.

        The run's records must already be truncated to the step it continues from. `announce` is called with one line
        for each service that has a web page or has failed.

        Raises:
            ServiceError: a service's package or credentials are missing.
        """
        self._run = run
        self._announce = announce
        lines = read_metrics(run.path / METRICS)
        last = lines[-1] if lines else {}
        self._wall_before = last.get("time/wall_s", 0.0)
        self._cpu_before = last.get("time/cpu_s", 0.0)
        self._services: list[Service] = []
        for name in service_names(metrics) if run.writes else ():
            self._connect(name, metrics, first_step=step_of(lines[-1]) + 1 if lines else 0)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Append a line of metrics by name; values are numbers, numpy scalars, or zero-dimensional arrays.

        `step` is the number of steps done: 0 for the evaluation of the initial model.

        Raises:
            RunFileError: metrics.jsonl cannot be written.
        """
        numbers: dict[str, int | float] = {name: _number(value) for name, value in metrics.items()}
        numbers["time/wall_s"] = self._wall_before + time.monotonic() - self._run.opened
        numbers["time/cpu_s"] = self._cpu_before + sum(os.times()[:4])
        self._run.append(METRICS, {"step": step, **numbers})
        for service in list(self._services):
            self._guard(service, lambda service=service: service.write(step, numbers))

    def write_samples(self, step: int, records: Sequence[SampleRecord]) -> None:
        """Send the services a table of the completions in some lines of samples.jsonl, all from one split."""
        if not records or not self._services:
            return
        name, rows = f"samples/{records[0]['split']}", table_rows(records)
        for service in list(self._services):
            self._guard(service, lambda service=service: service.write_samples(step, name, rows))

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the services, and tell them whether the run failed; a second call does nothing."""
        for service in list(self._services):
            self._guard(service, lambda service=service: service.close(failed=failed))
        self._services.clear()

    def _connect(self, name: str, metrics: MetricsConfig, *, first_step: int) -> None:
        try:
            service = make_service(name, self._run, metrics, first_step=first_step)
        except ServiceError:
            self.close()
            raise
        except (Exception, SystemExit) as error:  # whatever a third-party package raises: network, server, version
            self._announce(_failure(name, error))
            return
        self._services.append(service)
        if url := getattr(service, "url", None):
            self._announce(f"{name}: {url}")

    def _guard(self, service: Service, action: Callable[[], None]) -> None:
        """Run `action`; if it fails, report that once and drop the service."""
        try:
            action()
        except (Exception, SystemExit) as error:  # whatever a third-party package raises: network, server, full disk
            self._services.remove(service)
            self._announce(_failure(service.name, error))

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)


def _failure(name: str, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{name} failed ({reason}); nothing more is sent to it; {METRICS} continues"


def _number(value: SupportsFloat) -> int | float:
    return int(value) if isinstance(value, Integral) else float(value)
