"""Decoding and updating a model with delta nets, planned: Qwen3.5-9B compiled for TPUs that are not there.

    python -m benches.recurrent_planned [CASE ...]            (minutes of two cores a case; compilations are kept)

Decode steps of 128 and 1,024 sequences of 4,096 tokens on v6e-8, the latter in two groups of four chips: the roofline
of the compiled program at the chip's published bandwidths, over the time that it takes to read weights and pages and to
read and write states (without transfers between chips, which `floor_with_links_ms` has). The update of 2 rows of
4,096 tokens a chip on v6e-16: seconds by the same roofline, memory, and the instructions that its loops over chunks
execute, each of which costs a chip a microsecond or two that the roofline does not count; a kernel is one instruction.
Writes benches/results/recurrent-planned.json; exit status 1 where a bar is missed.
"""

import dataclasses
import gzip
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benches.decode_layouts import STEPS
from benches.record import ROOT, arguments, record, recorded, show_progress
from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.config.schema import Config
from podium.config.sizes import steps_at_once
from podium.hlo.cost import Roofline, roofline, walk
from podium.hlo.text import Module, parse
from podium.models.blocks.delta import CHUNK
from podium.models.layouts import DecodeFloor, machine_of
from podium.models.presets import PRESETS
from podium.plan.calibration import load_chip
from podium.plan.compile import cache_folder, compile_jobs
from podium.plan.planner import make_jobs
from podium.plan.sizes import make_sizes
from podium.plan.worker import CompiledPhase
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.settings import load_settings

NAME, MODEL, TOKENS = "recurrent-planned", "Qwen/Qwen3.5-9B", 4096
CONFIG = ROOT / "configs" / "gsm8k_qwen35_9b.yaml"
DECODES = {"decode 128": 128, "decode 1,024": 1024}
"""Sequences on v6e-8, by case."""
LAYOUT = {1024: ["rollout.layout=hybrid", "rollout.group_chips=4"]}
"""Settings by number of sequences. A trainer of all weights leaves no room for these groups; `auto` takes one of 8."""
UPDATE, ROWS = "update", 2
DECODE_BAR = 1.35
"""Largest multiple of the floor."""
UPDATE_BARS = {"update_s": 1.15, "gib": 25.0, "instructions": 30_000}


def compiled(config: Config, accelerator: Accelerator, program: str, blocks: float) -> tuple[CompiledPhase, Module]:
    """Compile a program of a run up to its memory, and read its text.

    Of each program only the last text is kept, in a folder of its own.
    """
    kept = cache_folder() / NAME / program.replace(":", "-")
    kept.mkdir(parents=True, exist_ok=True)
    before = set(kept.glob("*.hlo.gz"))
    with tempfile.TemporaryDirectory() as folder:
        (job,) = make_jobs(config, PRESETS[MODEL], accelerator, {program: blocks})
        (found,) = compile_jobs([dataclasses.replace(job, programs=kept)], folder=Path(folder), progress=show_progress)
    if set(kept.glob("*.hlo.gz")) - before:
        for old in before:
            (kept / old.name.replace(".hlo.gz", ".json")).unlink()
            old.unlink()
    (text,) = kept.glob("*.hlo.gz")
    return found, parse(gzip.decompress(text.read_bytes()).decode())


