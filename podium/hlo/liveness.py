"""Which arrays of a compiled program are in main memory at its peak, reconstructed from its text.

XLA reports how much memory a program needs, but not for which arrays. In a scheduled module, instructions run in text
order, so an array lives from its definition to its last use. Arrays that share memory form one buffer: elements of
tuples, loop carries, donated arguments and their outputs, arrays updated in place. No jax.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from podium.hlo.hlo_text import HBM, Computation, Instruction, Module, Shape, Type, leaves
from podium.hlo.traffic import ASYNC_STARTS, updates


class ArrayRef(NamedTuple):
    """One array of one instruction's result."""

    computation: str
    instruction: str
    leaf: int


@dataclasses.dataclass
class Buffer:
    """A piece of memory that holds the results of one or more instructions."""

    size: int
    shape: Shape  # of the largest array in it
    arrays: list[ArrayRef]


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment at which a program's arrays take the most memory."""

    size: int  # bytes, without code and without gaps between arrays
    instruction: str  # running at that moment
    buffers: tuple[Buffer, ...]  # largest first


class _Aliases:
    """Sets of arrays that share memory."""

    def __init__(self) -> None:
        self._above: dict[ArrayRef, ArrayRef] = {}

    def find(self, array: ArrayRef) -> ArrayRef:
        path = []
        while array in self._above:
            path.append(array)
            array = self._above[array]
        self._above.update(dict.fromkeys(path, array))  # shortens the next search
        return array

    def join(self, first: ArrayRef, second: ArrayRef) -> None:
        first, second = self.find(first), self.find(second)
        if first != second:
            self._above[second] = first


def live_at_peak(module: Module) -> Peak:
    """Find the buffers in main memory at the peak. Arguments always count, because the caller holds them."""
    aliases = _aliases(module)
    buffers = _buffers(module, aliases)
    lives = {name: _lives(module, name, aliases, buffers) for name in computations_run(module, module.entry.name)}
    size, moment, found = _peak(module, module.entry, lives, buffers, frozenset())
    order = sorted((buffers[root] for root in sorted(found)), key=lambda buffer: -buffer.size)
    return Peak(size, moment, tuple(order))


def find_buffers(module: Module) -> Callable[[ArrayRef], Buffer | None]:
    """A function that gives the buffer of any array of a program; None if the array is not in main memory."""
    aliases = _aliases(module)
    buffers = _buffers(module, aliases)
    return lambda array: buffers.get(aliases.find(array))


def _peak(
    module: Module,
    computation: Computation,
    lives: Mapping[str, Mapping[ArrayRef, tuple[int, int]]],
    buffers: Mapping[ArrayRef, Buffer],
    outer: frozenset[ArrayRef],
) -> tuple[int, str, frozenset[ArrayRef]]:
    """The largest total size during a computation; `outer` are the buffers alive around it."""
    starts: dict[int, list[ArrayRef]] = {}
    ends: dict[int, list[ArrayRef]] = {}
    for root, (first, last) in lives[computation.name].items():
        if root not in outer:
            starts.setdefault(first, []).append(root)
            ends.setdefault(last, []).append(root)
    live = set(outer)
    size = sum(buffers[root].size for root in live)
    best = (size, computation.name, outer)
    for index, each in enumerate(computation.instructions.values()):
        live.update(starts.get(index, ()))
        size += sum(buffers[root].size for root in starts.get(index, ()))
        if size > best[0]:
            best = (size, each.name, frozenset(live))
        for name in each.runs:
            inner = _peak(module, module.computations[name], lives, buffers, frozenset(live))
            best = max(best, inner, key=lambda peak: peak[0])
        live.difference_update(ends.get(index, ()))
        size -= sum(buffers[root].size for root in ends.get(index, ()))
    return best


def computations_run(module: Module, name: str) -> Iterator[str]:
    """The names of a computation and of all computations that it runs, except fused ones; some occur twice."""
    yield name
    for each in module.computations[name].instructions.values():
        for inner in each.runs:
            yield from computations_run(module, inner)


def _buffers(module: Module, aliases: _Aliases) -> dict[ArrayRef, Buffer]:
    """All buffers in main memory, by representative array. Constants are excluded, as they are part of the program."""
    buffers: dict[ArrayRef, Buffer] = {}
    for name in dict.fromkeys(computations_run(module, module.entry.name)):
        for each in module.computations[name].instructions.values():
            for leaf, shape in enumerate(each.shapes):
                if shape.space != HBM or each.opcode == "constant":
                    continue
                array = ArrayRef(name, each.name, leaf)
                buffer = buffers.setdefault(aliases.find(array), Buffer(0, shape, []))
                buffer.arrays.append(array)
                if shape.padded_size > buffer.size:
                    buffer.size, buffer.shape = shape.padded_size, shape
    return buffers


def _lives(
    module: Module, name: str, aliases: _Aliases, buffers: Mapping[ArrayRef, Buffer]
) -> dict[ArrayRef, tuple[int, int]]:
    """For each buffer of a computation, the indices of the first and last instruction that use it."""
    computation = module.computations[name]
    end = len(computation.instructions)
    found: dict[ArrayRef, tuple[int, int]] = {}

    def use(array: ArrayRef, index: int) -> None:
        root = aliases.find(array)
        if root in buffers:
            first, last = found.get(root, (index, index))
            found[root] = min(first, index), max(last, index)

    for index, each in enumerate(computation.instructions.values()):
        for leaf in range(len(each.shapes)):
            use(ArrayRef(name, each.name, leaf), 0 if each.opcode == "parameter" else index)
            if each.is_root or (each.opcode == "parameter" and name == module.entry.name):
                use(ArrayRef(name, each.name, leaf), end)
        if each.opcode not in ("tuple", "get-tuple-element"):  # these only rename arrays
            for operand in each.operands:
                for leaf in range(len(computation.instructions[operand].shapes)):
                    use(ArrayRef(name, operand, leaf), index)
    return found


