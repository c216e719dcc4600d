"""The demo learns, for several seeds, and learns nothing from rewards that say nothing.

    python -m benches.demo --seeds 0,1,2 --control-seeds 0        (CPU; up to 8 minutes per seed)
    python -m benches.demo --seeds 0 --control-seeds "" --isa AVX2   (as on a CPU without AVX512-BF16, in float32)

Trains configs/demo.yaml once per seed. The control is the same run with a coin's reward: what it gains in accuracy is
what rewards alone, whatever they say, would give. Its evaluation is honest. Prints a table and writes
benches/results/demo-cpu.json; exit status 1 where a bar is missed: 8 minutes, sampled accuracy 0.9, and for the control
no more than 0.1 above its start. `--set` reaches every run, for a quick trial of this script itself.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.record import ROOT, arguments, children_cpu_s, record, train_command
from podium.tasks.games.arithmetic import Arithmetic
from podium.tasks.task import Prompt

CONFIG = ROOT / "configs" / "demo.yaml"
BAR_S, BAR_ACCURACY, BAR_CONTROL_RISE = 480.0, 0.90, 0.10
CONTROL = "tasks.0.name=benches.demo:RandomArithmetic"


class RandomArithmetic(Arithmetic):
    """Arithmetic whose training answers earn 1 or 0 by the toss of a coin; held-out answers are graded honestly."""

    coin = random.Random(0)
    """One for each grading process: with one process, as in the demo, a run can be repeated."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        """The toss of a coin in training, else 1 if the last number of the text is the answer."""
        if prompt.id.startswith("arithmetic/eval/"):
            return super().grade(prompt, completion)
        return float(self.coin.random() < 0.5)


def train(
    folder: Path, name: str, seed: int, settings: list[str], isa: str | None, config: Path = CONFIG
) -> dict[str, Any]:
    """A row of the table: the run's accuracies and rewards, its number formats, and what it cost from start to exit."""
    changes = [f"name={name}", f"runs_dir={folder}", f"seed={seed}", *settings]
    command = train_command(config, *changes)
    env = os.environ | (older_cpu(isa) if isa else {})
    start, cpu = time.perf_counter(), children_cpu_s()
    with (folder / f"{name}.log").open("w") as log:
        status = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log).returncode
    if status:
        sys.exit(f"{name} ended with status {status}:\n{(folder / f'{name}.log').read_text()[-4000:]}")
    wall_s, cpu_s = time.perf_counter() - start, children_cpu_s() - cpu
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    formats = re.search(r"number formats: (.*)", (folder / f"{name}.log").read_text())
    steps = [line for line in lines if "train-reward/total/mean" in line]
    evaluations = [evaluation(line) for line in lines if "eval/accuracy" in line]
    return {
        "name": name,
        "seed": seed,
        "number_formats": formats[1] if formats else "not said",
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "before": evaluations[0],
        "after": evaluations[-1],
        "evaluations": evaluations,
        "rewards": [round(line["train-reward/total/mean"], 4) for line in steps],
        "step_s": [round(line["time/train/step_s"], 2) for line in steps],
        "step_cpu_s": [round(line["time/train/step_cpu_s"], 2) for line in steps],
    }


def older_cpu(isa: str) -> dict[str, str]:
    """The environment in which XLA and its matrix libraries use no newer instructions than these (as AVX2)."""
    no_ynnpack = "--xla_cpu_experimental_ynn_fusion_type="  # it asks the CPU itself
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={isa} {no_ynnpack}"
    return {"XLA_FLAGS": flags.strip(), "ONEDNN_MAX_CPU_ISA": isa}


def evaluation(line: dict[str, Any]) -> dict[str, float]:
    """What a line of metrics.jsonl says of the one task's evaluation."""
    shown = ("accuracy", "avg_at_k", "pass_at_k", "questions", "truncated_fraction", "completion_tokens")
    found = {name.rpartition("/")[2]: value for name, value in line.items() if name.startswith("eval/")}
    return {"step": line["step"]} | {name: found[name] for name in shown if name in found}


def sampled(evaluation: dict[str, float]) -> float:
    """Accuracy of sampled answers; of greedy ones where none are sampled."""
    return evaluation.get("avg_at_k", evaluation["accuracy"])


def meets_bar(row: dict[str, Any], control: bool) -> bool:
    """Whether a run did what it must."""
    before, after = sampled(row["before"]), sampled(row["after"])
    if control:
        return after - before <= BAR_CONTROL_RISE
    return after >= BAR_ACCURACY and row["wall_s"] <= BAR_S


def seeds_of(text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    return [int(seed) for seed in text.split(",") if seed]


def main() -> None:
    """Prints and writes the table; exit status 1 where a run misses its bar."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=[0, 1, 2], help="comma-separated")
    parser.add_argument("--control-seeds", type=seeds_of, default=[0], help="of the runs with random rewards")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as in podium")
    parser.add_argument("--isa", help="newest instruction set that XLA may use, as AVX2; unset: all that the CPU has")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"runs": [], "control": []}
    bars = {"wall_s": BAR_S, "accuracy": BAR_ACCURACY, "control_rise": BAR_CONTROL_RISE}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for kind, seeds in (("runs", args.seeds), ("control", args.control_seeds)):
            for seed in seeds:
                settings = [*([CONTROL] if kind == "control" else []), *args.settings]
                row = train(folder.absolute(), f"{kind}-{seed}", seed, settings, args.isa)
                row["meets_bar"] = meets_bar(row, kind == "control")
                rows[kind].append(row)
                before, after = sampled(row["before"]), sampled(row["after"])
                print(
                    f"{row['name']:12} sampled accuracy {before:.3f} -> {after:.3f}  {row['wall_s']:.0f} s"
                    f"  {row['cpu_s']:.0f} CPU s  {row['number_formats']}  {'ok' if row['meets_bar'] else 'MISSED'}",
                    flush=True,
                )
                # After each run: an interrupted bench keeps what it has measured.
                result = {"settings": args.settings, "isa": args.isa, "bars": bars, **rows}
                record(f"demo-cpu{f'-{args.isa.lower()}' if args.isa else ''}", result, args.results)
    sys.exit(not all(row["meets_bar"] for kind in rows.values() for row in kind))


if __name__ == "__main__":
    main()
