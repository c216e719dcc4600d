"""Updating and decoding mixtures of experts, planned: Qwen3-30B-A3B and gpt-oss-20b compiled for absent TPUs.

    python -m benches.mixtures_planned [CASE ...]            (minutes of two cores a case; compilations are kept)

Updates of one micro-batch of 4 rows of 4,096 tokens a chip: of all weights on v6e-64, and of adapters beside attention
on v6e-8. Decode steps of 128 sequences on v6e-8, of 128 tokens each (Qwen3-30B-A3B) and of 1,024 (gpt-oss-20b). Seconds
are rooflines of the compiled programs at the chip's published bandwidths, with as many links as the chip with the
fewest has. Devices reduce gradients in bfloat16 where a bar is set, and in float32 for comparison. 32 experts do not
divide over 64 chips, so gpt-oss's have a mesh of their own. Writes benches/results/mixtures-planned.json and its part
of docs/planner-measurements.md; exit status 1 where a bar is missed.
"""

import sys
from collections.abc import Mapping
from typing import NamedTuple

from benches.planned import decode_step, update_step
from benches.record import MEASUREMENTS, ROOT, arguments, record, recorded, write_section
from podium.accelerators import find_accelerator
from podium.settings import load_settings

NAME, TOKENS, ROWS, SEQUENCES = "mixtures-planned", 4096, 4, 128


class Case(NamedTuple):
    """A program, and the most that it may take."""

    tpu: str
    config: str
    bars: Mapping[str, float]
    tokens: int = 0
    """Of each sequence of a decode step; 0: the program is the update."""
    settings: tuple[str, ...] = ()


QWEN, GPT_OSS = "gsm8k_qwen3_30b_a3b", "gsm8k_gpt_oss_20b"
OF_32 = ("model=openai/gpt-oss-20b", "mesh=dp:2,fsdp:32")
BFLOAT16 = ("train.reduce_dtype=bfloat16",)
CASES = {
    "Qwen3-30B-A3B, all weights": Case("v6e-64", QWEN, {"update_s": 1.7, "gib": 17.0}, settings=BFLOAT16),
    "Qwen3-30B-A3B, float32 gradients": Case("v6e-64", QWEN, {}),
    "Qwen3-30B-A3B, adapters": Case("v6e-8", f"{QWEN}_lora", {"update_s": 1.9, "gib": 23.0}),
    "Qwen3-30B-A3B, decode": Case("v6e-8", f"{QWEN}_lora", {"planned_ms": 6.5}, tokens=128),
    "gpt-oss-20b, all weights": Case("v6e-64", QWEN, {"update_s": 1.45, "gib": 25.0}, settings=(*OF_32, *BFLOAT16)),
    "gpt-oss-20b, float32 gradients": Case("v6e-64", QWEN, {}, settings=OF_32),
    "gpt-oss-20b, adapters": Case("v6e-8", f"{GPT_OSS}_lora", {"update_s": 1.45}),
    "gpt-oss-20b, decode": Case("v6e-8", f"{GPT_OSS}_lora", {"planned_ms": 5.2}, tokens=1024),
}


def measure(case: Case) -> dict[str, object]:
    """One line of the results."""
    length = case.tokens or TOKENS
    settings = [f"rollout.max_prompt_tokens={length // 2}", f"rollout.max_new_tokens={length // 2}", *case.settings]
    if case.tokens:
        settings += [f"rollout.slots={SEQUENCES}", f"prompts_per_step={SEQUENCES // 8}"]
    else:
        settings += [f"train.row_tokens={TOKENS}", f"train.rows_per_device={ROWS}"]
    config = load_settings([ROOT / "configs" / f"{case.config}.yaml"], settings, {}).config
    accelerator = find_accelerator(case.tpu)
    if case.tokens:
        return decode_step(config, accelerator, case.tokens, folder=NAME)
    return update_step(config, accelerator, folder=NAME)[0]


def table(found: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Markdown; what a program needs beside its own memory, such as a rollout's weights, counts for updates alone."""
    lines = ["| program | TPU | seconds | memory, GiB |", "|---|---|---|---|"]
    for name, row in found.items():
        took = f"{row['planned_ms']} ms" if "planned_ms" in row else f"{row['update_s']} s"
        lines.append(f"| {name} | {row['tpu']} | {took} | {row.get('gib', '-')} |")
    return lines


def main() -> None:
    """Compile, compare with the bars, and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help="; ".join(CASES))
    args = parser.parse_args()
    known = recorded(NAME, "cases", args.results) or {}
    for name in args.cases or CASES:
        known[name] = measure(CASES[name])
        print(f"{name}: {known[name]}", flush=True)
    found = {name: known[name] for name in CASES if name in known}
    met = {
        name: {bar: found[name][bar] <= most for bar, most in case.bars.items()}
        for name, case in CASES.items()
        if name in found
    }
    settings = {name: case.settings for name, case in CASES.items()}
    bars = {name: case.bars for name, case in CASES.items()}
    record(NAME, {"cases": found, "settings": settings, "bars": bars, "met": met}, args.results, packages=["libtpu"])
    write_section(MEASUREMENTS, "mixtures", table(found), args.results)
    sys.exit(not all(all(each.values()) for each in met.values()))


if __name__ == "__main__":
    main()
