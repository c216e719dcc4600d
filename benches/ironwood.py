"""How far are programs compiled for TPU7x (Ironwood) from their floors? Small and large models, every program.

    python -m benches.ironwood                     (an hour of two cores; each program is kept)

All weights of a 0.5B and an 8B model, and adapters of a mixture of 30B and of a model of 27B with windows, in steps of
16 prompts with 8 answers of GSM8K's lengths, on the four chips (eight devices) of one machine. Every program of a step
is compiled. Nothing here runs on a TPU. Writes benches/results/ironwood-planned.json and its part of
docs/planner-measurements.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benches.record import MEASUREMENTS, ROOT, arguments, record, show_progress, write_section
from podium.accelerators import GIB, find_accelerator
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import Plan
from podium.settings import load_settings

MACHINE = "tpu7x-8"
ADAPTERS = ("lora.rank=32",)
CASES: Mapping[str, tuple[str, ...]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": (),
    "Qwen/Qwen3-8B": (),
    "Qwen/Qwen3-30B-A3B": ADAPTERS,
    "google/gemma-3-27b-it": ADAPTERS,
}
STEP = (
    "mesh=auto",
    "prompts_per_step=16",
    "group_size=8",
    "rollout.max_prompt_tokens=512",
    "rollout.max_new_tokens=1024",
    "rollout.slots=128",
    "rollout.prefill_rows=16",
    "train.rows_per_device=4",
)


def plan(model: str) -> Plan:
    """The plan of a model's step, of which every program is compiled."""
    config = load_settings([ROOT / "configs" / "gsm8k.yaml"], [f"model={model}", *STEP, *CASES[model]], {}).config
    return make_plan(Planned.of(config, find_accelerator(MACHINE)), progress=show_progress)


def row(model: str, found: Plan) -> dict[str, Any]:
    """What the results say of one plan."""
    assert found.step is not None
    return {
        "model": model,
        "settings": CASES[model],
        "verdict": found.verdict,
        "step_s": round(found.step.value, 3),
        "doubts": found.doubts,
        "phases": {
            phase.name: {
                "gib": round(phase.bytes / GIB, 2),
                "seconds": phase.seconds and round(phase.seconds.value, 4),
                "bound_by": phase.bound_by,
                "over_floor": phase.over_floor and round(phase.over_floor, 3),
                "moves": [f"{move.share:.0%} {move.what}" for move in phase.moves[:3]],
            }
            for phase in found.phases
            if phase.compiled
        },
    }


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table for docs/planner-measurements.md."""
    yield "| model | GiB of 94.75 | step, s | sync | prefill | decode | update |"
    yield "|---|---|---|---|---|---|---|"
    for each in rows:
        phases, adapters = each["phases"], ", adapters" if each["settings"] else ""
        largest = max(phases, key=lambda name: phases[name]["gib"])
        ratios = (phases[name]["over_floor"] for name in ("sync", "prefill", "decode", "update") if name in phases)
        cells = " | ".join(f"{ratio:.2f}" if ratio else "-" for ratio in ratios)
        yield (
            f"| {each['model'].partition('/')[2]}{adapters} | {largest} {phases[largest]['gib']:.1f} |"
            f" {each['step_s']:.2f} | {cells} |"
        )


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows = []
    for model in CASES:
        rows.append(row(model, plan(model)))
        print(rows[-1], flush=True)
        record("ironwood-planned", {"rows": rows}, args.results, packages=["libtpu"])
        write_section(MEASUREMENTS, "ironwood", list(lines(rows)), args.results)


if __name__ == "__main__":
    main()
