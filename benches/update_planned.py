"""Which share of a TPU's peak updates reach, planned: every program compiled for a v6e-8 that is not there.

    python -m benches.update_planned [CASE ...]            (minutes of two cores a case; compilations are kept)

Qwen2.5-3B and 7B, rows of 4,096 tokens, full ones and of GSM8K's lengths, as many as a step fills and the chips hold,
in the fastest settings that were found. The share is `podium plan`'s: 6N operations per real token, prompts of a group
once, and causal attention, over the published peak, as a range by the shares of the roofline that chips are taken to
reach. Beside it is the share that the same update would have if products, with those that `remat` makes again, were all
that it did. Writes benches/results/update-planned.json and its part of docs/planner-measurements.md; exit status 1
where a bar is missed: 0.53 with full rows, 0.50 with GSM8K's.
"""

import sys
from typing import Any

from benches.record import ROOT, arguments, record, recorded, write_section
from podium.accelerators import GIB, find_accelerator
from podium.plan.calibration import load_chip
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.settings import load_settings

NAME, TPU = "update-planned", "v6e-8"
FULL = "fixed:490"  # eight completions of 490 tokens and their prompt fill a row of 4,096
CASES: dict[str, tuple[str, str, str, int, int]] = {
    # name: the model, lengths, remat, rows of a chip, prompts of a step
    "3B, 4,096": ("Qwen/Qwen2.5-3B-Instruct", FULL, "layer", 16, 128),
    "7B, 4,096": ("Qwen/Qwen2.5-7B-Instruct", FULL, "offload", 10, 160),
    "3B, GSM8K": ("Qwen/Qwen2.5-3B-Instruct", "gsm8k", "offload", 33, 640),
    "7B, GSM8K": ("Qwen/Qwen2.5-7B-Instruct", "gsm8k", "offload", 9, 512),
}
ROW = 4096
BARS = {FULL: 0.53, "gsm8k": 0.50}
HEADS = ("model, lengths", "remat", "rows a chip", "update, s", "memory, GiB", "share of the peak", "of products alone")


def measure(name: str) -> dict[str, Any]:
    """One line of the table."""
    model, lengths, remat, rows, prompts = CASES[name]
    settings = [
        f"model={model}",
        f"prompts_per_step={prompts}",
        "group_size=8",
        f"train.remat={remat}",
        f"train.row_tokens={ROW}",
        f"train.rows_per_device={rows}",
        "train.head_chunk_tokens=2048",
    ]
    config = load_settings([ROOT / "configs" / "gsm8k.yaml"], settings, {}).config
    accelerator = find_accelerator(TPU)
    plan = make_plan(Planned.of(config, accelerator), lengths=lengths)
    update, chip = plan.phase("update"), load_chip(accelerator.generation)
    assert plan.mfu and update.seconds
    products_s = update.flops / chip.peaks.flops_bf16 / chip.calibration["update"].value
    return {
        "settings": settings,
        "lengths": lengths,
        "verdict": plan.verdict,
        "update_gib": update.bytes / GIB,
        "update_s": update.seconds.value,
        "bound_by": update.bound_by,
        "micro_batches": plan.micro_batches,
        "share": {"value": plan.mfu.value, "low": plan.mfu.low, "high": plan.mfu.high},
        "products_s": products_s,
        "share_of_products": plan.mfu.value * update.seconds.value / products_s,
        "executed_over_closed_form": update.flops / update.closed_form_flops,
    }


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name, row in found.items():
        _, _, remat, rows, _ = CASES[name]
        low, value, high = (f"{row['share'][each]:.2f}" for each in ("low", "value", "high"))
        sizes = [f"{row['update_s']:.2f}", f"{row['update_gib']:.1f}"]
        alone = f"{row['share_of_products']:.2f}"
        lines.append(f"| {' | '.join([name, remat, str(rows), *sizes, f'{value} ({low}-{high})', alone])} |")
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help="; ".join(CASES))
    args = parser.parse_args()
    known = recorded(NAME, "updates", args.results) or {}
    for name in args.cases or CASES:
        known[name] = measure(name)
        print(f"{name}: {known[name]}", flush=True)
    found = {name: known[name] for name in CASES if name in known}
    met = {
        name: row["verdict"] != "does_not_fit" and row["share"]["value"] >= BARS[row["lengths"]]
        for name, row in found.items()
    }
    record(NAME, {"updates": found, "bars": BARS, "met": met}, args.results, packages=["libtpu"])
    write_section(ROOT / "docs" / "planner-measurements.md", "updates", table(found), args.results)
    print(*table(found), sep="\n")
    sys.exit(not all(met.values()))


if __name__ == "__main__":
    main()
