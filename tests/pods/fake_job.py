"""`podium train` for tests of what is around it: steps that only count, checkpoints that only remember the count.

The config's `runs_dir` contains `plan.json`, which says how long a step takes and, with `hold`, that the last step
waits for the file `released`; files `fail-WORKER-STEP` make a worker fail. The "metrics" are a chain of digests, so
that a run that continued from a checkpoint can be told from one that did not. What it prints and fails with is full of
the secrets that it finds, as a careless library's would be.
"""

import base64
import hashlib
import json
import os
import signal
import sys
import time
import urllib.parse
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from podium.files import write_atomically
from podium.job.job_records import ProgressReport


def careless(value: str) -> str:
    """A secret in six encodings, over two lines, and coloured in its middle."""
    data, middle = value.encode(), len(value) // 2
    basic = base64.b64encode(b"user:" + data).decode()
    return (
        f"plain {value}\nbase64 {base64.b64encode(data).decode()}\nfor URLs {base64.urlsafe_b64encode(data).decode()}\n"
        f"Authorization: Basic {basic}\nhex {data.hex()}\nhttps://u:{urllib.parse.quote(value, safe='')}@host\n"
        f"two lines {value[:middle]}\n{value[middle:]}\n\033[31m{value[:9]}\033[1;31m{value[9:]}\033[0m\n"
    )


def spill() -> str:
    """All secrets of this process's environment, carelessly, also written to stdout in small pieces."""
    names = [name for name in os.environ if name.endswith(("TOKEN", "KEY"))]
    text = "".join(f"{name}: {careless(os.environ[name])}" for name in names)
    for start in range(0, len(text), 7):
        sys.stdout.write(text[start : start + 7])
        sys.stdout.flush()
    return text


def main() -> int:
    """Train nothing, as told."""
    text = Path(sys.argv[2]).read_text()
    folder = Path(next(line for line in text.splitlines() if line.startswith("runs_dir: ")).partition(" ")[2])
    worker, job = int(os.environ["PODRUN_WORKER"]), Path(os.environ["PODRUN_JOB_DIR"])
    plan = json.loads((folder / "plan.json").read_text())
    print(
        f"worker {worker} began; its token is {os.environ.get('HF_TOKEN')}, its key {os.environ.get('WANDB_API_KEY')}"
    )
    sys.stdout.flush()
    spilled = spill()
    stopping = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    report = ProgressReport(job, worker=worker)
    saved = folder / "checkpoint.json"
    step, chain = json.loads(saved.read_text()) if saved.exists() else (0, "")
    report.update(steps=plan["steps"], run_dir=str(folder), step=step)
    report.write_progress(time.time())
    while step < plan["steps"]:
        time.sleep(plan.get("step_s", 0.1))
        while step == plan["steps"] - 1 and plan.get("hold") and not stopping and not (folder / "released").exists():
            time.sleep(0.02)
        step += 1
        chain = hashlib.sha256(f"{chain}{step}".encode()).hexdigest()
        report.update(step=step, metrics={"train-reward/total/mean": step / 10})
        report.write_progress(time.time())
        if worker == 0:
            with (folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step, "chain": chain}) + "\n")
            if step % plan.get("save_every", 2) == 0 or stopping:
                write_atomically(saved, json.dumps((step, chain)))
        until = time.time() + plan.get("save_s", 0.0)
        while stopping and time.time() < until:  # a slow save, which says that it writes
            time.sleep(0.2)
            report.write_progress(time.time())
        print(f"step {step} of {plan['steps']}", flush=True)
        if stopping:
            report.end("stopped", f"stopped after step {step}", 143)
            return 143
        failing = folder / f"fail-{worker}-{step}"
        if failing.exists():
            status = int(failing.read_text())
            failing.unlink()
            report.end("guard" if status == 78 else "exception", f"told to fail at step {step}: {spilled}", status)
            return status
    report.end("done", "done", 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
