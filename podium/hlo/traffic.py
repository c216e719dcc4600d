"""Operations of one instruction of a compiled program, and the bytes that it moves to and from main memory."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

from podium.hlo.collectives import kind_of
from podium.hlo.hlo_text import HBM, HOST, Computation, Instruction, Module, Shape

# These move nothing themselves: they only rename arrays, or run computations that are counted separately.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"while", "conditional", "call", "async-update", "opt-barrier", "add-dependency"}
ASYNC_STARTS = ("async-start", "call-start")
"""Instructions that run a computation concurrently, perhaps on another core."""
FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked")
SLICES = ("dynamic-slice", "slice", "gather")
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that replace a part of operand 0, with the number of the operand that holds the new part."""
ALIASING = "output_to_operand_aliasing"
READS_ONE_OF = re.compile(r'reads_one_of="(\d+)"')
"""Attribute with the number of equal parts of a kernel's largest operand, of which the kernel reads one."""
ACCESSED = re.compile(r'"bytes_accessed":\s*"?(\d+)')


def products(instruction: Instruction, computation: Computation) -> int:
    """Twice the multiply-adds of a dot, a convolution, cuBLAS's product or cuDNN's attention; 0 for anything else.

    TPU programs express matrix products as convolutions whose spatial dimension is the batch or the heads, padded,
    dilated or strided so that each output combines only its own inputs; holes and padding are not counted.
    """
    if instruction.opcode == "custom-call":
        return _attention_products(instruction, computation) or _library_products(instruction, computation)
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    lhs, rhs = (computation.instructions[name].shapes[0].dims for name in instruction.operands)
    out = instruction.shapes[0].dims
    if instruction.opcode == "dot":
        contracted = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims"))
        return 2 * math.prod(out) * math.prod(lhs[int(dim)] for dim in contracted)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels, instruction.attributes
    of_lhs, of_rhs, of_out = labels.groups()
    total = 2 * out[of_out.index("b")] * out[of_out.index("f")] * rhs[of_rhs.index("i")]
    for dim, window in enumerate(_windows(instruction, len(out) - 2)):
        label = str(dim)
        total *= _meetings(out[of_out.index(label)], rhs[of_rhs.index(label)], lhs[of_lhs.index(label)], *window)
    return total


CUDNN_ATTENTION = "__cudnn$fmhaSoftmax"


def _attention_products(call: Instruction, computation: Computation) -> int:
    """Twice the multiply-adds of cuDNN's attention: two products of all visible pairs forward, five backward."""
    if not (found := re.search(rf'custom_call_target="{re.escape(CUDNN_ATTENTION)}(Backward)?"', call.attributes)):
        return 0
    scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', call.attributes)
    assert scores, call.attributes
    B, H, T, S = (int(size) for size in re.findall(r"\d+", scores[1]))
    pairs = B * H * T * (S + 1) // 2 if re.search(r'"mask_type":\s*"\w*CAUSAL"', call.attributes) else B * H * T * S
    head_size = computation.instructions[call.operands[0]].shapes[0].dims[-1]
    return 2 * (5 if found[1] else 2) * pairs * head_size


def _library_products(call: Instruction, computation: Computation) -> int:
    """Twice the multiply-adds of a product by cuBLAS, which XLA takes for float32 and on GPUs before Ampere."""
    contracted = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', call.attributes)
    if contracted is None or not _by_cublas(call):
        return 0
    lhs = computation.instructions[call.operands[0]].shapes[0].dims
    return 2 * math.prod(call.shapes[0].dims) * math.prod(lhs[int(dim)] for dim in re.findall(r"\d+", contracted[1]))


def _by_cublas(call: Instruction) -> bool:
    return call.attribute("custom_call_target").startswith('"__cublas')


