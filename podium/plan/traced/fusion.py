"""Which arrays of a program lie in memory, and the kernels that make them.

A compiler computes most operations inside whatever reads their results. What stays an array follows from what a kernel
can read: each rule below has its reason.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from podium.plan.traced.lowered_program import Array, Body, Operation
from podium.plan.traced.operation_table import SEPARATE, Kind
from podium.plan.traced.simplification import readers

REPEATED = 1.5
"""How many times its own bytes an array may stand for, and still be computed again in each kernel that reads it: beyond
that, writing it once and reading it twice moves less than reading its sources twice."""
PARTS = ("dynamic_slice", "slice")
"""Operations that read no more of an array than they give."""
SMALL = 2**20
"""Bytes below which it makes no difference how many results a kernel has."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """What a platform's compiler does."""

    products_compute: bool
    """Whether products compute their operands and what becomes of their results. Otherwise they are a library's."""
    hoists: bool
    """Whether it converts what a loop only reads before the loop, for all rounds at once."""
    lanes: int
    """To how many elements the last dimension of a Pallas kernel's arrays is padded."""
    products_widen: bool = False
    """Whether products read numbers as they are stored in fewer bits, and widen them: XLA's Triton products do."""
    on_chip: int = 0
    """Bytes up to which a result stays on the chip: a quarter of a TPU core's 128 MiB, which holds a kernel's operands
    and results and what the next one reads at once."""


COMPILERS: Mapping[str, Compiler] = {
    "tpu": Compiler(products_compute=True, hoists=True, lanes=128, on_chip=32 * 2**20),
    "gpu": Compiler(products_compute=False, hoists=False, lanes=1, products_widen=True),
    "cpu": Compiler(products_compute=False, hoists=False, lanes=1),
}


@dataclasses.dataclass(eq=False)
class Kernel:
    """What a device does at once: one operation with all that is computed inside it."""

    operation: Operation
    reads: list[Array]
    writes: list[Array]
    beside: list[Array] = dataclasses.field(default_factory=list)
    """What is read for a product's epilogue, element by element as its result is written."""
    parts: dict[Array, int] = dataclasses.field(default_factory=dict)
    """Bytes that it reads of arrays of which it reads only a part."""

    on_chip: frozenset[Array] = frozenset()
    """Those of its results that never leave the chip."""

    @property
    def read_bytes(self) -> int:
        """Bytes of memory that it reads."""
        return sum(self.parts.get(read, read.bytes) for read in self.reads)

    @property
    def written_bytes(self) -> int:
        """Bytes of memory that it writes."""
        return sum(write.bytes for write in self.writes if write not in self.on_chip)

    @property
    def elementwise(self) -> bool:
        """Whether each element of its result needs only the same elements of what it reads."""
        return self.operation.kind not in (*SEPARATE, Kind.REDUCE)


def kernels(body: Body, compiler: Compiler) -> list[Kernel]:
    """The kernels of a simplified body, in the order in which they were traced."""
    real = _InMemory(body, compiler).find()
    found: list[Kernel] = []
    sources: dict[Array, Mapping[Array, int]] = {}
    """The arrays in memory from which each array is computed, with the bytes that are read of each."""
    for each in body.operations:
        read: dict[Array, int] = {}
        for operand in each.reads:
            for array, size in sources.get(operand, {operand: operand.bytes}).items():
                read[array] = min(array.bytes, read.get(array, 0) + size)
        if each.name in PARTS:
            (write,) = each.writes
            read = {array: min(size, write.bytes) for array, size in read.items()}
        if each.kind in SEPARATE or any(write in real for write in each.writes):
            parts = {array: size for array, size in read.items() if size < array.bytes}
            found.append(Kernel(each, list(read), list(each.writes), parts=parts))
        else:
            sources.update(dict.fromkeys(each.writes, {} if each.name == "constant" else read))
    found = _joined_siblings(found)
    return _with_epilogues(found, set(body.results)) if compiler.products_compute else found


