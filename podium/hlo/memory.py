"""A compiled program's device memory: its total, the arrays that take it, and parsing of out-of-memory errors.

The total is the compiler's figure. `largest` splits it under user-facing names (parameters, kv_cache, logits, ...),
which the caller defines in `ArrayNames` by argument names, weight shapes, and the scopes under which the program is
traced.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from podium.hlo.hlo_text import Computation, Module, Shape
from podium.hlo.liveness import ArrayRef, Buffer, find_buffers, live_at_peak

OTHER = "other"
"""Name of arrays that match no rule."""
BETWEEN = "fragmentation"
"""Name of memory that is unused between a program's arrays."""


@dataclasses.dataclass(frozen=True)
class ArrayNames:
    """User-facing names for the arrays of one program."""

    arguments: Mapping[str, str]  # by the first part of an argument's path
    scopes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by `jax.named_scope`; the innermost applies
    results: str = ""  # the name of its results, except those that alias arguments
    known_by_shape: frozenset[str] = frozenset()  # names of arguments whose copies are recognised by their dimensions
    weights: str = ""  # the name of the weights, which are gathered, cast and, with `gradients`, differentiated
    gathering: str = ""  # the scope under which weights are gathered
    gradients: bool = False
    first_by_scope: frozenset[str] = frozenset()  # names of scopes that take precedence over shapes


@dataclasses.dataclass(frozen=True)
class Memory:
    """A program's memory on one device in bytes, as reported by the compiler."""

    # All arrays at the peak, including arguments and results, with donated ones counted once; for a TPU's program also
    # the gaps between arrays.
    peak: int
    code: int


class MemoryStats(Protocol):
    """The compiler's memory report of a program, in bytes; jax has no public type for it."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int


class Compiled(Protocol):
    """The part of jax's `Compiled` that `measure` uses."""

    def memory_analysis(self) -> MemoryStats:
        """Return the compiler's memory report."""
        ...


def measure(compiled: Compiled) -> Memory:
    """The memory of a program compiled for CPU or GPU.

    On these, temporaries are one allocation that lasts as long as the program; outputs that reuse donated arguments
    count once. (For TPU programs, `podium.plan.compiled.tpu_compile` reads the compiler's report.)
    """
    stats = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    size = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    return Memory(peak=size, code=stats.generated_code_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class NamedBuffer:
    """A buffer that is alive when the program's memory is at its peak."""

    name: str
    shape: str
    size: int  # bytes
    source: str  # the argument's path, or the path of scopes under which it was traced
    is_argument: bool = False


@dataclasses.dataclass(frozen=True)
class NamedPeak:
    """The contents of memory at the peak of a program."""

    size: int  # bytes of all buffers; `Memory.peak` is the compiler's figure for this
    buffers: tuple[NamedBuffer, ...]  # largest first

    @property
    def by_name(self) -> dict[str, int]:
        """Bytes under each name, largest first."""
        total: dict[str, int] = {}
        for buffer in self.buffers:
            total[buffer.name] = total.get(buffer.name, 0) + buffer.size
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @property
    def arguments_by_name(self) -> dict[str, int]:
        """Bytes of arguments under each name; these sizes are exact."""
        return NamedPeak(self.size, tuple(each for each in self.buffers if each.is_argument)).by_name


def largest(module: Module, names: ArrayNames) -> NamedPeak:
    """The buffers at a program's peak, under user-facing names."""
    known = _known(module, names)
    peak = live_at_peak(module)
    return NamedPeak(peak.size, tuple(_named(buffer, module, names, known) for buffer in peak.buffers))


def array_namer(module: Module, names: ArrayNames) -> Callable[[ArrayRef], NamedBuffer | None]:
    """A function that names the buffer of any array of a program; None if the array is not in main memory."""
    known, buffer_of = _known(module, names), find_buffers(module)
    named: dict[ArrayRef, NamedBuffer] = {}  # by the first array of each buffer

    def name(array: ArrayRef) -> NamedBuffer | None:
        buffer = buffer_of(array)
        if buffer is None:
            return None
        if buffer.arrays[0] not in named:
            named[buffer.arrays[0]] = _named(buffer, module, names, known)
        return named[buffer.arrays[0]]

    return name


@dataclasses.dataclass(frozen=True)
class _Known:
    """Names of arrays by shape; dimensions are sorted and ones dropped, as copies may be transposed."""

    shards: Mapping[tuple[int, ...], str]  # arguments as stored
    whole: frozenset[tuple[int, ...]]  # unsplit weights; for stacked ones also a single layer


def _named(buffer: Buffer, module: Module, names: ArrayNames, known: _Known) -> NamedBuffer:
    made = [(module.computations[array.computation], array.instruction) for array in buffer.arrays]
    given = [where.instructions[name] for where, name in made if where is module.entry]
    source = next((each.source for each in given if each.opcode == "parameter"), None)
    is_argument = source is not None
    if source is not None:
        name = _argument_name(source, names.arguments)
    elif names.results and any(each.is_root for each in given):
        name, source = names.results, _source(made, names.scopes)
    else:
        source = _source(made, names.scopes)
        name = _name(buffer.shape, source, names, known)
    return NamedBuffer(name, str(buffer.shape), buffer.size, source, is_argument)


def _name(shape: Shape, source: str, names: ArrayNames, known: _Known) -> str:
    """Name a temporary: by scope if in `first_by_scope`, otherwise by shape, otherwise by scope."""
    scope = _scope(source, names.scopes)
    by_scope = names.scopes.get(scope, OTHER)
    if by_scope in names.first_by_scope:
        return by_scope
    backward = "transpose(" in source and scope != names.gathering
    dims = _essence(shape.dims)
    gradient = names.gradients and (shape.dtype == "f32" or backward)
    if argument := known.shards.get(dims):
        if argument != names.weights:
            return argument
        return "gradients" if gradient else "cast_weights"
    if any(_fits(dims, whole) for whole in known.whole):
        return "gradients" if gradient else "gathered_weights"
    return by_scope


def _argument_name(path: str, arguments: Mapping[str, str]) -> str:
    """The name under the longest matching prefix of a path; paths continue with `.field` or `['key']`."""
    fitting = [start for start in arguments if re.match(rf"{re.escape(start)}(?!\w)", path)]
    return arguments[max(fitting, key=len)] if fitting else OTHER


_NAMING = ("tuple", "get-tuple-element", "bitcast", "parameter", "while", "opt-barrier", "custom-call")


def _source(made: list[tuple[Computation, str]], scopes: Mapping[str, str]) -> str:
    """The source path of an instruction that writes a buffer, or else of a neighbouring one."""
    fill = [(where, name) for where, name in made if where.instructions[name].opcode not in _NAMING]
    beside = [
        (where, near)
        for where, name in made
        for near in (*where.instructions[name].operands, *(user.name for user in where.users[name]))
    ]
    sources = [where.instructions[name].source for where, name in (*fill, *beside, *made)]
    paths = [source for source in sources if "/" in source]
    return next((path for path in paths if _scope(path, scopes)), paths[0] if paths else "")


def _scope(source: str, scopes: Mapping[str, str]) -> str:
    """The innermost of `scopes` in a source path; jax writes the gradient of a scope as transpose(jvp(scope))."""
    return next((name for name in reversed(re.split(r"[/()]+", source)) if name in scopes), "")


def _essence(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))


