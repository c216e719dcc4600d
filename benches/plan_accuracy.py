"""How far the plan is from what happens, on this machine: memory of programs, and seconds of steps.

    make plan-accuracy                     (CPU; wants a quiet machine)
    python -m benches.plan_accuracy --setting demo --setting "rows 4" --setting bfloat16

The demo's model does a few steps with each of the settings below, and its largest programs run alone in processes of
their own, whose memory the kernel counts. The plan of each is made by the compiler for CPU, as for a TPU. A CPU has no
published constants: products and copies are timed here, and what share of that roofline prefill, decoding and updates
reach comes from all *other* settings (leave one out), its range from how much those differ. Writes
benches/results/plan-accuracy-cpu.json and its part of docs/planner-measurements.md; exit status 1 where a bar is
missed.
"""

import ctypes
import dataclasses
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from benches.record import ROOT, arguments, record, train_command, write_section
from podium.accelerators import Accelerator
from podium.config.schema import Config
from podium.files import read_lines
from podium.hlo.cost import Peaks
from podium.models.presets import find_architecture
from podium.observe.run_dir import LENGTHS, METRICS
from podium.plan.calibration import Chip, Factor
from podium.plan.compiled.compile import compile_phases
from podium.plan.planner import make_jobs, make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import Plan, calibration_kind
from podium.settings import load_settings

STEPS = 5
WARM = 2
"""First steps that are left out: they compile."""
BASE = (
    f"steps={STEPS}",
    "prompts_per_step=4",
    "rollout.slots=32",
    "eval.at_start=false",
    "eval.at_end=false",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "algorithm.zero_variance=keep",
    "rollout.dtype=float32",
    "train.dtype=float32",
)
SETTINGS: Mapping[str, Sequence[str]] = {
    "demo": (),
    "bfloat16": ("rollout.dtype=bfloat16", "train.dtype=bfloat16"),
    "rows 1": ("train.rows_per_device=1",),
    "rows 4": ("train.rows_per_device=4",),
    "recomputing layers": ("train.remat=layer",),
    "keeping products": ("train.remat=products",),
    "long rows": ("train.row_tokens=512",),
    "a row each": ("train.packing=none", "train.row_tokens=84", "train.rows_per_device=8"),
    "packed without sharing": ("train.packing=sequences",),
    "2 prompts": ("prompts_per_step=2", "rollout.slots=16"),
    "12 prompts": ("prompts_per_step=12", "rollout.slots=64"),
    "8 slots": ("rollout.slots=8",),
    "a reference": ("algorithm.kl=k3", "algorithm.kl_coef=0.01"),
    "2 updates": ("algorithm.updates_per_batch=2",),
}
MEASURED = {
    "prefill": ("rollout/prefill_s",),
    "decode": ("rollout/decode_s", "time/train/sync_s"),
    "update": ("time/train/update_s", "time/train/score_s"),
}
"""What the trainer measures of each kind of phase."""
STEP = "time/train/step_s"
BARS = {"memory_mean": 0.03, "memory_worst": 0.08, "seconds_mean": 0.15, "inside": 0.9}
LIKELY = 0.9
"""Share of further settings that a range is to hold."""
SAME = 1e-3
"""Programs whose planned memory differs by less are one point, not two."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting: what was measured, and the least that the roofline asks for."""

    name: str
    plan: Plan
    """By the roofline itself, without any calibration."""
    seconds: Mapping[str, float]
    """Measured, by kind of phase."""
    step_s: float

    @property
    def calls(self) -> float:
        """Calls of all programs in a step."""
        return sum(phase.calls for phase in self.plan.phases)

    @property
    def host_s(self) -> float:
        """Per call, what no phase accounts for."""
        return max(0.0, self.step_s - sum(self.seconds.values())) / self.calls

    def share(self, kind: str) -> float:
        """The share of the roofline that phases of a kind reached."""
        least = (p.seconds.value for p in self.plan.phases if p.seconds and calibration_kind(p.name) == kind)
        return sum(least) / self.seconds[kind]


def config_of(settings: Sequence[str], *more: str) -> Config:
    """The demo's config, with changes."""
    return load_settings([ROOT / "configs" / "demo.yaml"], [*BASE, *settings, *more], {}).config