class _InMemory:
    """Finds the arrays of a body that lie in memory; the others are computed in the kernels that read them."""

    def __init__(self, body: Body, compiler: Compiler) -> None:
        self.body, self.compiler = body, compiler
        self.users, self.results = readers(body), set(body.results)
        self.sources: dict[Array, Sequence[Array]] = {}
        """The arrays in memory from which each array is computed."""
        self.moved: dict[Array, bool] = {}
        """Whether an array is only moved or added from these."""
        self.copied: set[Array] = set()
        """Layers that are copied out of a stack, since their products cannot read them there."""

    def find(self) -> set[Array]:
        """The arrays that lie in memory."""
        real: set[Array] = set()
        for _ in range(3):  # what lies in memory decides what is read, which decides what lies in memory
            self.find_sources(real)
            real = self.again()
        return real

    def find_sources(self, real: set[Array]) -> None:
        """Find what each array is computed from if the arrays `real` lie in memory."""
        for each in self.body.operations:
            is_source = each.kind in (*SEPARATE, Kind.REDUCE) or _is_part(each)
            found = (source for read in each.reads for source in self.below(read, real))
            sources = tuple(dict.fromkeys(found))
            moved = each.kind is not Kind.DEAR and all(
                read in real or self.moved.get(read, True) for read in each.reads
            )
            for write in each.writes:
                self.sources[write] = (write,) if is_source else sources
                self.moved[write] = is_source or moved

    def below(self, array: Array, real: set[Array]) -> Sequence[Array]:
        """What must be read to have an array."""
        return (array,) if array in real else self.sources.get(array, (array,))

    def again(self) -> set[Array]:
        """The arrays that lie in memory, from the last operation to the first."""
        real: set[Array] = set()
        into: dict[Array, set[Operation]] = {}
        """The kernels in which an array is computed unless it lies in memory."""
        for each in reversed(self.body.operations):
            for write in each.writes:
                into[write] = set()
                for user in self.users.get(write, ()):
                    whole = user.kind in SEPARATE or not real.isdisjoint(user.writes)
                    into[write] |= {user} if whole else into[user.writes[0]]
                if self.lies_in_memory(each, write, into[write]):
                    real.add(write)
        return real

    def lies_in_memory(self, operation: Operation, write: Array, into: set[Operation]) -> bool:
        """Whether a result that is needed in the kernels `into` lies in memory; each rule has its reason."""
        if operation.kind in (*SEPARATE, Kind.REDUCE):
            return True
        if _is_part(operation):
            return write in self.copied
        if operation.name == "constant":
            return False
        if not self.sources[write] and _repeats_number(operation, self.users):
            return write in self.results
        direct = self.users.get(write, ())
        if write in self.results or (write.shape and any(_reads_arrays(user, write) for user in direct)):
            return True
        read = sum(array.bytes for array in self.sources[write])
        free = self.moved[write] and read <= write.bytes
        if any(user.kind is Kind.PRODUCT for user in direct):
            if not self.compiler.products_compute:
                # A library's product reads arrays; it may read one number many times.
                return not (free and (self.widened(operation) or operation.name == "broadcast_in_dim"))
            if len(into) > 1 and not free:  # it would be computed for each tile of the product, and once more elsewhere
                return True
        # What takes many instructions is computed once; what stands for many bytes is cheaper to write and read.
        return len(into) > 1 and (operation.kind is Kind.DEAR or read > REPEATED * write.bytes)

    def widened(self, operation: Operation) -> bool:
        """Whether products widen the numbers that an operation converts. A layer in the stack of all layers is copied
        out of it first, as it is stored.
        """
        (write, *_) = operation.writes
        sources = self.sources[write]
        if operation.name != "convert" or not self.compiler.products_widen:
            return False
        if sum(each.bytes for each in sources) >= write.bytes:
            return False
        self.copied.update(
            each for each in sources if (maker := each.maker) and _is_part(maker) and maker.reads[0].bytes > each.bytes
        )
        return True


def _is_part(operation: Operation) -> bool:
    """Whether an operation only says where in a stack a round's part lies."""
    return operation.name == "dynamic_slice" and operation.reads[0].maker is None


def _reads_arrays(operation: Operation, array: Array) -> bool:
    """Whether an operation can read an operand only from memory: kernels, loops and transfers do.

    A product may compute it, and a part of a stack is computed where it is put.
    """
    put = operation.name == "dynamic_update_slice" and operation.reads[1] is array
    return operation.kind in SEPARATE and operation.kind is not Kind.PRODUCT and not put


def _repeats_number(operation: Operation, users: Mapping[Array, list[Operation]]) -> bool:
    """Whether its result is one number many times, which loops only read: they write it where they need it."""
    (out,) = operation.writes
    kernels = [user for user in users.get(out, ()) if user.kind in SEPARATE and user.kind is not Kind.PRODUCT]
    return operation.name != "iota" and all(user.kind is Kind.LOOP and _only_read(user, out) for user in kernels)


