"""Planned seconds of updates in a config's own shape of micro-batches alone, and in those that a run chooses.

    python -m benches.shaped_updates [--compile] [CASE...]      (no accelerator; compiled: a quarter of an hour)

A step is planned by the closed form or, with --compile, from its compiled updates; for GPUs always by the closed form.
Both take the same lengths: those of the steps that `podium plan` draws.

Prints a table and writes benches/results/shaped-updates-planned.json.
"""

import dataclasses
import sys
from typing import Any, NamedTuple

from benches.record import ROOT, arguments, record, recorded, show_progress
from podium.accelerators import find_accelerator
from podium.plan.calibration import load_chip
from podium.plan.compiled.compile import compile_phases
from podium.plan.planned_device import Device
from podium.plan.planner import is_compiled, make_jobs
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.request.planned_rows import packed_step
from podium.plan.request.step_calls import Call, packed_run, update_calls
from podium.settings import load_settings

NAME = "shaped-updates-planned"


class Case(NamedTuple):
    """A config on a machine, and the bar of its update."""

    config: str
    machine: str
    settings: tuple[str, ...] = ()
    lengths: str = "gsm8k"
    seconds: float | None = None
    """Most seconds of the update."""
    ratio: float | None = None
    """Most seconds, of those in the config's own shape."""


CASES = {
    "flagship": Case("gsm8k_qwen25_3b.yaml", "v6e-8", seconds=0.25),
    "long-answers": Case(
        "gsm8k_qwen25_3b.yaml",
        "v6e-16",
        ("prompts_per_step=32", "rollout.max_new_tokens=8192", "train.rows_per_device=1"),
        ratio=0.6,
    ),
    "adapters": Case("gsm8k_qwen25_3b_lora.yaml", "h100-1", ratio=0.9),
}


def measure(case: Case, compiling: bool) -> dict[str, Any]:
    """The update of a case in both ways."""
    config = load_settings([ROOT / "configs" / case.config], list(case.settings), {}).config
    accelerator = find_accelerator(case.machine)
    planned = Planned.of(config, accelerator)
    sizes = planned.sizes
    drawn = sizes.draw_lengths(case.lengths)
    chosen, number = packed_run(sizes, drawn)
    alone = packed_step(
        drawn,
        sizes.spec.batch,
        minibatches=sizes.spec.recipe.minibatches,
        attention=sizes.update.attention,
        chooses=False,
    )
    (own_share,) = alone.shapes
    own = dataclasses.replace(sizes, attended=own_share.attended, shapes=alone.shapes)
    ways: list[tuple[RunSizes, list[Call]]] = []
    for run, micro_batches in ((own, alone.micro_batches), (chosen, number)):
        ways.append((run, [call for call in update_calls(run, micro_batches) if call.phase == "update"]))
    compiled = {}
    if compiling and is_compiled(sizes) and sizes.platform == "tpu":
        programs = {call.program: call.blocks for _, calls in ways for call in calls}
        compiled = compile_phases(make_jobs(planned, programs), at_once=1, progress=show_progress)
    device = Device(accelerator, load_chip(accelerator.generation))
    phases = [next(device.phases(calls, compiled, run)) for run, calls in ways]
    before, after = (phase.seconds for phase in phases)
    assert before is not None and after is not None
    return {
        "compiled": bool(compiled),
        "own_s": round(before.value, 4),
        "chosen_s": round(after.value, 4),
        "ratio": round(after.value / before.value, 3),
        "bar": {"seconds": case.seconds, "ratio": case.ratio},
        "gib": [round(phase.bytes / 2**30, 2) for phase in phases],
        "programs": {call.program: round(call.calls, 3) for call in ways[1][1]},
        "gib_of_programs": {name: round(each.device_bytes / 2**30, 2) for name, each in compiled.items()},
    }


def main() -> int:
    """Measure the cases that were asked for, and keep those that were measured before."""
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--compile", action="store_true", help="compile updates of TPUs")
    options = parser.parse_args()
    found: dict[str, Any] = recorded(NAME, "cases", options.results) or {}
    for name in options.cases or CASES:
        found[name] = each = measure(CASES[name], options.compile)
        print(f"{name:14} own {each['own_s']:.3f} s  chosen {each['chosen_s']:.3f} s  ratio {each['ratio']:.2f}")
        record(NAME, {"cases": found}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
