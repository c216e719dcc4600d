"""Plans of models from 0.5B to 8B on GPUs that are not there: every program compiled, and how long that took.

    python -m benches.gpu_plans            (half an hour on two cores; needs pip install 'podium-rl[plan-gpu]')

Each plan starts without a cache, as the first of a user does; what was planned before is in the folder of --rows, so
that an interrupted bench goes on. Beside the compiler's memory stands the closed form's of the same phase. Writes
benches/results/gpu-plans-planned.json and its part of docs/planner-measurements.md.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.record import ROOT, arguments, record, write_section
from podium.accelerators import GIB, find_accelerator
from podium.plan import plan
from podium.plan.request.candidate import Case
from podium.plan.request.plan_subject import Subject
from podium.plan.result import Plan
from podium.plan.search.study import Study

MODELS = (
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen3-8B",
)
MACHINES = ("h100-1", "h100-8", "h200-8", "a100-80-8", "l4-1")
PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


def row(model: str, machine: str) -> dict[str, Any]:
    """A plan made from nothing, and what it says."""
    estimated = Study(Subject(model=model)).plan(Case(find_accelerator(machine)), closed_form=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        start, used = time.perf_counter(), _cpu_seconds()
        found = plan(model, machine)
        took, cpu = time.perf_counter() - start, _cpu_seconds() - used
    assert found.step is not None
    return {
        "model": model,
        "machine": machine,
        "wall_s": round(took, 1),
        "cpu_s": round(cpu, 1),
        "compiled": sum(phase.compiled for phase in found.phases),
        "verdict": found.verdict,
        "worst_phase": found.worst.name,
        "gib": round(found.worst.bytes / GIB, 2),
        "usable_gib": round(found.hbm_bytes / GIB, 2),
        "closed_form_gib": round(estimated.worst.bytes / GIB, 2),
        "step_s": [round(each, 2) for each in (found.step.value, found.step.low, found.step.high)],
        "phases": [_phase(found, estimated, phase.name) for phase in found.phases if phase.compiled],
    }


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def _phase(found: Plan, estimated: Plan, name: str) -> dict[str, Any]:
    """One phase: memory of compiler and closed form, seconds, and operations against the closed form's."""
    phase, form = found.phase(name), estimated.find_phase(name)
    return {
        "name": name,
        "gib": round(phase.bytes / GIB, 3),
        "closed_form_gib": round(form.bytes / GIB, 3) if form else None,
        "seconds": round(phase.seconds.value, 4) if phase.seconds else None,
        "bound_by": phase.bound_by,
        "operations_of_closed_form": round(phase.flops / phase.closed_form_flops, 3)
        if phase.closed_form_flops
        else None,
        "compile_s": round(phase.compile_s or 0.0, 1),
    }


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table for docs/planner-measurements.md."""
    slowest, busiest = (max(each[name] for each in rows) for name in ("wall_s", "cpu_s"))
    yield (
        f"{len(rows)} plans without a cache, at most {busiest:.0f} s of CPU time each, the slowest in {slowest:.0f} s"
        " on two cores that others used too."
    )
    yield ""
    yield "| model | GPUs | memory | closed form, GiB | step, s | all compiled in, s | CPU, s |"
    yield "|---|---|---|---|---|---|---|"
    for each in rows:
        value, low, high = each["step_s"]
        verdict = each["verdict"].replace("_", " ")
        memory = f"{verdict}: {each['worst_phase']} {each['gib']:.1f} of {each['usable_gib']:.1f} GiB"
        yield (
            f"| {each['model'].partition('/')[2]} | {each['machine']} | {memory} | {each['closed_form_gib']:.1f} |"
            f" {value:.1f} ({low:.1f} to {high:.1f}) | {each['wall_s']:.0f} | {each['cpu_s']:.0f} |"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
    parser.add_argument("--machines", nargs="+", default=MACHINES, metavar="NAME")
    parser.add_argument("--rows", type=Path, default=ROOT / "build" / "gpu-plans", metavar="FOLDER")
    args = parser.parse_args()
    args.rows.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in args.models:
        for machine in args.machines:
            path = args.rows / f"{model.replace('/', '-')}-{machine}.json"
            if not path.exists():
                path.write_text(json.dumps(row(model, machine)))
            rows.append(json.loads(path.read_text()))
            print(rows[-1], flush=True)
    record("gpu-plans-planned", {"rows": rows}, args.results, packages=PACKAGES)
    write_section(ROOT / "docs" / "planner-measurements.md", "gpu-plans", list(lines(rows)), args.results)


if __name__ == "__main__":
    main()
