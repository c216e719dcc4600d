"""What the compiler said of one phase's program, in a form that is kept on disk: memory, arrays, cost. No jax.

A program whose loop runs as often as it is told (decode steps, micro-batches, prompts to place) has a cost for each
number of rounds: `CompiledPhase.cost`.
"""

import dataclasses
from collections.abc import Mapping

from podium.hlo.cost import Cost, Work, unknown_loops, walk
from podium.hlo.memory import OTHER, Memory, NamedPeak, OutOfMemory, largest
from podium.hlo.text import Module
from podium.plan.result import LargeArray

KEPT_ARRAYS = 12
"""Of those at the peak, the largest, to be shown."""


@dataclasses.dataclass(frozen=True)
class LoopedWork:
    """Work that costs the same each time, and how often it is done."""

    work: Work
    """Of one time, without a name."""
    once: float
    """Times per call of the program, however often its loop runs."""
    each: float
    """Times more per round of the loop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPhase:
    """One program of a run, compiled for a device."""

    name: str
    residents: Mapping[str, int]
    """Bytes in use beside the program's own arguments."""
    memory: Memory
    parts: Mapping[str, int]
    """Bytes at the program's peak by our names; they add up to `memory.peak`."""
    largest: tuple[LargeArray, ...]
    work: tuple[LoopedWork, ...]
    loops: tuple[str, ...]
    """Sources of the loops whose rounds depend on what the program is given."""
    compile_s: float
    host_bytes: int
    """Memory of this machine that the compiler took."""
    versions: Mapping[str, str]

    @property
    def device_bytes(self) -> int:
        """Of a device while the program runs, but for code."""
        return sum(self.residents.values()) + self.memory.peak

    def cost(self, rounds: float) -> Cost:
        """Of one call in which the loop runs so often."""
        works = ((each.work, each.once + rounds * each.each) for each in self.work)
        return Cost(tuple(dataclasses.replace(work, times=times) for work, times in works if times))


def looped_work(module: Module, mesh: Mapping[str, int]) -> tuple[LoopedWork, ...]:
    """The cost of a program, split by whether it is repeated as often as the program is told; equal work together."""
    loops = unknown_loops(module)
    one, two = (walk(module, mesh, trips=dict.fromkeys(loops, rounds)).works for rounds in (1, 2))
    times: dict[Work, tuple[float, float]] = {}
    for first, second in zip(one, two, strict=True):
        work = dataclasses.replace(first, name="", source="", times=0.0)
        once, each = times.get(work, (0.0, 0.0))
        times[work] = (once + 2 * first.times - second.times, each + second.times - first.times)
    return tuple(LoopedWork(work, once, each) for work, (once, each) in times.items())


def named_memory(module: Module, peak: int) -> tuple[dict[str, int], tuple[LargeArray, ...]]:
    """The bytes at a program's peak by our names, and its largest arrays.

    What lives at the peak is found again from the program's text; where the compiler's own figure is another, the
    difference goes to `other`, or is taken from all in proportion.
    """
    found: NamedPeak = largest(module)
    parts = dict(found.by_name)
    if (beyond := peak - found.size) > 0:
        parts[OTHER] = parts.get(OTHER, 0) + beyond
    elif beyond < 0:
        parts = {name: size * peak // found.size for name, size in parts.items()}
        parts[OTHER] = parts.get(OTHER, 0) + peak - sum(parts.values())
    arrays = tuple(LargeArray(name=each.name, shape=each.shape, bytes=each.size) for each in found.buffers)
    return {name: size for name, size in parts.items() if size}, arrays[:KEPT_ARRAYS]


def named_refusal(refusal: OutOfMemory) -> tuple[dict[str, int], tuple[LargeArray, ...]]:
    """The same of a program that the compiler would not make: under one name, with what it listed."""
    arrays = tuple(LargeArray(name=each.source, shape=each.shape, bytes=each.size) for each in refusal.largest)
    return {"program": refusal.needed}, arrays[:KEPT_ARRAYS]
