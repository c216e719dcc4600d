"""The cost of one run of a compiled program on a device: products, memory traffic, transfers, and their time.

`walk` follows a module from its entry and counts loop bodies once per iteration; XLA's own `cost_analysis` counts them
only once. Pallas kernels are opaque in the text, so they count with the cost that they declare. `roofline` gives the
minimum seconds; callers apply measured factors. No jax.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from podium.hlo.collectives import KINDS, Beside, Transfer, kind_of, transfer
from podium.hlo.hlo_text import Computation, Instruction, Module
from podium.hlo.traffic import ASYNC_STARTS, fused, hbm_traffic, host_traffic, products

HOP_S = 1e-6  # seconds of a message to the neighbouring chip: jax-ml.github.io/scaling-book/sharding
KERNELS = ('"tpu_custom_call"', '"__gpu$xla.gpu.triton"')
DECLARED = re.compile(
    r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(?P<tpu>\d+)|serialized_metadata = "\{\\22flops\\22: \\22(?P<gpu>\d+)'
    r"(?:\\22, \\22bytes\\22: \\22(?P<bytes>\d+))?"
)
SPARSE_CORE = 'async_execution_thread="sparsecore"'
GPU_COLLECTIVE = '"collective_backend_config"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak rates of a device, per second."""

    flops_bf16: float  # operations of bfloat16 products
    flops_f32: float  # operations of float32 products at jax's highest precision
    hbm_bandwidth: float  # bytes to and from main memory
    link_bandwidth: float  # bytes over one link to another device, in one direction
    collective_s: float = 0.0  # minimum seconds of a collective, however small
    kernel_s: float = 0.0  # minimum seconds of any other instruction, from its launch to the next
    network_bandwidth: float = 0.0  # bytes to other machines, a device's share; 0: all devices are on one machine
    host_bandwidth: float = 0.0  # bytes to or from the host's memory; 0: devices use the host's memory


@dataclasses.dataclass(frozen=True)
class Work:
    """The cost of one instruction; all fields but `times` are for a single execution."""

    name: str
    source: str  # the path of names under which jax traced it
    times: float
    flops: float = 0  # operations of products whose operands are not both float32
    flops_f32: float = 0  # operations of products of float32
    hbm_bytes: float = 0
    transfers: tuple[Transfer, ...] = ()
    host_bytes: float = 0  # copied from or to the host's memory
    beside: Beside = (0.0, 0.0, 0.0)  # work that the device does while the host copies are in flight
    kernel: bool = False  # whether it is a Pallas kernel
    of_block: bool = False  # whether the kernel's operations and bytes are those of one block of the cache

    def seconds(self, peaks: Peaks) -> tuple[float, float]:
        """The minimum seconds of one execution, for its products and for its memory traffic."""
        multiplying = self.flops / peaks.flops_bf16 + self.flops_f32 / peaks.flops_f32
        return multiplying, self.hbm_bytes / peaks.hbm_bandwidth


@dataclasses.dataclass(frozen=True)
class CollectiveTotal:
    """The sum of all collectives of one kind along the same axes."""

    kind: str
    axes: tuple[str, ...]
    group: int
    overlaps: bool
    calls: float
    sent: float  # bytes


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """The cost of one run of a program on one device."""

    works: tuple[Work, ...]

    @property
    def flops(self) -> float:
        """Operations of all products; a multiply-add counts as two."""
        return sum(work.times * (work.flops + work.flops_f32) for work in self.works)

    @property
    def hbm_bytes(self) -> float:
        """Bytes read from and written to main memory."""
        return sum(work.times * work.hbm_bytes for work in self.works)

    @property
    def sent(self) -> float:
        """Bytes sent to other devices."""
        return sum(work.times * sum(each.sent for each in work.transfers) for work in self.works)

    @property
    def collectives(self) -> tuple[CollectiveTotal, ...]:
        """All transfers of the run, summed by kind and axes."""
        return sum_collectives(
            (work.times, CollectiveTotal(each.kind, each.axes, each.group, each.hidden, calls=1, sent=each.sent))
            for work in self.works
            for each in work.transfers
        )


def sum_collectives(found: Iterable[tuple[float, CollectiveTotal]]) -> tuple[CollectiveTotal, ...]:
    """Totals multiplied by their counts, equal kinds merged; the largest sender comes first."""
    sums: dict[tuple, tuple[float, float]] = {}
    for times, each in found:
        key = (each.kind, each.axes, each.group, each.overlaps)
        calls, sent = sums.get(key, (0.0, 0.0))
        sums[key] = (calls + times * each.calls, sent + times * each.sent)
    order = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    return tuple(CollectiveTotal(*key, calls=calls, sent=sent) for key, (calls, sent) in order)


