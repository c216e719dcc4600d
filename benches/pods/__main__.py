"""`podium pod` against a fake Google Cloud, when things go wrong: who is named as the cause, how soon, what is left.

    python -m benches.pods                 (Linux, as root, with gcloud, sshd and ip; a quiet machine)
    python -m benches.pods --bar a --bar f

Four machines are network namespaces with an sshd; Google's API is tests/pods/fake_tpu.py, to which the real gcloud
talks; jobs are `podium train` of a tiny random model over jax.distributed on CPU, four devices on each machine.

    a  up, run (3 steps), logs, down: one command each; the losses of all machines, and those of one process
    b  one machine is missing, duplicated, or has another config, commit or folder: named by the launch guard
    c  kill -9 of a worker or of worker 0, a cut cable, an exception, a hang: named on the laptop, and nothing left
    d  --keep-alive while machines are preempted at random instants: metrics continue bit for bit
    e  a job that ends with 255, ssh sessions that drop, a laptop that is killed and starts again: one copy of the job
    f  lost replies, stock-outs, 429, deletion during creation; 200 random fault sequences: nothing is left rented
    soak  --keep-alive through 300 random sequences of faults over whole runs, by a clock that is not waited for
    g  planted secrets: in no file, no request and no output of all that the other bars leave

Prints a line per case and writes benches/results/pods-BAR-cpu.json; exit status 1 where a case misses its bar.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benches.pods.bench import WORKERS, Bench, seconds_since
from benches.pods.failures import bar_b, bar_c
from benches.pods.renting import PLANTED, bar_f, bar_g
from benches.pods.runs import bar_a, bar_d, bar_e
from benches.pods.soak import bar_soak
from benches.record import arguments, record
from podium.hosts.platform import prepare_platform
from tests.pods.hosts import ROOT
from tests.pods.network_world import network_world, why_no_network


def make_checkout(folder: Path) -> Path:
    """What is measured, as a clean git checkout."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "podium", "tests/pods", "*.toml", "*.txt"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "--quiet"], ["add", "--all"], [*who, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


BARS = {"a": bar_a, "b": bar_b, "c": bar_c, "d": bar_d, "e": bar_e, "f": bar_f, "g": bar_g, "soak": bar_soak}


def main() -> None:
    """Prints a line per case and writes a file per bar."""
    parser = arguments(__doc__)
    parser.add_argument("--bar", action="append", choices=list(BARS), help="only this one; repeatable")
    parser.add_argument("--compiled", type=Path, metavar="FOLDER", help="programs that an earlier bench compiled")
    args = parser.parse_args()
    if (why := why_no_network()) is not None:
        sys.exit(f"no bench of pods here: {why}")
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    prepare_platform()
    missed = 0
    for bar in args.bar or BARS:
        begun = time.monotonic()
        rows = []
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "checkout").mkdir()
            with network_world(Path(name), make_checkout(Path(name) / "checkout"), workers=WORKERS) as world:
                world.environment |= PLANTED
                bench = Bench(Path(name), world, args.compiled or Path(name) / "compiled")
                for row in BARS[bar](bench):
                    rows.append(row)
                    print(f"{bar} {'good' if row['good'] else 'MISSED'} {json.dumps(row)}", flush=True)
        record(f"pods-{bar}-cpu", {"bar": bar, "seconds": seconds_since(begun), "rows": rows}, args.results)
        missed += sum(not row["good"] for row in rows)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
