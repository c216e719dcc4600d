"""What is known of a traced program: its memory by kind of array, and the work of its kernels. No jax."""

import dataclasses
from collections.abc import Iterable, Mapping

from podium.hlo.cost import Work
from podium.plan.result import LargeArray


@dataclasses.dataclass(frozen=True)
class TracedWork:
    """What a kernel does, and how often."""

    work: Work
    """One execution."""
    times: float = 1.0
    loops: tuple[str, ...] = ()
    """Sources of the loops around it whose rounds only the running program knows; `times` counts each of them once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedCost:
    """What a program does on one device; a loop whose rounds are unknown counts once."""

    flops: float = 0.0
    """Operations of products and of kernels, as these declare them."""
    hbm_bytes: float = 0.0
    sent: float = 0.0
    """Bytes sent to other devices."""


def cost_of(works: Iterable[TracedWork]) -> TracedCost:
    """The sum of some works."""
    flops = hbm_bytes = sent = 0.0
    for each in works:
        work = each.work
        flops += each.times * (work.flops + work.flops_f32)
        hbm_bytes += each.times * work.hbm_bytes
        sent += each.times * sum(transfer.sent for transfer in work.transfers)
    return TracedCost(flops=flops, hbm_bytes=hbm_bytes, sent=sent)


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
