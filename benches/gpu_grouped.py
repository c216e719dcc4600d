"""A mixture's products on GPUs that are not there: Podium's kernels beside what XLA makes of `jax.lax.ragged_dot`.

    python -m benches.gpu_grouped            (two minutes of CPU time; needs pip install 'podium-rl[plan-gpu]')

Rows in bfloat16 that are sorted by expert, times their experts' matrices, and the gradients of both, as the first
matrices of Qwen3-30B-A3B and gpt-oss-20b have them, both forms compiled in the same run: memory, operations, bytes to
and from memory, and milliseconds by the roofline at the published peaks. Nothing has run on a GPU. Writes
benches/results/gpu-grouped-planned.json; exit status 1 where a kernel does more operations than its rows need.
"""

import sys

from benches.record import arguments, child_for, record

ROWS = 40_960  # of 5,120 tokens with eight experts each
SHAPES = {"Qwen3-30B-A3B": (128, 2048, 1536), "gpt-oss-20b": (32, 2880, 5760)}
"""Experts, width, and width of a gate and an up matrix side by side."""
MACHINES = ("h100-1", "a100-80-1", "l40s-1")
FORMS = ("kernels", "ragged_dot")
PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


def measure(machine: str, form: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """Compile one form in a process of its own."""
    return child_for(machine, "benches.children.grouped_cost", form, str(ROWS), *map(str, shape))


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows: dict[str, dict[str, dict[str, float]]] = {}
    needed = {}
    for model, shape in SHAPES.items():
        _, width, wide = shape
        needed[model] = 3 * 2 * ROWS * width * wide / 1e12
        for machine in MACHINES:
            rows[f"{model}, {machine}"] = found = {form: measure(machine, form, shape) for form in FORMS}
            print(model, machine, found, flush=True)
    result = {"rows_multiplied": ROWS, "shapes": SHAPES, "needed_tflop": needed, "rows": rows}
    record("gpu-grouped-planned", result, args.results, packages=PACKAGES)
    sys.exit(any(found["kernels"]["tflop"] > 1.01 * needed[name.split(",")[0]] for name, found in rows.items()))


if __name__ == "__main__":
    main()
