"""Where the numbers of a run go: metrics.jsonl always, and the services that the config asks for.

metrics.jsonl is the record: it must be written or the run stops. A service may fail; the run says so once and goes on.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from podium.config.schema import Config
from podium.observe.run_dir import METRICS, RunDir
from podium.observe.services import Service, ServiceError, make_service, service_names, table_rows


class MetricWriter:
    """Writes the metrics of a run, with its wall and CPU time so far, to metrics.jsonl and to the services."""

    def __init__(self, run: RunDir, config: Config, *, announce: Callable[[str], None]):
        """Connect the services, before anything expensive begins; none where another process writes for the run.

        The run's folder is truncated already to the step that it continues from. `announce` gets one line about each
        service that has a page, or has failed.

        Raises:
            ServiceError: A service's package or credentials are missing.
        """
        self._run = run
        self._announce = announce
        lines = run.read(METRICS)
        last: Mapping[str, Any] = lines[-1] if lines else {}
        self._wall_before = last.get("time/wall_s", 0.0)
        self._cpu_before = last.get("time/cpu_s", 0.0)
        self._services: list[Service] = []
        for name in service_names(config.metrics) if run.writes else ():
            self._connect(name, config, first_step=last.get("step", -1) + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line of metrics: numbers (also numpy's, and arrays without dimensions) by their names.

        `step` counts the steps done; it is 0 for the evaluation of the first model.

        Raises:
            RunFileError: metrics.jsonl cannot be written.
        """
        numbers: dict[str, int | float] = {name: _number(value) for name, value in metrics.items()}
        numbers["time/wall_s"] = self._wall_before + time.monotonic() - self._run.opened
        numbers["time/cpu_s"] = self._cpu_before + sum(os.times()[:4])
        self._run.append(METRICS, {"step": step, **numbers})
        for service in list(self._services):
            self._guard(service, lambda service=service: service.write(step, numbers))

    def write_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Hand the services a table of the completions of some lines of samples.jsonl, of one split."""
        if not records or not self._services:
            return
        name, rows = f"samples/{records[0]['split']}", table_rows(records)
        for service in list(self._services):
            self._guard(service, lambda service=service: service.write_samples(step, name, rows))

    def close(self, *, failed: bool = False) -> None:
        """Hand what is left to the services, and whether the run failed; a second call does nothing."""
        for service in list(self._services):
            self._guard(service, lambda service=service: service.close(failed=failed))
        self._services.clear()

    def _connect(self, name: str, config: Config, *, first_step: int) -> None:
        try:
            service = make_service(name, self._run, config, first_step=first_step)
        except ServiceError:
            self.close()
            raise
        except Exception as error:  # another's package: the network, a server, a version
            self._announce(_failure(name, error))
            return
        self._services.append(service)
        if url := getattr(service, "url", None):
            self._announce(f"{name}: {url}")

    def _guard(self, service: Service, action: Callable[[], None]) -> None:
        """Do it; a service that fails is announced and left alone from then on."""
        try:
            action()
        except Exception as error:  # another's package: the network, a server, a full disk
            self._services.remove(service)
            self._announce(_failure(service.name, error))

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)


def _failure(name: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{name} failed ({reason}); this process sends it nothing more, {METRICS} continues"


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, Integral) else float(value)
