"""A run's metrics over its steps, collected line by line, and a question answered before and after training."""

import bisect
import dataclasses
import math
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from podium.observe.records import read_metrics, read_samples
from podium.observe.run_dir import METRICS, SAMPLES

PLACES = ("padding", "prompt", "completion", "demonstrations")
"""What the token places of updates hold, by the names of their metrics."""
Point = tuple[int, float]
"""A step and its value."""


@dataclasses.dataclass
class Series:
    """The values of one metric, with their steps, in ascending order of steps."""

    steps: list[int] = dataclasses.field(default_factory=list[int])
    values: list[float] = dataclasses.field(default_factory=list[float])

    def put(self, step: int, value: float) -> None:
        """Set the value of a step; a later call for the same step replaces it."""
        at = bisect.bisect_left(self.steps, step)
        known = at < len(self.steps) and self.steps[at] == step
        self.steps[at : at + known] = [step]
        self.values[at : at + known] = [value]


class History(Mapping[str, Series]):
    """The metrics of a run by name, in order of first appearance; values that are not finite are left out."""

    def __init__(self, names: Container[str] | None = None) -> None:
        """Start empty; `add` keeps the metrics with these `names`, or all if None."""
        self._names = names
        self._series: dict[str, Series] = {}
        self.steps = 0
        """The last step of any line."""

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line of metrics.jsonl; if a step was written twice, the last line counts."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            return
        self.steps = max(self.steps, step)
        for name, value in line.items():
            if name == "step" or (self._names is not None and name not in self._names):
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                self._series.setdefault(name, Series()).put(step, value)

    def points(self, name: str) -> list[Point]:
        """Each step that has the metric, with its value; empty if the run does not have the metric."""
        return list(zip(self[name].steps, self[name].values, strict=True)) if name in self else []

    def last(self, name: str) -> float | None:
        """The newest value of a metric; None if the run does not have the metric."""
        return self[name].values[-1] if name in self else None

    def total(self, name: str) -> float | None:
        """The sum of a metric over all steps; None if the run does not have the metric."""
        return sum(self[name].values) if name in self else None

    def __getitem__(self, name: str) -> Series:
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)


def padding_share(history: History) -> float | None:
    """Share of the token places of a run's updates that hold no token; None if it had no updates."""
    totals = [history.total(f"tokens/{kind}") for kind in PLACES]
    padding, places = totals[0], sum(total for total in totals if total is not None)
    return padding / places if padding is not None and places else None


def read_history(folder: Path) -> History:
    """Read the history of a run from its metrics.jsonl. Raises RunFileError for a line that is not a record."""
    history = History()
    for line in read_metrics(folder / METRICS):
        history.add(line)
    return history


class Answers(NamedTuple):
    """The model's answers to one held-out question, at the first and the last evaluation."""

    question: str
    expected: str
    before: str
    after: str


def read_answers(folder: Path) -> Answers | None:
    """A question from both the first and the last evaluation, preferably one whose answer became correct.

    None if samples.jsonl does not have two evaluations with a common question.
    """
    records = [record for record in read_samples(folder / SAMPLES) if record["split"] == "eval"]
    steps = [record["step"] for record in records]
    if not records or min(steps) == max(steps):
        return None
    first, last = (
        {(record["task"], record["prompt"]): record for record in records if record["step"] == step}
        for step in (min(steps), max(steps))
    )
    common = [key for key in first if key in last]
    if not common:
        return None
    before, after = ({key: asked[key]["completions"][0] for key in common} for asked in (first, last))
    key = max(common, key=lambda key: after[key]["reward"] - before[key]["reward"])
    return Answers(first[key]["question"], first[key]["answer"], before[key]["text"], after[key]["text"])
