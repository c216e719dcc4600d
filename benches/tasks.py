"""Do rewards rise on tasks beyond one-digit sums, and not without a reward that says anything? CPU, hours.

    python -m benches.tasks --tasks sums-2,products-1 --seeds 0,1,2     (SmolLM2-135M-Instruct; `make demo` installs it)

Each task is configs/demo.yaml with the settings below; a control is the same task with the toss of a coin as its
reward. Prints a table and writes benches/results/tasks-cpu.json after each run; runs that stand there with as many
steps are not repeated, so it may be interrupted, and called for one task after the other. The bar: the part of the
reward that is learned is higher in the last 10 steps than in the first 5 by 0.1 on average, with every seed, and not in
the control.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benches.record import arguments, record, recorded
from podium.api.train import train
from podium.observe.summary import commit

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
RISE = 0.1


def arithmetic(digits: int, *operations: str) -> dict[str, Any]:
    """The task of the demo with other operands."""
    return {"name": "arithmetic", "options": {"digits": digits, "operations": list(operations)}}


def puzzles(dataset: str, **config: int) -> dict[str, Any]:
    """A generator of reasoning-gym; the model is small, so it is asked for no thoughts."""
    options = {"dataset": dataset, "size": 500, "eval_size": 50, "config": config}
    return {"name": "reasoning_gym", "options": options, "system_prompt": "Write the answer and nothing else."}


TASKS: dict[str, dict[str, Any]] = {
    "sums-2": {"tasks": [arithmetic(2, "add")]},
    "sums-3": {"tasks": [arithmetic(3, "add")]},
    "products-1": {"tasks": [arithmetic(1, "mul")]},
    "syllogisms": {"tasks": [puzzles("syllogism")]},
    "isomorphic-strings": {"tasks": [puzzles("isomorphic_strings")]},
    "basic-arithmetic": {"tasks": [puzzles("basic_arithmetic", min_terms=2, max_terms=2, min_digits=1, max_digits=1)]},
    "number-alone": {"tasks": [arithmetic(1, "add") | {"rewards": {"benches.tasks:number_alone": 1.0}}]},
}
EVAL = {"questions": 40, "at_start": True, "every_steps": 0}
"""Beside the curve of rewards: 40 held-out questions, before and after."""
LENGTHS: dict[str, Any] = {"rollout": {"max_prompt_tokens": 256, "max_new_tokens": 16}, "train": {"row_tokens": 512}}


def number_alone(completion: str) -> float:
    """Of the format: a number and nothing else."""
    return float(completion.strip().isdigit())


def coin(completion: str) -> float:
    """1 or 0, whatever was written."""
    return float(random.random() < 0.5)


def learned(name: str) -> str:
    """The part of the reward that a task is about."""
    return next(iter(TASKS[name]["tasks"][0].get("rewards", {"correct": 1.0})))


def settings(name: str, *, control: bool) -> dict[str, Any]:
    """What a run changes of the demo."""
    changes = (LENGTHS if "reasoning_gym" in str(TASKS[name]) else {}) | TASKS[name]
    if control:
        rewards = {"benches.tasks:coin": 1.0, learned(name): 0.0}
        changes = changes | {"tasks": [task | {"rewards": rewards} for task in changes["tasks"]]}
    return changes


def measure(name: str, seed: int, folder: Path, steps: int, *, control: bool) -> dict[str, Any]:
    """A run's rise of the part that is learned."""
    label = f"{name}-{'control' if control else seed}"
    options = {"name": label, "runs_dir": str(folder), "seed": seed, "steps": steps, "eval": EVAL}
    before = time.process_time()
    run = train(CONFIG, **options, **settings(name, control=control))
    key = f"train-reward/func/{learned(name).rpartition(':')[2]}/mean"
    values = [line[key] for line in run.metrics if key in line]
    accuracies = [line["eval/accuracy"] for line in run.metrics if "eval/accuracy" in line]
    rise = {"first": float(np.mean(values[:5])), "last": float(np.mean(values[-10:]))}
    found = {"accuracy": [accuracies[0], accuracies[-1]], "values": values, "cpu_s": time.process_time() - before}
    about = {"task": name, "seed": seed, "control": control, "steps": steps, "commit": commit()}
    return {**about, **rise, **found}


def missing(
    rows: Sequence[dict[str, Any]], names: Sequence[str], seeds: Sequence[int], steps: int
) -> list[tuple[str, int, bool]]:
    """Task, seed and whether it is the control, of the runs that are not there yet."""
    done = {(row["task"], row["seed"], row["control"]) for row in rows if row["steps"] == steps}
    wanted = [
        (name, seed, control) for name in names for control in (False, True) for seed in seeds[: 1 if control else None]
    ]
    return [each for each in wanted if each not in done]


def main() -> None:
    """Prints the table and writes it; exit status 1 where a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    names, rows = args.tasks.split(","), recorded("tasks-cpu", "rows", args.results) or []
    for name, seed, control in missing(rows, names, [int(seed) for seed in args.seeds.split(",")], args.steps):
        with tempfile.TemporaryDirectory() as folder:  # of one run: its checkpoints are gigabytes
            rows.append(measure(name, seed, Path(folder), args.steps, control=control))
        record("tasks-cpu", {"bar_rise": RISE, "rows": rows}, args.results)
    asked = [row for row in rows if row["task"] in names and row["steps"] == args.steps]
    for row in asked:
        kind = "control" if row["control"] else f"seed {row['seed']}"
        print(f"{row['task']:16} {kind:8} {row['first']:6.3f} -> {row['last']:6.3f}   {json.dumps(row['accuracy'])}")
    sys.exit(any((row["last"] - row["first"] >= RISE) == row["control"] for row in asked))


if __name__ == "__main__":
    main()