def hbm_traffic(instruction: Instruction, computation: Computation, module: Module) -> int:
    """Bytes that an instruction reads from and writes to main memory.

    Collectives are excluded: their memory traffic overlaps their transfer, which takes longer.
    """
    opcode = instruction.opcode
    if _is_free(instruction) or kind_of(instruction):
        return 0
    operands = [computation.instructions[name] for name in instruction.operands]
    if opcode == "fusion":
        return _fusion_traffic(instruction, operands, module)
    if opcode == "fusion-start":  # ((operands), results, context)
        assert isinstance(instruction.type, tuple), instruction.name
        return _fusion_traffic(dataclasses.replace(instruction, type=instruction.type[1]), operands, module)
    if opcode in IN_PLACE:
        return _replaced(instruction, computation) if instruction.shapes[0].space == HBM else 0
    if opcode == "copy-start":  # (to, from, context): either may be in the chip's cache
        return sum(_in_hbm(shape) for shape in instruction.shapes[:2])
    if opcode == "slice-start":  # ((whole), slice, context)
        whole, part = instruction.shapes[:2]
        return part.padded_size * ((whole.space == HBM) + (part.space == HBM))
    if opcode in SLICES:
        ends = (instruction.shapes[0], operands[0].shapes[0])
        return instruction.shapes[0].padded_size * sum(shape.space == HBM for shape in ends)
    kernel = instruction.attribute("custom_call_target") == '"tpu_custom_call"'
    declared = ACCESSED.search(instruction.attributes) if kernel and instruction.attribute(ALIASING) else None
    if declared:  # it changes a part of an array in place
        return int(declared[1])
    results = instruction.shapes
    if _by_cublas(instruction):
        results = results[:1]  # the second result is a workspace of 32 MiB, which a product hardly uses
    parts = READS_ONE_OF.search(instruction.attributes) if opcode == "custom-call" else None
    return _read_whole(operands, int(parts[1]) if parts else 1) + sum(map(_in_hbm, results))


def _read_whole(operands: list[Instruction], parts: int) -> int:
    """Bytes of distinct operands, counting only one of the equal parts of the largest."""
    sizes = sorted(sum(map(_in_hbm, each.shapes)) for each in {each.name: each for each in operands}.values())
    return sum(sizes[:-1]) + sum(sizes[-1:]) // parts


def fused(module: Module, each: Instruction, computation: Computation) -> Iterator[tuple[Instruction, Computation]]:
    """The instruction itself, or all instructions inside a fusion, each with its computation."""
    if each.opcode not in ("fusion", "fusion-start"):
        yield each, computation
        return
    inner = module.computations[each.callees["calls"][0]]
    for part in inner.instructions.values():
        yield from fused(module, part, inner)


def host_traffic(instruction: Instruction, computation: Computation) -> int:
    """Bytes that an instruction copies between a device's memory and its host's, in either direction."""
    operands = [computation.instructions[name] for name in instruction.operands]
    ends = [shape for each in (*operands, instruction) for shape in each.shapes]
    if _is_free(instruction) or all(shape.space != HOST for shape in ends):
        return 0
    part = operands[IN_PLACE[instruction.opcode]] if instruction.opcode in IN_PLACE else instruction
    return part.shapes[0].padded_size


