"""Collectives of a compiled program: which devices take part, along which mesh axes, and how many bytes each sends."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from podium.hlo.hlo_text import Computation, Instruction, numbers


@dataclasses.dataclass(frozen=True)
class Kind:
    """Properties of one kind of collective."""

    does: str  # what a device does in the collective, as a verb for reports
    sent: Callable[[int], float] = lambda group: (group - 1) / group
    """Ratio of the bytes a device sends to the size of its input, for a ring over `group` devices."""
    rounds: int = 1  # how often a message goes around the ring


KINDS: Mapping[str, Kind] = {
    "all-gather": Kind("gathers", sent=lambda group: group - 1),
    "all-reduce": Kind("sums (all-reduce)", sent=lambda group: 2 * (group - 1) / group, rounds=2),
    "reduce-scatter": Kind("sums (reduce-scatter)"),
    "all-to-all": Kind("exchanges"),
    "ragged-all-to-all": Kind("exchanges"),
    "collective-permute": Kind("passes on"),
}


BETWEEN_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}[^"]*",_xla_megascale_transfer_type="(\w+)"')
"""Attribute of a `send`: the slices of a group, and the kind of their collective."""
Beside = tuple[float, float, float]
"""Work done during a transfer: float32 operations, other operations, and bytes of memory traffic."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective, from the point of view of one device."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which a group's devices differ
    group: int  # devices of a group; 2 for a permute
    sent: int  # bytes that this device sends, around a ring
    overlaps: bool  # whether the device does other work meanwhile
    machines: int = 1  # machines over which the group is spread
    beside: Beside | None = None  # work done until the device waits for the transfer, if the program tells

    @property
    def hidden(self) -> bool:
        """Whether the device does other work during at least part of the transfer."""
        return self.overlaps or any(self.beside or ())


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction is or starts; None for all others, including `-done` instructions.

    What TPU slices exchange over the network is a `send` of this kind, by which the host's library does the rest.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send" and (between := BETWEEN_SLICES.search(instruction.attributes)):
        kind = between[2].lower().replace("_", "-")
    return kind if kind in KINDS else None


def transfer(
    instruction: Instruction,
    kind: str,
    computation: Computation,
    mesh: Mapping[str, int],
    *,
    overlaps: bool,
    per_machine: int = 0,
) -> Transfer:
    """Describe a collective of this kind (`kind_of`): its axes, group and bytes.

    An all-reduce whose result each device only slices is a reduce-scatter on TPU. `mesh` maps mesh axes to their sizes,
    major first; devices are numbered in that order, `per_machine` of them on each machine (0: all on one).
    """

    def machines(devices: Sequence[int]) -> int:
        return len({device // per_machine for device in devices}) if per_machine else 1

    if between := BETWEEN_SLICES.search(instruction.attributes):  # slices are the mesh's outermost part
        size, data = len(numbers(between[1])), computation.instructions[instruction.operands[0]].shapes[0]
        sent = round(data.size * KINDS[kind].sent(size))
        return Transfer(kind, tuple(mesh)[:1], group=size, sent=sent, overlaps=overlaps, machines=size)
    if kind == "all-reduce" and _only_sliced(instruction, computation):
        kind = "reduce-scatter"
    given = sum(shape.size for name in instruction.operands for shape in computation.instructions[name].shapes)
    if instruction.opcode == "all-reduce":  # its operand may be float32 although bfloat16 is sent
        given = min(given, sum(shape.size for shape in instruction.shapes))
    if kind == "collective-permute":
        pairs = [numbers(pair) for pair in _listed(instruction, "source_target_pairs")]
        axes = {axis for pair in pairs for axis in _differing(pair, mesh)}
        apart = max((machines(pair) for pair in pairs), default=1)
        return Transfer(
            kind,
            tuple(axis for axis in mesh if axis in axes),
            group=2,
            sent=given if pairs else 0,
            overlaps=overlaps,
            machines=apart,
        )
    devices = group_of(instruction, math.prod(mesh.values()))
    size = len(devices)
    sent = round(given * KINDS[kind].sent(size))
    return Transfer(
        kind, _differing(devices, mesh), group=size, sent=sent, overlaps=overlaps, machines=machines(devices)
    )


def group_of(instruction: Instruction, num_devices: int) -> list[int]:
    """The first group of devices among which a collective runs.

    XLA writes groups in three ways: `{{0,1},{2,3}}`; `[4,2]<=[2,4]T(1,0)`, devices counted, transposed and cut into
    rows; and `mesh['a'=4,'b'=2] {'b'}`, axes of a mesh that XLA names itself. Without groups, all devices take part.
    """
    _, _, text = instruction.attributes.partition("replica_groups=")
    if found := _MESH.match(text):
        return _mesh_group(*found.groups(default=""))
    if found := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, counted, order = found.groups(default="")
        return _transposed(counted, order).reshape(numbers(shape))[0].tolist()
    listed = _listed(instruction, "replica_groups")
    return list(numbers(listed[0])) if listed else list(range(num_devices))


_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))? \{([^}]*)\}")


def _mesh_group(axes: str, counted: str, order: str, listed: str, inside: str) -> list[int]:
    """The group of the first device: devices that differ only along the axes `inside`.

    `'a':(2)4` is a part of an axis, of size 4, with a more major part of size 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", axes)}
    devices = numbers(listed) or range(math.prod(sizes.values()))
    ids = _transposed(counted, order) if counted else np.array(devices)
    wanted = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'?(\w+)'?(?::\((\d+)\)(\d+))?", inside)
    }
    return first_group(ids.reshape(tuple(sizes.values())), list(sizes), wanted)


def first_group(ids: np.ndarray, axes: Sequence[str], parts: Mapping[str, tuple[int, int]]) -> list[int]:
    """The group of a mesh's first device.

    Args:
        ids: numbers of the mesh's devices, a dimension for each axis.
        axes: names of these dimensions.
        parts: by name of each axis along which the group's devices differ: into how many blocks the axis is cut first,
            and how many devices of a block, evenly spaced, are in the group.
    """
    for dim, name in enumerate(axes):
        before, size = parts.get(name, (1, 1))
        ids = ids.reshape(*ids.shape[:dim], before, size, -1, *ids.shape[dim + 1 :])
        ids = ids.take(0, axis=dim + 2).take(0, axis=dim)  # keeps the middle one
    return ids.flatten().tolist()


def _transposed(counted: str, order: str) -> np.ndarray:
    """Device numbers of an iota array of these dimensions, after its dimensions are permuted."""
    dims = numbers(counted)
    return np.arange(math.prod(dims)).reshape(dims).transpose(numbers(order) or None)


def _listed(instruction: Instruction, attribute: str) -> list[str]:
    """The inner lists of `attribute={{..},{..}}`."""
    return re.findall(r"\{([\d,]+)\}", instruction.attribute(attribute))


def _differing(devices: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which these devices have different coordinates."""
    coordinates = np.unravel_index(list(devices), tuple(mesh.values()))
    return tuple(axis for axis, found in zip(mesh, coordinates, strict=True) if len(set(found.tolist())) > 1)


def _only_sliced(instruction: Instruction, computation: Computation) -> bool:
    """Whether a result is only ever sliced."""
    users = computation.users[instruction.name]
    passed = [each for each in users if each.opcode in ("get-tuple-element", "bitcast")]
    sliced = [each for each in users if each.opcode == "dynamic-slice"]
    return bool(users) and len(passed) + len(sliced) == len(users) and all(_only_sliced(e, computation) for e in passed)
