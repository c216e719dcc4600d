"""A decode step and an update of a model, compiled for TPUs that are not there: what benches of planned figures share.

Seconds are rooflines of the compiled programs at the chip's published bandwidths; nothing runs.
"""

import dataclasses
import gzip
import tempfile
from pathlib import Path

from benches.decode_layouts import STEPS
from benches.record import show_progress
from podium.accelerators import GIB, Accelerator
from podium.config.schema import Config
from podium.config.sizes import steps_at_once
from podium.hlo.cost import Roofline, roofline
from podium.hlo.hlo_text import Module, parse
from podium.models.layouts import DecodeFloor, machine_of
from podium.plan.calibration import load_chip
from podium.plan.compiled.compile import cache_folder, compile_jobs
from podium.plan.compiled.compile_worker import CompiledPhase
from podium.plan.planner import make_jobs
from podium.plan.request.phase_sizes import Planned
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import find_decoder


def compiled(
    config: Config, accelerator: Accelerator, program: str, *, blocks: float = 1.0, folder: str
) -> tuple[CompiledPhase, Module]:
    """Compile a program of a run up to its memory, and read its text.

    Of each program only the last text is kept, in a folder of its own below `folder` of the planner's cache.
    """
    kept = cache_folder() / folder / program.replace(":", "-")
    kept.mkdir(parents=True, exist_ok=True)
    before = set(kept.glob("*.hlo.gz"))
    with tempfile.TemporaryDirectory() as answers:
        (job,) = make_jobs(Planned.of(config, accelerator), {program: blocks})
        (found,) = compile_jobs([dataclasses.replace(job, programs=kept)], folder=Path(answers), progress=show_progress)
    if set(kept.glob("*.hlo.gz")) - before:
        for old in before:
            (kept / old.name.replace(".hlo.gz", ".json")).unlink()
            old.unlink()
    (text,) = kept.glob("*.hlo.gz")
    return found, parse(gzip.decompress(text.read_bytes()).decode())


def decode_step(config: Config, accelerator: Accelerator, tokens: int, *, folder: str) -> dict[str, object]:
    """A decode step of all slots, each with a sequence of `tokens` tokens.

    `floor_ms` is the time that it takes to read weights and pages and to read and write states, without transfers
    between chips, which `floor_with_links_ms` has.
    """
    decoder, rows = find_decoder(config), config.rollout.slots
    run = Planned.of(config, accelerator, decoder).sizes
    blocks = run.in_blocks(tokens) / run.block
    found, _ = compiled(config, accelerator, f"decode:{rows}", blocks=blocks, folder=folder)
    at_once = steps_at_once(config.rollout.refill_steps, run.rollout_shards)
    few, many = found.cost(1), found.cost(1 + STEPS / at_once)
    peaks = load_chip(accelerator.generation).peaks
    once, again = (roofline(cost, peaks, links=accelerator.ici_links).parts for cost in (few, many))
    parts = {part: (again[part] - once[part]) / STEPS for part in once}
    step = Roofline(compute=parts["compute"], hbm=parts["hbm"], ici=parts["ici"], latency=parts["latency"])
    planned = step.compute + step.hbm + step.ici + step.latency
    machine = machine_of(accelerator, accelerator.devices)
    group = resolve(config, decoder, Machine.planned(accelerator)).rollout.layout.group
    assert machine is not None
    floor = DecodeFloor(decoder=decoder, machine=machine, group=group)
    chips = accelerator.devices
    moved = decoder.stored * 2 + rows * floor.sequence_bytes(tokens)
    moved_s = moved / chips / machine.hbm_bandwidth
    return {
        "tpu": accelerator.name,
        "group": group,
        "planned_ms": round(1e3 * planned, 3),
        "parts_ms": {part: round(1e3 * each, 3) for part, each in parts.items()},
        "floor_ms": round(1e3 * moved_s, 3),
        "over_floor": round(planned / moved_s, 3),
        "floor_with_links_ms": round(1e3 * floor.step_s(rows, tokens), 3),
        "hbm_gb": round((many.hbm_bytes - few.hbm_bytes) / STEPS / 1e9, 3),
        "program_gib": round(found.memory.peak / GIB, 2),
        "refused": found.refused,
        "compile_s": round(found.compile_s, 1),
    }


def update_step(config: Config, accelerator: Accelerator, *, folder: str) -> tuple[dict[str, object], Module]:
    """The update of one micro-batch, and its program."""
    found, module = compiled(config, accelerator, "update", folder=folder)
    step = roofline(found.cost(1), load_chip(accelerator.generation).peaks, links=accelerator.ici_links)
    row: dict[str, object] = {
        "tpu": accelerator.name,
        "update_s": round(sum(step.parts.values()), 3),
        "parts_s": {part: round(each, 3) for part, each in step.parts.items()},
        "gib": round(found.device_bytes / GIB, 2),
        "largest": [[each.name, each.shape, each.bytes] for each in found.largest[:6]],
        "refused": found.refused,
        "compile_s": round(found.compile_s, 1),
    }
    return row, module
