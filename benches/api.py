"""Twelve lines of Python with SmolLM2-135M-Instruct: when do they first say something, and do they learn? CPU, minutes.

    python -m benches.api --steps 20            (`make demo` installs the model)

Runs the lines below in a process of their own and notes when each line that they print comes. Writes
benches/results/api-cpu.json. The bar: 3 seconds to the first one, and accuracy on held-out sums rises by 0.2.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benches.record import arguments, record

ROOT = Path(__file__).parents[1]
BAR_S, BAR_RISE = 3.0, 0.2
LINES = """\
import podium
rows = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(1, 10) for b in range(1, 10)]
def short(num_tokens: int) -> float:
    return 1 - num_tokens / 20
run = podium.grpo("demo", data=[row for i, row in enumerate(rows) if i % 4], eval_data=rows[::4],
                  rewards=[podium.math_equal, (short, 0.1)], steps=STEPS, prompts_per_step=8, group_size=8,
                  on_step=lambda step, metrics, samples: print(step, metrics["train-reward/total/mean"], flush=True),
                  rollout={"max_prompt_tokens": 64, "max_new_tokens": 20, "slots": 64},
                  train={"remat": "none", "optimizer": {"learning_rate": 4e-5}})
print(run.evaluate(rows[::4]).accuracy, run.generate(["What is 2 + 3?"], max_new_tokens=16)[0].text)
run.export("out")
"""


def main() -> None:
    """Prints and writes what came when; exit status 1 where a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "lines.py")
        script.write_text(LINES.replace("STEPS", str(args.steps)))
        began, said = time.perf_counter(), []
        command = [
            sys.executable,
            "-c",
            f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path('lines.py')",
        ]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append({"s": round(time.perf_counter() - began, 2), "line": line.strip()})
                print(said[-1], flush=True)
        if process.returncode:
            sys.exit(process.returncode)
        (metrics,) = Path(folder, "runs").glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    bars = {"first_line_s": BAR_S, "rise": BAR_RISE}
    record(
        "api-cpu", {"lines": LINES, "steps": args.steps, "bars": bars, "accuracy": accuracy, "said": said}, args.results
    )
    sys.exit(said[0]["s"] > BAR_S or accuracy[-1] - accuracy[0] < BAR_RISE)


if __name__ == "__main__":
    main()
