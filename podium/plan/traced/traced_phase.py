"""What is known of a traced program: its memory by kind of array, and the work of its kernels. No jax."""

import dataclasses
from collections.abc import Iterable, Mapping

from podium.hlo.cost import ProgramCost, Work
from podium.plan.result import LargeArray


@dataclasses.dataclass(frozen=True)
class TracedWork:
    """What a kernel does, and how often."""

    work: Work
    """One execution."""
    times: float = 1.0
    loops: tuple[str, ...] = ()
    """Sources of the loops around it whose rounds only the running program knows; `times` counts each of them once."""


def cost_of(works: Iterable[TracedWork]) -> ProgramCost:
    """The cost of some works; a loop whose rounds are unknown counts once."""
    return ProgramCost(tuple(dataclasses.replace(each.work, times=each.times) for each in works))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedPhase:
    """One program of a run as it was traced."""

    residents: Mapping[str, int]
    """Bytes in use on a device beside the program's own arguments, by kind of array."""
    parts: Mapping[str, int]
    """Bytes at the program's peak by kind of array, its arguments included."""
    largest: tuple[LargeArray, ...]
    """The largest arrays at the peak."""
    works: tuple[TracedWork, ...]
