"""When each array of a program is in memory, and so the most bytes at once; with operations and bytes moved.

Kernels run one after the other. Transfers between devices take their time beside them, so what they read stays while
they go on. Results are written over what dies where a kernel reads each element where it writes it.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from podium.hlo.cost import Peaks, ProgramCost, transfer_seconds
from podium.plan.traced.fusion import Compiler, Kernel, keep_on_chip, kernels
from podium.plan.traced.kernel_work import beside_copies, work_of, works_in_order
from podium.plan.traced.lowered_program import Array, Body, DeviceProgram, Operation
from podium.plan.traced.operation_table import TO_MEMORY, Kind
from podium.plan.traced.simplification import hoist, simplify
from podium.plan.traced.traced_phase import TracedWork, cost_of
from podium.plan.traced.transfers import gathers_late, sums_end


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedMemory:
    """What a program needs on one device."""

    arguments: int
    """Bytes of its arguments."""
    temporary: int
    """Bytes of its other arrays, results included, where they are most."""
    works: tuple[TracedWork, ...]
    largest: tuple[tuple[int, Array], ...]
    """The arrays beside the arguments there, in descending order of bytes."""

    @property
    def peak(self) -> int:
        """Bytes in use where they are most."""
        return self.arguments + self.temporary

    @property
    def cost(self) -> ProgramCost:
        """The sum of its works."""
        return cost_of(self.works)


@dataclasses.dataclass(frozen=True)
class _Peak:
    """The moment of a body at which most bytes are alive."""

    bytes: int
    alive: Mapping[Array, int]
    inside: "_Peak | None" = None
    """That of the loop or branch that runs then."""

    def arrays(self) -> Iterator[tuple[Array, int]]:
        """The arrays alive, and those inside the loop that runs."""
        yield from self.alive.items()
        if self.inside is not None:
            yield from self.inside.arrays()


@dataclasses.dataclass(frozen=True)
class TracedMachine:
    """What runs a traced program."""

    compiler: Compiler
    peaks: Peaks | None
    """Rates of a device; None if they are unknown, and transfers then take no time."""
    kernel_rows: frozenset[int] = frozenset()
    """Sizes of the last dimensions of what the program's Pallas kernels read."""
    skipped: frozenset[str] = frozenset()
    """Scopes of the choices that take their cheapest branch; others take the dearest."""


def measure(program: DeviceProgram, machine: TracedMachine) -> TracedMemory:
    """The memory and cost of a program on one device, which is simplified in place."""
    body = program.body
    simplify(body)
    machine = dataclasses.replace(machine, kernel_rows=frozenset(_kernel_rows(body)))
    if machine.compiler.hoists:
        hoist(body)
    found = _Schedule(machine, body, donated=[body.given[number] for number in program.donated])
    found.store_results(_stored(program))
    peak = found.peak()
    largest = sorted(((size, array) for array, size in peak.arrays() if size), key=lambda each: -each[0])
    return TracedMemory(
        arguments=sum(array.bytes for array in body.given),
        temporary=peak.bytes,
        works=tuple(found.works()),
        largest=tuple(largest),
    )


def _stored(program: DeviceProgram) -> set[int]:
    """The numbers of the results that are written over arguments."""
    stored = {number for number in program.donated.values() if number is not None}
    free = [program.body.given[number] for number, result in program.donated.items() if result is None]
    for number, result in enumerate(program.body.results):
        match = next((array for array in free if repr(array) == repr(result)), None)
        if number not in stored and match is not None:
            free.remove(match)
            stored.add(number)
    return stored