def this_cpu() -> Accelerator:
    """A machine to plan for: the one that this runs on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Accelerator(name="cpu-1", generation="cpu", devices=1, hosts=1, hbm_bytes=memory)


def measured_step(settings: Sequence[str], folder: Path) -> tuple[dict[str, float], float]:
    """Train in a process of its own: the middle one, by its seconds, of the steps that did not compile.

    Its lengths are kept in `folder`: of a step with few prompts, how many micro-batches they fill depends on them.
    """
    command = train_command(ROOT / "configs" / "demo.yaml", f"runs_dir={folder}", "name=run", *BASE, *settings)
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    shutil.rmtree(folder / "run" / "checkpoints")
    steps = sorted(list(read_lines(folder / "run" / METRICS))[WARM:], key=lambda step: step[STEP])
    middle = steps[len(steps) // 2]
    (lengths,) = (line for line in read_lines(folder / "run" / LENGTHS) if line["step"] == middle["step"])
    (folder / LENGTHS).write_text(json.dumps(lengths) + "\n")
    return {kind: sum(middle[name] for name in names) for kind, names in MEASURED.items()}, middle[STEP]


def constants() -> dict[str, float]:
    """Products and copies of the machine that this runs on, timed; copies go into memory that is there already."""
    import jax
    import jax.numpy as jnp

    def seconds(run: Any, operand: Any) -> float:
        times = []
        for _ in range(6):
            start = time.perf_counter()
            result = jax.block_until_ready(run(operand))
            times.append(time.perf_counter() - start)
            operand = result if operand.is_deleted() else operand  # donated
        return min(times)

    found = {}
    for name, dtype in (("flops_f32", jnp.float32), ("flops_bf16", jnp.bfloat16)):
        x = jnp.ones((2048, 2048), dtype)
        product = lambda a: jnp.einsum("ij,jk->ik", a, a, preferred_element_type=jnp.float32)  # noqa: E731
        found[name] = 2 * 2048**3 / seconds(jax.jit(product), x)
    big = jnp.ones(2**26, jnp.float32)
    return found | {"hbm_bandwidth": 2 * big.nbytes / seconds(jax.jit(lambda a: a + 1, donate_argnums=0), big)}


def chip(found: Mapping[str, float], calibration: Mapping[str, Factor]) -> Chip:
    """The CPU with these shares; it has no links."""
    none = Factor(value=1.0, low=1.0, high=1.0, source="")
    return Chip(
        peaks=Peaks(**found, link_bandwidth=1.0), links=1, calibration={"ici": none, "host": none, **calibration}
    )


def uncalibrated() -> dict[str, Factor]:
    """Shares of 1, and a host that takes no time."""
    one, zero = (Factor(value=value, low=value, high=value, source="") for value in (1.0, 0.0))
    return {**dict.fromkeys(MEASURED, one), "host_s": zero}


def fitted(points: Sequence[Point]) -> dict[str, Factor]:
    """What other settings say: the middle of their shares, and a range for one more of their kind."""
    found = {kind: _middle([point.share(kind) for point in points]) for kind in MEASURED}
    host = [point.host_s for point in points]
    return found | {"host_s": Factor(value=statistics.mean(host), low=min(host), high=max(host), source="")}


def _middle(shares: Sequence[float]) -> Factor:
    logs = [math.log(share) for share in shares]
    middle, spread = statistics.mean(logs), statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    wide = float(student.ppf((1 + LIKELY) / 2, len(logs) - 1)) * spread
    low, high = math.exp(middle - wide), math.exp(middle + wide)
    return Factor(value=math.exp(middle), low=low, high=high, source="")


def seconds_rows(points: Sequence[Point], found: Mapping[str, float], folder: Path) -> list[dict[str, Any]]:
    """Each step's seconds by the calibration of all other settings."""
    rows = []
    for point in points:
        others = [each for each in points if each is not point]
        plan = plan_of(point.name, folder, chip(found, fitted(others)))
        assert plan.step is not None
        value, low, high = plan.step.value, plan.step.low, plan.step.high
        rows.append(
            {
                "name": point.name,
                "shares": {kind: round(point.share(kind), 3) for kind in MEASURED},
                "planned_s": round(value, 3),
                "range_s": [round(low, 3), round(high, 3)],
                "measured_s": round(point.step_s, 3),
                "error": round(value / point.step_s - 1, 4),
                "inside": low <= point.step_s <= high,
            }
        )
    return rows


def plan_of(name: str, folder: Path, machine: Chip) -> Plan:
    """The plan of a setting for the lengths that its measured step had."""
    lengths = str(folder / name / LENGTHS)
    return make_plan(Planned.of(config_of(SETTINGS[name]), this_cpu()), lengths=lengths, chip=machine)


