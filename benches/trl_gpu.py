"""The demo by TRL's GRPOTrainer with vLLM and by Podium, by turns on one GPU: seconds of a step, memory, and reward.

    python -m benches.trl_gpu --steps 20     (needs `pip install torch trl vllm`, and Podium's extra `cuda`)

The same race as benches.trl_cpu, in bfloat16: TRL trains under autocast and samples with vLLM in the same process.
Seconds are by the clock, without the first step; memory is what each side's own allocator held at most, which for TRL
has the share of the GPU that vLLM reserves. It has not run yet. Writes benches/results/trl-gpu.json; exit status 1
where TRL's step takes fewer seconds than Podium's.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benches.record import arguments, record
from benches.trl_cpu import Run, podium, rounded, trl, write_model

FORMAT = "bfloat16"


def settled_s(run: Run) -> float:
    """Mean seconds of a step but for the first, which compiles and warms up."""
    return statistics.mean(run.step_wall_s[1:])


def main() -> None:
    """Prints and writes the comparison."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        write_model(Path(temporary))
        ours, theirs = (each(Path(temporary), FORMAT, args.steps, args.seed, gpu=True) for each in (podium, trl))
    ratio = settled_s(theirs) / settled_s(ours)
    for name, run in (("Podium", ours), ("TRL", theirs)):
        print(f"{name}: a step {settled_s(run):.2f} s, {run.peak_gib:.1f} GiB, reward {run.rewards[-1]:.2f}")
    found = {"podium": rounded(ours), "trl": rounded(theirs), "step_s_ratio": round(ratio, 3)}
    record("trl-gpu", {"steps": args.steps, **found}, args.results, packages=("torch", "trl", "vllm"))
    sys.exit(ratio < 1)


if __name__ == "__main__":
    main()
