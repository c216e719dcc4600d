"""A small model on this machine: a decode step and an update, timed by the benches and compared with their plan."""

from collections.abc import Iterator

from podium.accelerators import Accelerator, this_cpu
from podium.config.schema import Config
from podium.doctor.benchmarks import update
from podium.doctor.benchmarks.rollout import make_engine, measure, run_lengths
from podium.doctor.benchmarks.timing import cpu_peaks
from podium.doctor.diagnosis import Row
from podium.doctor.machine_subject import Sizes, Subject
from podium.plan.calibration import Chip, uncalibrated
from podium.plan.planner import plan_run
from podium.plan.request.phase_sizes import sizes_on
from podium.plan.result import Plan, Seconds, total
from podium.run.run_spec import RunSpec
from podium.sharding import make_mesh
from podium.train.setup import run_spec

GROUP = 4
MOST_SECONDS = 2.0
"""Ratio to the upper end of the plan's range from which a duration counts as a problem."""
UPDATES = 2
"""Updates to time after one that compiles; the fastest counts."""
FIRST = "assumed: the least that the measured peaks allow; podium calibrate RUN lets plans say more"


def small_model(subject: Subject) -> Iterator[Row]:
    """Time decoding and an update of a model of SmolLM2's shape with random weights, and compare with its plan."""
    sizes, mesh = subject.sizes, make_mesh("auto")
    spec, lengths = run_spec(model_config(sizes, mesh.size), sizes.decoder, mesh), f"fixed:{sizes.new_tokens}"
    drawn = run_lengths(lengths, spec)
    plan = _plan(subject, spec, lengths)
    engine = make_engine(spec, mesh)
    decoded = measure(spec, engine, drawn)
    del engine
    yield _row("decode step", decoded.rollout["ms_per_step"] / 1e3, plan and decode_s(plan), subject)
    found = update.measure(spec, mesh, drawn, UPDATES)
    assert isinstance(found["wall_s"], float)
    yield _row("update", found["wall_s"], plan and plan.phase("update").seconds, subject)


def model_config(sizes: Sizes, devices: int) -> Config:
    """The config of a step whose rollout fills the slots once."""
    prompts = -(-sizes.slots * devices // GROUP)
    return Config.model_validate(
        {
            "model": "demo",
            "tasks": [{"name": "arithmetic"}],
            "prompts_per_step": prompts,
            "group_size": GROUP,
            "rollout": {
                "max_prompt_tokens": min(256, sizes.row_tokens - sizes.new_tokens),
                "max_new_tokens": sizes.new_tokens,
                "slots": prompts * GROUP,
                "prefill_rows": prompts,
            },
            "train": {"row_tokens": sizes.row_tokens, "rows_per_device": sizes.rows_per_device},
        }
    )


def _plan(subject: Subject, spec: RunSpec, lengths: str) -> Plan | None:
    """The plan by the closed form; None for a device that plans do not know."""
    machine: Accelerator | None = subject.accelerator
    chip: Chip | None = subject.chip
    if subject.platform == "cpu":
        machine = this_cpu(spec.machine.devices)
        chip = chip or uncalibrated(cpu_peaks())
    if machine is None or chip is None:
        return None
    return plan_run(sizes_on(spec, machine), lengths=lengths, chip=chip)


def decode_s(plan: Plan) -> Seconds | None:
    """Planned seconds of a decode step, including the host's share."""
    phase, steps = plan.phase("decode"), plan.workload.decode_steps
    if phase.seconds is None or plan.host is None or not steps:
        return None
    calls = sum(each.calls for each in plan.phases)
    return total([phase.seconds, plan.host * (phase.calls / calls)]) * (1 / steps)


def _row(name: str, measured: float, planned: Seconds | None, subject: Subject) -> Row:
    if planned is None:
        text = "podium plan has no target for this device"
        return Row(name=name, unit="ms", measured=1e3 * measured, text=text)
    known = subject.chip is not None
    problem = ""
    if known and measured > MOST_SECONDS * planned.high:
        problem = f"{measured / planned.high:.1f} times the plan's upper end; look at what is slow above"
    text = f"planned {1e3 * planned.low:.3g} to {1e3 * planned.high:.3g}" if known else FIRST
    return Row(name=name, unit="ms", measured=1e3 * measured, assumed=1e3 * planned.value, text=text, problem=problem)