class _Schedule:
    """The kernels of a body, what they write where, and their order."""

    def __init__(
        self, machine: TracedMachine, body: Body, *, owned: Collection[Array] = (), donated: Collection[Array] = ()
    ) -> None:
        """Find the kernels of a body.

        Args:
            machine: the device, and what its compiler does.
            body: a simplified body.
            owned: those of its arguments that are in its memory, and over which it may write.
            donated: those that are in memory that is counted elsewhere, and over which it may write.
        """
        self.machine, self.body = machine, body
        self.kernels = kernels(body, machine.compiler)
        keep_on_chip(self.kernels, set(body.results), machine.compiler.on_chip)
        self.owned, self.writable = list(owned), {*owned, *donated}
        self.results = set(body.results)
        self.homes: dict[Array, Array] = {}
        self.inside: dict[Kernel, _Peak] = {}
        self.works_inside: list[TracedWork] = []
        self.order: Sequence[Kernel] = self.kernels
        for kernel in self.kernels:
            if kernel.operation.bodies:
                self.inside[kernel], works = self.loop(kernel.operation)
                self.works_inside += works
        self.find_homes()
        self.stacks = {read for kernel in self.kernels for read in _stacks(kernel.operation)}
        self.sizes = {write: self.size(kernel, write) for kernel in self.kernels for write in kernel.writes}
        self.sizes |= {array: array.bytes for array in self.owned} | dict.fromkeys(donated, 0)
        self.write_into_stacks()

    def seconds(self, kernel: Kernel) -> float:
        """How long a kernel takes by the roofline, or a transfer around a ring, which is sent both ways."""
        work, peaks = work_of(kernel), self.machine.peaks
        if peaks is None or work is None:
            return 0.0
        return max(*work.seconds(peaks), sum(transfer_seconds(each, peaks, links=2) for each in work.transfers))

    def works(self) -> Iterator[TracedWork]:
        """The work of its kernels and of what runs inside them, after `peak` has chosen their order."""
        yield from works_in_order(self.order, self.seconds)
        yield from self.works_inside

    def loop(self, operation: Operation) -> tuple[_Peak, list[TracedWork]]:
        """What a round of a loop or a branch needs beside what the loop carries, and the work of all rounds."""
        if operation.name != "while":
            branches = [_Schedule(self.machine, body) for body in operation.bodies]
            peak = max((branch.peak() for branch in branches), key=lambda peak: peak.bytes)
            skipped = not self.machine.skipped.isdisjoint(operation.source.split("/"))
            works = [list(branch.works()) for branch in branches]
            return peak, (min if skipped else max)(works, key=_weight)
        (body,) = operation.bodies
        carried = [given for given, result in zip(body.given, body.results, strict=True) if given is not result]
        inside = _Schedule(self.machine, body, owned=carried)
        peak, held = inside.peak(), sum(given.bytes for given in carried)
        alive = {array: size for array, size in peak.alive.items() if array not in carried}
        moving = sum(_in_flight(each) for each in body.operations)
        peak = dataclasses.replace(peak, bytes=max(0, peak.bytes - held) + moving, alive=alive)
        works, trips = beside_copies(list(inside.works())), operation.trips
        if trips is None:
            return peak, [dataclasses.replace(each, loops=(*each.loops, operation.source)) for each in works]
        return peak, [dataclasses.replace(each, times=trips * each.times) for each in works]

    def place(self, array: Array) -> Array:
        """The array in whose memory an array is."""
        while array in self.homes:
            array = self.homes[array]
        return array

    def find_homes(self) -> None:
        """Find which results are written over operands: updates of a part, and what loops carry."""
        made, last = {write for kernel in self.kernels for write in kernel.writes}, dict[Array, int]()
        for number, kernel in enumerate(self.kernels):
            last.update(dict.fromkeys(kernel.reads, number))
        for number, kernel in enumerate(self.kernels):
            operation, taken = kernel.operation, set[Array]()
            for out, at in operation.in_place:
                write, read = operation.writes[out], operation.reads[at]
                free = read in self.writable or read in made
                kept = operation.kind is Kind.BARRIER or (operation.kind is Kind.LOOP and _unchanged(operation, out))
                dies = free and last.get(read, -1) <= number and read.bytes == write.bytes and read not in self.results
                if kept or (dies and self.place(read) not in taken):
                    self.homes[write] = read
                    taken.add(self.place(read))

    def size(self, kernel: Kernel, write: Array) -> int:
        """Bytes that a kernel's result needs of its own."""
        if write in self.homes:
            return 0
        # Kernels read and write rows of whole lanes; what a loop keeps for kernels lies as they read it.
        in_rows = kernel.operation.is_pallas or (write in self.stacks and write.shape[-1] in self.machine.kernel_rows)
        return _padded(write, self.machine.compiler.lanes) if in_rows and len(write.shape) > 1 else write.bytes

    def write_into_stacks(self) -> None:
        """Let what is only put into a stack be computed there, by kernels whose results a compiler can redirect."""
        reading = defaultdict(list)
        for kernel in self.kernels:
            for read in kernel.reads:
                reading[read].append(kernel)
        for kernel in self.kernels:
            if kernel.operation.name == "dynamic_update_slice":
                part = kernel.operation.reads[1]
                if reading[part] == [kernel] and part not in self.results and self.redirects(part.maker):
                    self.sizes[part] = 0

    def redirects(self, maker: Operation | None) -> bool:
        """Whether the result of an operation can be written into a part of another array."""
        if maker is None or maker.kind in (Kind.OWN, Kind.LOOP, Kind.TRANSFER, Kind.BARRIER):
            return False
        return maker.kind is not Kind.PRODUCT or self.machine.compiler.products_compute

    def store_results(self, stored: Collection[int]) -> None:
        """Let results be written over donated arguments, those that are read again by a copy."""
        own = {result for number, result in enumerate(self.body.results) if number not in stored}
        read = {array for kernel in self.kernels for array in kernel.reads}
        with_copies: list[Kernel] = []
        for kernel in self.kernels:
            with_copies.append(kernel)
            for write in kernel.writes:
                if write in self.results and write not in own and self.place(write) not in self.writable:
                    if write not in read and not kernel.operation.is_pallas and self.redirects(kernel.operation):
                        self.sizes[write] = 0
                    else:
                        copy = Operation(name="copy", kind=Kind.OWN, reads=[write], writes=[])
                        with_copies.append(Kernel(copy, [write], []))
        self.kernels, self.results = with_copies, own

    def peak(self) -> _Peak:
        """The most bytes alive at once: in the order of the trace or in one that frees bytes first, the lesser."""
        self.order, peak = min(((order, self.walk(order)) for order in self.orders()), key=lambda found: found[1].bytes)
        return peak

    def orders(self) -> Iterator[Sequence[Kernel]]:
        """The orders of the kernels that a compiler would try."""
        made = {write: kernel for kernel in self.kernels for write in kernel.writes}
        needs = {kernel: {made[read] for read in kernel.reads if read in made} - {kernel} for kernel in self.kernels}
        for order in (self.kernels, self.freeing(needs)):
            yield gathers_late(order, self.seconds)

    def freeing(self, needs: Mapping[Kernel, set[Kernel]]) -> list[Kernel]:
        """The order in which always that kernel is next that frees most."""
        left: dict[Array, int] = defaultdict(int)
        touched = {kernel: {self.place(read) for read in kernel.reads} for kernel in self.kernels}
        for places in touched.values():
            for place in places:
                left[place] += 1
        kept = {self.place(result) for result in self.results}
        users: dict[Kernel, list[Kernel]] = defaultdict(list)
        for kernel, needed in needs.items():
            for other in needed:
                users[other].append(kernel)
        missing = {kernel: len(needed) for kernel, needed in needs.items()}
        numbers = {kernel: number for number, kernel in enumerate(self.kernels)}
        ready = [kernel for kernel in self.kernels if not missing[kernel]]
        order: list[Kernel] = []

        def gain(kernel: Kernel) -> tuple[int, int]:
            freed = sum(self.sizes.get(place, 0) for place in touched[kernel] if left[place] == 1 and place not in kept)
            return freed - sum(self.sizes.get(write, 0) for write in kernel.writes), -numbers[kernel]

        while ready:
            best = max(ready, key=gain)
            ready.remove(best)
            order.append(best)
            for place in touched[best]:
                left[place] -= 1
            for user in users[best]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        return order

    def walk(self, order: Sequence[Kernel]) -> _Peak:
        """The most bytes alive at once in an order."""
        last: dict[Array, int] = {}
        for number, kernel in enumerate(order):
            last.update({self.place(array): number for array in (*kernel.reads, *kernel.writes)})
        for kernel, end in sums_end(order, self.seconds).items():
            last.update({self.place(read): max(last[self.place(read)], end) for read in kernel.reads})
        final = {self.place(result) for result in self.results}
        alive = {array: self.sizes[array] for array in self.owned if array in last or array in final}
        ends: dict[int, list[Array]] = defaultdict(list)
        for array, number in last.items():
            if array not in final:
                ends[number].append(array)
        now = sum(alive.values())
        peak = _Peak(now, dict(alive))
        for number, kernel in enumerate(order):
            fresh = {write: self.sizes[write] for write in kernel.writes if write not in self.homes}
            alive |= fresh
            now += sum(fresh.values())
            inside = self.inside.get(kernel)
            needed = now + (inside.bytes if inside else 0) - self.overwritten(kernel, fresh, alive, ends[number])
            if needed > peak.bytes:
                peak = _Peak(needed, dict(alive), inside)
            now -= sum(alive.pop(array, 0) for array in ends[number])
        return peak

    def overwritten(
        self, kernel: Kernel, fresh: Mapping[Array, int], alive: Mapping[Array, int], ends: Iterable[Array]
    ) -> int:
        """Bytes of a kernel's results that are written over what it reads last, element by element."""
        beside = {self.place(read) for read in kernel.beside}
        if not (kernel.elementwise or beside) or self.transposes(kernel):
            return 0
        dying = sorted((alive.get(array, 0) for array in ends if kernel.elementwise or array in beside), reverse=True)
        shared = 0
        for size in sorted(fresh.values(), reverse=True):
            if size and size in dying:
                dying.remove(size)
                shared += size
        return shared

    def transposes(self, kernel: Kernel) -> bool:
        """Whether it reads elements elsewhere than it writes them; compilers with layouts of their own avoid it."""
        if self.machine.compiler.products_compute:
            return False
        own = [size for size in kernel.writes[0].shape if size != 1]
        read = ([size for size in array.shape if size != 1] for array in kernel.reads)
        return any(other != own and sorted(other) == sorted(own) for other in read)


