"""What a compiler does with each operation of a lowered program: the table that the reader and the fusion look up.

An operation that is not in the table is an error that names it: a guess would be wrong by an unknown amount.
"""

import enum
import re


class Kind(enum.Enum):
    """What becomes of an operation's results."""

    VIEW = "the bytes of its operand under another shape"
    LIGHT = "moves or adds numbers: computed in whatever reads it, as often as need be"
    DEAR = "many instructions for each number: computed in what reads it, but only once"
    REDUCE = "a sum over elements: computed with what it reads, and an array in memory"
    PRODUCT = "a product on the matrix unit"
    OWN = "a kernel of its own, whose operands and results are arrays in memory"
    TRANSFER = "between devices"
    LOOP = "repeats or chooses a body"
    BARRIER = "its operands, none of which may be used before all are there"


SEPARATE = (Kind.PRODUCT, Kind.OWN, Kind.TRANSFER, Kind.LOOP, Kind.BARRIER)
"""Kinds that are kernels by themselves."""


def _named(text: str, kind: Kind) -> dict[str, Kind]:
    return dict.fromkeys(re.findall(r"\S+", text), kind)


# Names of stablehlo, chlo and sdy, without the dialect. openxla.org/stablehlo/spec
KINDS: dict[str, Kind] = {
    **_named("reshape transpose bitcast_convert sharding_constraint reshard copy propagation_barrier", Kind.VIEW),
    **_named(
        """abs add all_slice and broadcast broadcast_in_dim ceil clamp compare complex concatenate constant convert
        count_leading_zeros dynamic_slice floor get_tuple_element imag iota is_finite is_inf is_neg_inf is_pos_inf
        maximum minimum multiply negate next_after not or pad partition_id popcnt real reduce_precision replica_id
        reverse round_nearest_afz round_nearest_even select shift_left shift_right_arithmetic shift_right_logical sign
        slice square subtract xor""",
        Kind.LIGHT,
    ),
    **_named(
        """acos acosh asin asinh atan atan2 atanh bessel_i1e cbrt cosh cosine digamma divide erf erf_inv erfc
        exponential exponential_minus_one lgamma log log_plus_one logistic power remainder rsqrt sine sinh sqrt tan
        tanh""",
        Kind.DEAR,
    ),
    **_named("reduce", Kind.REDUCE),
    **_named("dot_general convolution", Kind.PRODUCT),
    **_named(
        """custom_call dynamic_update_slice gather reduce_window rng rng_bit_generator scatter sort
        top_k""",
        Kind.OWN,
    ),
    **_named("all_gather all_reduce all_to_all collective_broadcast collective_permute reduce_scatter", Kind.TRANSFER),
    **_named("while case if", Kind.LOOP),
    **_named("optimization_barrier", Kind.BARRIER),
}

TPU_KERNEL = "tpu_custom_call"
KERNELS = (TPU_KERNEL, "__gpu$xla.gpu.triton")
"""Custom calls that run a Pallas kernel."""
TO_MEMORY = "annotate_device_placement"
"""The custom call that copies an array to the host's memory or back."""
NAMES_ONLY = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_cond_branch", "LayoutConstraint")
"""Custom calls that compute nothing."""
LIBRARY_CALLS = (
    "mhlo.topk",
    "ApproxTopK",
    "PartialReduce",
    "TopK",
    "xla_python_cpu_callback",
    "xla_ffi_python_cpu_callback",
)
"""Custom calls whose operands and results are all that they need."""


class UnknownOperation(ValueError):
    """An operation that the table lacks: compile the program to be sure."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"a traced program holds the operation {name}, which podium/plan/traced/operation_table.py lacks, so its"
            " memory is unknown until it is compiled; plan without --fast, or add the operation there"
        )


def kind_of_operation(name: str) -> Kind:
    """The kind of an operation by its full name, such as `stablehlo.add`. Raises UnknownOperation."""
    kind = KINDS.get(name.rpartition(".")[2])
    if kind is None:
        raise UnknownOperation(name)
    return kind
