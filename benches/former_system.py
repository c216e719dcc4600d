"""The former system's own programs, compiled for the TPUs that its owners rented, beside what they measured.

    git clone https://github.com/demon2036/MLLM-JAX FOLDER && git -C FOLDER checkout 86da4e7
    python -m venv VENV && VENV/bin/pip install jax==0.9.0 libtpu==0.0.34 flax optax einops huggingface_hub safetensors
    python -m benches.former_system --checkout FOLDER --python VENV/bin/python

One process for each row (`benches/children/former_step.py`): minutes each on two cores, for its layers are not scanned.
Rows that a results file already has are kept, unless `--again`. `make seeds` shows the results beside the plan's.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benches.record import arguments, record, recorded
from podium.accelerators import GIB, find_accelerator
from podium.hlo.cost import ProgramCost, roofline, unknown_loops, walk
from podium.hlo.hlo_text import parse
from podium.hlo.memory import parse_out_of_memory
from podium.plan.calibration import load_chip

COMMIT = "86da4e7"
NAME = "former-system-planned"
MESH = {"dp": 1, "fsdp": 8, "tp": 1}
LIMIT_S = 7200
HBM_GIB = {"v6e-8": 31.50, "v4-16": 31.0}
RESERVED_GIB = 0.25
"""Of a chip, in that compiler's refusals: "Used 35.08G of 31.50G hbm", of which the runtime has 258 MiB. Today's counts
neither: 31.25 GiB of a v6e and 30.75 of a v4 are usable, to which the reserve is added here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program, and what its owners saw of it."""

    experiment: str
    measured: str
    phase: str = "update"
    tpu: str = "v6e-8"
    model: str = "3b"
    rows: int  # of a chip: sequences of a micro-step, or of decoding
    batch: int = 96  # rows of a whole update, over all chips
    length: int = 2560
    remat: str = "dots_with_no_batch_dims"
    optimizer: str = "lion"
    loss: str = "jax"
    whole: bool = False
    """Whether to wait for the compiler's own refusal, which comes after it made the code."""


ROWS = (
    Row(experiment="3b_v6e8_2560_rows4", measured="out of memory by 3.58 G", rows=4),
    Row(experiment="3b_v6e8_2560_rows3", measured="fits", rows=3),
    Row(experiment="rows4, nothing_saveable", measured="out of memory by 2.48 G", rows=4, remat="nothing_saveable"),
    Row(experiment="rows4, sgd", measured="out of memory by 1.07 G", rows=4, optimizer="sgd"),
    Row(experiment="rows4, fused loss kernel", measured="out of memory by 18.8 MB", rows=4, loss="pallas"),
    Row(experiment="3b_v6e8_1536", measured="reserved 24.62 GiB; update 3.9 s", rows=4, batch=128, length=1536),
    Row(experiment="3b_v6e8_1536_rows8", measured="out of memory", rows=8, batch=128, length=1536),
    Row(experiment="7b_v4_16_2176_rows1", measured="fits", tpu="v4-16", model="7b", rows=1, batch=8, length=2176),
    Row(
        experiment="7b_v4_16_2176_rows2",
        measured="out of memory",
        tpu="v4-16",
        model="7b",
        rows=2,
        batch=16,
        length=2176,
    ),
    Row(experiment="3b_v6e8_1536, decode", measured="9.12 s for 1,023 tokens", phase="decode", rows=16, length=1536),
)


def compile_row(row: Row, checkout: Path, python: Path) -> dict[str, Any]:
    """What the compiler says of a row.

    Raises:
        RuntimeError: its process failed; the message has the end of its output.
    """
    known = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    script = Path(__file__).parent / "children" / "former_step.py"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, script, json.dumps(known), folder],
            env={"MLLM_SRC": str(checkout), "PATH": "/usr/bin:/bin", "HOME": folder},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            raise RuntimeError(f"{row.experiment}: {done.stdout[-500:]}{done.stderr[-2000:]}")
        said = json.loads(answer.read_text())
        text, report = (
            next((path.read_text() for path in sorted(Path(folder).glob(f"*.{ending}"))[-1:]), "")
            for ending in ("after_optimizations.txt", "after_optimizations-memory-usage-report.txt")
        )
    made = (
        known | {"took_s": round(time.perf_counter() - start), "jax": said["jax"]} | memory(row, said["says"], report)
    )
    return made | (costs(row, text) if text else {})


def memory(row: Row, says: str, report: str) -> dict[str, Any]:
    """GiB that the program takes, with what the runtime reserves, and the refusal, if the compiler got that far."""
    assigned = re.search(r"Total bytes(?: used)?: (\d+)", report)
    found: dict[str, Any] = {}
    if assigned:
        needs = int(assigned[1]) / GIB + RESERVED_GIB
        found = {
            "needs_gib": needs,
            "of_gib": HBM_GIB[row.tpu],
            "over_gib": needs - HBM_GIB[row.tpu],
            "fits": needs <= HBM_GIB[row.tpu],
        }
    if says:
        refusal = parse_out_of_memory(says)
        if refusal is None:
            raise RuntimeError(says[:2000])
        over = re.search(r"Exceeded hbm capacity by ([\d.]+[MG])", says)
        parts = re.findall(r"^\s+(reserved|program|arguments|output)\s+([\d.]+[KMG])", says, re.MULTILINE)
        found |= {"refused_at_gib": refusal.needed / GIB, "refused_by": over[1] if over else None, "parts": parts}
    return found


def costs(row: Row, text: str) -> dict[str, Any]:
    """Work and least seconds of an update, or of one step of decoding."""
    module = parse(text)
    loops = unknown_loops(module)
    trips = [ProgramCost(walk(module, MESH, trips=dict.fromkeys(loops, n)).works) for n in (1, 2)]
    accelerator = find_accelerator(row.tpu)
    chip = load_chip(accelerator.generation)

    def figures(cost: ProgramCost) -> dict[str, float]:
        least = roofline(cost, chip.peaks, links=accelerator.ici_links).parts
        sent = {each.kind: each.sent / 1e9 for each in cost.collectives}
        return {"tflop": cost.flops / 1e12, "hbm_gb": cost.hbm_bytes / 1e9, **least, **sent}

    one, two = map(figures, trips)
    return {"cost": {name: two[name] - one.get(name, 0.0) for name in two} if loops else one}


def kept(results: Path) -> Mapping[str, dict[str, Any]]:
    """Rows of an earlier run, by experiment."""
    return {row["experiment"]: row for row in recorded(NAME, "rows", results) or []}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help=f"the former system's repository at {COMMIT}")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="with jax 0.9.0 and libtpu 0.0.34")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name has it")
    parser.add_argument("--whole", action="store_true", help="wait for the code, and so for the compiler's refusals")
    parser.add_argument("--again", action="store_true", help="compile rows that the results have too")
    args = parser.parse_args()
    if not (args.checkout / "training2.py").exists():
        parser.error(f"--checkout {args.checkout}: no training2.py in it; clone demon2036/MLLM-JAX at {COMMIT}")
    found = dict(kept(args.results))
    for row in ROWS:
        if args.only not in row.experiment or (row.experiment in found and not args.again):
            continue
        found[row.experiment] = made = compile_row(
            dataclasses.replace(row, whole=args.whole), args.checkout.resolve(), args.python.absolute()
        )
        print(f"{row.experiment}: {made} ({row.measured})", flush=True)
        rows = [found[each.experiment] for each in ROWS if each.experiment in found]
        record(NAME, {"former_commit": COMMIT, "rows": rows}, args.results)


if __name__ == "__main__":
    main()
