"""The demo by TRL's GRPOTrainer and by Podium, by turns on the same CPU: CPU seconds of a step, memory, and reward.

    python -m benches.trl_cpu                (half an hour of CPU time; needs `pip install torch trl`)

Both train the same SmolLM2-135M on the same sums: 8 prompts a step, 8 completions each of at most 20 tokens, AdamW with
the same rate and moments, no KL. Podium leaves out groups whose rewards are all equal (`zero_variance: drop`), TRL
updates with them too. Each trains in float32, then in bfloat16 (TRL: autocast; Podium: rollout and update). The first
step of each, which loads and warms up, is left out of the means of steps and not of the totals. Podium trains twice:
once without a cache of compiled programs, which gives its totals, and once with what that run kept, which gives its
steps, in which nothing is compiled then. Prints a table and writes benches/results/trl-cpu.json; exit status 1 where
TRL's step takes less than BAR times Podium's CPU seconds, or Podium more than BAR_MEMORY times TRL's memory.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benches.demo import CONFIG
from benches.record import ROOT, arguments, record, train_command
from podium.models.files.hf import save_model
from podium.settings import load_settings
from podium.train.setup import load_parts, make_model

FORMATS = ("float32", "bfloat16")
BAR = {"float32": 3.3, "bfloat16": 4.3}
BAR_MEMORY = 0.35
QUIET = ("eval.at_start=false", "eval.at_end=false", "eval.every_steps=0", "checkpoint.every_steps=0")


class Run(NamedTuple):
    """What a training process did, from its start to its end."""

    cpu_s: float
    wall_s: float
    peak_gib: float
    """Of the host, or of the GPU as the process's own allocator counts it."""
    step_cpu_s: list[float]
    step_wall_s: list[float]
    rewards: list[float]

    @property
    def settled_cpu_s(self) -> float:
        """Mean CPU seconds of a step but for the first."""
        return statistics.mean(self.step_cpu_s[1:])


class Used(NamedTuple):
    """What a process used."""

    wall_s: float
    cpu_s: float
    peak_gib: float


def used(command: Sequence[str], log: Path) -> Used:
    """Run a command with its output in `log`. Exits with the log's end where it fails."""
    start = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-4000:]}")
    return Used(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def write_model(folder: Path) -> None:
    """The demo's model where transformers finds it, in `folder`/model."""
    model = make_model(load_settings([CONFIG], [], {}).config)
    save_model(load_parts(model, None)[0], model.decoder, model.tokenizer, folder / "model", dtype="float32")


def podium(folder: Path, number_format: str, steps: int, seed: int, *, gpu: bool = False) -> Run:
    """`podium train` of the demo; `gpu` says whose memory counts."""
    name = f"podium-{number_format}"
    formats = (f"train.dtype={number_format}", f"rollout.dtype={number_format}")
    command = train_command(
        CONFIG, f"name={name}", f"runs_dir={folder}", f"seed={seed}", f"steps={steps}", *QUIET, *formats
    )
    spent = used(command, folder / f"{name}.log")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    if gpu:
        spent = spent._replace(peak_gib=max(line["memory/train/peak_bytes_in_use_max_gib"] for line in lines))
    return Run(
        **spent._asdict(),
        step_cpu_s=[line["time/train/step_cpu_s"] for line in lines],
        step_wall_s=[line["time/train/step_s"] for line in lines],
        rewards=[line["train-reward/total/mean"] for line in lines],
    )


def trl(folder: Path, number_format: str, steps: int, seed: int, *, sampler: str | None = None) -> Run:
    """TRL's trainer on the same: on the CPU, or with this sampler (vllm, transformers) on a GPU."""
    log = folder / f"trl-{number_format}.log"
    child = [
        sys.executable,
        "-m",
        "benches.children.trl_run",
        str(folder / "model"),
        number_format,
        str(steps),
        str(seed),
        *([sampler] if sampler else []),
    ]
    spent = used(child, log)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"step"')]
    if sampler:
        spent = spent._replace(peak_gib=max(line["gpu_gib"] for line in lines))
    return Run(
        **spent._asdict(),
        step_cpu_s=[line["cpu_s"] for line in lines],
        step_wall_s=[line["wall_s"] for line in lines],
        rewards=[line["reward"] for line in lines],
    )


def rounded(run: Run) -> dict[str, float | list[float]]:
    """A run for the results file."""
    return {
        name: [round(each, 4) for each in value] if isinstance(value, list) else round(value, 2)
        for name, value in (*run._asdict().items(), ("settled_step_cpu_s", run.settled_cpu_s))
    }


def main() -> None:
    """Prints and writes the table; exit status 1 where a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    missed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
        write_model(folder)
        for name in ("first", "again"):
            (folder / name).mkdir()
        for number_format in FORMATS:
            first = podium(folder / "first", number_format, args.steps, args.seed)
            theirs = trl(folder, number_format, args.steps, args.seed)
            again = podium(folder / "again", number_format, args.steps, args.seed)
            ours = first._replace(step_cpu_s=again.step_cpu_s, step_wall_s=again.step_wall_s)
            ratio, memory = theirs.settled_cpu_s / ours.settled_cpu_s, ours.peak_gib / theirs.peak_gib
            meets_bar = ratio >= BAR[number_format] and memory <= BAR_MEMORY
            missed |= not meets_bar
            print(
                f"{number_format}: a step {ours.settled_cpu_s:.1f} CPU s, TRL {theirs.settled_cpu_s:.1f}: {ratio:.2f}"
                f" times; memory {ours.peak_gib:.1f} GiB, TRL {theirs.peak_gib:.1f}; reward {ours.rewards[-1]:.2f}, TRL"
                f" {theirs.rewards[-1]:.2f}  {'ok' if meets_bar else 'MISSED'}",
                flush=True,
            )
            rows[number_format] = {
                "podium": rounded(ours),
                "trl": rounded(theirs),
                "step_cpu_ratio": round(ratio, 3),
                "memory_ratio": round(memory, 3),
                "meets_bar": meets_bar,
            }
    bars = {"step_cpu_ratio": BAR, "memory_ratio": BAR_MEMORY}
    packages = ("torch", "trl", "accelerate")
    record("trl-cpu", {"steps": args.steps, "bars": bars, "formats": rows}, args.results, packages=packages)
    sys.exit(missed)


if __name__ == "__main__":
    main()
