"""How much of a device's memory a compiled program needs, which arrays take it, and how to read an out-of-memory error.

The total is the compiler's figure. `largest` splits it under names that users know (parameters, kv_cache, logits, ...),
derived from names of arguments, shapes of weights, and the scopes under which the program is traced; the caller
passes those in `ArrayNames`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Protocol

from podium.hlo.liveness import Buffer, live_at_peak
from podium.hlo.text import Computation, Module, Shape

OTHER = "other"
"""The name of arrays that no rule names."""
BETWEEN = "fragmentation"
"""The name of a program's memory that lies unused between its arrays."""


@dataclasses.dataclass(frozen=True)
class ArrayNames:
    """What users call the arrays of one program."""

    arguments: Mapping[str, str]  # by the beginning of an argument's path
    scopes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by `jax.named_scope`; the innermost counts
    results: str = ""  # the name of its results, except those that alias arguments
    known_by_shape: frozenset[str] = frozenset()  # names of arguments whose copies are recognised by their dimensions
    weights: str = ""  # which of them is gathered, cast and, with `gradients`, differentiated
    gathering: str = ""  # the scope under which weights are gathered
    gradients: bool = False
    first_by_scope: frozenset[str] = frozenset()  # names of scopes that take precedence over dimensions


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device that one program takes, by the compiler's account."""

    # All arrays at the peak, including arguments and results, donated ones once; for a TPU's program also the gaps
    # between them.
    peak: int
    code: int


class MemoryStats(Protocol):
    """The compiler's account of a program, in bytes; jax has no public type for it."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int


class Compiled(Protocol):
    """What `measure` needs of jax's `Compiled`."""

    def memory_analysis(self) -> MemoryStats:
        """Return the compiler's account."""
        ...


def measure(compiled: Compiled) -> Memory:
    """The memory of a program compiled for a CPU or a GPU.

    There, temporaries are one allocation that lasts as long as the program; outputs that reuse donated arguments count
    once. (For a TPU's program, `podium.plan.tpu_compile` reads the compiler's own report.)
    """
    stats = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    size = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    return Memory(peak=size, code=stats.generated_code_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class NamedBuffer:
    """One buffer at the peak."""

    name: str
    shape: str
    size: int  # bytes
    source: str  # the argument's path, or the path of names under which it was traced
    is_argument: bool = False


@dataclasses.dataclass(frozen=True)
class NamedPeak:
    """The contents of memory at a program's peak."""

    size: int  # bytes of all buffers; `Memory.peak` is the compiler's figure for the same
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
        """Bytes of arguments under each name; their sizes do not depend on the compiler."""
        return NamedPeak(self.size, tuple(each for each in self.buffers if each.is_argument)).by_name


def largest(module: Module, names: ArrayNames) -> NamedPeak:
    """The buffers at a program's peak, under names that users know."""
    known = _known(module, names)
    peak = live_at_peak(module)
    return NamedPeak(peak.size, tuple(_named(buffer, module, names, known) for buffer in peak.buffers))


@dataclasses.dataclass(frozen=True)
class _Known:
    """Names of arrays by their dimensions, which are sorted and without ones, as copies may be transposed."""

    shards: Mapping[tuple[int, ...], str]  # arguments as they are stored
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
    """The name of a temporary, by its scope if that is in `first_by_scope`, else by its shape, else by its scope."""
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
    """The source path of an instruction that fills a buffer, else of a neighbour."""
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
    """The last of `scopes` in a source's path; jax writes a scope's gradient as transpose(jvp(scope))."""
    return next((name for name in reversed(re.split(r"[/()]+", source)) if name in scopes), "")


def _essence(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))


def _fits(dims: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array has a weight's dimensions, up to 1 % of padding: compilers pad vocabularies to round numbers."""
    return len(dims) == len(whole) and all(b <= a <= 1.01 * b for a, b in zip(dims, whole, strict=True))


def _known(module: Module, names: ArrayNames) -> _Known:
    """The shapes that identify arguments; arrays of fewer than two dimensions identify nothing."""
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
    """The memory that a program needs, according to the compiler."""

    needed: int  # bytes, rounded to two decimals of the text's unit
    largest: tuple[NamedBuffer, ...]  # allocations that the compiler lists, all named `program`


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([BKMGT]?)(?:iB|B)?"
_ANY_SIZE = r"[\d.]+[BKMGT]?"
# The compiler on temporaries; the compiler on a whole program, with its largest allocations; the runtime on one
# allocation.
_OUT_OF_MEMORY = (
    re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_ANY_SIZE}"),
    re.compile(rf"Used {_SIZE} of {_ANY_SIZE} hbm", re.IGNORECASE),
    re.compile(rf"Allocation \(size={_SIZE}\) would exceed memory \(size={_ANY_SIZE}"),
)
_ENTRY = re.compile(rf"^\s*\d+\.\s+Size:\s+{_SIZE}(.*?)(?=^\s*\d+\.\s+Size:|\Z)", re.DOTALL | re.MULTILINE)


def parse_out_of_memory(text: str) -> OutOfMemory | None:
    """Parse the memory figures in a message of the TPU's compiler or runtime; None if it is about something else."""
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
