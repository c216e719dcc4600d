"""What a decode step on a GPU moves, compiled for GPUs that are not there: weights by layer beside a loop over stacks.

    python -m benches.gpu_decode            (half an hour of CPU time; needs pip install 'podium-rl[plan-gpu]')

For each case, the bytes of a step over those of its floor (`podium.plan.closed_form.least_bytes`: each weight, key and
value read once, logits written); its milliseconds by the roofline and as `podium plan` has them; its kernels; how many
instructions, products apart, write an array with the dimensions of a matrix of weights; and the largest array that a
step writes, logits apart; with 256 slots and on eight GPUs it is one that sampling makes of them. Activations and
partial sums of products count as bytes moved, although those smaller than the GPU's L2 cache (50 MB in an H100) need
not leave it.

Three forms are compiled in the same run: `stacks`, a loop over the trainer's stacks, in which XLA copies each layer's
slice, joins weights in every call and gathers pages of the cache (of one case only); `layers`, an array for each
matrix of each layer; and `joined`, what the engine does: matrices of one input side by side, except adapters beside
the trainer's own int8 base, which it reads in stacks. One case is compiled as XLA chooses kernels, and with cuBLAS
for every product. Writes benches/results/gpu-decode-planned.json; exit status 1 where a step of `joined` moves more
than 1.15 times its floor. Cases that an interrupted run's file has are left out; those without `largest_written_mb`
are older than this form of the script, and compiled again.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from benches.record import arguments, child_for, record

BAR = 1.15
CONTEXT = 1024
LORA = "lora.rank=32"
INT8 = ("rollout.weights=int8", f"{LORA} lora.base=int8 lora.rollout=apart", f"{LORA} lora.base=int8")
"""Rollouts from int8 weights, and adapters beside an int8 base: its copy in the rollout, and the trainer's stacks."""
MODELS = {"3B": "Qwen/Qwen2.5-3B-Instruct", "7B": "Qwen/Qwen2.5-7B-Instruct", "8B": "Qwen/Qwen3-8B"}
MACHINES = ("h200-1", "a100-80-1", "l4-1", "rtx4090-1", "h100-8")
CUBLAS = "--xla_gpu_enable_triton_gemm=false"
PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


def cases() -> Iterator[tuple[str, str, int, str, str]]:
    """Yield model, machine, slots, settings and kernels: everything around Qwen2.5-3B with 64 slots on an H100."""
    yield from (("3B", "h100-1", 64, adapters, "auto") for adapters in ("", LORA))
    yield from (("3B", "h100-1", 64, adapters, "cublas") for adapters in ("", LORA))
    yield from (("3B", "h100-1", slots, LORA, "auto") for slots in (16, 256))
    yield from (("3B", machine, 64, LORA, "auto") for machine in MACHINES)
    yield from ((model, machine, 64, "", "auto") for model in ("7B", "8B") for machine in ("h100-1", "h100-8"))
    yield from (("3B", "h100-1", 64, settings, "auto") for settings in INT8)


def forms(model: str, machine: str, slots: int, settings: str, kernels: str) -> tuple[str, ...]:
    """The forms to compile of a case: stacks are compared with once."""
    first = (model, machine, slots, settings) == ("3B", "h100-1", 64, "")
    return (*(("stacks",) if first else ()), "layers", "joined")


def measure(form: str, model: str, machine: str, slots: int, settings: str, kernels: str) -> dict[str, Any]:
    """Compile one decode program in a process of its own, and return what its step moves."""
    given = (form, str(slots), str(CONTEXT), f"model={MODELS[model]}", "mesh=auto", *settings.split())
    flags = CUBLAS if kernels == "cublas" else ""
    return child_for(machine, "benches.children.decode_bytes", *given, xla_flags=flags)


def main() -> None:
    args = arguments(__doc__).parse_args()
    path = args.results / "gpu-decode-planned.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    rows: dict[tuple[str | int, ...], dict[str, Any]] = {tuple(row["case"]): row for row in known}
    for case in cases():
        if all(f"{form}_largest_written_mb" in rows.get(case, {}) for form in forms(*case)):
            continue
        row: dict[str, Any] = {"case": list(case)}
        for form in forms(*case):
            found = measure(form, *case)
            floor_ms = 1e3 * found["floor_bytes"] / found["bandwidth"]
            row |= {
                f"{form}_over_floor": round(found["step_bytes"] / found["floor_bytes"], 3),
                f"{form}_ms": round(found["step_ms"], 2),
                f"{form}_planned_ms": round(found["planned_ms"], 2),
                f"{form}_kernels": round(found["kernels"]),
                f"{form}_weights_written": found["weights_written"],
                f"{form}_largest_written_mb": round(found["largest_written"] / 1e6, 1),
                f"{form}_compile_cpu_s": found["compile_cpu_s"],
                "floor_ms": round(floor_ms, 2),
            }
        print(row, flush=True)
        rows[case] = row
        columns = "model, machine, slots, settings, kernels"
        result = {"bar": BAR, "context": CONTEXT, "columns": columns, "rows": list(rows.values())}
        record("gpu-decode-planned", result, args.results, packages=PACKAGES)
    sys.exit(any(row["joined_over_floor"] > BAR for row in rows.values()))


if __name__ == "__main__":
    main()
