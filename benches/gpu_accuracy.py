"""What `podium plan` says of one GPU beside what that GPU shows: memory of six programs, seconds of three runs' steps.

    benches/gpu.sh                         (this and the rest; on a machine with an NVIDIA GPU, about ten minutes)
    python -m benches.gpu_accuracy         (needs pip install 'podium-rl[cuda,demo]')

Each program runs in a process of its own on arrays of ones: its most bytes by jax's `memory_stats`, and what nvidia-smi
counts for the process beyond them, which is CUDA's context. Steps are those of training runs of the demo's model, with
the lengths that they had; the plan's shares of the roofline are those of `podium/chips`, which have not seen the
GPU. Prints both tables and writes benches/results/gpu-accuracy-GPU.json. Exit status 1 where a bar is missed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.plan_accuracy import MEASURED, config_of, measured_step
from benches.record import ROOT, arguments, record
from podium.accelerators import GIB, Accelerator, recognise
from podium.models.presets import find_architecture
from podium.observe.run_dir import LENGTHS
from podium.plan.compiled.compile import compile_phases
from podium.plan.planner import make_jobs, make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import calibration_kind

BFLOAT16 = ("rollout.dtype=bfloat16", "train.dtype=bfloat16")
SIZES: Mapping[str, Sequence[str]] = {
    "small": BFLOAT16,
    "middle": (*BFLOAT16, "prompts_per_step=16", "group_size=16", "rollout.slots=256", "train.rows_per_device=8"),
    "large": (
        *BFLOAT16,
        "prompts_per_step=64",
        "group_size=16",
        "rollout.slots=1024",
        "rollout.prefill_rows=64",
        "train.row_tokens=1024",
        "train.rows_per_device=16",
    ),
}
PROGRAMS = (
    ("update", "small"),
    ("update", "large"),
    ("decode", "small"),
    ("decode", "large"),
    ("prefill:64", "large"),
    ("sync", "large"),
)
BAR = 0.05
"""Of memory; seconds are to be inside their range."""


def this_gpu() -> Accelerator:
    """One GPU of this machine, by the name that nvidia-smi gives it; jax is not started."""
    name = _smi("name").splitlines()[0]
    if (found := recognise(name, 1)) is None:
        raise ValueError(f"{name}: podium plan has no target for this GPU; add one to podium/plan/gpus")
    return found


def measure_program(program: str, size: str) -> dict[str, int]:
    """Bytes of a program's arrays at their most, by jax, and of this process, which has nothing else, by nvidia-smi."""
    import jax
    import jax.numpy as jnp

    from podium.plan.compiled.phases import phase_programs
    from podium.sharding import make_mesh
    from podium.train.setup import run_spec

    config = config_of(SIZES[size])
    mesh = make_mesh("auto", jax.devices()[:1])
    phase = phase_programs(run_spec(config, find_architecture(config.model), mesh), mesh)[program]
    compiled = phase.lower().compile()
    values = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), phase.arguments)
    jax.block_until_ready(compiled(*values))
    stats = jax.devices()[0].memory_stats() or {}
    used = {int(pid): int(mib) * 2**20 for pid, mib in (line.split(",") for line in _smi_apps())}
    return {
        "peak_bytes": stats["peak_bytes_in_use"],
        "pool_bytes": stats.get("pool_bytes", stats["bytes_in_use"]),
        "process_bytes": used.get(os.getpid(), 0),
    }


def memory_rows(gpu: Accelerator) -> list[dict[str, Any]]:
    """Each program's memory, planned and measured."""
    rows = []
    for name, size in PROGRAMS:
        config = config_of(SIZES[size])
        program = f"decode:{config.rollout.slots}" if name == "decode" else name
        jobs = make_jobs(Planned.of(config, gpu, find_architecture(config.model)), {program: 1.0})
        planned = compile_phases(jobs)[program].memory.peak
        command = [sys.executable, "-m", "benches.gpu_accuracy", "--measure", program, "--size", size]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        out = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
        measured = json.loads(out.splitlines()[-1])
        peak = measured["peak_bytes"]
        rows.append(
            {
                "program": program,
                "size": size,
                "planned_gib": round(planned / GIB, 4),
                "measured_gib": round(peak / GIB, 4),
                "context_gib": round((measured["process_bytes"] - measured["pool_bytes"]) / GIB, 4),
                "error": round(planned / peak - 1, 4),
            }
        )
        print(rows[-1], flush=True)
    return rows


def seconds_rows(gpu: Accelerator) -> list[dict[str, Any]]:
    """The middle step of a run of each size, planned for the lengths that it had, by kind of phase."""
    rows = []
    for name, settings in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            measured, step_s = measured_step(settings, Path(folder))
            plan = make_plan(Planned.of(config_of(settings), gpu), lengths=str(Path(folder) / LENGTHS))
        timed = [(calibration_kind(phase.name), phase.seconds) for phase in plan.phases if phase.seconds]
        planned = {kind: [seconds for own, seconds in timed if own == kind] for kind in MEASURED}
        assert plan.step is not None
        for kind, times, seconds in (
            *((kind, planned[kind], measured[kind]) for kind in ("decode", "update")),
            ("step", [plan.step], step_s),
        ):
            value, low, high = (sum(getattr(each, name) for each in times) for name in ("value", "low", "high"))
            rows.append(
                {
                    "size": name,
                    "what": kind,
                    "planned_s": round(value, 4),
                    "range_s": [round(low, 4), round(high, 4)],
                    "measured_s": round(seconds, 4),
                    "inside": low <= seconds <= high,
                }
            )
            print(rows[-1], flush=True)
    return rows


def _smi(what: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _smi_apps() -> list[str]:
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> int:
    """Prints and writes both tables."""
    parser = arguments(__doc__)
    parser.add_argument("--measure", metavar="PROGRAM", help="print the bytes that one program of --size takes")
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="of --measure")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure_program(args.measure, args.size)))
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    gpu = this_gpu()
    memory, seconds = memory_rows(gpu), seconds_rows(gpu)
    figures = {
        "memory_worst": max(abs(row["error"]) for row in memory),
        "context_gib": max(row["context_gib"] for row in memory),
        "outside": [f"{row['what']} of {row['size']}" for row in seconds if not row["inside"]],
    }
    record(f"gpu-accuracy-{gpu.generation}", {"figures": figures, "memory": memory, "seconds": seconds}, args.results)
    print(figures)
    return int(figures["memory_worst"] > BAR or bool(figures["outside"]))


if __name__ == "__main__":
    sys.exit(main())
