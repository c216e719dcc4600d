"""Does SmolLM2-135M learn to call a calculator, and not from a coin's rewards? 45 minutes of CPU time.

    python -m benches.learn_tools

configs/tools_sft.yaml shows the form by 48 written calls; then configs/tools.yaml trains from there, once per seed, and
for the control with a coin's rewards. All conversations of all steps are recorded; shares and means are of the first
FIRST and of the last LAST steps, with 95 % intervals (Wilson's; of a mean, the normal one). Success is counted here,
from what was said, also in the control. CPU seconds are of a whole process, its start and its compilations included.
Prints a table and writes benches/results/learn-tools-cpu.json; exit status 1 where a bar is missed.
"""

import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.demo import seeds_of
from benches.record import ROOT, arguments, children_cpu_s, record, train_command
from podium.tasks.games.calculator_task import CalculatorTask
from podium.tasks.task import Prompt

FIRST, LAST = 2, 3
"""Steps that are put together at the start and at the end of a run."""
SHOWN, TRAINED = ROOT / "configs" / "tools_sft.yaml", ROOT / "configs" / "tools.yaml"
COIN = "tasks.0.name=benches.learn_tools:CoinCalculator"
PARTS = ("success", "with_a_call", "turns")
CPU_BAR_S = 900.0
SUCCESS_BAR, CALLS_BAR = 0.8, 0.9


class CoinCalculator(CalculatorTask):
    """Training answers earn 1 or 0 by the toss of a coin."""

    coin = random.Random(0)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """The toss of a coin."""
        return float(self.coin.random() < 0.5)


def conversations(run: Path) -> dict[int, list[dict[str, Any]]]:
    """The recorded conversations of each step's training groups."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in (run / "samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["split"] == "train":
            each = [{**completion, "answer": record["answer"]} for completion in record["completions"]]
            found.setdefault(record["step"], []).extend(each)
    return found


def answers(conversation: dict[str, Any]) -> list[str]:
    """What the model said, by turn."""
    return [message["content"] or "" for message in conversation["messages"] if message["role"] == "assistant"]


def succeeded(conversation: dict[str, Any]) -> bool:
    """Whether the digits of the last number are those of the answer."""
    digits = "".join(each if each.isdigit() else " " for each in answers(conversation)[-1].replace(",", ""))
    expected = conversation["answer"].lstrip("-")
    return digits.split()[-1:] == [expected]


def share(hits: int, count: int) -> dict[str, float]:
    """A share with its 95 % Wilson interval."""
    z, p = 1.96, hits / count
    middle, width = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    norm = 1 + z * z / count
    return {"mean": round(p, 4), "low": round((middle - width) / norm, 4), "high": round((middle + width) / norm, 4)}


def mean(values: list[int]) -> dict[str, float]:
    """A mean with its 95 % normal interval."""
    middle = sum(values) / len(values)
    spread = math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values))
    return {"mean": round(middle, 3), "low": round(middle - 1.96 * spread, 3), "high": round(middle + 1.96 * spread, 3)}


def measured(held: list[dict[str, Any]]) -> dict[str, Any]:
    """Success, calls and turns of conversations."""
    return {
        "conversations": len(held),
        "success": share(sum(succeeded(each) for each in held), len(held)),
        "with_a_call": share(
            sum(any(message.get("tool_calls") for message in each["messages"]) for each in held), len(held)
        ),
        "turns": mean([len(answers(each)) for each in held]),
    }


def run(folder: Path, name: str, config: Path, *changes: str, start: Path | None = None) -> dict[str, float]:
    """`podium train` of a config; wall and CPU seconds from start to exit."""
    command = train_command(config, f"name={name}", f"runs_dir={folder}", *changes)
    command += [] if start is None else ["--from", str(start)]
    began, cpu = time.perf_counter(), children_cpu_s()
    with (folder / f"{name}.log").open("w") as log:
        status = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode
    if status:
        sys.exit(f"{name} ended with status {status}:\n{(folder / f'{name}.log').read_text()[-4000:]}")
    return {"wall_s": round(time.perf_counter() - began, 1), "cpu_s": round(children_cpu_s() - cpu, 1)}


def learn(folder: Path, name: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Train once; what the conversations of the first and of the last steps did, and the cost."""
    still = ("metrics.samples_every=1", "eval.at_start=false", "eval.at_end=false", "eval.every_steps=0")
    cost = run(folder, name, TRAINED, f"seed={seed}", *still, *settings, start=folder / "start")
    held = conversations(folder / name)
    steps = sorted(held)
    first = [each for step in steps[:FIRST] for each in held[step]]
    last = [each for step in steps[-LAST:] for each in held[step]]
    by_step = [measured(held[step])["success"]["mean"] for step in steps]
    return {
        "name": name,
        "seed": seed,
        **cost,
        "first": measured(first),
        "last": measured(last),
        "success_by_step": by_step,
    }


def meets_bar(row: dict[str, Any], *, control: bool) -> bool:
    """Whether success, calls and turns did what they must; of a control, whether success did not rise."""
    first, last = row["first"], row["last"]
    if control:
        return last["success"]["low"] <= first["success"]["high"]
    reached = last["success"]["mean"] >= SUCCESS_BAR and last["with_a_call"]["mean"] >= CALLS_BAR
    return reached and row["cpu_s"] <= CPU_BAR_S


def main() -> None:
    """Prints and writes the table; exit status 1 where a run misses its bar."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=[0, 1, 2], help="comma-separated")
    parser.add_argument("--control-seeds", type=seeds_of, default=[0], help="of the runs with a coin's rewards")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as in podium")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"runs": [], "control": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = run(folder, "start", SHOWN)
        for kind, seeds in (("runs", args.seeds), ("control", args.control_seeds)):
            for seed in seeds:
                coin = [COIN] if kind == "control" else []
                row = learn(folder, f"{kind}-{seed}", seed, [*coin, *args.settings])
                row["meets_bar"] = meets_bar(row, control=kind == "control")
                rows[kind].append(row)
                told = {part: (row["first"][part]["mean"], row["last"][part]["mean"]) for part in PARTS}
                print(row["name"], told, f"{row['cpu_s']:.0f} CPU s", row["success_by_step"], flush=True)
                # After each run: an interrupted bench keeps what it has measured.
                result = {"settings": args.settings, "warm_start": start, **rows}
                record("learn-tools-cpu", result, args.results)
    sys.exit(not all(row["meets_bar"] for kind in rows.values() for row in kind))


if __name__ == "__main__":
    main()