@dataclasses.dataclass(frozen=True)
class _Context:
    """State that is constant during a walk."""

    module: Module
    mesh: Mapping[str, int]
    trips: Mapping[str, float]
    skipped: frozenset[str]
    per_machine: int
    once: bool = False  # whether each loop counts as one iteration
    beside: bool = True  # whether to find the work done during transfers and copies


def walk(
    module: Module,
    mesh: Mapping[str, int],
    *,
    trips: Mapping[str, float] | None = None,
    skipped: Iterable[str] = (),
    per_machine: int = 0,
    once: bool = False,
) -> ProgramCost:
    """Compute the cost of one run on one device; a conditional counts as its most expensive branch.

    Args:
        module: the compiled program.
        mesh: sizes of the mesh axes, major first; devices are numbered in this order.
        trips: iterations, by source, of loops whose trip count is not in the text (`unknown_loops`).
        skipped: scopes whose conditionals count as their cheapest branch.
        per_machine: devices per machine; 0: all are on one.
        once: count each loop as one iteration, as XLA's `cost_analysis` does.

    Raises:
        ValueError: the program was compiled for another number of devices, or a trip count is missing.
    """
    if math.prod(mesh.values()) != module.num_partitions:
        raise ValueError(
            f"{module.name} is compiled for {module.num_partitions} devices, not for the {math.prod(mesh.values())} of"
            f" mesh {dict(mesh)}; give the mesh that it was lowered on"
        )
    context = _Context(module, mesh, trips=trips or {}, skipped=frozenset(skipped), per_machine=per_machine, once=once)
    if not once and (missing := [source for source in unknown_loops(module) if source not in context.trips]):
        raise ValueError(
            f"{module.name}: the trip count of {' and '.join(map(repr, missing))} is not in the program's text;"
            f" pass it, for example trips={{{missing[0]!r}: 4}}"
        )
    return ProgramCost(tuple(_walk(context, module.entry, 1.0)))


def unknown_loops(module: Module) -> list[str]:
    """Sources of the loops whose trip count depends on the program's arguments."""
    return list(dict.fromkeys(loop.source for loop, trips in module.loops.items() if trips is None))


def _walk(context: _Context, computation: Computation, times: float) -> Iterator[Work]:
    for each in computation.instructions.values():
        yield from _works(context, each, computation, times)


def _works(context: _Context, each: Instruction, computation: Computation, times: float) -> Iterator[Work]:
    inner = [context.module.computations[name] for name in each.runs]
    if each.opcode == "while":
        counted = 1 if context.once else context.module.loops[each]
        again = context.trips[each.source] if counted is None else counted
        for part in inner:
            yield from _walk(context, part, times * again)
    elif each.opcode == "conditional":
        branches = [tuple(_walk(context, part, times)) for part in inner]
        runs = min if context.skipped.intersection(re.split(r"[/()]+", each.source)) else max
        yield from runs(branches, key=_weight)
    elif inner:
        works = [work for part in inner for work in _walk(context, part, times)]
        copies = each.opcode in ASYNC_STARTS and any(work.host_bytes for work in works)
        beside = _until_done(context, each, computation) if copies or SPARSE_CORE in each.attributes else None
        for work in works:
            apart = tuple(dataclasses.replace(sent, beside=beside or sent.beside) for sent in work.transfers)
            yield dataclasses.replace(work, transfers=apart, beside=beside or work.beside)
    elif work := _work(context, each, computation, times):
        waits_later = work.host_bytes and each.opcode.endswith("-start")
        yield dataclasses.replace(work, beside=_until_done(context, each, computation)) if waits_later else work


def _weight(branch: tuple[Work, ...]) -> float:
    """The cost by which branches are ranked, in bytes; 100 flops count as a byte, so all chips give the same order."""
    cost = ProgramCost(branch)
    return cost.hbm_bytes + cost.flops / 100


def _work(context: _Context, each: Instruction, computation: Computation, times: float) -> Work | None:
    """The work of an instruction outside a fusion; None if it is free."""
    inside = list(fused(context.module, each, computation))
    made = [(part, where, number) for part, where in inside if (number := products(part, where))]
    float32 = sum(number for part, where, number in made if _is_float32(part, where))
    work = Work(
        name=each.name,
        source=made[0][0].source if made else each.source,
        times=times,
        flops=sum(number for *_, number in made) - float32,
        flops_f32=float32,
        hbm_bytes=hbm_traffic(each, computation, context.module),
        transfers=tuple(_transfers(context, inside)),
        host_bytes=sum(host_traffic(part, where) for part, where in inside),
    )
    if each.attribute("custom_call_target") in KERNELS:  # its author may declare its operations
        declared = DECLARED.search(each.attributes)
        flops = float(declared["tpu"] or declared["gpu"]) if declared else 0.0
        work = dataclasses.replace(work, flops=flops, kernel=True)
        if declared and declared["bytes"]:  # of a kernel that reads only the pages in use
            work = dataclasses.replace(work, hbm_bytes=float(declared["bytes"]), of_block=True)
    return work if any((work.flops, work.flops_f32, work.hbm_bytes, work.transfers, work.host_bytes)) else None


