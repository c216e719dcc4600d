"""What `podium calibrate` does for plans of runs that it has not seen, on this machine's CPU, end to end.

    python -m benches.calibration           (a quarter of an hour on 2 quiet cores)

The demo's model is trained for a few steps with some settings. `podium calibrate` learns from three of these runs; the
others are planned by `podium plan --on cpu` with the lengths that they had. Before it, a plan has the measured products
and copies of this CPU, and takes programs to reach them. Writes benches/results/calibration-cpu.json; exit status 1 if
the mean error of the unseen steps does not fall by half.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.plan_accuracy import BASE, SETTINGS, config_of, measured_step
from benches.record import ROOT, arguments, record
from podium.accelerators import this_cpu
from podium.doctor.benchmarks.timing import cpu_peaks
from podium.observe.run_dir import LENGTHS
from podium.plan.calibration import Chip, uncalibrated
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned

SEEN = ("demo", "2 prompts", "rows 4")
UNSEEN = ("rows 1", "long rows", "12 prompts", "packed without sharing", "8 slots", "a reference")
HALF = 0.5


def before(name: str, folder: Path, chip: Chip) -> float:
    """Seconds of a step as planned from the roofline alone."""
    step = make_plan(Planned.of(config_of(SETTINGS[name]), this_cpu()), lengths=str(folder / LENGTHS), chip=chip).step
    assert step is not None
    return step.value


def podium(*arguments: str, config: Path) -> dict[str, Any]:
    """The JSON object that a command prints, with its figures of machines below `config`."""
    environment = os.environ | {"XDG_CONFIG_HOME": str(config)}
    command = [sys.executable, "-m", "podium.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout)


def planned(name: str, folder: Path, config: Path) -> dict[str, Any]:
    """The plan of a setting by the command, with the lengths that its measured step had."""
    changes = [part for setting in (*BASE, *SETTINGS[name]) for part in ("--set", setting)]
    demo = str(ROOT / "configs" / "demo.yaml")
    return podium("plan", demo, "--on", "cpu", "--lengths", str(folder / LENGTHS), *changes, config=config)


def main() -> None:
    """Train, calibrate, plan, print and record."""
    args = arguments(__doc__).parse_args()
    chip = uncalibrated(cpu_peaks())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measured: dict[str, float] = {}
        for name in (*SEEN, *UNSEEN):
            (folder / name).mkdir()
            _, measured[name] = measured_step(SETTINGS[name], folder / name)
            print(f"{name}: {measured[name]:.3f} s per step", flush=True)
        learned = podium("calibrate", *(str(folder / name / "run") for name in SEEN), config=folder)
        print(learned["about"], flush=True)
        rows = []
        for name in UNSEEN:
            plan = planned(name, folder / name, folder)
            assert plan["calibration"] == learned["about"]
            step = plan["step_seconds"]
            rows.append(
                {
                    "name": name,
                    "measured_s": round(measured[name], 3),
                    "before_s": round(before(name, folder / name, chip), 3),
                    "after_s": round(step["value"], 3),
                    "inside": step["low"] <= measured[name] <= step["high"],
                }
            )
            print(rows[-1], flush=True)
    errors = {
        which: round(statistics.mean(abs(row[f"{which}_s"] / row["measured_s"] - 1) for row in rows), 4)
        for which in ("before", "after")
    }
    figures = errors | {"inside": round(statistics.mean(row["inside"] for row in rows), 3)}
    print(figures)
    del learned["file"]  # a path of this machine
    record("calibration-cpu", {"seen": SEEN, "figures": figures, "calibration": learned, "runs": rows}, args.results)
    sys.exit(errors["after"] > HALF * errors["before"])


if __name__ == "__main__":
    main()
