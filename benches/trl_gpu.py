"""The demo by TRL's GRPOTrainer and by Podium, by turns on one GPU: seconds of a step, memory, and reward.

    python -m benches.trl_gpu --steps 40     (needs `pip install torch trl vllm`, and Podium's extra `cuda`)

The same race as benches.trl_cpu, in bfloat16: TRL trains under autocast and samples with vLLM in the same process, or,
with `--sampler transformers`, as it does by default. With vLLM it has not run yet. Seconds are by the clock, the median
of a step, without the first; memory is what each side's own allocator held at most, which with vLLM has the share of
the GPU that vLLM reserves. Writes benches/results/trl-gpu.json; exit status 1
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
    """Median seconds of a step but for the first, which compiles and warms up."""
    return statistics.median(run.step_wall_s[1:])


def main() -> None:
    """Prints and writes the comparison."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", choices=("vllm", "transformers"), default="vllm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        write_model(Path(temporary))
        ours = podium(Path(temporary), FORMAT, args.steps, args.seed, gpu=True)
        theirs = trl(Path(temporary), FORMAT, args.steps, args.seed, sampler=args.sampler)
    ratio = settled_s(theirs) / settled_s(ours)
    for name, run in (("Podium", ours), ("TRL", theirs)):
        print(f"{name}: a step {settled_s(run):.2f} s, {run.peak_gib:.1f} GiB, reward {run.rewards[-1]:.2f}")
    found = {"podium": rounded(ours), "trl": rounded(theirs), "step_s_ratio": round(ratio, 3)}
    packages = ("torch", "trl", *(["vllm"] if args.sampler == "vllm" else []))
    record("trl-gpu", {"steps": args.steps, "sampler": args.sampler, **found}, args.results, packages=packages)
    sys.exit(ratio < 1)


if __name__ == "__main__":
    main()