def _is_float32(product: Instruction, computation: Computation) -> bool:
    return all(computation.instructions[name].shapes[0].dtype == "f32" for name in product.operands)


def _transfers(context: _Context, inside: list[tuple[Instruction, Computation]]) -> Iterator[Transfer]:
    """The collectives of an instruction; a gather that spans several fusions is counted where it starts."""
    starts = any('"AsyncCollectiveStart"' in part.attributes for part, _ in inside)
    for part, computation in inside:
        chained = "chain_id" in part.attribute("frontend_attributes")
        if (kind := kind_of(part)) and (starts or not chained):
            begins = part.opcode.endswith("-start")
            waits = begins and GPU_COLLECTIVE in part.attributes
            found = transfer(
                part,
                kind,
                computation,
                context.mesh,
                overlaps=starts or (begins and not waits),
                per_machine=context.per_machine,
            )
            yield dataclasses.replace(found, beside=_until_done(context, part, computation)) if waits else found


def _until_done(context: _Context, start: Instruction, computation: Computation) -> Beside:
    """The work of a device between the start and the end of a collective or copy, in program order."""
    if not context.beside:
        return 0.0, 0.0, 0.0
    alone = dataclasses.replace(context, beside=False)
    rest = itertools.dropwhile(lambda each: each is not start, computation.instructions.values())
    between = itertools.takewhile(lambda each: start.name not in each.operands, itertools.islice(rest, 1, None))
    works = [work for each in between if not kind_of(each) for work in _works(alone, each, computation, 1.0)]
    found = ProgramCost(tuple(works))
    float32 = sum(work.times * work.flops_f32 for work in works)
    return float32, found.flops - float32, found.hbm_bytes


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one run, split into parts that add up."""

    compute: float  # in instructions whose products take longer than their memory traffic
    hbm: float  # in instructions whose memory traffic takes longer
    ici: float  # in transfers while nothing else runs
    latency: float  # that small kernels and transfers need beyond the time for their operations and bytes
    copies: tuple[tuple[float, float, float], ...] = ()
    """Copies between device and host: how often, seconds of each, and seconds of the work done during each."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the resource waited for; copies count only beyond the work done meanwhile."""
        host = sum(times * max(0.0, copied - doing) for times, copied, doing in self.copies)
        return {"compute": self.compute, "hbm": self.hbm, "ici": self.ici, "latency": self.latency, "host": host}


def roofline(cost: ProgramCost, peaks: Peaks, *, links: int) -> Roofline:
    """The minimum time of one run on a device whose rings use `links` links at once.

    Instructions run one after another; each takes the longest of its compute time, its memory time and a launch.
    Transfers that the program waits for are added; overlapping ones add only the time by which, taken together, they
    exceed the work. Copies between device and host are listed separately, because their time depends on the measured
    speed of both.
    """
    compute = hbm = waited = beside = latency = 0.0
    copies: dict[tuple[float, float], float] = collections.defaultdict(float)
    for work in cost.works:
        multiplying, moving = work.seconds(peaks)
        compute += work.times * multiplying * (multiplying >= moving)
        hbm += work.times * moving * (moving > multiplying)
        latency += work.times * max(0.0, peaks.kernel_s - max(multiplying, moving)) * (not work.transfers)
        if work.host_bytes and peaks.host_bandwidth:
            copies[work.host_bytes / peaks.host_bandwidth, _doing(work.beside, peaks)] += work.times
        for each in work.transfers:
            link_s, doing = transfer_seconds(each, peaks, links), _doing(each.beside or (0.0, 0.0, 0.0), peaks)
            waited += work.times * max(0.0, link_s - doing) * (not each.overlaps)
            beside += work.times * link_s * each.overlaps
            hops = KINDS[each.kind].rounds * max(1, each.group // 2)  # one after the other, both ways around a ring
            least = max(hops * HOP_S, peaks.collective_s)
            latency += work.times * max(0.0, least - link_s) * (not each.overlaps)
    ici = waited + max(0.0, beside - compute - hbm)
    return Roofline(compute, hbm, ici, latency, tuple((times, *each) for each, times in copies.items()))


def _doing(beside: Beside, peaks: Peaks) -> float:
    """The minimum time of the work done during a transfer."""
    float32, flops, traffic = beside
    return max(float32 / peaks.flops_f32 + flops / peaks.flops_bf16, traffic / peaks.hbm_bandwidth)


def transfer_seconds(each: Transfer, peaks: Peaks, links: int) -> float:
    """The time of a transfer's bytes: within machines or between them, whichever is longer.

    Only bytes that leave a machine use the network, whose bandwidth the group's devices on that machine share.
    """
    within = each.sent / (links * peaks.link_bandwidth)
    if each.machines == 1:
        return within
    return max(within, each.sent * each.machines / each.group / peaks.network_bandwidth)
