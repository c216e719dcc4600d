"""What does the loss on logits take on TPUs that are not there? The kernels, compiled: memory, traffic, instructions.

    python -m benches.loss_kernel          (two minutes on two cores; needs libtpu)

Value and gradient of the mean loss of one row of 4,096 tokens over 151,643, bfloat16, as the seed measured on v6e: 7.50
ms with 2.485 GB, or 11.86 ms with 1.242 (its runs avj7ns0s, jlvc5hlq). Beside the kernels stands the same by XLA alone.

`bytes_ms` is what the kernels and the rest move, at the published bandwidth; `bundles_ms` what the kernels' inner
loops have in instruction bundles, one a cycle, as the compiler has scheduled them. The slower of the two counts, kernel
by kernel: transfers run beside the instructions.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benches.record import arguments, record
from podium.accelerators import find_accelerator
from podium.plan.calibration import load_chip
from podium.plan.request.topology import compiler_environment

SHAPE = (1, 4096, 151643)
MACHINES = ("v4-8", "v5litepod-8", "v6e-8")
CLOCK = {"v4": 2.1e9, "v5e": 1.5e9, "v6e": 1.75e9}
"""Cycles a second: the published peak over the operations of the matrix units in a cycle (8 of 128 x 128 for the two
cores of a v4, which share a kernel's rows and blocks; 4 for v5e); that of v6e is assumed.
"""
SEED = {"ms": 7.50, "gb": 2.485, "smaller_ms": 11.86, "smaller_gb": 1.242}


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows = []
    for machine in MACHINES:
        for impl in ("kernel", "jax"):
            rows.append({"machine": machine, "impl": impl, **compiled(machine, impl)})
            print(rows[-1], flush=True)
    record("loss-kernel-planned", {"shape": SHAPE, "dtype": "bf16", "seed_v6e": SEED, "rows": rows}, args.results)


def compile_apart(
    machine: str, child: str, arguments: Sequence[object], count: Callable[[Path, str], int]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Compile a program in a process of its own: what it says of it, and each kernel's bundles, which `count` finds."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = {**os.environ, **compiler_environment(find_accelerator(machine)), "LIBTPU_INIT_ARGS": flags}
        command = [sys.executable, "-m", f"benches.children.{child}", machine, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        bundles = {name: count(Path(folder), name) for name in ("statistics", "gradient")}
    return json.loads(done.stdout.splitlines()[-1]), bundles


def compiled(machine: str, impl: str) -> dict[str, Any]:
    """What one program takes."""
    accelerator = find_accelerator(machine)
    found, loops = compile_apart(machine, "loss_step", (impl, *SHAPE), loop_bundles)
    peaks = load_chip(accelerator.generation).peaks
    moved = {name: 1e3 * size / peaks.hbm_bandwidth for name, size in found.pop("moved").items()}
    if impl != "kernel":
        return {**found, "bytes_ms": round(sum(moved.values()), 3)}
    bundles = {name: 1e3 * loops[name] * found["strips"] / CLOCK[accelerator.generation] for name in loops}
    slower = sum(max(bundles.get(name, 0.0), each) for name, each in moved.items())
    return {
        **found,
        "bundles_of_a_strip": loops,
        "bytes_ms": round(sum(moved.values()), 3),
        "bundles_ms": round(sum(bundles.values()), 3),
        "planned_ms": round(slower, 3),
    }


def loop_bundles(folder: Path, name: str) -> int:
    """Bundles of the first loop within a step of the kernel's grid: a strip of a whole tile; 0 without the kernel."""
    files = [path for path in folder.glob(f"*logits_{name}*final_bundles.txt") if "schedule" not in path.name]
    if not files:
        return 0
    inner = [
        bool(re.match(r".*0x[0-9a-f]+ *(LH|LB|LE|PB|PF|CT|)*: >> ", line)) for line in files[0].read_text().splitlines()
    ]
    start = inner.index(True)
    return next((at for at, inside in enumerate(inner[start:]) if not inside), len(inner) - start)


if __name__ == "__main__":
    main()
