"""How far are compiled programs from their floors? Presets on TPUs and GPUs, each program over the least it has to do.

    python -m benches.floors                                  (a day of two cores for all; each program is kept)
    python -m benches.floors Qwen/Qwen3-8B@v6e-8 Qwen/Qwen3-8B@h100-8

A case is a model on a machine: sync, the longest prefill, the decode that runs most steps, and the update, of steps of
16 prompts with 8 answers of GSM8K's lengths and 4 rows a device, whether or not that fits. Of each, the ratio of its
time to its floor (`podium.plan.closed_form.over_floor`) and what takes most of it without being a product. Nothing here
runs on a TPU or GPU; GPUs need pip install 'podium-rl[plan-gpu]', and cases whose compiler is not installed are left
out. Cases that the results have are not compiled again unless they are named. Writes
benches/results/floors-planned.json and its part of docs/planner-measurements.md; `make test-long` compiles each
recorded case again and fails where a ratio has risen.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benches.record import MEASUREMENTS, RESULTS, ROOT, arguments, record, recorded, show_progress, write_section
from podium.accelerators import find_accelerator
from podium.models.presets import PRESETS
from podium.plan.calibration import load_chip
from podium.plan.compiled.compile import compile_phases
from podium.plan.planned_device import Device
from podium.plan.planner import make_jobs
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.step_calls import Call, packed_run, step_calls
from podium.plan.request.topology import check_compiler, compiler_versions
from podium.plan.request.workload import simulate_rollout
from podium.plan.result import Phase
from podium.run.roles import find_decoder
from podium.settings import load_settings

MACHINES = (
    "v4-8", "v5litepod-1", "v5litepod-8", "v5p-8", "v6e-1", "v6e-8", "a100-80-1", "l4-1", "rtx4090-1", "h100-1",
    "h100-8", "b200-8",
)  # fmt: skip
PHASES = ("sync", "prefill", "decode", "update")
PROMPTS, GROUP, ROWS, PREFILL_ROWS = 16, 8, 4, 16
Rows = dict[str, dict[str, float | str | None]]
"""By phase: its ratio, and the instructions that take most of its time."""
NAME = "floors-planned"


def recorded_rows(folder: Path = RESULTS) -> dict[str, Rows]:
    """The rows of all cases that were recorded, by model@machine."""
    return recorded(NAME, "rows", folder) or {}


def phases(model: str, machine: str) -> Iterator[Phase]:
    """Compile a model's programs for a machine and hold each against its floor."""
    accelerator = find_accelerator(machine)
    devices = accelerator.devices
    settings = {
        "model": model,
        "mesh": "auto",
        "prompts_per_step": -(-max(PROMPTS * GROUP, devices) // GROUP),
        "group_size": GROUP,
        "rollout.max_prompt_tokens": 512,
        "rollout.max_new_tokens": 1024,
        "rollout.slots": -(-PROMPTS * GROUP // devices) * devices,
        "rollout.prefill_rows": -(-PREFILL_ROWS // devices) * devices,
        "train.rows_per_device": ROWS,
    }
    base = ROOT / "configs" / "gsm8k.yaml"
    config = load_settings([base], [f"{key}={value}" for key, value in settings.items()], {}).config
    decoder = find_decoder(config)
    run = Planned.of(config, accelerator, decoder).sizes
    drawn = run.draw_lengths("gsm8k")
    workload = simulate_rollout(drawn, run.rollout, shards=run.rollout_shards, overlap=True)
    run, micro_batches = packed_run(run, drawn)
    calls = list(_one_of_each(step_calls(run, workload, micro_batches)))
    jobs = make_jobs(Planned.of(config, accelerator, decoder), {call.program: call.blocks for call in calls})
    compiled = compile_phases(jobs, progress=show_progress)
    device = Device(accelerator, load_chip(accelerator.generation))
    for call in calls:
        yield device.compiled_phase([call], compiled, run)


def _one_of_each(calls: Iterable[Call]) -> Iterator[Call]:
    """Of each phase the program that does most."""
    of: dict[str, list[Call]] = {}
    for call in calls:
        of.setdefault(call.phase, []).append(call)
    for name in PHASES:
        yield max(of[name], key=lambda call: (call.repeats, call.program))


def row(found: Iterable[Phase]) -> Rows:
    """What the results say of a case."""
    return {
        phase.name: {
            "over_floor": phase.over_floor and round(phase.over_floor, 3),
            "moves": "; ".join(f"{move.share:.0%} {move.what}" for move in phase.moves[:2]),
        }
        for phase in found
    }


def table(rows: Mapping[str, Rows]) -> list[str]:
    """The cases as a table of Markdown, one line each."""
    lines = [f"| model, machine | {' | '.join(PHASES)} |", "|---|" + "---|" * len(PHASES)]
    for case, found in sorted(rows.items()):
        ratios = (found.get(name, {}).get("over_floor") for name in PHASES)
        cells = (f"{ratio:.2f}" if isinstance(ratio, float) else "-" for ratio in ratios)
        lines.append(f"| {case.replace('@', ', ')} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", metavar="MODEL@MACHINE", help="cases to compile, again if they are known")
    args = parser.parse_args()
    rows = recorded_rows(args.results)
    every = (f"{model}@{machine}" for machine in MACHINES for model in PRESETS)
    for case in args.cases or [each for each in every if each not in rows]:
        model, _, machine = case.partition("@")
        try:
            check_compiler(find_accelerator(machine))
            rows[case] = row(phases(model, machine))
        except ValueError as error:  # a compiler that is not installed, or heads that do not divide over the machine
            print(f"{case}: {error}", flush=True)
            continue
        print(case, rows[case], flush=True)
        packages = list(compiler_versions(find_accelerator(machine)))
        record(NAME, {"rows": rows}, args.results, packages=packages)
        write_section(MEASUREMENTS, "floors", table(rows), args.results)


if __name__ == "__main__":
    main()