def _in_flight(operation: Operation) -> int:
    """Bytes of the next round's copy from the host's memory, or of the last one's to it, while a round computes."""
    if operation.name != TO_MEMORY:
        return 0
    return max(array.bytes for array in (*operation.reads, *operation.writes))


def _unchanged(loop: Operation, number: int) -> bool:
    """Whether a loop only reads what is its operand and result of a number."""
    (body,) = loop.bodies
    return body.given[number] is body.results[number]


def _kernel_rows(body: Body) -> Iterator[int]:
    for each in body.operations:
        for inner in each.bodies:
            yield from _kernel_rows(inner)
        if each.is_pallas:
            yield from (read.shape[-1] for read in each.reads if len(read.shape) > 2)


def _stacks(loop: Operation) -> Iterator[Array]:
    """The arrays in which a loop keeps a part of each round."""
    if loop.name == "while":
        (body,) = loop.bodies
        for read, result in zip(loop.reads, body.results, strict=True):
            if result.maker is not None and result.maker.name == "dynamic_update_slice" and len(read.shape) > 3:
                yield read


def _padded(array: Array, lanes: int) -> int:
    """Bytes of a kernel's array, whose last dimension is padded to whole lanes."""
    *others, last = array.shape
    return dataclasses.replace(array, shape=(*others, -(-last // lanes) * lanes)).bytes


def _weight(works: Iterable[TracedWork]) -> tuple[float, float]:
    """By what branches are ranked."""
    cost = cost_of(works)
    return cost.flops, cost.hbm_bytes
