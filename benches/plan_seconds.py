"""How long `podium plan` takes: a first look, traced, again, compiled, again, to search, and to rank all machines.

    python -m benches.plan_seconds         (about twenty minutes on two cores; needs podium-rl[plan-gpu])
    python -m benches.plan_seconds --only search auto

Each is a command of its own, with an empty cache folder but for those that are done again. CPU seconds stand beside
those of the clock, which others on the machine stretch; alone on a machine a command takes no longer than its CPU
seconds, so a bar is met by either. Writes benches/results/plan-seconds-cpu.json; exit status 1 where a bar is missed.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.record import ROOT, arguments, children_cpu_s, record, recorded

CONFIG, TPU, NAME = "configs/gsm8k_qwen25_3b.yaml", "v6e-8", "plan-seconds-cpu"
LONG = ("rollout.max_new_tokens=2048", "train.row_tokens=2560", "prompts_per_step=64")
"""Settings of the search: rows of 2,560 tokens, and more completions than fit."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "first use": ("Qwen/Qwen2.5-7B-Instruct", "--on", TPU),
    "fast": (CONFIG, "--on", TPU, "--fast"),
    "fast again": (CONFIG, "--on", TPU, "--fast"),
    "cold": (CONFIG, "--on", TPU),
    "cached": (CONFIG, "--on", TPU),
    "search": (CONFIG, "--on", TPU, *(f"--set={each}" for each in LONG), "--search", "train.rows_per_device"),
    "auto, estimates": (CONFIG, "--on", "auto", "--fast"),
    "auto": (CONFIG, "--on", "auto"),
}
EVERY, MACHINES = "every config, fast", ("v4-16", "v6e-8", "v5p-64", "h100-8")
"""The plan with `--fast` of each config in configs/ on each of these machines, of which the slowest counts."""
CONFIGS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "configs").glob("*.yaml"))]
KEEPS_CACHE = {"fast again", "cached"}  # of the command before
BARS = {
    "first use": 2.5,
    "fast": 6.0,
    "fast again": 2.0,
    "cold": 720.0,
    "cached": 5.0,
    "search": 360.0,
    EVERY: 6.0,
}
NAMES = [*COMMANDS, EVERY]
LINES = {"auto": 18}
"""Lines of the answer that are kept, where it is more than the first."""


def seconds(options: Sequence[str], cache: str, lines: int = 1) -> dict[str, Any]:
    """Seconds that one command takes, and the first lines of its answer.

    Raises RuntimeError if the command fails; a plan that does not fit is an answer.
    """
    command = [sys.executable, "-m", "podium.cli", "plan", *options]
    before, start = children_cpu_s(), time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    wall, cpu = time.perf_counter() - start, children_cpu_s() - before
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(options)}: exit status {done.returncode}: {done.stderr[-2000:]}")
    answer = [line.rstrip() for line in done.stdout.splitlines() if line.strip()][:lines]
    known = {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "load_1_min": round(os.getloadavg()[0], 1)}
    return {"command": f"podium plan {' '.join(options)}", **known, "answer": answer}


def slowest(cache: str) -> dict[str, Any]:
    """Of the fast plans of every config on each machine, the one that takes most CPU seconds, and how many there are.

    A mesh that a machine does not have is a usage error, and no plan.
    """
    rows: list[dict[str, Any]] = []
    for config, machine in itertools.product(CONFIGS, MACHINES):
        with contextlib.suppress(RuntimeError):
            rows.append(seconds((config, "--on", machine, "--fast"), cache))
    return max(rows, key=lambda row: row["cpu_s"]) | {"plans": len(rows)}


def main() -> None:
    """Prints and records each; those of an earlier run are kept where `--only` leaves them out."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="what to measure anew")
    args = parser.parse_args()
    kept = (recorded(NAME, "rows", args.results) or {}) if len(args.only) < len(NAMES) else {}
    rows = dict(kept)
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(each for each in NAMES if each in args.only):
            cache = Path(folder) / str(number - (name in KEEPS_CACHE))
            cache.mkdir(exist_ok=True)
            lines = LINES.get(name, 1)
            kept[name] = slowest(str(cache)) if name == EVERY else seconds(COMMANDS[name], str(cache), lines)
            print(f"{name}: {kept[name]}", flush=True)
            rows = {each: kept[each] for each in NAMES if each in kept}
            record(NAME, {"bars": BARS, "rows": rows}, args.results)
    sys.exit(any(min(rows[each]["wall_s"], rows[each]["cpu_s"]) > bar for each, bar in BARS.items() if each in rows))


if __name__ == "__main__":
    main()
