"""When transfers between devices run beside a device's own kernels, each for as long as its bytes need.

A compiler starts a gather as late as still hides it, and a sum as soon as its parts are there. Transfers wait for each
other, since all use the same links, and none goes on during a loop: a loop's body is scheduled for itself.
"""

from collections.abc import Callable, Mapping, Sequence

from podium.plan.traced.fusion import Kernel
from podium.plan.traced.lowered_program import Array
from podium.plan.traced.operation_table import Kind

SUMS = ("all_reduce", "reduce_scatter")
Seconds = Callable[[Kernel], float]
"""How long a kernel takes, or a transfer."""


def gathers_late(order: Sequence[Kernel], seconds: Seconds) -> list[Kernel]:
    """The kernels in their order, with every gather as late as the kernels after it hide it."""
    made = {write: kernel for kernel in order for write in kernel.writes}
    gathers = [kernel for kernel in order if _waits(kernel, made)]
    others = [kernel for kernel in order if kernel not in set(gathers)]
    at = {kernel: number for number, kernel in enumerate(others)}
    first: dict[Kernel, int] = {}
    for number, kernel in enumerate(others):
        for read in kernel.reads:
            if read in made:
                first.setdefault(made[read], number)
    before: dict[int, list[Kernel]] = {}
    start = len(others)
    for kernel in sorted(gathers, key=lambda each: first.get(each, len(others)), reverse=True):
        start, left = min(start, first.get(kernel, len(others))), seconds(kernel)
        earliest = max((at[made[read]] + 1 for read in kernel.reads if read in made), default=0)
        while start > earliest and left > 0 and others[start - 1].operation.kind is not Kind.LOOP:
            start -= 1
            left -= seconds(others[start])
        start = max(start, earliest)
        before.setdefault(start, []).insert(0, kernel)
    return [
        each for number in range(len(others) + 1) for each in (*before.get(number, ()), *others[number : number + 1])
    ]


def _waits(kernel: Kernel, made: Mapping[Array, Kernel]) -> bool:
    """Whether a kernel is a transfer that may be put off: all that it reads is there already."""
    if kernel.operation.kind is not Kind.TRANSFER or kernel.operation.name in SUMS:
        return False
    return all(made[read].operation.kind is not Kind.TRANSFER for read in kernel.reads if read in made)


def sums_end(order: Sequence[Kernel], seconds: Seconds) -> dict[Kernel, int]:
    """For each sum over devices, the number of the kernel during which it ends."""
    ends: dict[Kernel, int] = {}
    end = 0
    for number, kernel in enumerate(order):
        if kernel.operation.name not in SUMS:
            continue
        end, left, results = max(end, number), seconds(kernel), set(kernel.writes)
        while left > 0 and end + 1 < len(order):
            following = order[end + 1]
            if following.operation.kind is Kind.LOOP or not results.isdisjoint(following.reads):
                break
            end += 1
            left -= 0.0 if following.operation.kind is Kind.TRANSFER else seconds(following)
        ends[kernel] = end
    return ends
