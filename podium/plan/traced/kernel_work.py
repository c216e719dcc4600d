"""The work of a traced program's kernels: operations, bytes of memory, and what they send, each with its place."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from podium.hlo.collectives import Transfer
from podium.hlo.cost import Beside, Work
from podium.plan.traced.fusion import Kernel
from podium.plan.traced.operation_table import TO_MEMORY, TPU_KERNEL, Kind
from podium.plan.traced.traced_phase import TracedWork, cost_of

NOTHING: Beside = (0.0, 0.0, 0.0)


def beside_copies(works: Sequence[TracedWork]) -> Iterator[TracedWork]:
    """The work of a loop's round, whose copies from and to the host's memory go on beside all else."""
    own = [each for each in works if not each.work.host_bytes]
    float32 = sum(each.times * each.work.flops_f32 for each in own)
    cost = cost_of(own)
    for each in works:
        work = dataclasses.replace(each.work, beside=(float32, cost.flops - float32, cost.hbm_bytes))
        yield dataclasses.replace(each, work=work) if each.work.host_bytes else each


def work_of(kernel: Kernel) -> Work | None:
    """The work of one execution of a kernel without what runs inside it; None if it does nothing."""
    operation = kernel.operation
    if operation.kind in (Kind.LOOP, Kind.BARRIER):
        return None
    if operation.kind is Kind.TRANSFER:
        size, group, machines = operation.sent
        if size <= 0:
            return None
        name = "collective_permute" if operation.name == "collective_broadcast" else operation.name
        sent = Transfer(name.replace("_", "-"), (), group, round(size), overlaps=False, machines=machines)
        return Work("", operation.source, 1.0, transfers=(sent,))
    if operation.name == TO_MEMORY:
        size = max(array.bytes for array in (*operation.reads, *operation.writes))
        return Work("", operation.source, 1.0, hbm_bytes=float(size), host_bytes=float(size))
    float32 = operation.kind is Kind.PRODUCT and all(read.dtype == "f32" for read in operation.reads)
    work = Work(
        name="",
        source=operation.source,
        times=1.0,
        flops=0.0 if float32 else operation.flops,
        flops_f32=operation.flops if float32 else 0.0,
        hbm_bytes=_moved(kernel) if operation.declared_bytes is None else operation.declared_bytes,
        kernel=operation.is_pallas,
        of_block=operation.declared_bytes is not None and operation.name != TPU_KERNEL,
    )
    return work if work.flops or work.flops_f32 or work.hbm_bytes else None


def _moved(kernel: Kernel) -> float:
    """Bytes of memory that a kernel reads and writes; what only takes or puts a part moves that part."""
    operation = kernel.operation
    if operation.name == "gather":
        return float(kernel.writes[0].bytes + kernel.written_bytes)
    if operation.name == "dynamic_update_slice" and len(operation.reads) > 1:
        return 2.0 * operation.reads[1].bytes
    if operation.name == "scatter" and len(operation.reads) > 2:
        return 3.0 * operation.reads[2].bytes
    return float(kernel.read_bytes + kernel.written_bytes)


def works_in_order(order: Sequence[Kernel], seconds: Callable[[Kernel], float]) -> Iterator[TracedWork]:
    """The work of kernels that run in an order, without what runs inside them.

    A transfer goes on beside the kernels until one reads its result, or until as much time has passed as it takes;
    transfers share the links, so each kernel hides one, and a loop hides none: its body is scheduled for itself.
    """
    beside: dict[Kernel, Beside] = {}
    going: dict[Kernel, float] = {}
    """Transfers that have begun, with the seconds that they still take."""
    for kernel in order:
        if kernel.operation.kind is Kind.TRANSFER:
            going[kernel], beside[kernel] = seconds(kernel), NOTHING
            continue
        reads = set(kernel.reads)
        for each in [each for each in going if not reads.isdisjoint(each.writes)]:
            del going[each]
        if kernel.operation.kind is Kind.LOOP:
            going.clear()
        work, first = work_of(kernel), next(iter(going), None)
        if work is not None and first is not None:
            float32, flops, moved = beside[first]
            beside[first] = float32 + work.flops_f32, flops + work.flops, moved + work.hbm_bytes
            going[first] -= seconds(kernel)
            if going[first] <= 0:
                del going[first]
    for kernel in order:
        if (work := work_of(kernel)) is not None:
            sent = tuple(dataclasses.replace(each, beside=beside[kernel]) for each in work.transfers)
            yield TracedWork(dataclasses.replace(work, transfers=sent))