def _aliases(module: Module) -> _Aliases:
    """Group the arrays that share memory."""
    aliases = _Aliases()
    for name in dict.fromkeys(computations_run(module, module.entry.name)):
        computation = module.computations[name]
        for each in computation.instructions.values():
            for leaf, operand, of_operand in _shared(each, computation, module):
                aliases.join(ArrayRef(name, operand, of_operand), ArrayRef(name, each.name, leaf))
            for first, second in _handed_over(each, computation, module):
                aliases.join(first, second)
    root, entry = module.entry.root, module.entry.name
    for output, parameter in module.aliases:
        leaf = _offset(root.type, output)
        aliases.join(ArrayRef(entry, module.entry.parameters[parameter].name, 0), ArrayRef(entry, root.name, leaf))
    return aliases


def _offset(kind: Type, path: tuple[int, ...]) -> int:
    """Index of the first leaf of one element of a tuple type."""
    total = 0
    for index in path:
        assert not isinstance(kind, Shape)
        total += sum(1 for part in kind[:index] for _ in leaves(part))
        kind = kind[index]
    return total


SharedLeaf = tuple[int, str, int]
"""(leaf of the result, operand, leaf of the operand), which share memory."""


def _shared(each: Instruction, computation: Computation, module: Module) -> Iterator[SharedLeaf]:
    """Yield the leaves that an instruction's result shares with its operands."""
    operands = [computation.instructions[name] for name in each.operands]
    opcode = each.opcode
    if opcode in ("bitcast", "opt-barrier", "add-dependency", "while"):
        yield from _all_leaves(each, each.operands[0], 0)
    elif opcode == "tuple":
        arrays = ((operand.name, leaf) for operand in operands for leaf in range(len(operand.shapes)))
        yield from ((number, name, leaf) for number, (name, leaf) in enumerate(arrays))
    elif opcode == "get-tuple-element":
        yield from _all_leaves(each, each.operands[0], _offset(operands[0].type, (int(each.attribute("index")),)))
    elif opcode.endswith(("-start", "-done")):
        yield from _shared_by_async(each, operands)
        if opcode == "fusion-start":  # (operands, results, context)
            yield from ((len(operands) + leaf, name, part) for leaf, name, part in _shared_by_fusion(each, module))
    elif opcode in ("dynamic-update-slice", "scatter"):
        yield 0, each.operands[0], 0
    elif opcode == "fusion":
        yield from _shared_by_fusion(each, module)


def _all_leaves(each: Instruction, operand: str, first: int) -> Iterator[SharedLeaf]:
    """Yield every leaf of a result, paired with the operand's leaves from `first` on."""
    yield from ((leaf, operand, first + leaf) for leaf in range(len(each.shapes)))


def _shared_by_async(each: Instruction, operands: list[Instruction]) -> Iterator[SharedLeaf]:
    """Yield the leaves that the start or end of an asynchronous instruction shares with its operands."""
    if each.opcode == "copy-start":  # (to, from, context)
        yield 1, each.operands[0], 0
    elif each.opcode.endswith("-done"):
        start = operands[0]
        skipped = 0 if start.opcode in ("copy-start", "all-reduce-start") else len(start.operands)
        yield from _all_leaves(each, start.name, skipped)
    elif each.opcode != "all-reduce-start":  # (operands, results, context)
        yield from ((number, operand.name, 0) for number, operand in enumerate(operands))


def _shared_by_fusion(each: Instruction, module: Module) -> Iterator[SharedLeaf]:
    """Yield the leaves that a fusion updates in place, and those that XLA declares as shared."""
    for leaf, update in enumerate(updates(module.computations[each.callees["calls"][0]], module)):
        if update:
            yield leaf, each.operands[update.parameter], 0
    for output, number in re.findall(r"\{(\d*)\}: \((\d+), \{", each.attribute("output_to_operand_aliasing")):
        yield int(output or 0), each.operands[int(number)], 0


def _handed_over(each: Instruction, computation: Computation, module: Module) -> Iterator[tuple[ArrayRef, ArrayRef]]:
    """Yield the arrays that an instruction shares with the computations it calls, as arguments and results."""
    here = computation.name
    for number, name in enumerate(each.runs):
        inner = module.computations[name]
        given = each.operands[number + 1 : number + 2] if each.opcode == "conditional" else each.operands
        for position, operand in enumerate(given):
            for leaf in range(len(computation.instructions[operand].shapes)):
                yield ArrayRef(here, operand, leaf), ArrayRef(name, inner.parameters[position].name, leaf)
        if name not in each.callees.get("condition", ()):
            first = len(each.operands) if each.opcode in ASYNC_STARTS else 0  # (operands, results, context)
            for leaf in range(len(inner.root.shapes)):
                yield ArrayRef(here, each.name, first + leaf), ArrayRef(name, inner.root.name, leaf)
