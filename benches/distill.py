"""Does the demo learn from a teacher instead of rewards? The demo's trained model teaches a fresh one.

    python -m benches.distill --seeds 0,1,2        (CPU; 10 minutes of CPU time per seed)

Trains configs/demo.yaml with seed 0 for the teacher, and exports it. Then for each seed the demo is trained twice from
the same fresh model: by GRPO, and by recipe `distill` with KL(teacher || policy) over the whole vocabulary, 32
completions a step instead of 64, twice the learning rate and `--steps` steps, whose tokens fill a micro-batch. Prints
a table and writes benches/results/distill-cpu.json; exit status 1 where a distilled run misses its bar: sampled
accuracy 0.9 in at most half of GRPO's CPU seconds. `--set` reaches every run, for a quick trial of this script itself.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.demo import sampled, seeds_of, train
from benches.record import ROOT, arguments, record

NAME = "distill-cpu"
BAR_ACCURACY, BAR_CPU = 0.9, 0.5
TEACHER_SEED = 0


def meets_bar(row: dict[str, Any], grpo: dict[str, Any]) -> bool:
    """Whether a distilled run is as accurate as it must be, and cheap enough beside GRPO's of the same seed."""
    return sampled(row["after"]) >= BAR_ACCURACY and row["cpu_s"] <= BAR_CPU * grpo["cpu_s"]


def exported(run: Path, folder: Path) -> Path:
    """The folder of a run's last weights in Hugging Face's form."""
    subprocess.run([sys.executable, "-m", "podium.cli", "export", str(run), str(folder)], cwd=ROOT, check=True)
    return folder


def main() -> None:
    """Prints and writes the table; exit status 1 where a distilled run misses its bar."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=[0, 1, 2], help="comma-separated")
    parser.add_argument("--steps", type=int, default=10, help="of the distilled runs")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as in podium")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        teacher = train(folder, "teacher", TEACHER_SEED, args.settings, None)
        print(f"teacher: sampled accuracy {sampled(teacher['after']):.3f}, {teacher['cpu_s']:.0f} CPU s", flush=True)
        model = exported(folder / "teacher", folder / "model")
        taught = [
            "algorithm.recipe=distill",
            "algorithm.zero_variance=keep",
            f"teacher.model={model}",
            "teacher.loss=full",
            "teacher.reverse=0",
            f"steps={args.steps}",
            "group_size=4",
            "train.row_tokens=384",
            "train.optimizer.learning_rate=8e-5",
            "eval.every_steps=0",
        ]
        for seed in args.seeds:
            grpo = teacher if seed == TEACHER_SEED else train(folder, f"grpo-{seed}", seed, args.settings, None)
            row = train(folder, f"distill-{seed}", seed, [*taught, *args.settings], None)
            rows.append({"seed": seed, "grpo": grpo, "distill": row, "meets_bar": meets_bar(row, grpo)})
            before, after = sampled(row["before"]), sampled(row["after"])
            verdict = "ok" if rows[-1]["meets_bar"] else "MISSED"
            print(
                f"seed {seed}: distilled {before:.3f} -> {after:.3f}, {row['cpu_s']:.0f} CPU s; grpo"
                f" {sampled(grpo['after']):.3f}, {grpo['cpu_s']:.0f} CPU s  {verdict}",
                flush=True,
            )
            bars = {"accuracy": BAR_ACCURACY, "cpu": BAR_CPU}
            result = {"settings": args.settings, "steps": args.steps, "bars": bars, "teacher": teacher, "runs": rows}
            record(NAME, result, args.results)  # after each seed: an interrupted bench keeps what it has measured
    sys.exit(not all(row["meets_bar"] for row in rows))


if __name__ == "__main__":
    main()
