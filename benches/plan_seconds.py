"""How long `podium plan` takes: the first time, again, by the closed form, and to search.

    python -m benches.plan_seconds         (about ten minutes on two cores)

Each is a command of its own, with an empty cache folder for the first. Writes benches/results/plan-seconds-cpu.json;
exit status 1 where a bar is missed.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.record import arguments, record

ROOT = Path(__file__).parents[1]
CONFIG, TPU = "configs/gsm8k_qwen25_3b.yaml", "v6e-8"
BARS = {"cold": 720.0, "cached": 5.0, "fast": 5.0, "search": 360.0}
LONG = ("rollout.max_new_tokens=2048", "train.row_tokens=2560", "prompts_per_step=64")
"""Settings of the search: rows of 2,560 tokens, and more completions than fit."""


def seconds(cache: str, *more: str) -> dict[str, Any]:
    """Seconds that one command takes, and its verdict."""
    command = [sys.executable, "-m", "podium.cli", "plan", CONFIG, "--tpu", TPU, *more]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "verdict": done.stdout.splitlines()[0]}


def main() -> None:
    """Prints and records all four."""
    args = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as cache:
        found = {"fast": seconds(cache, "--fast"), "cold": seconds(cache), "cached": seconds(cache)}
    with tempfile.TemporaryDirectory() as cache:
        long = [part for setting in LONG for part in ("--set", setting)]
        found["search"] = seconds(cache, *long, "--search", "train.rows_per_device")
    for name, row in found.items():
        print(f"{name}: {row}", flush=True)
    record("plan-seconds-cpu", {"config": CONFIG, "tpu": TPU, "bars": BARS, "rows": found}, args.results)
    sys.exit(any(found[name]["wall_s"] > bar for name, bar in BARS.items()))


if __name__ == "__main__":
    main()
