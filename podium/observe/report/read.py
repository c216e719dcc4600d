"""Reads a run's folder, even if damaged: reads what it can and lists the problems. Imports no jax."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from podium.config.errors import UsageError
from podium.files import open_file
from podium.observe.history import History
from podium.observe.identity import SUMMARY
from podium.observe.record_check import listed, missing_steps
from podium.observe.run_dir import CONFIG, MACHINE, METRICS

PLAN = "plan.json"  # podium.plan.report.deviation


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run, except its samples (`podium.observe.report.sample_pages`)."""

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    machine: Mapping[str, Any]
    plan: Mapping[str, Any]
    metrics: History
    problems: tuple[str, ...]
    """One sentence per missing or damaged file."""

    @property
    def name(self) -> str:
        """The run's name, or its folder's name if it has no config."""
        return str(self.config.get("name") or self.folder.name)

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key in the config."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value


def read_run(folder: Path) -> RunRecords:
    """Read the records of the run in `folder`.

    Raises:
        UsageError: the folder has neither metrics nor a config.
    """
    if not any((folder / name).is_file() for name in (METRICS, CONFIG)):
        raise UsageError(
            f"{folder} has no {METRICS} and no {CONFIG}, so it is not a run's folder; give one, such as runs/demo"
        )
    problems: list[str] = []
    config = _document(folder / CONFIG, yaml.safe_load, problems, "settings are not shown")
    summary = _document(folder / SUMMARY, json.loads, problems, "the run has not ended, or was stopped")
    plan = _document(folder / PLAN, json.loads, problems, "")
    machine = _document(folder / MACHINE, json.loads, problems, "")
    metrics = _metrics(folder / METRICS, problems)
    return RunRecords(
        folder=folder,
        config=config,
        summary=summary,
        machine=machine,
        plan=plan,
        metrics=metrics,
        problems=tuple(problems),
    )


def records(path: Path, problems: list[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (offset, length, record) for each complete line of a JSON lines file; offset and length are in bytes.

    Damaged lines are skipped and reported in `problems` at the end.
    """
    try:
        opened = open_file(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
        return
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return
    damaged: list[int] = []
    with opened as file:
        start = 0
        for number, line in enumerate(file, start=1):
            record = parse_record(line)
            if record is not None:
                yield start, len(line), record
            elif line.strip():
                damaged.append(number)
            start += len(line)
    if damaged:
        lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        noun = "line is" if len(damaged) == 1 else "lines are"
        problems.append(f"{path.name}: {len(damaged)} {noun} damaged (line {lines}) and skipped")


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line of JSON; None for a damaged line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _document(path: Path, parse: Any, problems: list[str], consequence: str) -> Mapping[str, Any]:
    """Read a file that contains one mapping. If it is missing, report `consequence` unless that is empty."""
    try:
        with open_file(path) as file:
            found = parse(file.read().decode("utf-8", "backslashreplace"))
    except OSError:
        if consequence:
            problems.append(f"{path.name} is missing: {consequence}")
        return {}
    except (ValueError, yaml.YAMLError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        problems.append(f"{path.name} is damaged and was skipped")
        return {}
    return found


def _metrics(path: Path, problems: list[str]) -> History:
    """The metrics in a file; steps that decrease or are missing are reported in `problems`."""
    found = History()
    last, repeated = -1, 0
    steps: list[int] = []
    for _, _, record in records(path, problems):
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        repeated += step < last
        last = step
        if not any(name.startswith("eval/") for name in record):
            steps.append(step)
        found.add(record)
    if repeated:
        problems.append(
            f"{path.name}: step numbers decrease {repeated} times, as if the file held two runs; the last line of "
            "each step counts"
        )
    if lost := missing_steps(steps, max(steps, default=0)):
        problems.append(f"{path.name}: {listed(lost)} {'is' if len(lost) == 1 else 'are'} missing")
    return found
