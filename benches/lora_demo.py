"""The demo with adapters of rank 8: what it learns, and what steps, memory and checkpoints cost beside full training.

    python -m benches.lora_demo --seeds 0,1,2           (CPU; up to 8 minutes per seed, and 6 minutes for the costs)
    python -m benches.lora_demo --seeds "" --costs --gaps     (not the seeds; those that were measured stay)

Costs are of runs of six steps whose learning rate is next to nothing: all draw the same completions, so that they do
equal work. CPU seconds are the middle of the steps after the first, which compiles; memory is the most that the process
and its graders had in use. Writes benches/results/lora-demo-cpu.json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.demo import sampled, train
from benches.record import ROOT, arguments, record, train_command

NAME = "lora-demo-cpu"
FULL, LORA = ROOT / "configs" / "demo.yaml", ROOT / "configs" / "demo_lora.yaml"
STILL = [
    "steps=6",
    "eval.every_steps=0",
    "eval.at_start=false",
    "eval.at_end=false",
    "train.optimizer.learning_rate=1e-12",
]
FORMS: dict[str, tuple[Path, list[str]]] = {
    "full": (FULL, []),
    "apart": (LORA, ["lora.rollout=apart"]),
    "merged": (LORA, ["lora.rollout=merged"]),
    "int8": (LORA, ["lora.base=int8"]),
}
BARS = {"accuracy": 0.9, "step_cpu": 0.8, "memory": 0.4, "checkpoint_mb": 10}


def cost(folder: Path, form: str) -> dict[str, Any]:
    """Of one form: CPU seconds of a step and their parts' share, peak memory, and bytes of a checkpoint."""
    config, settings = FORMS[form]
    lines, peak = run(folder, form, config, [*STILL, *settings])
    steps = sum(1 for _ in (folder / form / "checkpoints").glob("[0-9]*"))
    stored = sum(path.stat().st_size for path in (folder / form / "checkpoints").rglob("*") if path.is_file())
    middle = lambda name: statistics.median(line[name] for line in lines[1:])  # noqa: E731
    return {
        "step_cpu_s": round(middle("time/train/step_cpu_s"), 2),
        "rollout_s": round(middle("time/train/rollout_s"), 2),
        "update_s": round(middle("time/train/update_s"), 2),
        "sync_s": round(middle("time/train/sync_s"), 4),
        "completion_tokens": [line["rollout/completion_tokens"] for line in lines],
        "peak_memory_gb": round(peak / 1e9, 2),
        "checkpoint_mb": round(stored / max(1, steps) / 1e6, 2),
    }


def gap(folder: Path, form: str) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the sampler's while adapters learn: from the second step on."""
    lines, _ = run(
        folder, f"gap-{form}", LORA, ["steps=6", "eval.at_start=false", "eval.at_end=false", *FORMS[form][1]]
    )
    return {
        "mean": statistics.fmean(line["policy/logprob_gap/mean"] for line in lines[1:]),
        "max": max(line["policy/logprob_gap/max"] for line in lines[1:]),
    }


def run(folder: Path, name: str, config: Path, settings: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The records of a run's steps, and the most memory that its process had in use."""
    command = train_command(config, f"name={name}", f"runs_dir={folder}", *settings)
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{name} ended with status {status}:\n{(folder / f'{name}.log').read_text()[-4000:]}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train-reward/total/mean" in line], usage.ru_maxrss * 1024


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--costs", action="store_true", help="measure the costs too")
    parser.add_argument("--gaps", action="store_true", help="measure the gap between sampler and trainer too")
    parser.add_argument("--forms", default=",".join(FORMS), help="whose costs")
    args = parser.parse_args()
    path: Path = args.results / f"{NAME}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found = {"bars": BARS, **{key: found.get(key, {}) for key in ("costs", "gap_bf16")}, "runs": found.get("runs", [])}
    with tempfile.TemporaryDirectory() as temporary:
        for form in args.forms.split(",") if args.costs else ():
            found["costs"][form] = cost(Path(temporary), form)
            print(form, found["costs"][form], flush=True)
            record(NAME, found, args.results)
        for form in ("apart", "merged") if args.gaps else ():
            found["gap_bf16"][form] = gap(Path(temporary), form)
            print(form, found["gap_bf16"][form], flush=True)
            record(NAME, found, args.results)
        for seed in filter(None, args.seeds.split(",")):
            row = train(Path(temporary), f"run-{seed}", int(seed), [], None, config=LORA)
            found["runs"] = [*(each for each in found["runs"] if each["seed"] != int(seed)), row]
            print(f"seed {seed}: {sampled(row['before']):.3f} -> {sampled(row['after']):.3f}, {row['cpu_s']:.0f} CPU s")
            record(NAME, found, args.results)


if __name__ == "__main__":
    main()
