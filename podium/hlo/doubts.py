"""Checks that `podium.hlo` reads a compiled program's text correctly, because a new compiler may change the format.

Three independent checks are made: the grammar of the text, the compiler's own count of operations and bytes, and its
memory. Each check that fails adds a sentence to the plan. No jax.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

from podium.hlo.cost import ProgramCost
from podium.hlo.hlo_text import Module

# github.com/openxla/xla, xla/hlo/ir/hlo_opcode.h, in November 2026.
OPCODES = frozenset(
    re.findall(
        r"\S+",
        """abs acos acosh add add-dependency after-all all-gather all-reduce all-to-all and asin asinh async atan2 atanh
        batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil
        cholesky clamp collective-broadcast collective-permute compare complex concatenate conditional constant convert
        convolution copy cosine cosh count-leading-zeros custom-call divide domain dot dynamic-reshape dynamic-slice
        dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather get-dimension-size
        get-tuple-element imag infeed iota is-finite log log-plus-one logistic map maximum minimum multiply negate not
        opt-barrier or outfeed pad parameter partition-id popcnt power ragged-all-to-all ragged-dot real recv reduce
        reduce-precision reduce-scatter reduce-window remainder replica-id reshape reverse rng rng-bit-generator
        rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select
        select-and-scatter send set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine sinh
        slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor""",
    )
)
"""Names of operations; asynchronous ones are written with the suffix -start, -update or -done."""
LAYOUT = re.compile(r"[\d,]*(:(T(\([\d,*]+\))+|D\([A-Z,+~]*\)|[SLEM]\(\d+\)|[#*]\(\w+\))+)?")
"""A regular expression for layouts: order of dimensions, tiles, and the numbers of memory space, padding and bits."""
ARRAY = re.compile(r"(?<![\w.%-])((?:pred|token|[a-z]{1,4}\d\w*)\[[^\]]*\])(\{[^}]*\})?")
DIMENSIONS = re.compile(r"\[(<=\d+|\d+)?(,(<=)?\d+)*\]")
COUNTED = 0.5
"""Bound for the ratio of the reader's count of operations to the compiler's, each loop counted once: from this to its
inverse; also the upper bound for bytes. For the programs below, the ratio was 0.96 to 0.99."""
LEAST_BYTES = 0.03
"""The smallest allowed ratio of the reader's bytes to the compiler's, which counts whole arrays where a part is
replaced. In programs of SmolLM2 for a CPU it was 1.0 (updates and copies), 0.48 (decoding) and 0.09 (prefill)."""
PER_BYTE = 8.0
"""Elementwise operations per byte, which the compiler counts and the reader does not."""
MEMORY = 0.35
"""Largest difference between the arrays of the text and the compiler's memory, as a share of the latter."""
SMALL = 2**24
"""Bytes of traffic, and of a difference in memory, below which nothing is reported: small arrays differ by more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """The compiler's own count of a program, each loop once: jax's `cost_analysis`."""

    flops: float  # of products and elementwise operations
    accessed: float  # bytes read and written by all instructions


def doubts(
    text: str, module: Module, *, once: ProgramCost, counted: Counted | None, arrays: int, peak: int
) -> list[str]:
    """A sentence for each check that fails; empty if all agree.

    Args:
        text: the compiled program.
        module: the parsed text.
        once: the program's cost by `walk(..., once=True)`.
        counted: the compiler's count; None if it made no count.
        arrays: bytes of the arrays at the peak, by `live_at_peak`.
        peak: the compiler's figure for the same arrays.
    """
    return [*unknown_text(text, module), *_counts(once, counted), *_memory(arrays, peak)]


def unknown_text(text: str, module: Module) -> Iterator[str]:
    """Operations and layouts that are written in an unknown way."""
    opcodes = collections.Counter(
        each.opcode for computation in module.computations.values() for each in computation.instructions.values()
    )
    if unknown := [name for name in opcodes if not known_opcode(name)]:
        yield f"operations that the reader of programs does not know: {', '.join(sorted(unknown)[:5])}"
    found = {(dims, layout) for dims, layout in ARRAY.findall(text)}
    odd = sorted(
        f"{dims}{layout}"
        for dims, layout in found
        if not DIMENSIONS.fullmatch(dims[dims.index("[") :]) or not LAYOUT.fullmatch(layout[1:-1])
    )
    if odd:
        yield f"shapes that the reader of programs does not know, such as {odd[0][:60]}"


def known_opcode(opcode: str) -> bool:
    """Whether an opcode is among those that XLA had when this was written."""
    return opcode in OPCODES or re.sub(r"-(start|update|done)$", "", opcode) in OPCODES


def _counts(once: ProgramCost, counted: Counted | None) -> Iterator[str]:
    if counted is None:
        return
    own = sum(work.times * (work.flops + work.flops_f32) for work in once.works if not work.kernel)
    elementwise = PER_BYTE * counted.accessed
    if own > counted.flops / COUNTED or own + elementwise < COUNTED * counted.flops:
        yield f"the reader counts {own:.3g} operations where the compiler counts {counted.flops:.3g}, each loop once"
    moved = sum(work.times * work.hbm_bytes for work in once.works if not work.kernel)
    if counted.accessed > SMALL and not LEAST_BYTES <= moved / counted.accessed <= 1 / COUNTED:
        yield f"the reader counts {moved:.3g} bytes of traffic where the compiler counts {counted.accessed:.3g}"


def _memory(arrays: int, peak: int) -> Iterator[str]:
    if abs(arrays - peak) > max(MEMORY * peak, SMALL):
        yield f"the arrays in the text take {arrays:.3g} bytes at their peak where the compiler says {peak:.3g}"
