"""`podium certify` on four models: whether each is green, its largest difference, and how long it takes.

    python -m benches.certify

Tiny clones of Llama 3.2, Qwen2.5, Qwen3 and the demo's SmolLM2, each in a process of its own, one after the other.
Prints a table and writes benches/results/certify-cpu.json. On a busy machine only CPU seconds can be compared.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.record import arguments, children_cpu_s, record

MODELS = ("meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "demo")


def measure(model: str, folder: Path, full: bool) -> dict[str, Any]:
    """One certificate."""
    config = folder / "run.yaml"
    config.write_text(f"model: {model}\nsteps: 10\ntasks:\n- name: arithmetic\n")
    before, start = children_cpu_s(), time.perf_counter()
    command = [sys.executable, "-m", "podium.cli", "certify", str(config), "--json", *(["--full"] if full else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    found = json.loads(done.stdout)
    worst = max((check for check in found["checks"] if check["bar"]), key=lambda check: check["difference"])
    return {
        "model": model,
        "subject": found["subject"],
        "green": found["green"],
        "checks": len(found["checks"]),
        "skipped": found["skipped"],
        "worst": worst["name"],
        "largest_difference": worst["difference"],
        "wall_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(children_cpu_s() - before, 1),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--full", action="store_true", help="the demo's own weights instead of the four clones")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS[-1:] if args.full else MODELS:
            rows.append(measure(model, Path(folder), args.full))
            print(json.dumps(rows[-1]), flush=True)
    record(f"certify{'-full' * args.full}-cpu", {"models": rows}, args.results)
    sys.exit(not all(row["green"] for row in rows))


if __name__ == "__main__":
    main()