def memory_rows(name: str, known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Memory of the largest programs of a setting that other settings did not have alike, planned and measured."""
    config = config_of(SETTINGS[name])
    programs = dict.fromkeys(("update", f"decode:{config.rollout.slots}", "prefill:64"), 1.0)
    planned = compile_phases(make_jobs(Planned.of(config, this_cpu(), find_architecture(config.model)), programs))
    rows = []
    for program in programs:
        gib = planned[program].memory.peak / 2**30
        if any(row["program"] == program and abs(row["planned_gib"] / gib - 1) < SAME for row in known):
            continue
        command = [sys.executable, "-m", "benches.plan_accuracy", "--measure", program, "--setting", name]
        out = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
        measured, expected = json.loads(out.splitlines()[-1]), planned[program].memory.peak
        rows.append(
            {
                "name": name,
                "program": program,
                "planned_gib": round(expected / 2**30, 4),
                "measured_gib": round(measured / 2**30, 4),
                "error": round(expected / measured - 1, 4),
            }
        )
    return rows


def measure_program(name: str, program: str) -> int:
    """Bytes that this process took more while a program ran, arguments among them: the kernel's count of its pages.

    It has run once before: the libraries' code that it loads, and their threads' stacks, are no memory of the program.
    """
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    from podium.plan.compiled.phases import phase_programs
    from podium.sharding import make_mesh
    from podium.train.setup import run_spec

    config = config_of(SETTINGS[name])
    mesh = make_mesh("auto", jax.devices()[:1])
    phase = phase_programs(run_spec(config, find_architecture(config.model), mesh), mesh)[program]
    compiled = phase.lower().compile()

    def run() -> None:
        values = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), phase.arguments)
        jax.block_until_ready(values)
        Path("/proc/self/clear_refs").write_text("5")  # the most there ever was begins anew
        made = jax.block_until_ready(compiled(*values))
        for array in jax.tree.leaves((values, made)):
            if not array.is_deleted():
                array.delete()

    run()
    time.sleep(1)  # until threads have freed it
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def summary(memory: Sequence[Mapping[str, Any]], seconds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures that have bars."""
    errors = [abs(row["error"]) for row in memory]
    return {
        "memory_mean": round(statistics.mean(errors), 4),
        "memory_worst": round(max(errors), 4),
        "seconds_mean": round(statistics.mean(abs(row["error"]) for row in seconds), 4),
        "inside": round(statistics.mean(row["inside"] for row in seconds), 3),
    }


def tables(
    figures: Mapping[str, float], memory: Sequence[Mapping[str, Any]], seconds: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Both tables for docs/planner-measurements.md."""
    yield f"Memory: {figures['memory_mean']:.1%} off on average, {figures['memory_worst']:.1%} at worst. Seconds:"
    yield f"{figures['seconds_mean']:.1%} off on average, {figures['inside']:.0%} inside their range."
    yield from ("", "| settings | step planned, s | range | measured, s | error |", "|---|---|---|---|---|")
    for row in seconds:
        low, high = row["range_s"]
        name, planned, measured, error = (row[key] for key in ("name", "planned_s", "measured_s", "error"))
        yield f"| {name} | {planned:.2f} | {low:.2f} to {high:.2f} | {measured:.2f} | {error:+.1%} |"
    yield from ("", "| settings | program | planned, GiB | measured, GiB | error |", "|---|---|---|---|---|")
    for row in memory:
        name, program, planned, measured = (row[key] for key in ("name", "program", "planned_gib", "measured_gib"))
        yield f"| {name} | {program} | {planned:.3f} | {measured:.3f} | {row['error']:+.1%} |"


def main() -> None:
    """Prints and writes both tables; exit status 1 where a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--setting", choices=tuple(SETTINGS), action="append", help="only these")
    parser.add_argument("--measure", metavar="PROGRAM", help="print the bytes that one program of --setting takes")
    args = parser.parse_args()
    names = args.setting or list(SETTINGS)
    if args.measure:
        print(measure_program(names[0], args.measure))
        return
    found = constants()
    memory: list[dict[str, Any]] = []
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in names:
            (folder / name).mkdir()
            seconds, step_s = measured_step(SETTINGS[name], folder / name)
            plan = plan_of(name, folder, chip(found, uncalibrated()))
            points.append(Point(name, plan, seconds, step_s))
            own = memory_rows(name, memory)
            memory += own
            shares = {kind: round(points[-1].share(kind), 3) for kind in MEASURED}
            print(f"{name}: step {step_s:.2f} s, shares of the roofline {shares}", flush=True)
            for row in own:
                print(f"  {row['program']}: {row['planned_gib']} GiB planned, {row['measured_gib']}", flush=True)
        rows = seconds_rows(points, found, folder)
    for row in rows:
        print(
            f"{row['name']}: {row['planned_s']} s planned {row['range_s']}, {row['measured_s']} s  {row['error']:+.1%}"
        )
    figures = summary(memory, rows)
    print(figures)
    settings = {name: list(SETTINGS[name]) for name in names}
    details = {"bars": BARS, "figures": figures, "constants": found, "seconds": rows, "memory": memory}
    if not args.setting:
        write_section(
            ROOT / "docs" / "planner-measurements.md",
            "plan-accuracy",
            list(tables(figures, memory, rows)),
            args.results,
        )
    record("plan-accuracy-cpu", {"base": list(BASE), "settings": settings, **details}, args.results)
    below = all(figures[name] <= bar for name, bar in BARS.items() if name != "inside")
    sys.exit(not (below and figures["inside"] >= BARS["inside"]))


if __name__ == "__main__":
    main()
