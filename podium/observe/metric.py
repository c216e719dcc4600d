"""What a metric is: a name with its unit, its definition, and the reader of its value."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from podium.observe.stats import EvaluationStats, StepStats, TaskScores

SPREAD = ("mean", "std", "min", "max")
MEAN_MAX = ("mean", "max")
LOW_HIGH = ("low", "high")

Value = float | None | tuple[float, float] | np.ndarray | Mapping[str, float]
"""What a reader returns: a number; None where there is none to write; for `parts` low and high, or an array for those
that are statistics; for a name with `<part>` a value by part."""


class Metric(NamedTuple):
    """One metric, or those of one quantity that differ by their last part."""

    name: str
    unit: str
    definition: str
    step: Callable[[StepStats], Value] | None = None
    """Reads the value from a step's statistics; unset here and in the next two: who measures it writes it."""
    evaluation: Callable[[EvaluationStats], Value] | None = None
    task: Callable[[TaskScores], Value] | None = None
    parts: tuple[str, ...] = ()
    """Last parts of the name: `name/mean`, `name/max`, ...; none: the name is complete."""

    @property
    def names(self) -> tuple[str, ...]:
        """The complete names."""
        return tuple(f"{self.name}/{part}" for part in self.parts) or (self.name,)
