"""What the compiler said of one phase's program, in a form that is kept on disk: memory, arrays, cost. No jax.

A program whose loop runs as often as it is asked to (decode steps, micro-batches, prompts that enter slots) has a cost
for each number of rounds: `CompiledPhase.cost`.
"""

import dataclasses
from collections.abc import Mapping

from podium.hlo.cost import ProgramCost, Work, unknown_loops, walk
from podium.hlo.memory import OTHER, Memory, OutOfMemory, largest
from podium.hlo.text import Module
from podium.plan.result import LargeArray

KEPT_ARRAYS = 12  # how many of the arrays at the peak are kept, the largest, to be shown


@dataclasses.dataclass(frozen=True)
class LoopedWork:
    """Work that costs the same each time, and how often it is done."""

    work: Work  # of one time, without a name
    once: float  # times per call of the program, however often its loop runs
    each: float  # times more per round of the loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPhase:
    """One program of a run, compiled for a device."""

    residents: Mapping[str, int]  # bytes in use beside the program's own arguments
    memory: Memory
    parts: Mapping[str, int]  # bytes at the program's peak by our names; they add up to `memory.peak`
    largest: tuple[LargeArray, ...]
    work: tuple[LoopedWork, ...]
    compile_s: float

    @property
    def device_bytes(self) -> int:
        """Of a device while the program runs, but for code."""
        return sum(self.residents.values()) + self.memory.peak

    def cost(self, rounds: float) -> ProgramCost:
        """The cost of one call in which the loop runs so often."""
        works = ((each.work, each.once + rounds * each.each) for each in self.work)
        return ProgramCost(tuple(dataclasses.replace(work, times=times) for work, times in works if times))


def looped_work(module: Module, mesh: Mapping[str, int]) -> tuple[LoopedWork, ...]:
    """The cost of a program, split by whether it is repeated with the program's own loop; equal work together."""
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
    found = largest(module)
    parts = dict(found.by_name)
    if (beyond := peak - found.size) > 0:
        parts[OTHER] = parts.get(OTHER, 0) + beyond
    elif beyond < 0:
        parts = {name: size * peak // found.size for name, size in parts.items()}
        parts[OTHER] = parts.get(OTHER, 0) + peak - sum(parts.values())
    arrays = tuple(LargeArray(name=each.name, shape=each.shape, bytes=each.size) for each in found.buffers)
    return {name: size for name, size in parts.items() if size}, arrays[:KEPT_ARRAYS]


def named_refusal(refusal: OutOfMemory) -> tuple[dict[str, int], tuple[LargeArray, ...]]:
    """The memory of a program that the compiler refused: under one name, with the arrays that it listed."""
    arrays = tuple(LargeArray(name=each.source, shape=each.shape, bytes=each.size) for each in refusal.largest)
    return {"program": refusal.needed}, arrays[:KEPT_ARRAYS]