def _only_read(loop: Operation, array: Array) -> bool:
    """Whether a loop leaves an array that it reads as it is."""
    if loop.name != "while":
        return True
    pairs = zip(loop.reads, loop.bodies[0].given, loop.bodies[0].results, strict=True)
    return all(given is result for read, given, result in pairs if read is array)


def _joined_siblings(found: list[Kernel]) -> list[Kernel]:
    """Join elementwise kernels of equal size that read the same large arrays: they are read once for all results."""
    groups: dict[tuple[object, ...], tuple[int, Kernel]] = {}
    made = {write: number for number, kernel in enumerate(found) for write in kernel.writes}
    gone: set[Kernel] = set()
    for number, kernel in enumerate(found):
        size = kernel.writes[0].bytes if kernel.writes else 0
        large = frozenset(read for read in kernel.reads if read.bytes >= size)
        if not kernel.elementwise or len(kernel.writes) != 1 or size < SMALL or not large:
            continue
        key = large, kernel.writes[0].elements
        first, other = groups.setdefault(key, (number, kernel))
        if other is kernel:
            continue
        if any(read in other.writes or made.get(read, -1) > first for read in kernel.reads):
            groups[key] = number, kernel
            continue
        other.parts = _parts_of_both(other, kernel)
        other.reads = list(dict.fromkeys([*other.reads, *kernel.reads]))
        other.writes += kernel.writes
        gone.add(kernel)
    return [kernel for kernel in found if kernel not in gone]


def keep_on_chip(found: Sequence[Kernel], results: set[Array], most: int) -> None:
    """Let results of at most `most` bytes stay on the chip: their readers find them there, and memory has no copy."""
    kept = {
        write
        for kernel in found
        if kernel.operation.kind not in (Kind.LOOP, Kind.TRANSFER, Kind.BARRIER)
        for write in kernel.writes
        if write.bytes <= most and write not in results
    }
    for kernel in found:
        kernel.on_chip = frozenset(kept.intersection(kernel.writes))
        if kernel.operation.kind is not Kind.LOOP:
            kernel.parts |= dict.fromkeys(kept.intersection(kernel.reads), 0)


def _parts_of_both(one: Kernel, two: Kernel) -> dict[Array, int]:
    """Bytes that both together read of arrays of which they read only a part."""
    both = {*one.parts, *two.parts}
    sizes = {
        array: [each.parts.get(array, array.bytes) for each in (one, two) if array in each.reads] for array in both
    }
    return {array: min(array.bytes, sum(each)) for array, each in sizes.items()}


def _with_epilogues(found: list[Kernel], results: set[Array]) -> list[Kernel]:
    """Join products with the one elementwise kernel that reads their result: it is computed tile by tile."""
    reading: dict[Array, list[Kernel]] = defaultdict(list)
    for kernel in found:
        for read in kernel.reads:
            reading[read].append(kernel)
    gone: set[Kernel] = set()
    for kernel in found:
        while (
            kernel.operation.kind is Kind.PRODUCT and len(reading[out := kernel.writes[0]]) == 1 and out not in results
        ):
            (user,) = reading[out]
            if not user.elementwise or len(user.writes) != 1 or user.writes[0].bytes > 1.01 * out.bytes:
                break
            others = [read for read in user.reads if read is not out]
            kernel.beside += others
            kernel.parts = _parts_of_both(kernel, user)
            kernel.reads, kernel.writes = list(dict.fromkeys([*kernel.reads, *others])), user.writes
            gone.add(user)
            for read in others:
                reading[read] = [kernel if other is user else other for other in reading[read]]
    # An epilogue may read what is made after the product: the product then runs in the place of its last operand.
    made = {write: kernel for kernel in found if kernel not in gone for write in kernel.writes}
    return _ordered([kernel for kernel in found if kernel not in gone], made)


def _ordered(found: list[Kernel], made: Mapping[Array, Kernel]) -> list[Kernel]:
    """The kernels in their order, each after those whose results it reads."""
    done: dict[Kernel, None] = {}
    for kernel in found:
        stack = [kernel]
        while stack:
            top = stack[-1]
            needs = [
                made[read] for read in top.reads if read in made and made[read] not in done and made[read] is not top
            ]
            if top in done:
                stack.pop()
            elif needs:
                stack.extend(needs)
            else:
                done[stack.pop()] = None
    return list(done)
