"""Milliseconds of a decode step in every layout, planned: the engine's program compiled for a TPU that is not there.

    python -m benches.decode_layouts              (long: some fifteen compilations of large models, each kept)

Each row is a number of sequences of 512 positions, prompt included. `planned` is the roofline of the compiled program
at the chip's published bandwidths, `floor` that of the arithmetic by which `rollout.layout: auto` chooses
(`podium.models.layouts`); a layout whose floor is above what another is planned to take is not compiled, as it cannot
be the best; and `with shares` the plan's estimate with the shares that chips are taken to reach. Writes
benches/results/decode-layouts-planned.json and its part of docs/planner-measurements.md.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benches.record import ROOT, arguments, record, show_progress, write_section
from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.config.rollout_weights import RolloutWeights
from podium.config.schema import Config
from podium.config.sizes import steps_at_once
from podium.hlo.cost import Roofline, roofline
from podium.models.architecture import DecoderConfig
from podium.models.layouts import DecodeFloor, choose_layout, machine_of
from podium.models.presets import preset_decoder
from podium.plan.calibration import calibrated, load_chip
from podium.plan.compiled.compile import compile_phases
from podium.plan.compiled.compile_worker import CompiledPhase
from podium.plan.planner import make_jobs
from podium.plan.request.phase_sizes import Planned
from podium.run.roles import find_decoder
from podium.settings import load_settings

TPU, POSITIONS = "v6e-8", 512
POINTS = {
    "Qwen/Qwen2.5-3B-Instruct": (128, 512, 1024, 4096),
    "Qwen/Qwen2.5-7B-Instruct": (256,),
    "Qwen/Qwen3-8B": (256,),
}
"""Sequences in flight, by model."""
LAYOUTS = ("replicated", "hybrid-2", "hybrid-4", "tensor")
FORMER = ("legacy",)
"""Compiled at the smallest point alone, for comparison."""
STEPS = 8
"""Decode steps over which the cost of one is averaged."""


def run_config(model: str, rows: int, layout: str, weights: RolloutWeights = "dtype") -> Config:
    """Make the shipped config with `rows` slots of 512 positions."""
    name, _, group = layout.partition("-")
    settings = [
        f"model={model}",
        f"rollout.slots={rows}",
        f"rollout.max_prompt_tokens={POSITIONS // 2}",
        f"rollout.max_new_tokens={POSITIONS // 2}",
        f"rollout.layout={name}",
        f"rollout.weights={weights}",
        *([f"rollout.group_chips={group}"] if group else []),
    ]
    return load_settings([ROOT / "configs" / "gsm8k.yaml"], settings, {}).config


def compile_decode(
    config: Config, decoder: DecoderConfig, accelerator: Accelerator, tokens: int = POSITIONS
) -> CompiledPhase:
    """Compile the decode program of a run, in which each sequence attends to `tokens` positions."""
    run = Planned.of(config, accelerator, decoder).sizes
    name = f"decode:{config.rollout.slots}"
    programs = {name: run.in_blocks(tokens) / run.block}
    return compile_phases(make_jobs(Planned.of(config, accelerator, decoder), programs), progress=show_progress)[name]


def measure(
    model: str,
    rows: int,
    layout: str,
    accelerator: Accelerator,
    weights: RolloutWeights = "dtype",
    tokens: int = POSITIONS,
) -> dict[str, Any]:
    """One line of the table."""
    config, chip = run_config(model, rows, layout, weights), load_chip(accelerator.generation)
    decoder = find_decoder(config)
    compiled = compile_decode(config, decoder, accelerator, tokens)
    at_once = steps_at_once(config.rollout.refill_steps, Planned.of(config, accelerator, decoder).sizes.rollout_shards)
    few, many = compiled.cost(1), compiled.cost(1 + STEPS / at_once)
    once, again = (roofline(cost, chip.peaks, links=accelerator.ici_links).parts for cost in (few, many))
    parts = {part: (again[part] - once[part]) / STEPS for part in once}
    step = Roofline(compute=parts["compute"], hbm=parts["hbm"], ici=parts["ici"], latency=parts["latency"])
    sent: dict[str, float] = {}
    calls = 0.0
    for sign, cost in ((-1, few), (1, many)):
        for each in cost.collectives:
            sent[each.kind] = sent.get(each.kind, 0.0) + sign * each.sent / STEPS
            calls += sign * each.calls / STEPS
    seconds, _ = calibrated([(1, step)], chip, "decode")
    planned = step.compute + step.hbm + step.ici + step.latency
    return {
        "model": model,
        "rows": rows,
        "layout": layout,
        "floor_ms": None if layout in FORMER else round(floor(decoder, rows, layout, accelerator, tokens) * 1e3, 3),
        "planned_ms": round(planned * 1e3, 3),
        "parts_ms": {part: round(each * 1e3, 3) for part, each in parts.items()},
        "with_shares_ms": [round(each * 1e3, 2) for each in (seconds.value, seconds.low, seconds.high)],
        "collectives": round(calls, 2),
        "sent_mb": {kind: round(size / 1e6, 3) for kind, size in sent.items()},
        "gib": round(compiled.device_bytes / GIB, 2),
        "fits": compiled.device_bytes <= accelerator.hbm_bytes,
    }


def floor(decoder: DecoderConfig, rows: int, layout: str, accelerator: Accelerator, tokens: int = POSITIONS) -> float:
    """The least seconds of a step of `rows` sequences that attend to `tokens` positions each."""
    chips = accelerator.devices_per_host
    machine = machine_of(accelerator, chips)
    assert machine is not None
    group = {"replicated": 1, "tensor": chips}.get(layout) or int(layout.partition("-")[2])
    return DecodeFloor(decoder=decoder, machine=machine, group=group).step_s(rows, tokens)


def chosen(model: str, rows: int, accelerator: Accelerator, weights: RolloutWeights = "dtype") -> str:
    """The layout that `auto` chooses."""
    config = run_config(model, rows, "auto", weights)
    layout = choose_layout(
        config.rollout,
        find_decoder(config),
        accelerator,
        devices=accelerator.devices,
        hosts=accelerator.hosts,
        optimizer=config.train.optimizer.name,
    )
    return f"hybrid-{layout.group}" if layout.name == "hybrid" else layout.name


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table for docs/planner-measurements.md."""
    yield "| model | sequences | layout | floor, ms | planned, ms | with shares, ms | collectives | sent, MB | GiB |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for each in rows:
        layout = f"**{each['layout']}**" if each["auto"] else each["layout"]
        least = "" if each["floor_ms"] is None else f"{each['floor_ms']:.2f}"
        value, low, high = each["with_shares_ms"]
        gib = f"{each['gib']:.1f}" + ("" if each["fits"] else ", does not fit")
        yield (
            f"| {each['model'].partition('/')[2]} | {each['rows']:,} | {layout} | {least} | {each['planned_ms']:.2f} |"
            f" {value:.1f} ({low:.1f} to {high:.1f}) | {each['collectives']:.0f} |"
            f" {sum(each['sent_mb'].values()):,.1f} | {gib} |"
        )


def main() -> None:
    args = arguments(__doc__).parse_args()
    accelerator, found = find_accelerator(TPU), []
    for model, points in POINTS.items():
        for rows in points:
            auto = chosen(model, rows, accelerator)
            least = {layout: floor(preset_decoder(model), rows, layout, accelerator) for layout in LAYOUTS}
            former = FORMER if (model, rows) == (next(iter(POINTS)), points[0]) else ()
            best = math.inf
            for layout in (*sorted(LAYOUTS, key=least.__getitem__), *former):
                if layout in least and 1e3 * least[layout] > best and layout != auto:
                    continue
                print(f"{model}, {rows} sequences, {layout}", flush=True)
                found.append(measure(model, rows, layout, accelerator) | {"auto": layout == auto})
                print(f"  {found[-1]}", flush=True)
                best = min(best, found[-1]["planned_ms"]) if found[-1]["fits"] else best
    record("decode-layouts-planned", {"tpu": TPU, "positions": POSITIONS, "rows": found}, args.results)
    write_section(ROOT / "docs" / "planner-measurements.md", "decode layouts", list(lines(found)), args.results)


if __name__ == "__main__":
    main()
