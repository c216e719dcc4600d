"""Describes the instructions of a program that are not products, in words: `slice of rollout_weights bf16[2048,11008]`.

Such instructions are copies of arrays into another layout, slices of stacks, joined or converted weights, and passes
over activations. They take most of a program's time beyond its floor (`podium.plan.closed_form.least_bytes`). Arrays
are named as in `podium.hlo.memory`. No jax.
"""

from collections.abc import Callable, Iterable, Iterator

from podium.hlo.collectives import kind_of
from podium.hlo.hlo_text import HBM, Computation, Instruction, Module, Shape
from podium.hlo.liveness import ArrayRef, computations_run
from podium.hlo.memory import ArrayNames, NamedBuffer, array_namer
from podium.hlo.traffic import IN_PLACE, SLICES, fused, hbm_traffic, products, updates

LEAST = 2**20
"""Bytes of memory traffic of one execution below which an instruction is not described."""
SMALL = 2**16
"""Bytes of an array inside a fusion below which it is an index or a constant rather than what the fusion moves."""
FORMS = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota", "reshape")
"""Operations inside a fusion that move nothing themselves."""
COPIES = ("copy", "transpose", "pad", "reverse")
VERBS = {"join of": ("concatenate",), "cast of": ("convert",), "slice of": SLICES, "copy of": COPIES}
"""Verbs for instructions whose operations only move arrays; the first that applies is used, else WRITES."""
WRITES, PASSES = "write to", "pass over"

Array = tuple[ArrayRef, Shape]


def moves(module: Module, names: ArrayNames) -> dict[str, str]:
    """Describe what each instruction does that moves at least `LEAST` bytes and computes no product, by its name.

    Kernels, collectives, and copies into a chip's cache from which a product reads its operands are left out.
    """
    name_of = array_namer(module, names)
    found: dict[str, str] = {}
    for title in dict.fromkeys(computations_run(module, module.entry.name)):
        computation = module.computations[title]
        for each in computation.instructions.values():
            if hbm_traffic(each, computation, module) < LEAST or each.opcode == "custom-call":
                continue
            inside = list(fused(module, each, computation))
            if any(products(part, where) or kind_of(part) for part, where in inside):
                continue
            if moved := _described(_verb(part for part, _ in inside), each, computation, module, name_of):
                found[each.name] = moved
    return found


def _verb(inside: Iterable[Instruction]) -> str:
    """What a fusion does with arrays, by its operations on large ones."""
    large = [part for part in inside if max((shape.size for shape in part.shapes), default=0) >= SMALL]
    opcodes = {part.opcode.removesuffix("-start") for part in large}.difference(FORMS)
    if not opcodes or not opcodes <= {*IN_PLACE, *(name for own in VERBS.values() for name in own)}:
        return PASSES
    return next((verb for verb, own in VERBS.items() if opcodes.intersection(own)), WRITES)


def _described(
    verb: str,
    each: Instruction,
    computation: Computation,
    module: Module,
    name_of: Callable[[ArrayRef], NamedBuffer | None],
) -> str:
    """What an instruction does with which array; empty if it fills a cache of the chip.

    A moved array has the name of the program's argument that it comes from or goes to, if any.
    """
    read = [array for name in each.operands for array in _arrays(computation, computation.instructions[name])]
    made = [array for array in _arrays(computation, each) if _is_new(each, array[0].leaf, module)]
    if not (made if verb in VERBS else (*read, *made)):
        return ""
    by_size = sorted((*read, *made), key=lambda array: -array[1].padded_size)
    array, shape = max(made, key=lambda array: array[1].padded_size) if verb in VERBS else by_size[0]
    buffers = [name_of(each) for each, _ in (by_size if verb in VERBS else by_size[:1])]
    given = next((buffer for buffer in buffers if buffer and buffer.is_argument), name_of(array))
    assert given is not None, "the array is in main memory"
    return f"{verb} {given.name} {shape}"


def _arrays(computation: Computation, each: Instruction) -> Iterator[Array]:
    """The arrays of a result that are in main memory and are not constants of the program."""
    for leaf, shape in enumerate(each.shapes):
        if shape.space == HBM and each.opcode != "constant":
            yield ArrayRef(computation.name, each.name, leaf), shape


def _is_new(each: Instruction, leaf: int, module: Module) -> bool:
    """Whether an instruction writes a whole leaf of its result, instead of a part of an operand."""
    if each.opcode.endswith("-start"):  # (to, from, context), or (operands, results, context)
        return leaf == (0 if each.opcode == "copy-start" else len(each.operands))
    if each.opcode == "fusion":
        return updates(module.computations[each.callees["calls"][0]], module)[leaf] is None
    return each.opcode not in IN_PLACE