def _is_free(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode == "custom-call":
        return instruction.attribute("custom_call_target").strip('"') in FREE_CALLS
    return opcode in (*FREE, *ASYNC_STARTS) or opcode.endswith("-done")


def _windows(instruction: Instruction, spatial_dims: int) -> Iterator[tuple[int, int, int, int]]:
    """(stride, low padding, dilation of the input, dilation of the kernel) of each spatial dimension."""
    given = dict(re.findall(r"(\w+)=([\dx_-]+)", instruction.attribute("window")))
    settings = [
        [int(part.split("_")[0]) for part in given[key].split("x")] if key in given else [default] * spatial_dims
        for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
    ]
    yield from zip(*settings, strict=True)  # pyright: ignore[reportReturnType]  # there are four


@functools.cache
def _meetings(out: int, kernel: int, inputs: int, stride: int, low: int, dilation: int, kernel_dilation: int) -> int:
    """Number of pairs (output position, kernel position) along a dimension that read an input element, not padding."""
    positions = np.add.outer(np.arange(out) * stride, np.arange(kernel) * kernel_dilation) - low
    return int(np.sum((positions % dilation == 0) & (positions >= 0) & (positions < inputs * dilation)))


def _in_hbm(shape: Shape) -> int:
    return shape.padded_size if shape.space == HBM else 0


def _replaced(instruction: Instruction, computation: Computation) -> int:
    """Traffic of an in-place update: read its operand and write the slice; a scatter also reads the slice."""
    part = computation.instructions[instruction.operands[IN_PLACE[instruction.opcode]]].shapes[0].padded_size
    return part * (3 if instruction.opcode == "scatter" else 2)


def _fusion_traffic(fusion: Instruction, operands: list[Instruction], module: Module) -> int:
    """Bytes that a fusion reads and writes; of a sliced array, only the slices count."""
    inner = module.computations[fusion.callees["calls"][0]]
    aliasing = fusion.attribute(ALIASING)
    handed_on = _aliased(fusion)  # through the steps of a running gather
    handed_to = {int(number) for number in re.findall(r"\{(\d*)\}: \(", aliasing) if number}
    if re.search(r"\{\}: \(", aliasing):
        handed_to = set(range(len(fusion.shapes)))
    total = 0
    for number, operand in enumerate(operands):
        if number not in handed_on:
            whole = sum(_in_hbm(shape) for shape in operand.shapes)
            read, handed_out = _read(inner, number, module)
            total += whole if handed_out else min(whole, read)
    for index, (shape, update) in enumerate(zip(fusion.shapes, updates(inner, module), strict=True)):
        if index not in handed_to and shape.space == HBM:
            total += update.written if update else shape.padded_size
    return total


def _aliased(fusion: Instruction) -> set[int]:
    """Numbers of the operands in whose memory a fusion has its results."""
    return {int(number) for number in re.findall(r"\((\d+), \{", fusion.attribute(ALIASING))}


def _renames(instruction: Instruction, module: Module) -> bool:
    """Whether an instruction inside a fusion is operand 0 in another shape, or with other tiles in its own memory."""
    if instruction.opcode != "fusion" or not _aliased(instruction):
        return instruction.opcode == "bitcast"
    return module.computations[instruction.callees["calls"][0]].root.opcode == "copy"


EVERYTHING = 2**62  # no upper bound
AS_USED = ("convert", "transpose")
"""Instructions that a fusion evaluates only for the elements that are used."""


def _read(computation: Computation, number: int, module: Module) -> tuple[int, bool]:
    """Upper bound of the bytes that a fused computation reads of a parameter, and whether it returns the parameter.

    It returns the parameter if its result is the parameter, at most reshaped, cast or transposed; users outside then
    read it. Reshapes and casts are computed only where they are used, so a slice of one reads a slice of the parameter.
    """
    parameter = computation.parameters[number]
    names, total = {parameter.name}, 0
    computed: set[str] = set()
    for user in computation.instructions.values():  # defined before used
        for index in (index for index, name in enumerate(user.operands) if name in names):
            if (_renames(user, module) or user.opcode in AS_USED) and index == 0:
                names.add(user.name)
                computed |= {user.name} if user.opcode in AS_USED or user.operands[0] in computed else set()
            elif user.opcode == "fusion":
                read, handed_on = _read(module.computations[user.callees["calls"][0]], index, module)
                total += read
                names |= {user.name} if handed_on else set()
            elif user.opcode in SLICES and index == 0:
                total += dataclasses.replace(user.shapes[0], dtype=parameter.shapes[0].dtype).padded_size
            elif user.opcode not in IN_PLACE or index > 0 or user.operands[0] in computed:  # else replaced, not read
                return EVERYTHING, False
    return total, computation.root.name in names


@dataclasses.dataclass(frozen=True)
class Update:
    """An output of a fusion that is one of its parameters with a part replaced, in the same memory."""

    parameter: int
    written: int  # bytes


def updates(computation: Computation, module: Module) -> list[Update | None]:
    """For each output of a fused computation, the parameter that it updates in place; None if the output is new."""
    root = computation.root
    if root.opcode != "tuple":
        return [_update(root, computation, module)] if len(root.shapes) == 1 else [None] * len(root.shapes)
    found: list[Update | None] = []
    for each in (computation.instructions[name] for name in root.operands):
        new = len(each.shapes) != 1  # a reduction of several arrays at once
        found += [None] * len(each.shapes) if new else [_update(each, computation, module)]
    return found


def _update(output: Instruction, computation: Computation, module: Module) -> Update | None:
    output = _renamed(output, computation, module)
    if output.opcode == "fusion" and len(output.shapes) == 1:
        inner = updates(module.computations[output.callees["calls"][0]], module)[0]
        replaced, written = (inner.parameter, inner.written) if inner else (None, 0)
    elif output.opcode in IN_PLACE:
        part = computation.instructions[output.operands[IN_PLACE[output.opcode]]].shapes[0].padded_size
        replaced, written = 0, part * (2 if output.opcode == "scatter" else 1)
    else:
        return None
    if replaced is None:
        return None
    target = _renamed(computation.instructions[output.operands[replaced]], computation, module)
    # an update of an array made in the computation is written whole
    return Update(int(target.literal), written) if target.opcode == "parameter" else None


def _renamed(instruction: Instruction, computation: Computation, module: Module) -> Instruction:
    while _renames(instruction, module):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction
