"""Tokens per second and chip of updates on 8 to 256 TPU chips, planned: compiled for slices that are not there.

    python -m benches.wide_updates              (nine compilations of a model of 7B, under a minute each and kept)

Qwen2.5-7B, four prompts of eight completions of 200 tokens for each chip, float32 state and gradients. A mesh is
`auto`, which splits weights over all chips, or splits them over 8 neighbours and copies them over groups of 8.
`sent_gb` is what a chip sends in a step by kind of exchange; an `all-reduce` of gradients or weights over the chips
that split them sends twice what a `reduce-scatter` or an `all-gather` would. Plans know how many bytes a chip sends and
over how many links, and not how far. Writes benches/results/wide-updates-planned.json; exit status 1 where `auto`
reaches less than 0.92 of the rate on 8 chips of its kind, or all-reduces over fsdp send 0.1 GB.
"""

import sys
from typing import NamedTuple

from benches.record import arguments, record, show_progress
from benches.scaling import GROUP, PROMPTS, config_of
from podium.accelerators import GIB, find_accelerator
from podium.plan.calibration import load_chip
from podium.plan.compiled.compile import compile_phases
from podium.plan.planned_device import Device
from podium.plan.planner import make_jobs
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.step_calls import packed_run, step_calls
from podium.plan.request.workload import no_rollout
from podium.run.roles import find_decoder

MODEL, TOKENS = "Qwen/Qwen2.5-7B-Instruct", 200
CASES = {
    "v6e-8": ("auto",),
    "v6e-16": ("auto",),
    "v6e-32": ("auto",),
    "v6e-64": ("auto", "dp:8,fsdp:8"),
    "v6e-256": ("auto",),
    "v5p-16": ("auto",),
    "v5p-64": ("auto",),
    "v5p-128": ("auto",),
}
"""The meshes of each slice; those of a kind begin with its slice of 8 chips."""
SHARE, SENT_GB = 0.92, 0.1


class Row(NamedTuple):
    """One update, compiled."""

    tpu: str
    mesh: str
    update_s: float
    gib: float
    """Memory of a chip."""
    rate: int
    """Completion tokens per second and chip."""
    sent_gb: dict[str, float]


def measure(tpu: str, mesh: str) -> Row:
    """Compile one update."""
    accelerator = find_accelerator(tpu)
    config = config_of(MODEL, accelerator.devices, f"mesh={mesh}")
    decoder = find_decoder(config)
    run = Planned.of(config, accelerator, decoder).sizes
    drawn = run.draw_lengths(f"fixed:{TOKENS}")
    run, micro_batches = packed_run(run, drawn)
    calls = [call for call in step_calls(run, no_rollout(drawn), micro_batches) if call.phase == "update"]
    programs = {call.program: call.blocks for call in calls}
    compiled = compile_phases(make_jobs(Planned.of(config, accelerator, decoder), programs), progress=show_progress)
    phase = Device(accelerator, load_chip(accelerator.generation)).compiled_phase(calls, compiled, run)
    assert phase.seconds is not None
    sent: dict[str, float] = {}
    for each in phase.collectives:
        kind = f"{each.kind} over {'+'.join(each.axes)}"
        sent[kind] = round(sent.get(kind, 0.0) + each.sent / 1e9, 3)
    return Row(
        tpu=tpu,
        mesh=mesh,
        update_s=round(phase.seconds.value, 3),
        gib=round(phase.bytes / GIB, 2),
        rate=round(PROMPTS * GROUP * TOKENS / phase.seconds.value),
        sent_gb=sent,
    )


def main() -> None:
    """Compile, compare, and write the figures."""
    args = arguments(__doc__).parse_args()
    rows: list[Row] = []
    for tpu, meshes in CASES.items():
        for mesh in meshes:
            rows.append(measure(tpu, mesh))
            print(rows[-1], flush=True)
    met: dict[str, bool] = {}
    of_eight: dict[str, int] = {}
    for row in rows:
        accelerator = find_accelerator(row.tpu)
        share = row.rate / of_eight.setdefault(accelerator.generation, row.rate)
        summed = row.sent_gb.get("all-reduce over fsdp", 0.0)
        print(f"{row.tpu}, mesh {row.mesh}: {share:.3f} of the rate on 8 chips, {summed} GB in all-reduces", flush=True)
        if row.mesh == "auto":
            met[row.tpu] = share >= SHARE and summed <= SENT_GB
    found = {"rows": [row._asdict() for row in rows], "bars": {"share": SHARE, "sent_gb": SENT_GB}, "met": met}
    record("wide-updates-planned", found, args.results, packages=["libtpu"])
    sys.exit(not all(met.values()))


if __name__ == "__main__":
    main()
