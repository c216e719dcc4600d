"""Programs that a run compiles, and its first step, with a config's own shape of micro-batches and with chosen ones.

    python -m benches.shape_compilations [--config configs/demo.yaml] [SETTING...]     (CPU; minutes a run)

Two runs with each, by turns, every one in a process of its own without a cache of compiled programs. Counted are all
programs that jax compiles, those of a few operations too.

Prints a line for each run, and writes benches/results/shape-compilations-CONFIG-cpu.json; exit status 1 if a bar is
missed: three programs more, none after the tenth step, and a first step 1.05 times as long in CPU time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from benches.record import ROOT, arguments, record
from podium.settings import load_settings

COMPILED = "/jax/core/compile/backend_compile_duration"
SIDES = ("own", "chosen")
TURNS = 2
MORE, LATEST, LONGER = 3, 10, 1.05
"""The bars: programs more, the last step that may compile, and the first step's CPU time as a multiple."""


def child(config: str, settings: list[str], side: str) -> None:
    """Do one run, and print its compilations by step and the CPU time of its first step and of all."""
    import jax

    from podium.train.batches.run_shapes import RunShapes
    from podium.train.loop import train

    compiled: dict[int, int] = {}
    now, begun, first = 1, time.process_time(), 0.0

    def hear(event: str, duration_secs: float, **about: str | int) -> None:
        if event == COMPILED:
            compiled[now] = compiled.get(now, 0) + 1

    def after(step: int, metrics: Mapping[str, float], samples: list[Any]) -> None:
        nonlocal now, first
        now = step + 1
        first = first or time.process_time() - begun

    jax.monitoring.register_event_duration_secs_listener(hear)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(RunShapes, "chooses", RunShapes.chooses):
        if side == "own":
            RunShapes.chooses = False  # pyright: ignore[reportAttributeAccessIssue]
        loaded = load_settings([ROOT / config], [*settings, f"runs_dir={folder}", f"name={side}"], {}).config
        assert train(loaded, plain=True, on_step=after) == 0
        kept = Path(folder) / side / "shapes.json"
        shapes = json.loads(kept.read_text())["shapes"] if kept.exists() else []
    times = {"first_step_cpu_s": round(first, 2), "run_cpu_s": round(time.process_time() - begun, 2)}
    print(json.dumps({"side": side, "compiled": compiled, **times, "shapes": shapes}))


def measure(config: str, settings: list[str], side: str) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benches.shape_compilations", "--config", config, "--side", side, *settings]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    late = sum(number for step, number in found["compiled"].items() if int(step) > LATEST)
    total = sum(found["compiled"].values())
    first, whole = found["first_step_cpu_s"], found["run_cpu_s"]
    print(f"{side:7} {total} programs, {late} after step {LATEST}; first step {first} of {whole} CPU s", flush=True)
    return found | {"programs": total, "late": late}


def main() -> int:
    """Measure by turns, print and record."""
    parser = arguments(__doc__)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--side", choices=SIDES, help="do one run of this kind, here")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="settings over those of the config")
    options = parser.parse_args()
    if options.side:
        child(options.config, options.settings, options.side)
        return 0
    order = [side for turn in range(TURNS) for side in (SIDES if turn % 2 else reversed(SIDES))]
    runs = [measure(options.config, options.settings, side) for side in order]
    own, chosen = ([run for run in runs if run["side"] == side] for side in SIDES)
    first = [min(run["first_step_cpu_s"] for run in side) for side in (own, chosen)]
    more = max(run["programs"] for run in chosen) - max(run["programs"] for run in own)
    late = max(run["late"] for run in chosen)
    name = Path(options.config).stem.replace("_", "-")
    found = {"settings": options.settings, "runs": runs, "more": more, "late": late, "ratio": first[1] / first[0]}
    record(f"shape-compilations-{name}-cpu", found, options.results)
    return int(more > MORE or late > 0 or first[1] > LONGER * first[0])


if __name__ == "__main__":
    sys.exit(main())
