"""The head, from hidden states to log-probabilities and back, compiled for TPUs that are not there: memory and time.

    python -m benches.head          (five minutes on two cores; needs libtpu)

Value and gradient of one row of 8,192 tokens, width 4,096, vocabulary 151,936, bfloat16 with the head's gradient in
float32: by XLA in chunks, and by the fused kernels in the same memory (`train.head`). The seed measured 63.7 ms with
two arrays of 2.5 GB on v6e. Milliseconds are the roofline's: per instruction its operations or its traffic, whichever
is longer; a kernel counts with what it declares, its operations. `bundles_ms` takes for the kernels what the compiler
has scheduled instead: the instruction bundles of a step of their grids, one a cycle, those of first and last steps
among them, so it is an upper bound where no transfer is waited for.
"""

import re
from pathlib import Path
from typing import Any

from benches.loss_kernel import CLOCK, compile_apart
from benches.record import arguments, record
from podium.accelerators import find_accelerator

SHAPE = (8192, 4096, 151936)
CASES = [("v6e-8", "chunked", 1024), ("v6e-8", "fused", 1024), ("v6e-8", "chunked", 2048), ("v6e-8", "fused", 2048)]
CASES += [(machine, kind, 1024) for machine in ("v5litepod-8", "v4-8") for kind in ("chunked", "fused")]
INSIDE = re.compile(r"\s*0x[0-9a-f]+ *(LH|LB|LE|PB|PF|CT|)*: >+ ")
"""A bundle in a loop, as the compiler writes its final program."""
BAR = {"temporaries_gib": 0.6, "planned_ms": 50, "of": ["v6e-8", "fused", 1024]}


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows = []
    for machine, kind, chunk in CASES:
        rows.append({"machine": machine, "head": kind, "chunk": chunk, **compiled(machine, kind, chunk)})
        print(rows[-1], flush=True)
    record("head-planned", {"shape": SHAPE, "bar": BAR, "rows": rows}, args.results, packages=["libtpu"])


def compiled(machine: str, kind: str, chunk: int) -> dict[str, Any]:
    """What one program takes."""
    found, bundles = compile_apart(machine, "head_step", (kind, chunk, *SHAPE), step_bundles)
    if kind != "fused":
        return {name: value for name, value in found.items() if not name.endswith("of_a_kernel")}
    cycles_ms = {
        name: 1e3 * size * found["steps_of_a_kernel"] / CLOCK[find_accelerator(machine).generation]
        for name, size in bundles.items()
    }
    least = found["least_ms_of_a_kernel"]
    beyond = sum(max(0.0, each - least) for each in cycles_ms.values())
    return {**found, "bundles_of_a_step": bundles, "bundles_ms": round(found["planned_ms"] + beyond, 1)}


def step_bundles(folder: Path, name: str) -> int:
    """Bundles within the loop over the kernel's grid; 0 without the kernel."""
    files = [path for path in folder.glob(f"*head_{name}*final_bundles.txt") if "schedule" not in path.name]
    return sum(bool(INSIDE.match(line)) for line in files[0].read_text().splitlines()) if files else 0


if __name__ == "__main__":
    main()
