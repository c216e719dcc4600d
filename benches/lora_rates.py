"""Which learning rate suits adapters: 1, 10 and 100 times that of full training, three seeds, sums of two digits.

    python -m benches.lora_rates [--seeds 0,1,2]      (CPU; two minutes a run)

The demo's model and recipe with adapters of rank 8 on additions of two-digit numbers, for enough steps that learning
shows; 50 held-out questions, eight answers each. The rate of full training is the demo's. Runs that the results
have stay there. Writes benches/results/lora-rates-cpu.json.
"""

import tempfile
from pathlib import Path

from benches.demo import sampled, train
from benches.lora_demo import LORA
from benches.record import arguments, record, recorded

NAME = "lora-rates-cpu"
FULL_RATE, TIMES, STEPS = 4e-5, (1, 10, 100), 12
SETTINGS = ["tasks.0.options.digits=2", f"steps={STEPS}", f"eval.every_steps={STEPS}", "eval.questions=50"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    args = parser.parse_args()
    rows = recorded(NAME, "runs", args.results) or []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds.split(","):
            for times in TIMES:
                if any((row["seed"], row["times"]) == (int(seed), times) for row in rows):
                    continue
                rate = f"train.optimizer.learning_rate={times * FULL_RATE:g}"
                run = train(Path(folder), f"{seed}-{times}", int(seed), [*SETTINGS, rate], None, config=LORA)
                before, after = sampled(run["before"]), sampled(run["after"])
                row = {"seed": int(seed), "times": times, "learning_rate": times * FULL_RATE}
                row |= {"accuracy_before": before, "accuracy_after": after, "rewards": run["rewards"]}
                rows.append(row | {"cpu_s": run["cpu_s"]})
                print(f"seed {seed}, {times} x: sampled accuracy {before:.3f} -> {after:.3f}", flush=True)
                means = {
                    f"{times} x": sum(each) / len(each)
                    for times in TIMES
                    if (each := [row["accuracy_after"] for row in rows if row["times"] == times])
                }
                record(NAME, {"settings": SETTINGS, "mean_accuracy_after": means, "runs": rows}, args.results)


if __name__ == "__main__":
    main()
