"""Parses the text of a compiled program: computations, instructions, shapes, and how often its loops run.

The text is XLA's dump of an optimised module (`compiled.as_text()`), for TPU, GPU or CPU. `podium.hlo.cost` computes
the instructions' cost, `podium.hlo.memory` their memory. No jax.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

HBM = 0  # memory space of arrays in a device's main memory; the others are caches inside the chip
HOST = 5  # memory space of arrays in the host's memory


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: its element type, dimensions and memory layout."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()  # of the minor-most dimensions, which are padded to multiples of it
    space: int = HBM  # XLA's number of the memory that holds it

    @property
    def size(self) -> int:
        """Bytes of the array's elements, without padding."""
        return math.ceil(math.prod(self.dims) * item_bits(self.dtype) / 8)

    @property
    def padded_size(self) -> int:
        """Bytes that the array occupies, with its minor-most dimensions padded to whole tiles."""
        order = self.minor_to_major or tuple(reversed(range(len(self.dims))))
        dims = [self.dims[dim] for dim in reversed(order)]  # most major first
        dims = [1] * (len(self.tile) - len(dims)) + dims
        start = len(dims) - len(self.tile)
        padded = [-(-dim // side) * side for dim, side in zip(dims[start:], self.tile, strict=True)]
        return math.ceil(math.prod(dims[:start] + padded) * item_bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Type = Shape | tuple["Type", ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction of a computation."""

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    literal: str  # the text in parentheses if there are no operands: a parameter's number, a constant's value
    attributes: str
    is_root: bool

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, flattened."""
        return tuple(leaves(self.type))

    @cached_property
    def source(self) -> str:
        """The path of scopes under which jax traced the instruction, such as `jit(step)/while/body/mlp/dot_general`."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @cached_property
    def callees(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the computations that the instruction runs, by role: calls, body, condition, branch_computations,
        ...
        """
        found = _CALLEES.findall(self.attributes)
        return {role: tuple(name.strip(" %") for name in names.strip("{}").split(",")) for role, names in found}

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the computations that the instruction runs and that have their own memory, unlike fused ones."""
        return tuple(name for role in _ROLES.get(self.opcode, ()) for name in self.callees.get(role, ()))

    def attribute(self, name: str) -> str:
        """The text of an attribute up to the next one; empty if the instruction does not have it."""
        braces = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # attributes may be nested
        found = re.search(rf"\b{name}=({braces}|\{{\{{.*?\}}\}}|\{{[^}}]*\}}|[^,]*)", self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """The instructions of a computation, by name, in order of execution."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next(each for each in self.instructions.values() if each.is_root)

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The computation's parameters by number."""
        found = [each for each in self.instructions.values() if each.opcode == "parameter"]
        return {int(each.literal): each for each in found}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For each instruction, the instructions that use its result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for each in self.instructions.values():
            for operand in dict.fromkeys(each.operands):
                users[operand].append(each)
        return {name: tuple(found) for name, found in users.items()}


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program, as it runs on one device."""

    name: str
    entry: Computation
    computations: Mapping[str, Computation]
    aliases: tuple[tuple[tuple[int, ...], int], ...]
    """Outputs (by index in the result) that reuse the memory of a donated parameter, with that parameter's number."""
    num_partitions: int

    @cached_property
    def loops(self) -> Mapping[Instruction, int | None]:
        """Iterations of every while loop; None if they depend on data or cannot be read from the text."""
        return {
            each: _trip_count(self, computation, each)
            for computation in self.computations.values()
            for each in computation.instructions.values()
            if each.opcode == "while"
        }


def item_bits(dtype: str) -> int:
    """Bits per element: the number in the type's name, except for pred and token."""
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    found = re.search(r"\d+", dtype)
    assert found, dtype
    return int(found[0])


def leaves(kind: Type) -> Iterator[Shape]:
    """The arrays of a type, in order."""
    if isinstance(kind, Shape):
        yield kind
    else:
        for part in kind:
            yield from leaves(part)


def parse(text: str) -> Module:
    """Parse the text of a module.

    Raises:
        ValueError: the text is not HLO, or is incomplete.
    """
    header = _MODULE.match(text)
    if not header:
        raise ValueError(f"not HLO text: it begins with {text[:40]!r}, not with 'HloModule'")
    first_line = text.partition("\n")[0]
    computations: dict[str, Computation] = {}
    entry = ""
    for title, lines in _blocks(text):
        computations[title[2]] = Computation(title[2], _with_elements(map(_instruction, lines)))
        entry = title[2] if title[1] else entry
    if not entry:
        raise ValueError(f"module {header[1]} has no entry computation: its text is incomplete")
    partitions = re.search(r"num_partitions=(\d+)", first_line)
    return Module(
        name=header[1],
        entry=computations[entry],
        computations=computations,
        aliases=tuple((numbers(index), int(number)) for index, number in _ALIAS.findall(first_line)),
        num_partitions=int(partitions[1]) if partitions else 1,
    )


_MODULE = re.compile(r"HloModule ([\w.-]+)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_TITLE = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_START = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (?=\(|[a-z]\w*\[)")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLEES = re.compile(
    r"\b(calls|to_apply|condition|body|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)


_ROLES: Mapping[str, tuple[str, ...]] = {
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    "async-start": ("calls",),
    "call-start": ("to_apply",),
}


def _blocks(text: str) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Yield the header and the instructions of each computation; instructions over several lines are joined."""
    title: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if title is None:
            title, lines = _TITLE.match(line), []
        elif line == "}" or line.startswith("}, execution_thread="):
            yield title, lines
            title = None
        elif _START.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += " " + line


def _instruction(line: str) -> Instruction:
    """Parse one line such as `ROOT %name = type opcode(operands), attributes`."""
    start = _START.match(line)
    assert start, line
    head, quote, metadata = _COMMENT.sub("", line[start.end() :]).partition("metadata=")
    kind, end = _type(head, 0)
    opcode, _, rest = head[end:].strip().partition("(")
    close = _closing(rest)
    inside = rest[:close]
    operands = () if opcode in ("parameter", "constant") else tuple(_OPERAND.findall(inside))
    return Instruction(
        name=start[2],
        type=kind,
        opcode=opcode,
        operands=operands,
        literal="" if operands else inside,
        attributes=rest[close + 1 :] + quote + metadata,
        is_root=start[1] is not None,
    )


_OPERAND = re.compile(r"%([\w.-]+(?:#\d+)*)")


def _with_elements(instructions: Iterable[Instruction]) -> dict[str, Instruction]:
    """Instructions by name, plus one for each tuple element that newer compilers refer to as `%tuple#index`."""
    found: dict[str, Instruction] = {}
    for each in instructions:
        for operand in each.operands:
            for mark in re.finditer(r"#(\d+)", operand):  # several indices for an element of an element
                whole, name = operand[: mark.start()], operand[: mark.end()]
                if name not in found:
                    kind = found[whole].type
                    assert not isinstance(kind, Shape), name
                    index = int(mark[1])
                    found[name] = Instruction(
                        name,
                        kind[index],
                        opcode="get-tuple-element",
                        operands=(whole,),
                        literal="",
                        attributes=f", index={index}",
                        is_root=False,
                    )
        found[each.name] = each
    return found


def _type(text: str, at: int) -> tuple[Type, int]:
    """The type that begins at index `at`, and the index after it."""
    if text[at] != "(":
        found = _ARRAY.match(text, at)
        assert found, text[at : at + 80]
        return _shape(*found.groups(default="")), found.end()
    parts: list[Type] = []
    at += 1
    while text[at] != ")":
        if text[at] in ", ":
            at += 1
        else:
            part, at = _type(text, at)
            parts.append(part)
    return tuple(parts), at + 1


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    order, _, rest = layout.partition(":")
    tile, space = re.search(r"T\(([\d,]+)\)", rest), re.search(r"S\((\d+)\)", rest)
    return Shape(
        dtype=dtype,
        dims=numbers(dims.replace("<=", "")),
        minor_to_major=numbers(order),
        tile=numbers(tile[1]) if tile else (),
        space=int(space[1]) if space else HBM,
    )


def numbers(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas."""
    return tuple(int(number) for number in text.split(",") if number.strip())


def _closing(text: str) -> int:
    """Index of the bracket that closes the one opened just before the text."""
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise ValueError(f"unbalanced brackets in the text of a compiled program: {text[:120]!r}")


def _trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of a while loop: XLA's own count, or read from `counter < limit`; None if unknown.

    A scan counts from 0 to the constant in its condition; start and step are read, not assumed. A loop has no count if
    its condition tests something else too, as decoding's does, or if its limit is an input.
    """
    if known := re.search(r'known_trip_count"?:\s*\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition, body = (module.computations[loop.callees[role][0]] for role in ("condition", "body"))
    test = condition.root
    if test.opcode == "fusion":  # contains only the compare, whose operands are the fusion's in any order
        inner = module.computations[test.callees["calls"][0]]
        arguments = tuple(_counted(module, condition, name) for name in test.operands)
        sides = [_counted(module, inner, name, arguments) for name in inner.root.operands]
        test = inner.root
    else:
        sides = [_counted(module, condition, name) for name in test.operands]
    if test.opcode != "compare" or test.attribute("direction") != "LT" or len(sides) != 2:
        return None
    counter, limit = sides
    if counter is None or counter.index is None or limit is None or limit.index is not None:
        return None
    made = computation.instructions[loop.operands[0]]  # the carry
    start = _counted(module, computation, made.operands[counter.index]) if made.opcode == "tuple" else None
    after = _counted(module, body, body.root.operands[counter.index]) if body.root.opcode == "tuple" else None
    if start is None or start.index is not None or after is None or after.index != counter.index or after.offset < 1:
        return None
    return max(0, -(-(limit.offset - counter.offset - start.offset) // after.offset))


@dataclasses.dataclass(frozen=True)
class _Counted:
    """An integer of the form carry[index] + constant, or a constant."""

    index: int | None
    offset: int


def _counted(
    module: Module, computation: Computation, name: str, arguments: tuple[_Counted | None, ...] | None = None
) -> _Counted | None:
    """An integer in terms of the loop's carry, through a fusion's `arguments`; None if it has another form."""
    each = computation.instructions[name]
    if each.opcode == "constant":
        return _Counted(None, int(each.literal)) if re.fullmatch(r"-?\d+", each.literal) else None
    if each.opcode == "parameter":
        return arguments[int(each.literal)] if arguments else None
    if each.opcode == "get-tuple-element":
        is_carry = computation.instructions[each.operands[0]].opcode == "parameter"
        return _Counted(int(each.attribute("index")), 0) if is_carry else None
    parts = tuple(_counted(module, computation, operand, arguments) for operand in each.operands)
    if each.opcode in _PASSING:
        return parts[0]
    if each.opcode == "fusion":
        callee = module.computations[each.callees["calls"][0]]
        return _counted(module, callee, callee.root.name, parts)
    if each.opcode == "add" and parts[0] and parts[1] and None in (parts[0].index, parts[1].index):
        index = parts[1].index if parts[0].index is None else parts[0].index
        return _Counted(index, parts[0].offset + parts[1].offset)
    return None


_PASSING = ("bitcast", "copy", "convert", "reshape", "copy-start", "copy-done")
