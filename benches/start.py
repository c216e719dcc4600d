"""How long until the first step of the demo is done, at the first start and at the second? CPU, minutes.

    python -m benches.start --pairs 2            (SmolLM2-135M-Instruct; `make demo` installs it)

Each pair starts `podium train configs/demo.yaml` twice, with an empty folder for compiled programs and then with what
the first start left there, and ends both after their first step; the initial model is not evaluated, as by default.
Prints seconds by phase and writes benches/results/start-cpu.json. The bar: the median second start takes 0.45 of the
median first, by the clock.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.record import ROOT, arguments, record, train_command

BAR = 0.45
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def start(folder: Path, name: str, compiled: Path, settings: list[str]) -> dict[str, Any]:
    """Seconds and CPU seconds until each line that a run prints about a phase, up to its first step."""
    own = (f"name={name}", f"runs_dir={folder}", "eval.at_start=false")
    command = train_command(ROOT / "configs" / "demo.yaml", *own, *settings)
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(compiled)
    began, seen, said = time.perf_counter(), [], []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if "..." in line or line.startswith(("evaluation at", "step 1/")):
                seen.append(
                    {"line": line.split("  ")[0].strip(), "s": time.perf_counter() - began, **_cpu(process.pid)}
                )
            if line.startswith("step 1/"):
                process.kill()
                break
        else:
            sys.exit(f"the run ended before its first step:\n{''.join(said)}")
    return {"name": name, "s": seen[-1]["s"], "cpu_s": seen[-1]["cpu_s"], "seen": seen}


def _cpu(pid: int) -> dict[str, float]:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {"cpu_s": (int(fields[11]) + int(fields[12])) / TICKS_PER_S}


def main() -> None:
    """Prints and writes both sides; exit status 1 where the bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as in podium")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"first": [], "second": []}
    with tempfile.TemporaryDirectory() as temporary:
        for pair in range(args.pairs):
            for side in rows:
                compiled = Path(temporary, f"compiled-{pair}")
                rows[side].append(start(Path(temporary, "runs"), f"{side}-{pair}", compiled, args.settings))
                print(json.dumps(rows[side][-1]), flush=True)
    ratios = {
        unit: statistics.median(row[unit] for row in rows["second"]) / statistics.median(r[unit] for r in rows["first"])
        for unit in ("s", "cpu_s")
    }
    record("start-cpu", {"settings": args.settings, "bar": BAR, "second_over_first": ratios, **rows}, args.results)
    print(f"second over first: {ratios['s']:.2f} by the clock, {ratios['cpu_s']:.2f} of CPU time; bar {BAR}")
    sys.exit(ratios["s"] > BAR)


if __name__ == "__main__":
    main()
