"""Does a warm start help? Ten steps of SFT and then GRPO beside GRPO alone, in equally many steps, on one-digit sums.

    python -m benches.sft                                (a tiny random model; needs nothing but Podium)
    python -m benches.sft --model demo --seeds 1         (SmolLM2-135M-Instruct, `make demo` installs it; half an hour)

The tiny model is that of benches.recipes, which answers one in thirty right, as a base model does whose groups are
nearly all zero. What is compared is the mean reward of the last 10 steps, and the accuracy on held-out sums (the tiny
model learns the sums it has seen, and little more). Writes benches/results/sft-cpu.json, or sft-demo-cpu.json. The bar:
the warm start earns more with every seed.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benches.recipes import make_config, write_tiny_model
from benches.record import arguments, record
from podium.config.schema import AlgorithmConfig, Config, EvalConfig
from podium.observe.run_dir import Fork
from podium.settings import load_settings
from podium.train.loop import train

EVAL = EvalConfig(at_start=False, greedy=False, samples=8)
DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"
STEPS = {"tiny": (60, 10), "demo": (15, 3)}
"""In all, and of those with SFT first."""


def run(config: Config, fork: Fork | None = None) -> dict[str, float]:
    """Train; the mean reward of the last steps, the last accuracy, and the first steps' groups of equal rewards."""
    train(config, plain=True, fork=fork)
    text = (Path(config.runs_dir) / str(config.name) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if "train-reward/total/mean" in line]
    return {
        "reward": float(np.mean([line["train-reward/total/mean"] for line in steps[-10:]])),
        "accuracy": next(line["eval/accuracy"] for line in reversed(lines) if "eval/accuracy" in line),
        "equal_groups_at_first": float(np.mean([line["group/equal_rewards_fraction"] for line in steps[:5]])),
        "cpu_s": lines[-1]["time/cpu_s"],
    }


def base(model: str, folder: Path, seed: int) -> Config:
    """GRPO on one-digit sums, evaluated at its end."""
    if model == "demo":
        settings = [f"runs_dir={folder / 'runs'}", f"seed={seed}", "eval.every_steps=0", "eval.at_start=false"]
        return load_settings([DEMO], settings, {}).config
    config = make_config(folder / "model", folder / "runs", "grpo")
    return config.model_copy(update={"seed": seed, "eval": EVAL})


def measure(model: str, seed: int, folder: Path) -> dict[str, Any]:
    """GRPO alone, and after SFT, with one seed."""
    steps, warm_steps = STEPS[model]
    config = base(model, folder, seed)
    warm = {"steps": warm_steps, "group_size": 1, "algorithm": AlgorithmConfig(recipe="sft")}
    if model == "demo":
        warm["prompts_per_step"] = 32
    alone = run(config.model_copy(update={"name": f"alone-{seed}", "steps": steps}))
    sft = run(config.model_copy(update={"name": f"sft-{seed}", **warm}))
    fork = Fork(str(folder / "runs" / f"sft-{seed}"), warm_steps)
    after = run(config.model_copy(update={"name": f"after-{seed}", "steps": steps - warm_steps}), fork)
    return {"seed": seed, "grpo": alone, "sft": {k: sft[k] for k in ("accuracy", "cpu_s")}, "sft_then_grpo": after}


def main() -> None:
    """Prints the table and writes it; exit status 1 where GRPO alone is as good."""
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=STEPS, default="tiny")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model")
        rows = [measure(args.model, seed, Path(folder)) for seed in range(args.seeds)]
    print(f"{'seed':>4} {'reward: grpo':>14} {'sft then grpo':>14} {'accuracy: grpo':>15} {'sft':>8} {'then grpo':>10}")
    for row in rows:
        alone, sft, after = (row[key] for key in ("grpo", "sft", "sft_then_grpo"))
        print(
            f"{row['seed']:>4} {alone['reward']:14.3f} {after['reward']:14.3f} {alone['accuracy']:15.3f}"
            f" {sft['accuracy']:8.3f} {after['accuracy']:10.3f}"
        )
    steps, warm_steps = STEPS[args.model]
    name = "sft-cpu" if args.model == "tiny" else "sft-demo-cpu"
    record(name, {"model": args.model, "steps": steps, "warm_steps": warm_steps, "rows": rows}, args.results)
    sys.exit(any(row["sft_then_grpo"]["reward"] <= row["grpo"]["reward"] for row in rows))


if __name__ == "__main__":
    main()
