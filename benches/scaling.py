"""Tokens per second per chip of larger models on 8 to 256 chips, planned: every program compiled for each machine.

    python -m benches.scaling              (long: some forty compilations of large models, each kept)

The work grows with the chips: four prompts of eight completions for each. Writes
benches/results/scaling-planned.json and its part of docs/planner-measurements.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benches.record import ROOT, arguments, record, show_progress, write_section
from podium.accelerators import GIB, find_accelerator
from podium.config.schema import Config
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import Plan
from podium.settings import load_settings

MODELS = ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B")
MACHINES = ("v6e-8", "v6e-16", "v6e-64", "v6e-256", "v5p-64")
PROMPTS, GROUP = 4, 8
"""Prompts for each chip, and completions of each."""


def config_of(model: str, devices: int, *more: str) -> Config:
    """The config of a run whose work grows with the number of devices."""
    settings = [
        f"model={model}",
        f"prompts_per_step={PROMPTS * devices}",
        f"group_size={GROUP}",
        f"rollout.slots={PROMPTS * GROUP * devices}",
        f"rollout.prefill_rows={devices}",
        "rollout.refill_steps=8",
        "rollout.in_flight=1",
        "rollout.max_prompt_tokens=256",
    ]
    return load_settings([ROOT / "configs" / "gsm8k.yaml"], [*settings, *more], {}).config


def plan(model: str, tpu: str) -> Plan:
    """The plan of a run whose work grows with the number of chips."""
    accelerator = find_accelerator(tpu)
    return make_plan(Planned.of(config_of(model, accelerator.devices), accelerator), progress=show_progress)


def row(model: str, tpu: str, found: Plan) -> dict[str, Any]:
    """What the table says of one plan."""
    assert found.step is not None
    assert found.tokens_per_s_per_chip is not None
    timed = {phase.name: phase for phase in found.phases if phase.seconds is not None}
    longest = max(timed.values(), key=lambda phase: phase.seconds.value if phase.seconds else 0.0)
    return {
        "model": model,
        "tpu": tpu,
        "devices": found.devices,
        "verdict": found.verdict,
        "worst_phase": found.worst.name,
        "gib": round(found.worst.bytes / GIB, 2),
        "hbm_gib": round(found.hbm_bytes / GIB, 2),
        "step_s": [round(each, 2) for each in (found.step.value, found.step.low, found.step.high)],
        "phases_s": {name: round(phase.seconds.value, 3) for name, phase in timed.items() if phase.seconds},
        "longest": longest.name,
        "bound_by": longest.bound_by,
        "tokens_per_s_per_chip": round(found.tokens_per_s_per_chip.value),
    }


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table for docs/planner-measurements.md."""
    yield "| model | TPU | chips | memory | step, s | longest phase, waits for | tokens/s per chip |"
    yield "|---|---|---|---|---|---|---|"
    for each in rows:
        value, low, high = each["step_s"]
        model, verdict = each["model"].partition("/")[2], each["verdict"].replace("_", " ")
        longest = f"{each['longest']} {each['phases_s'][each['longest']]:.1f} s, {each['bound_by']}"
        yield (
            f"| {model} | {each['tpu']} | {each['devices']} | {verdict}: {each['worst_phase']} {each['gib']:.1f} of"
            f" {each['hbm_gib']:.1f} GiB | {value:.1f} ({low:.1f} to {high:.1f}) | {longest} |"
            f" {each['tokens_per_s_per_chip']:,} |"
        )


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows = []
    for model in MODELS:
        for tpu in MACHINES:
            print(f"{model} on {tpu}", flush=True)
            rows.append(row(model, tpu, plan(model, tpu)))
            print(f"  {rows[-1]}", flush=True)
    record("scaling-planned", {"rows": rows}, args.results)
    write_section(ROOT / "docs" / "planner-measurements.md", "scaling", list(lines(rows)), args.results)


if __name__ == "__main__":
    main()
