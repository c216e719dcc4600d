"""README's first example, `examples/first.py`, as a reader runs it: does its reward rise, and when? CPU, minutes.

    python -m benches.first_run            (`make install` installs the model)

Runs it in a process of its own and an empty folder. `--isa AVX512_VNNI` keeps XLA from instructions that older CPUs
lack: products are then in float32. Writes benches/results/first-run-cpu.json, a case for each, with seconds from the
start of the process; exit status 1 where a bar is missed: the last third of the rewards is 0.2 above the first one.
"""

import ast
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benches.record import ROOT, arguments, children_cpu_s, record, recorded

BAR_RISE = 0.2
NAME = "first-run-cpu"


def rise(rewards: list[float]) -> float:
    """The mean of the last third of the steps less that of the first."""
    third = len(rewards) // 3
    return statistics.mean(rewards[-third:]) - statistics.mean(rewards[:third])


def main() -> None:
    """Runs the example, prints and writes what it printed."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--isa", metavar="NAME", help="the newest instructions that XLA may use, as AVX512_VNNI or AVX2"
    )
    args = parser.parse_args()
    flags = {"XLA_FLAGS": f"--xla_cpu_max_isa={args.isa}"} if args.isa else {}
    began, cpu = time.perf_counter(), children_cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | flags | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled"}
        script = [sys.executable, "-u", str(ROOT / "examples" / "first.py")]
        done = subprocess.run(script, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rewards = ast.literal_eval(done.stdout.splitlines()[-1])
    case = {"wall_s": time.perf_counter() - began, "cpu_s": children_cpu_s() - cpu, "rewards": rewards}
    print(args.isa or "all instructions", case)
    others = recorded(NAME, "cases", args.results) or {}
    record(NAME, {"bar_rise": BAR_RISE, "cases": {**others, args.isa or "all": case}}, args.results)
    sys.exit(rise(rewards) < BAR_RISE)


if __name__ == "__main__":
    main()
