"""One device's part of a lowered program: operations on arrays of this device's shapes.

A program is read in the very form that its compiler gets, StableHLO. Shardy, the pass by which XLA itself decides how
arrays are split, is part of jaxlib and needs no device: it says the sharding of every array and which collectives
change it. Functions are inlined; a loop's body is kept with the number of its rounds.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from podium.hlo.collectives import first_group
from podium.plan.traced.operation_table import (
    KERNELS,
    LIBRARY_CALLS,
    NAMES_ONLY,
    TO_MEMORY,
    TPU_KERNEL,
    Kind,
    UnknownOperation,
    kind_of_operation,
)

PARTITION = (
    "builtin.module(sdy-propagation-pipeline,func.func(sdy-insert-explicit-reshards{enable-full-version=true},"
    "sdy-reshard-to-collectives))"
)
"""Shardy's passes: shardings of all arrays, and the collectives between different ones."""
BITS = {"i1": 8, "complex<f32>": 64, "f8E4M3FN": 8, "f8E5M2": 8, "f8E8M0FNU": 8, "f4E2M1FN": 4}
"""Bits of an element in memory, of types whose name does not say them."""
MOVES = ("broadcast_in_dim", "dynamic_slice", "reshape", "slice", "transpose")
"""Operations whose result lies where their first operand does."""
OF_GROUPS = ("reduction_axes", "gathering_axes", "reduce_scatter_axes", "params")
"""Attributes of Shardy's collectives that name the axes along which the devices of a group differ."""
_QUOTE = r'(?:\\+22|\\*")'
_FLOPS = re.compile(rf"flops{_QUOTE}:\s*{_QUOTE}?(\d+)")
_BYTES = re.compile(rf"(?<![a-z_])bytes(?:_accessed)?{_QUOTE}:\s*{_QUOTE}?(\d+)")
_AXES = re.compile(r'"(\w+)"(?::\((\d+)\)(\d+))?')
"""An axis of the mesh in an attribute; of a part of one the sizes of what is more major, and of the part."""
_PAIRS = re.compile(r"output_tuple_indices = \[(\d*)\],\s*operand_index = (\d+)")


@functools.cache
def _bits(dtype: str) -> int:
    return BITS.get(dtype) or int(re.sub(r"\D", "", dtype))


