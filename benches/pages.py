"""What does malloc's habit of giving memory back cost the update on CPU? See `podium.train.platform.keep_freed_memory`.

    python -m benches.pages

An update of the demo's size (benches/update.py) in a process of its own for each side, by turns: with malloc as it is,
and with freed memory kept. Writes benches/results/pages-cpu.json.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benches.record import arguments, record

ROOT = Path(__file__).parents[1]
UPDATE = ("--rows", "1", "--row-tokens", "320", "--dtype", "bfloat16")
SIDES = ("give_back", "keep")


def measure(side: str, options: list[str]) -> dict[str, float]:
    """What benches/update.py finds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benches.update", "--malloc", side, "--results", folder, *UPDATE, *options]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return json.loads(next(Path(folder).glob("update-*.json")).read_text())


def main() -> None:
    """Prints and writes both sides."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    args, options = parser.parse_known_args()
    runs = [{side: measure(side, options) for side in SIDES} for _ in range(args.repeats)]
    cpu_s = {side: [round(run[side]["cpu_s"], 2) for run in runs] for side in SIDES}
    wall_s = {side: [round(run[side]["wall_s"], 2) for run in runs] for side in SIDES}
    median = {side: statistics.median(cpu_s[side]) for side in SIDES}
    result = {"cpu_s": cpu_s, "wall_s": wall_s, "cpu_ratio": round(median["keep"] / median["give_back"], 3)}
    print(result)
    record("pages-cpu", {"update": [*UPDATE, *options], **result}, args.results)


if __name__ == "__main__":
    main()