def decode(rows: int, accelerator: Accelerator) -> dict[str, object]:
    """A decode step of `rows` sequences of 4,096 tokens."""
    settings = [
        f"rollout.slots={rows}",
        f"rollout.max_prompt_tokens={TOKENS // 2}",
        f"rollout.max_new_tokens={TOKENS // 2}",
        "grading.overlong_buffer_tokens=512",
        f"prompts_per_step={rows // 8}",
        "train.row_tokens=null",
        *LAYOUT.get(rows, []),
    ]
    config, decoder = load_settings([CONFIG], settings, {}).config, PRESETS[MODEL]
    run = make_sizes(config, decoder, accelerator)
    found, _ = compiled(config, accelerator, f"decode:{rows}", run.in_blocks(TOKENS) / run.block)
    at_once = steps_at_once(config.rollout.refill_steps, run.rollout_shards)
    few, many = found.cost(1), found.cost(1 + STEPS / at_once)
    peaks = load_chip(accelerator.generation).peaks
    once, again = (roofline(cost, peaks, links=accelerator.ici_links).parts for cost in (few, many))
    parts = {part: (again[part] - once[part]) / STEPS for part in once}
    step = Roofline(compute=parts["compute"], hbm=parts["hbm"], ici=parts["ici"], latency=parts["latency"])
    planned = step.compute + step.hbm + step.ici + step.latency
    machine, layout = machine_of(accelerator, accelerator.devices), resolve_group(config, accelerator)
    assert machine is not None
    floor = DecodeFloor(decoder=decoder, machine=machine, group=layout)
    chips = accelerator.devices
    moved = decoder.stored * 2 + rows * (TOKENS * floor.kv_bytes + 2 * floor.state_bytes)
    moved_s = moved / chips / machine.hbm_bandwidth
    return {
        "tpu": accelerator.name,
        "group": layout,
        "planned_ms": round(1e3 * planned, 3),
        "parts_ms": {part: round(1e3 * each, 3) for part, each in parts.items()},
        "floor_ms": round(1e3 * moved_s, 3),
        "over_floor": round(planned / moved_s, 3),
        "floor_with_links_ms": round(1e3 * floor.step_s(rows, rows * TOKENS), 3),
        "hbm_gb": round((many.hbm_bytes - few.hbm_bytes) / STEPS / 1e9, 3),
        "program_gib": round(found.memory.peak / GIB, 2),
        "refused": found.refused,
        "compile_s": round(found.compile_s, 1),
    }


def resolve_group(config: Config, accelerator: Accelerator) -> int:
    """The number of devices that share a copy of the rollout's weights."""
    return resolve(config, PRESETS[MODEL], Machine.planned(accelerator)).rollout.layout.group


def update(accelerator: Accelerator) -> dict[str, object]:
    """The update of one micro-batch of 2 rows of 4,096 tokens a chip."""
    settings = [
        f"rollout.max_prompt_tokens={TOKENS // 2}",
        f"rollout.max_new_tokens={TOKENS // 2}",
        "grading.overlong_buffer_tokens=512",
        f"train.row_tokens={TOKENS}",
        f"train.rows_per_device={ROWS}",
    ]
    config = load_settings([CONFIG], settings, {}).config
    found, module = compiled(config, accelerator, "update", 1.0)
    step = roofline(found.cost(1), load_chip(accelerator.generation).peaks, links=accelerator.ici_links)
    mesh = resolve(config, PRESETS[MODEL], Machine.planned(accelerator)).mesh
    return {
        "tpu": accelerator.name,
        "update_s": round(sum(step.parts.values()), 3),
        "parts_s": {part: round(each, 3) for part, each in step.parts.items()},
        "gib": round(found.device_bytes / GIB, 2),
        "largest": [[each.name, each.shape, each.bytes] for each in found.largest[:6]],
        "refused": found.refused,
        "instructions": chunk_instructions(module, mesh),
        "compile_s": round(found.compile_s, 1),
    }


def chunk_instructions(module: Module, mesh: Mapping[str, int]) -> int:
    """Instructions with a cost of their own that a micro-batch executes in loops over a row's chunks."""
    chunks = TOKENS // CHUNK
    loops = {name for loop, trips in module.loops.items() if trips == chunks for name in loop.runs}
    inside = {each for name in loops for each in module.computations[name].instructions}
    trips = dict.fromkeys((loop.source for loop, trips in module.loops.items() if trips is None), 1.0)
    return round(sum(work.times for work in walk(module, mesh, trips=trips).works if work.name in inside))


def main() -> None:
    parser = arguments(__doc__)
    cases = [*DECODES, UPDATE]
    parser.add_argument("cases", nargs="*", choices=[*cases, []], metavar="CASE", help="; ".join(cases))
    args = parser.parse_args()
    known = recorded(NAME, "cases", args.results) or {}
    for name in args.cases or cases:
        if name == UPDATE:
            known[name] = update(find_accelerator("v6e-16"))
        else:
            known[name] = decode(DECODES[name], find_accelerator("v6e-8"))
        print(f"{name}: {known[name]}", flush=True)
        record(NAME, result(known), args.results, packages=["libtpu"])
    sys.exit(not all(result(known)["met"].values()))


def result(known: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of the cases that were measured."""
    found = {case: known[case] for case in (*DECODES, UPDATE) if case in known}
    met = {case: row["over_floor"] <= DECODE_BAR for case, row in found.items() if case in DECODES}
    met |= {bar: found[UPDATE][bar] <= most for bar, most in UPDATE_BARS.items() if UPDATE in found}
    return {"cases": found, "bars": UPDATE_BARS | {"over_floor": DECODE_BAR}, "met": met}


if __name__ == "__main__":
    main()