@dataclasses.dataclass(eq=False)
class Array:
    """An array as one device holds it."""

    shape: tuple[int, ...]
    dtype: str
    host: bool = False
    """Whether it lies in the host's memory."""
    value: int | None = None
    """The value of a constant scalar."""
    maker: "Operation | None" = None
    """None for what a body is given."""
    mesh: str = ""
    """The mesh over which it is split; empty if it is not."""

    @property
    def is_constant(self) -> bool:
        """Whether the program's text holds its value."""
        return self.maker is not None and self.maker.name == "constant"

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return _bits(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of the device's memory."""
        return 0 if self.host else -(-self.elements * self.bits // 8)

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(eq=False)
class Body:
    """A program, a round of a loop, or a branch."""

    given: list[Array]
    operations: list["Operation"]
    results: list[Array]

    @property
    def flops(self) -> float:
        """Operations of a run: a loop of unknown length counts once, and a choice as its dearest branch."""
        loops = ((each.trips or 1) * max(body.flops for body in each.bodies) for each in self.operations if each.bodies)
        return sum(each.flops for each in self.operations) + sum(loops)


class Sent(NamedTuple):
    """What a device sends in a collective."""

    bytes: float = 0.0
    group: int = 1
    """Devices that take part."""
    machines: int = 1
    """Slices, or GPU machines, that these are on."""


NOTHING_SENT = Sent()


@dataclasses.dataclass(eq=False, kw_only=True)
class Operation:
    """One operation on one device."""

    name: str
    kind: Kind
    reads: list[Array]
    writes: list[Array]
    text: str = ""
    """Its attributes; equal operations on equal arrays have equal ones."""
    source: str = ""
    """The path of names under which jax traced it."""
    flops: float = 0.0
    sent: Sent = NOTHING_SENT
    """What the device sends to others."""
    declared_bytes: float | None = None
    """Bytes that a Pallas kernel says it moves, where it reads a part of what it is given; None: all of that, and its
    results."""
    in_place: Sequence[tuple[int, int]] = ()
    """Pairs of the numbers of a result and of the operand over which it may be written."""
    bodies: list[Body] = dataclasses.field(default_factory=list)
    trips: int | None = 1
    """Rounds of a loop; None if only the running program knows them."""

    @property
    def is_pallas(self) -> bool:
        """Whether it is a Pallas kernel."""
        return self.name in KERNELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProgram:
    """A program on one device, and which of its arguments it may write over."""

    body: Body
    donated: Mapping[int, int | None]
    """Numbers of the arguments over which it may write, each with the number of the result that goes there; None if the
    compiler chooses one."""


def read_program(module: ir.Module, per_machine: int = 0) -> DeviceProgram:
    """Read a lowered program, `jax.stages.Lowered.compiler_ir()`, which stays as it is.

    Of the mesh's devices `per_machine` each are on one machine, or in one slice; 0: all on one.

    Raises:
        UnknownOperation: it holds an operation that `operation_table` lacks.
    """
    with module.context:
        own = module.operation.clone()  # with the sources that its text lacks
        passmanager.PassManager.parse(PARTITION).run(own.operation)
        return _Reader(own, per_machine).program()


class _Reader:
    """Reads a partitioned module."""

    def __init__(self, module: ir.Operation, per_machine: int) -> None:
        self.per_machine = per_machine
        self.scopes: list[str] = []
        """The sources of the calls around what is read."""
        self.functions: dict[str, ir.Operation] = {}
        self.meshes: dict[str, dict[str, int]] = {}
        for each in module.regions[0].blocks[0].operations:
            name = ir.StringAttr(each.attributes["sym_name"]).value
            if each.operation.name == "sdy.mesh":
                axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(each.attributes["mesh"]).axes)
                self.meshes[name] = {axis.name: axis.size for axis in axes}
            else:
                self.functions[name] = each.operation

    def program(self) -> DeviceProgram:
        """Read the function `main`, which calls all others."""
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        attributes = [{}] * len(block.arguments)
        if "arg_attrs" in main.attributes:
            attributes = [ir.DictAttr(each) for each in ir.ArrayAttr(main.attributes["arg_attrs"])]
        given, donated = [], {}
        for number, (value, own) in enumerate(zip(block.arguments, attributes, strict=True)):
            sharding = sdy.TensorShardingAttr(own["sdy.sharding"]) if "sdy.sharding" in own else None
            array = self.array(value.type, sharding)
            array.host = "mhlo.memory_kind" in own and "host" in str(own["mhlo.memory_kind"])
            if "tf.aliasing_output" in own:
                donated[number] = ir.IntegerAttr(own["tf.aliasing_output"]).value
            elif "jax.buffer_donor" in own:
                donated[number] = None
            given.append(array)
        operations: list[Operation] = []
        results = self.block(block, dict(zip(block.arguments, given, strict=True)), operations)
        return DeviceProgram(body=Body(given, operations, results), donated=donated)

    def array(self, kind: ir.Type, sharding: sdy.TensorShardingAttr | None) -> Array:
        """An array of a type that Shardy has split as it says."""
        if not isinstance(kind, ir.RankedTensorType):
            return Array((), "i0")  # a token, which orders effects
        shape, mesh = list(kind.shape), ""
        if sharding is not None:
            sizes, mesh = self.mesh(sharding), str(sharding.mesh_or_ref)
            for at, each in enumerate(sharding.dimension_shardings):
                parts = math.prod(_parts(axis, sizes) for axis in sdy.DimensionShardingAttr(each).axes)
                shape[at] = -(-shape[at] // parts)
        return Array(tuple(shape), str(kind.element_type), mesh=mesh)

    def mesh(self, sharding: sdy.TensorShardingAttr) -> Mapping[str, int]:
        """The sizes of the axes of a sharding's mesh; none if it has no axes."""
        return self.meshes.get(str(sharding.mesh_or_ref).removeprefix("@"), {})

    def block(self, block: ir.Block, known: dict[ir.Value, Array], operations: list[Operation]) -> list[Array]:
        """Read a block's operations, with functions inlined; returns the arrays with which it ends."""
        *body, end = (each.operation for each in block.operations)
        for own in body:
            reads = [known[value] for value in own.operands]
            inner = self.inlined(own)
            if inner is None:
                results = self.operation(own, reads, known, operations)
            else:
                self.scopes.append(_source(own))
                results = self.block(inner, dict(zip(inner.arguments, reads, strict=True)), operations)
                self.scopes.pop()
            known.update(zip(own.results, results, strict=True))
        return [known[value] for value in end.operands]

    def inlined(self, own: ir.Operation) -> ir.Block | None:
        """The block that an operation stands for; None for those that stand for themselves."""
        if own.name in ("sdy.manual_computation", "sdy.named_computation"):
            return own.regions[0].blocks[0]
        named = {"func.call": "callee", "stablehlo.composite": "decomposition"}.get(own.name)
        if named is None:
            return None
        return self.functions[ir.FlatSymbolRefAttr(own.attributes[named]).value].regions[0].blocks[0]

    def operation(
        self, own: ir.Operation, reads: list[Array], known: dict[ir.Value, Array], operations: list[Operation]
    ) -> list[Array]:
        """Read one operation; returns its results."""
        kind, name = kind_of_operation(own.name), own.name.rpartition(".")[2]
        pairs = zip(own.results, _shardings(own), strict=True)
        writes = [self.array(value.type, sharding) for value, sharding in pairs]
        source = "/".join(filter(None, (*self.scopes, _source(own))))
        if kind in (Kind.VIEW, Kind.LIGHT) and reads and "" != reads[0].mesh != writes[0].mesh != "":
            operations.append(moved := _between_meshes(reads[0], writes[0]))
            reads = [*moved.writes, *reads[1:]]
        found = Operation(name=name, kind=kind, reads=reads, writes=writes, source=source)
        for write in writes:
            write.maker, write.host = found, name in MOVES and reads[0].host
        if name == "constant" and not writes[0].shape and writes[0].dtype.startswith(("i", "ui")):
            writes[0].value = int(ir.DenseIntElementsAttr(own.attributes["value"])[0])
        if kind is Kind.LOOP:
            self.loop(own, found, known)
        elif kind is Kind.TRANSFER:
            group = self.group(own)
            found.sent = Sent(self.sent(own, reads[0], writes[0]), len(group), self.machines(group))
        elif kind is Kind.PRODUCT:
            found.flops = _product_flops(own, found)
        elif name == "custom_call" and self.custom_call(own, found):
            return reads[: len(writes)]
        else:
            _place_in_memory(found)
        if kind not in (Kind.LOOP, Kind.TRANSFER) and not found.is_pallas:
            found.text = str([(key, str(own.attributes[key])) for key in own.attributes if "sharding" not in key])
        operations.append(found)
        return writes

    def loop(self, own: ir.Operation, found: Operation, known: dict[ir.Value, Array]) -> None:
        """Read the body of a loop, or the branches of a choice, which know the arrays around them."""
        if found.name != "while":
            for region in own.regions:
                operations: list[Operation] = []
                results = self.block(region.blocks[0], dict(known), operations)
                found.bodies.append(Body([], operations, results))
            found.reads = [*found.reads, *_free(found.bodies)]
            return
        condition, block = (region.blocks[0] for region in own.regions)
        pairs = list(zip(found.writes, found.reads, strict=True))
        given = [dataclasses.replace(write, maker=None, host=read.host) for write, read in pairs]
        body = Body(given, [], [])
        body.results = self.block(block, known | dict(zip(block.arguments, given, strict=True)), body.operations)
        found.bodies, found.in_place = [body], [(number, number) for number in range(len(pairs))]
        for (write, read), own_array, result in zip(pairs, given, body.results, strict=True):
            write.host = own_array.host = read.host = read.host or own_array.host or result.host
        found.trips = _trips(condition, found, known)

    def custom_call(self, own: ir.Operation, found: Operation) -> bool:
        """Read a call of what is no operation of the language; returns whether it is only a name for its operands."""
        target = ir.StringAttr(own.attributes["call_target_name"]).value
        found.name = target
        if target in NAMES_ONLY:
            return True
        if target == TO_MEMORY:
            found.writes[0].host = "host" in str(own.attributes["mhlo.frontend_attributes"])
            return found.writes[0].host == found.reads[0].host
        if target in KERNELS:
            text = " ".join(str(own.attributes[key]) for key in own.attributes)
            flops, moved = _FLOPS.search(text), _BYTES.search(text)
            found.flops = float(flops[1]) if flops else 0.0
            of_part = target != TPU_KERNEL or "output_operand_aliases" in own.attributes
            found.declared_bytes = float(moved[1]) if moved and of_part else None
        elif target not in LIBRARY_CALLS:
            raise UnknownOperation(f"stablehlo.custom_call @{target}")
        if "output_operand_aliases" in own.attributes:
            pairs = _PAIRS.findall(str(own.attributes["output_operand_aliases"]))
            found.in_place = [(int(out or 0), int(at)) for out, at in pairs]
        return False

    def sent(self, own: ir.Operation, read: Array, write: Array) -> float:
        """Bytes that a device sends in a collective around a ring."""
        name = own.name.rpartition(".")[2]
        if name == "all_gather":
            return float(write.bytes - read.bytes)
        if name == "reduce_scatter":
            return float(read.bytes - write.bytes)
        if name in ("collective_permute", "collective_broadcast"):
            return float(read.bytes)
        group = len(self.group(own))
        share = (group - 1) / group
        return (2 * share if name == "all_reduce" else share) * read.bytes

    def group(self, own: ir.Operation) -> list[int]:
        """A group of devices that take part in a collective; two where each sends to one other."""
        for name in ("source_target_pairs", "replica_groups"):
            if name in own.attributes:
                groups = np.array(ir.DenseIntElementsAttr(own.attributes[name]))  # [groups, devices]
                return max(groups.tolist(), key=self.machines)
        if own.name.endswith(("collective_permute", "collective_broadcast")):
            return [0, 1]
        sizes = self.mesh(sdy.TensorShardingAttr(own.attributes["out_sharding"]))
        axes = next((own.attributes[key] for key in OF_GROUPS if key in own.attributes), "")
        parts = {name: (int(more or 1), int(part or sizes[name])) for name, more, part in _AXES.findall(str(axes))}
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        return first_group(ids, list(sizes), parts)

    def machines(self, group: Sequence[int]) -> int:
        """On how many machines these devices are."""
        return len({device // self.per_machine for device in group}) if self.per_machine else 1


def _between_meshes(read: Array, like: Array) -> Operation:
    """Give an array the layout of another over another mesh: Shardy leaves it to XLA, and most comes from others."""
    moved = Array(like.shape, read.dtype, mesh=like.mesh)
    sent = Sent(float(moved.bytes), 2)
    moved.maker = Operation(name="collective_permute", kind=Kind.TRANSFER, reads=[read], writes=[moved], sent=sent)
    return moved.maker


def _source(own: ir.Operation) -> str:
    """The names under which an operation was traced within its function; empty if it has none."""
    place = own.location
    return place.name_str if isinstance(place, ir.NameLoc) else ""


def _parts(axis: ir.Attribute, sizes: Mapping[str, int]) -> int:
    """Into how many parts a dimension is split along an axis or a part of one."""
    own = sdy.AxisRefAttr(axis)
    if own.sub_axis_info is not None:
        return sdy.SubAxisInfoAttr(own.sub_axis_info).size
    return sizes[own.name]


def _shardings(own: ir.Operation) -> list[sdy.TensorShardingAttr | None]:
    """The sharding of each result; None where all devices hold the whole array."""
    if "out_sharding" in own.attributes:
        return [sdy.TensorShardingAttr(own.attributes["out_sharding"])]
    if "sdy.sharding" not in own.attributes:
        return [None] * len(own.results)
    return [
        sdy.TensorShardingAttr(each)
        for each in sdy.TensorShardingPerValueAttr(own.attributes["sdy.sharding"]).shardings
    ]


def _product_flops(own: ir.Operation, found: Operation) -> float:
    """Operations of a product on this device; a multiply-add counts as two."""
    left, right, out = *found.reads[:2], found.writes[0]
    if found.name == "convolution":
        numbers = stablehlo.ConvDimensionNumbers(own.attributes["dimension_numbers"])
        return 2.0 * out.elements * right.elements / right.shape[numbers.kernel_output_feature_dimension]
    numbers = stablehlo.DotDimensionNumbers(own.attributes["dot_dimension_numbers"])
    return 2.0 * out.elements * math.prod(left.shape[at] for at in numbers.lhs_contracting_dimensions)


def _free(bodies: Sequence[Body]) -> list[Array]:
    """Arrays that branches read and do not make."""
    made = {array for body in bodies for each in body.operations for array in each.writes}
    read = [array for body in bodies for each in body.operations for array in each.reads]
    read += [array for body in bodies for array in body.results]
    return [array for array in dict.fromkeys(read) if array not in made]


def _trips(condition: ir.Block, found: Operation, known: Mapping[ir.Value, Array]) -> int | None:
    """Rounds of a loop that counts by ones from one number to another, as jax's scans do; None if they are unknown."""
    pairs = zip(condition.arguments, found.reads, strict=True)
    numbers: dict[ir.Value, int | None] = {value: read.value for value, read in pairs}
    *before, compared, _ = (each.operation for each in condition.operations)
    for each in before:
        if each.name not in ("sdy.constant", "stablehlo.constant"):
            return None
        numbers[each.results[0]] = int(ir.DenseIntElementsAttr(each.attributes["value"])[0])
    if compared.name != "stablehlo.compare" or "LT" not in str(compared.attributes["comparison_direction"]):
        return None
    start, end = (numbers[value] if value in numbers else known[value].value for value in compared.operands)
    return None if start is None or end is None else end - start


def _place_in_memory(found: Operation) -> None:
    """Say over which operands an operation's results are written, and that parts of a host's array are on the host."""
    if found.name in ("dynamic_update_slice", "scatter"):
        found.in_place = [(0, 0)]
        if found.reads[1].host:
            found.writes[0].host = found.reads[0].host = True
    elif found.kind is Kind.BARRIER:
        found.in_place = [(number, number) for number in range(len(found.reads))]
        for write, read in zip(found.writes, found.reads, strict=True):
            write.host = read.host
