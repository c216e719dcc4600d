"""What does malloc's habit of giving memory back cost a run on CPU? See `podium.malloc.keep_freed_memory`.

    python -m benches.pages                (five minutes on two cores)

The demo's first steps with float32, by turns: with malloc as it is; told when jax is about to start, while threads of
other libraries have arenas of their own already; and told first of all, as `podium train` does. Writes
benches/results/pages-cpu.json.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.record import ROOT, arguments, record
from podium.files import read_lines
from podium.observe.run_dir import METRICS

STEPS, WARM = 10, 3
SETTINGS = (
    f"steps={STEPS}",
    "prompts_per_step=4",
    "rollout.slots=32",
    "rollout.dtype=float32",
    "train.dtype=float32",
    "eval.at_start=false",
    "eval.at_end=false",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "algorithm.zero_variance=keep",
)
SIDES = {
    "given back": "import podium.malloc as m; m.keep_freed_memory = lambda: None; import podium.cli; podium.cli.main()",
    "kept late": "import podium.cli; podium.cli.keep_freed_memory = lambda: None; podium.cli.main()",
    "kept": "import podium.cli; podium.cli.main()",
}
"""The program that each side runs."""


def measure(side: str) -> dict[str, float]:
    """Seconds of the middle step that did not compile and of its update, and what the process used."""
    with tempfile.TemporaryDirectory() as folder:
        options = [part for each in (*SETTINGS, f"runs_dir={folder}", "name=run") for part in ("--set", each)]
        command = [sys.executable, "-c", SIDES[side], "train", str(ROOT / "configs" / "demo.yaml"), *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        assert status == 0, f"{side}: the run failed"
        steps = list(read_lines(Path(folder) / "run" / METRICS))[WARM:]
    return {
        "step_s": statistics.median(step["time/train/step_s"] for step in steps),
        "update_s": statistics.median(step["time/train/update_s"] for step in steps),
        "user_s": used.ru_utime,
        "system_s": used.ru_stime,
        "faults": used.ru_minflt,
        "most_gib": used.ru_maxrss / 2**20,
    }


def main() -> None:
    """Prints and writes all sides."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="processes of each side")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(args.repeats):
        for side, own in runs.items():
            own.append(measure(side))
            print(side, {name: round(value, 2) for name, value in own[-1].items()}, flush=True)
    middle = {
        side: {name: round(statistics.median(each[name] for each in own), 2) for name in own[0]}
        for side, own in runs.items()
    }
    record("pages-cpu", {"settings": list(SETTINGS), "runs": runs, "middle": middle}, args.results)


if __name__ == "__main__":
    main()
