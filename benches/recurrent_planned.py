"""Decoding and updating a model with delta nets, planned: Qwen3.5-9B compiled for TPUs that are not there.

    python -m benches.recurrent_planned [CASE ...]            (minutes of two cores a case; compilations are kept)

Decode steps of 128 and 1,024 sequences of 4,096 tokens on v6e-8, the latter in two groups of four chips: the roofline
of the compiled program at the chip's published bandwidths, over the time that it takes to read weights and pages and to
read and write states (without transfers between chips, which `floor_with_links_ms` has). The update of 2 rows of
4,096 tokens a chip on v6e-16: seconds by the same roofline, memory, and the instructions that its loops over chunks
execute, each of which costs a chip a microsecond or two that the roofline does not count; a kernel is one instruction.
Writes benches/results/recurrent-planned.json; exit status 1 where a bar is missed.
"""

import sys
from collections.abc import Mapping
from typing import Any

from benches.planned import decode_step, update_step
from benches.record import ROOT, arguments, record, recorded
from podium.accelerators import Accelerator, find_accelerator
from podium.config.schema import Config
from podium.hlo.cost import walk
from podium.hlo.hlo_text import Module
from podium.models.blocks.delta import CHUNK
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import find_decoder
from podium.settings import load_settings

NAME, TOKENS = "recurrent-planned", 4096
CONFIG = ROOT / "configs" / "gsm8k_qwen35_9b.yaml"
LENGTHS = (
    f"rollout.max_prompt_tokens={TOKENS // 2}",
    f"rollout.max_new_tokens={TOKENS // 2}",
    "grading.overlong_buffer_tokens=512",
)
DECODES = {"decode 128": 128, "decode 1,024": 1024}
"""Sequences on v6e-8, by case."""
LAYOUT = {1024: ["rollout.layout=hybrid", "rollout.group_chips=4"]}
"""Settings by number of sequences. A trainer of all weights leaves no room for these groups; `auto` takes one of 8."""
UPDATE, ROWS = "update", 2
DECODE_BAR = 1.35
"""Largest multiple of the floor."""
UPDATE_BARS = {"update_s": 1.15, "gib": 25.0, "instructions": 30_000}


def decode(rows: int, accelerator: Accelerator) -> dict[str, object]:
    """A decode step of `rows` sequences of 4,096 tokens."""
    settings = [
        *LENGTHS,
        f"rollout.slots={rows}",
        f"prompts_per_step={rows // 8}",
        "train.row_tokens=null",
        *LAYOUT.get(rows, []),
    ]
    return decode_step(load_settings([CONFIG], settings, {}).config, accelerator, TOKENS, folder=NAME)


def update(accelerator: Accelerator) -> dict[str, object]:
    """The update of one micro-batch of 2 rows of 4,096 tokens a chip."""
    settings = [*LENGTHS, f"train.row_tokens={TOKENS}", f"train.rows_per_device={ROWS}"]
    config = load_settings([CONFIG], settings, {}).config
    row, module = update_step(config, accelerator, folder=NAME)
    return row | {"instructions": chunk_instructions(module, config, accelerator)}


def chunk_instructions(module: Module, config: Config, accelerator: Accelerator) -> int:
    """Instructions with a cost of their own that a micro-batch executes in loops over a row's chunks."""
    mesh = resolve(config, find_decoder(config), Machine.planned(accelerator)).mesh
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