def _fits(dims: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array has a weight's dimensions, give or take 1 % of padding: compilers round vocabularies up."""
    return len(dims) == len(whole) and all(b <= a <= 1.01 * b for a, b in zip(dims, whole, strict=True))


def _known(module: Module, names: ArrayNames) -> _Known:
    """The shapes that identify arguments; arrays with fewer than two dimensions are too ambiguous."""
    shards: dict[tuple[int, ...], str] = {}
    whole: set[tuple[int, ...]] = set()
    for each in module.entry.parameters.values():
        (shape,), name = each.shapes, _argument_name(each.source, names.arguments)
        if name not in names.known_by_shape or len(_essence(shape.dims)) < 2:
            continue
        shards[_essence(shape.dims)] = name
        split = re.search(r"devices=\[([\d,]+)\]", each.attribute("sharding"))
        parts = [int(part) for part in split[1].split(",")] if split else []
        if name == names.weights and parts:
            dims = tuple(dim * part for dim, part in zip(shape.dims, parts, strict=False))
            whole |= {_essence(dims), _essence(dims[1:])}
    return _Known(shards, frozenset(dims for dims in whole if len(dims) > 1))


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """A program's memory requirement, as reported in an out-of-memory error."""

    needed: int  # bytes, rounded to two decimals of the text's unit
    largest: tuple[NamedBuffer, ...]  # the allocations that the compiler lists, all named `program`


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([BKMGT]?)(?:iB|B)?"
_ANY_SIZE = r"[\d.]+[BKMGT]?"
# Reported by the compiler about temporaries; by the compiler about a whole program, with its largest allocations; by
# the runtime about one allocation.
_OUT_OF_MEMORY = (
    re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_ANY_SIZE}"),
    re.compile(rf"Used {_SIZE} of {_ANY_SIZE} hbm", re.IGNORECASE),
    re.compile(rf"Allocation \(size={_SIZE}\) would exceed memory \(size={_ANY_SIZE}"),
)
_ENTRY = re.compile(rf"^\s*\d+\.\s+Size:\s+{_SIZE}(.*?)(?=^\s*\d+\.\s+Size:|\Z)", re.DOTALL | re.MULTILINE)


def parse_out_of_memory(text: str) -> OutOfMemory | None:
    """Parse an out-of-memory message of the TPU compiler or runtime; None if the text is about something else."""
    found = next(filter(None, (pattern.search(text) for pattern in _OUT_OF_MEMORY)), None)
    if found is None:
        return None
    entries = []  # of the list "Largest program allocations", which is often missing
    for number, unit, rest in _ENTRY.findall(text):
        shape = re.search(r"Shape:\s+(\S+)", rest)
        source = re.search(r'op_name="([^"]*)"', rest)
        entries.append(
            NamedBuffer("program", shape[1] if shape else "", _bytes(number, unit), source[1] if source else "")
        )
    return OutOfMemory(_bytes(*found.groups()), tuple(sorted(entries, key=lambda entry: -entry.size)))


def _bytes(number: str, unit: str) -> int:
    return math.ceil(float(number) * _UNITS[unit.upper()])
