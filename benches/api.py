"""Twelve lines of Python with SmolLM2-135M-Instruct: when do they first say something, and do they learn? CPU, minutes.

    python -m benches.api --steps 20            (`make demo` installs the model)

Runs the lines below as a script in a process of its own, and as a cell of a notebook, and notes when each line that
they print comes: from the start of the process, and of the cell, whose kernel is there already. Writes
benches/results/api-cpu.json. The bar of both: 3 seconds to the first line, and accuracy on held-out sums rises by 0.2.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches.record import ROOT, arguments, record

BAR_S, BAR_RISE = 3.0, 0.2
PROGRESS = "run runs/"
"""How the first line of a run begins; the view's own lines follow."""
Hear = Callable[[float, str], None]
"""Called with each line that is printed, and the seconds since the start."""
LINES = """\
import podium
sums = [(a, b, {"question": f"What is {a} + {b}?", "answer": a + b}) for a in range(1, 10) for b in range(1, 10)]
train, test = [row for a, b, row in sums if (a - b) % 4], [row for a, b, row in sums if (a - b) % 4 == 0]
def short(num_tokens: int) -> float:
    return 1 - num_tokens / 20
run = podium.grpo("demo", data=train, eval_data=test,
                  rewards=[podium.math_equal, (short, 0.1)], steps=STEPS, prompts_per_step=8, group_size=8,
                  on_step=lambda step, metrics, samples: print(step, metrics["train-reward/total/mean"], flush=True),
                  eval={"at_start": True}, rollout={"max_prompt_tokens": 64, "max_new_tokens": 20, "slots": 64},
                  train={"remat": "none", "optimizer": {"learning_rate": 4e-5}})
print(len(run.metrics), len(run.samples), run.evaluate(test).accuracy)
print(run.generate(["What is 2 + 3?"], max_new_tokens=16)[0].text)
run.export("out")
"""


def as_script(lines: str, folder: Path, hear: Hear) -> None:
    """The lines in a process of their own."""
    (folder / "lines.py").write_text(lines)
    command = [sys.executable, "-u", "-c", f"import sys, runpy; {_path()}; runpy.run_path('lines.py')"]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            hear(time.perf_counter() - began, line.strip())
    if process.returncode:
        sys.exit(process.returncode)


def as_cell(lines: str, folder: Path, hear: Hear) -> None:
    """The lines in a cell of a notebook, whose kernel is there before."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(folder))
    try:
        client.execute_interactive(f"import sys; {_path()}")
        began = time.perf_counter()

        def output(message: dict[str, Any]) -> None:
            for line in message["content"].get("text", "").splitlines():
                hear(time.perf_counter() - began, line.strip())

        reply = client.execute_interactive(lines, output_hook=output)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    if reply["content"]["status"] != "ok":
        sys.exit("\n".join(reply["content"]["traceback"]))


def _path() -> str:
    return f"sys.path.insert(0, {str(ROOT)!r})"


WAYS = {"script": as_script, "notebook": as_cell}


def measure(way: str, steps: int) -> dict[str, Any]:
    """What came when, and the accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        said: list[dict[str, Any]] = []

        def hear(seconds: float, line: str) -> None:
            said.append({"s": round(seconds, 2), "line": line.replace(sys.prefix, ".venv")})
            print(f"{way} {seconds:8.2f} s  {line}", flush=True)

        WAYS[way](LINES.replace("STEPS", str(steps)), Path(folder), hear)
        (metrics,) = Path(folder, "runs").glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        exported = sorted(path.name for path in Path(folder, "out").iterdir())
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    return {
        "first_line_s": next(each["s"] for each in said if each["line"].startswith(PROGRESS)),
        "rise": accuracy[-1] - accuracy[0],
        "accuracy": accuracy,
        "exported": exported,
        "said": said,
    }


def main() -> None:
    """Prints and writes what came when; exit status 1 where a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    found = {way: measure(way, args.steps) for way in WAYS}
    bars = {"first_line_s": BAR_S, "rise": BAR_RISE}
    record("api-cpu", {"lines": LINES, "steps": args.steps, "bars": bars, **found}, args.results)
    sys.exit(any(each["first_line_s"] > BAR_S or each["rise"] < BAR_RISE for each in found.values()))


if __name__ == "__main__":
    main()
