"""Whole rollouts, planned: every program of them compiled for a TPU that is not there, with the calls that they take.

    python -m benches.rollout_planned            (ten minutes: some dozen compilations, each kept)

Qwen2.5-3B on v6e-8, GSM8K's lengths, up to 1,024 new tokens: 128 completions and 1,024 of them, with slots enough for
all and with fewer, waiting for the longest or carrying completions over (`rollout.in_flight`). `device` is the time of
sync, prefill, copy and decode with the shares that chips are taken to reach, `host` what the host takes beside them if
nothing of it is hidden; `rate` the completion tokens per second and chip of the device's time, and `of full` its share
of that with all slots busy. Writes benches/results/rollout-planned.json and its part of docs/planner-measurements.md;
exit status 1 where a bar is missed: 1.3 s for the first, 0.9 s for the first with 1.5 in flight, 0.75 of full for one
with 1,024.
"""

import sys
from typing import Any

from benches.record import ROOT, arguments, record, write_section
from podium.accelerators import find_accelerator
from podium.plan.calibration import load_chip
from podium.plan.planner import ROLLOUT, make_plan
from podium.plan.request.phase_sizes import Planned
from podium.settings import load_settings

TPU = "v6e-8"
CASES = {
    "128": (16, 128, 16, 1.0),
    "128, carried over": (16, 128, 8, 1.5),
    "1,024": (128, 1024, 64, 1.0),
    "1,024 in 256 slots": (128, 256, 8, 1.0),
    "1,024 in 256 slots, carried over": (128, 256, 8, 1.25),
    "1,024 in 128 slots, carried over": (128, 128, 8, 1.125),
}
"""By completions: prompts of a step, slots, prefill rows, in flight."""
BARS = {"128": 1.3, "128, carried over": 0.9}
SHARE = 0.75
HEADS = (
    "completions",
    "in flight",
    "slots",
    "steps",
    "prefill, s",
    "decode, s",
    "device, s",
    "host, s",
    "rate",
    "of full",
)


def measure(name: str) -> dict[str, Any]:
    """One line of the table."""
    prompts, slots, rows, in_flight = CASES[name]
    settings = [
        f"prompts_per_step={prompts}",
        f"rollout.slots={slots}",
        f"rollout.prefill_rows={rows}",
        "rollout.refill_steps=8",
        f"rollout.in_flight={in_flight}",
    ]
    config = load_settings([ROOT / "configs" / "gsm8k.yaml"], settings, {}).config
    plan = make_plan(Planned.of(config, find_accelerator(TPU)))
    seconds = {name: time.value for name in ROLLOUT if (time := plan.phase(name).seconds)}
    assert plan.rollout_rate and plan.full_slots_rate
    looks = sum(plan.phase(name).calls for name in ROLLOUT)
    return {
        "prompts": prompts,
        "slots": slots,
        "prefill_rows": rows,
        "in_flight": in_flight,
        "seconds": seconds,
        "device_s": sum(seconds.values()),
        "host_s": looks * load_chip("v6e").calibration["host_s"].value,
        "decode_steps": plan.workload.decode_steps,
        "calls": looks,
        "completion_tokens": plan.workload.completion_tokens,
        "rate": plan.rollout_rate.value,
        "full_rate": plan.full_slots_rate.value,
        "share": plan.rollout_rate.value / plan.full_slots_rate.value,
        "notes": [note for note in plan.notes if "in_flight" in note],
    }


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name, row in found.items():
        figures = [f"{row['seconds'][part]:.2f}" for part in ("prefill", "decode")]
        figures += [f"{row['device_s']:.2f}", f"{row['host_s']:.2f}", f"{row['rate']:,.0f}", f"{row['share']:.2f}"]
        settings = [name.partition(" ")[0].rstrip(","), f"{row['in_flight']:g}", f"{row['slots']:,}"]
        lines.append(f"| {' | '.join([*settings, str(row['decode_steps']), *figures])} |")
    return lines


def main() -> None:
    """Plan all of them."""
    args = arguments(__doc__).parse_args()
    found = {}
    for name in CASES:
        found[name] = measure(name)
        print(f"{name}: {found[name]}", flush=True)
    shares = [row["share"] for name, row in found.items() if name.startswith("1,024")]
    met = {name: found[name]["device_s"] <= bar for name, bar in BARS.items()} | {"share": max(shares) >= SHARE}
    record("rollout-planned", {"rollouts": found, "bars": {**BARS, "share": SHARE}, "met": met}, args.results)
    write_section(ROOT / "docs" / "planner-measurements.md", "rollouts", table(found), args.results)
    print(*table(found), sep="\n")
    sys.exit(not all(met.values()))


if __name__ == "__main__":
    main()
