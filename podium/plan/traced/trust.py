"""How far the memory of a traced program may be from the compiler's, by kind of program. No jax.

Each figure is the largest error that `benches.traced` found: in recorded programs, and in updates that a random seed
drew after the rules of traces were written. A plan says that a run fits, or that it does not, only where the whole
range lies on one side of the memory; otherwise it compiles the programs that decide.
"""

from typing import NamedTuple

from podium.models.blocks.experts import Experts
from podium.plan.request.phase_sizes import RunSizes
from podium.plan.result import part_of


class Trust(NamedTuple):
    """The least and the most that compilers were seen to need, relative to the trace."""

    low: float
    high: float
    near: bool = True
    """Whether traces of this kind are near enough for a compiler to be asked only where they leave a doubt."""


SYNC = Trust(0.98, 1.51)
ROLLOUT = Trust(0.98, 1.09)
TPU_UPDATE = Trust(0.87, 1.11)
TPU_PATTERN = Trust(0.94, 1.42, near=False)
"""XLA's schedule of a loop whose body has several layers keeps arrays of more than one of them."""
TPU_EXPERTS = Trust(0.94, 1.42)
"""XLA copies stacks of experts, into tiles of 128 lanes where an expert's rows on a device are no multiple of these."""
GPU_UPDATE = Trust(0.87, 1.09)
GPU_PLAIN = Trust(0.83, 1.25, near=False)
"""cuBLAS gets copies of operands in other layouts, of scores and of recurrences, which a trace does not have."""

WITHOUT_SCORES = ("tpu_kernel", "gpu_kernel", "blocks")
"""Attention that never holds the scores of whole rows."""


def trust(run: RunSizes, phase: str) -> Trust:
    """How far the trace of a phase's largest program may be from the compiler's figure."""
    if part_of(phase) not in ("reward", "score", "update"):
        return SYNC if phase == "sync" else ROLLOUT
    several = len({place.block for place in run.decoder.places}) > 1
    if run.platform == "tpu":
        experts = any(isinstance(place.block.feed_forward, Experts) for place in run.decoder.places)
        return TPU_PATTERN if several else TPU_EXPERTS if experts else TPU_UPDATE
    return GPU_UPDATE if run.update.attention in WITHOUT_SCORES and not several else GPU_PLAIN
