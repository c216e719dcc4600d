"""Programs as compilers made them, kept in golden/plan, and the sizes that golden/plan/record.py gave them."""

from pathlib import Path

from podium.hlo.cost import ProgramCost

GOLDEN = Path(__file__).parents[1] / "golden" / "plan"
FSDP = {"fsdp": 8}
MESH = {"dp": 2, "fsdp": 2, "tp": 2}
LAYERS, TOKENS, WIDTH, HIDDEN = 4, 4096, 2048, 8192  # per device


def by_kind(cost: ProgramCost) -> dict[tuple[str, bool], tuple[float, float]]:
    """Collectives by kind and whether they overlap with other work: how many, and the bytes that a device sends."""
    return {(each.kind, each.overlaps): (each.calls, each.sent) for each in cost.collectives}
