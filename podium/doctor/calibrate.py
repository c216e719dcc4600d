"""Learns from finished runs which share of the roofline programs reach on a machine, for `podium calibrate`.

For each run, the step with the median time among its settled steps is planned with its actual lengths, by the compiler
or the closed form. The run's share is the roofline's time divided by the measured time. The middle of all runs' shares,
with a range for a further run, goes into the user's file for this kind of machine.
"""

import dataclasses
import datetime
import math
import re
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from scipy.stats import t as student

from podium.accelerators import GIB, Accelerator, recognise, this_cpu
from podium.config.errors import UsageError
from podium.config.schema import Config
from podium.doctor.benchmarks.timing import cpu_peaks
from podium.files import read_lines, to_json
from podium.hosts.platform import machine_text
from podium.observe.records import LengthsRecord, MetricsRecord, read_metrics
from podium.observe.run_dir import CONFIG, LENGTHS, METRICS, read_config, read_machine
from podium.plan.calibration import Chip, Constant, Factor, UserFile, find_chip, uncalibrated
from podium.plan.planner import make_plan
from podium.plan.report.deviation import COMPILED, settled_step
from podium.plan.report.deviation_causes import MEASURED, PEAK, STEP
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import Plan, calibration_kind

KINDS: Mapping[str, tuple[str, ...]] = {
    "prefill": ("rollout/prefill_s",),
    "decode": ("rollout/decode_s", MEASURED["sync"]),
    "update": (MEASURED["update"], MEASURED["score"], MEASURED["reward"]),
}
"""The metrics that measure each kind of phase."""
LIKELY = 0.9
"""Share of further runs that should lie within a range."""
ASSUMED_RANGE = 1.5
"""Relative range, up and down, assumed for a share that comes from a single run."""
LEAST_WORK = 0.2
"""A phase's measurement is used only if more than this share of its seconds is its own work, rather than transfers."""
MACHINE_TEXT = re.compile(r"(\d+) x (.+?)(?: \(.*\))?(?: on \d+ hosts)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A finished run, represented by the step with the median time among those that compiled nothing."""

    name: str
    machine: str  # as `machine_text` describes it
    config: Config
    lengths: LengthsRecord
    seconds: Mapping[str, float]  # measured, by kind of phase
    step_s: float
    steps: int  # of which this one has the median time
    peak_bytes: float | None  # of the fullest device, over all steps; None where devices do not report it


def read_sample(folder: Path) -> Sample:
    """Read a run. Raises UsageError if the folder does not contain a run, or the run has no settled step."""
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} has no {CONFIG}, so it is not a run's folder; give one, such as runs/demo")
    config, machine = read_config(folder), read_machine(folder)
    if machine is None:
        raise UsageError(f"{folder} does not say which machine it ran on; give a run that podium train has begun")
    known = MACHINE_TEXT.fullmatch(machine)
    first = settled_step(known[2] if known else "")
    lines = [line for line in read_metrics(folder / METRICS) if STEP in line][first - 1 :]
    settled = sorted((line for line in lines if not line.get(COMPILED)), key=lambda line: line[STEP])
    if not settled:
        raise UsageError(
            f"{folder} has no step from step {first} on in which nothing was compiled; train it a little longer"
        )
    middle = settled[len(settled) // 2]
    records = cast(list[LengthsRecord], read_lines(folder / LENGTHS))
    lengths = next((each for each in records if each["step"] == middle["step"]), None)
    if lengths is None:
        raise UsageError(f"{folder / LENGTHS} has no line of step {middle['step']:.0f}, which is needed to plan it")
    peaks = [line[PEAK] * GIB for line in lines if line.get(PEAK)]
    return Sample(
        name=folder.name,
        machine=machine,
        config=config,
        lengths=lengths,
        seconds={kind: _sum(middle, names) for kind, names in KINDS.items()},
        step_s=middle[STEP],
        steps=len(settled),
        peak_bytes=max(peaks, default=None),
    )


def _sum(line: MetricsRecord, names: Iterable[str]) -> float:
    return sum(line[name] for name in names if math.isfinite(line.get(name, math.nan)))


def machine_of_runs(samples: Sequence[Sample]) -> Accelerator:
    """The machine that all runs ran on.

    Raises:
        UsageError: the runs used different machines, a machine without plans, or a different CPU from this one.
    """
    texts = sorted({sample.machine for sample in samples})
    found = MACHINE_TEXT.fullmatch(texts[0])
    if len(texts) > 1 or found is None:
        raise UsageError(f"the runs ran on different machines: {'; '.join(texts)}; name only the runs of one machine")
    devices, kind = int(found[1]), found[2]
    if kind == "cpu":
        if texts[0] != (here := machine_text()):
            raise UsageError(
                f"the runs ran on {texts[0]}, and this is {here}: a CPU's speed is measured too, so calibrate there"
            )
        return this_cpu(devices)
    if (machine := recognise(kind, devices)) is None:
        raise UsageError(f"podium plan does not know the machine {texts[0]}, so it cannot be calibrated")
    return machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reached:
    """The results of one run: the shares of the roofline that it reached."""

    sample: Sample
    shares: Mapping[str, float]
    """Share of the roofline by kind of phase, for the kinds of phases with enough work to tell."""
    host_s: float
    """Seconds per call that no phase accounts for."""
    memory: float | None
    """Measured over planned memory."""


WRITER = "podium calibrate"
"""The beginning of `about` in the files that the command writes."""


class Planner:
    """Plans samples with the lengths that their steps had."""

    def __init__(self, machine: Accelerator, folder: Path, *, fast: bool) -> None:
        """Keep lengths in `folder`; `fast`: by the closed form instead of the compiler."""
        self.machine = machine
        self.folder = folder
        self.fast = fast

    def plan(self, sample: Sample, chip: Chip) -> Plan:
        """The plan of a sample with the shares of `chip`."""
        path = self.folder / f"{sample.name}-{id(sample)}.jsonl"
        path.write_text(to_json(sample.lengths) + "\n", encoding="utf-8")
        return make_plan(
            Planned.of(sample.config, self.machine),
            by="closed_form" if self.fast else "compiler",
            lengths=str(path),
            chip=chip,
        )

    def step_s(self, sample: Sample, chip: Chip) -> float:
        """Planned seconds of a sample's step."""
        step = self.plan(sample, chip).step
        assert step is not None  # the chip is known
        return step.value

    def reached(self, sample: Sample, base: Chip) -> Reached:
        """The shares with which a sample's plan would take the measured time; transfers and launches stay as in `base`.

        A phase takes its work divided by a share, plus a constant; two plans with different shares determine both.
        """
        whole, half = (self.plan(sample, _with_work(base, share)) for share in (1.0, 0.5))
        shares = {}
        for kind, measured in sample.seconds.items():
            work = _seconds(half, kind) - _seconds(whole, kind)
            rest = _seconds(whole, kind) - work
            if work > 0 and measured - rest > LEAST_WORK * measured:
                shares[kind] = work / (measured - rest)
        calls = sum(phase.calls for phase in whole.phases)
        others = max(0.0, sample.step_s - sum(sample.seconds.values()))
        memory = sample.peak_bytes and sample.peak_bytes / whole.worst.bytes
        return Reached(sample=sample, shares=shares, host_s=others / calls if calls else 0.0, memory=memory)


def _with_work(chip: Chip, share: float) -> Chip:
    exact = Factor(value=share, low=share, high=share, source="")
    return dataclasses.replace(chip, calibration=chip.calibration | dict.fromkeys(KINDS, exact))


def _seconds(plan: Plan, kind: str) -> float:
    return sum(p.seconds.value for p in plan.phases if p.seconds and calibration_kind(p.name) == kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepError:
    """Seconds of a run's step: measured, planned before calibration, and planned with the calibration from the other
    runs.
    """

    run: str
    measured_s: float
    before_s: float
    after_s: float
    steps: int

    @property
    def before(self) -> float:
        """Error of the plan before calibration, as a share of the measurement."""
        return self.before_s / self.measured_s - 1

    @property
    def after(self) -> float:
        """Error of the plan after calibration, as a share of the measurement."""
        return self.after_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of a calibration: the contents of the user's file, and the measurements that it is based on."""

    machine: Accelerator
    file: UserFile
    before: Chip
    errors: tuple[StepError, ...]
    memory: tuple[float, ...]
    """Measured over planned memory of each run whose devices report it."""
    apart: bool
    """Whether each error is measured with a calibration from the other runs; otherwise the run itself was included."""


def learn(samples: Sequence[Sample], *, fast: bool) -> Calibration:
    """Calibrate the machine of some runs.

    Raises:
        UsageError: the runs are of different machines, or of one that plans do not know.
    """
    machine = machine_of_runs(samples)
    on_cpu = machine.platform == "cpu"
    base = uncalibrated(cpu_peaks()) if on_cpu else find_chip(machine.generation)
    assert base is not None  # the machine is in the table
    constants = _constants(base) if on_cpu else {}
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(machine, Path(folder), fast=fast)
        reached = [planner.reached(sample, base) for sample in samples]
        apart = len(reached) > 2
        errors = []
        for own in reached:
            others = [each for each in reached if each is not own] if apart else reached
            step = StepError(
                run=own.sample.name,
                measured_s=own.sample.step_s,
                before_s=planner.step_s(own.sample, base),
                after_s=planner.step_s(own.sample, _applied(base, shares_of(others, base))),
                steps=own.sample.steps,
            )
            errors.append(step)
    memory = tuple(each.memory for each in reached if each.memory)
    about = _about(errors, memory, apart=apart, fast=fast)
    file = UserFile(about=about, constants=constants, calibration=shares_of(reached, base))
    return Calibration(machine=machine, file=file, before=base, errors=tuple(errors), memory=memory, apart=apart)


def _applied(base: Chip, shares: Mapping[str, Factor]) -> Chip:
    return dataclasses.replace(base, calibration=base.calibration | dict(shares))


def shares_of(reached: Sequence[Reached], base: Chip) -> dict[str, Factor]:
    """The middle of the shares that runs reached, and a range for a further run, by kind of phase; and host_s per call.

    For a CPU, which has no file in the package, this includes the shares that its runs do not show.
    """
    names = ", ".join(each.sample.name for each in reached)
    found = {}
    for kind in KINDS:
        shares = [each.shares[kind] for each in reached if kind in each.shares]
        if shares:
            source = f"Measured: {len(shares)} runs ({names})"
            found[kind] = middle(shares, base.calibration[kind], source)
    host = [each.host_s for each in reached]
    source = f"Measured: seconds per call that no phase accounts for, mean and range of {len(host)} runs ({names})"
    found["host_s"] = Factor(value=statistics.mean(host), low=min(host), high=max(host), source=source)
    unknown = {kind: each for kind, each in base.calibration.items() if kind not in found and not each.source}
    return found | {kind: dataclasses.replace(each, source="No run has shown it") for kind, each in unknown.items()}


def middle(shares: Sequence[float], known: Factor, source: str) -> Factor:
    """The geometric mean of shares and the range that holds one more of them nine times in ten.

    The range of a single share is proportionally as wide as that of `known`, or assumed where `known` has none.
    """
    logs = [math.log(share) for share in shares]
    value = math.exp(statistics.mean(logs))
    if len(logs) == 1:
        exact = known.low == known.high
        low = value / ASSUMED_RANGE if exact else value * known.low / known.value
        high = value * ASSUMED_RANGE if exact else value * known.high / known.value
        return Factor(value=value, low=low, high=high, source=f"{source}; the range is assumed")
    spread = statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    wide = math.exp(float(student.ppf((1 + LIKELY) / 2, len(logs) - 1)) * spread)
    return Factor(value=value, low=value / wide, high=value * wide, source=source)


def _constants(chip: Chip) -> dict[str, Constant]:
    source = "measured by podium calibrate: the fastest of a few products and copies"
    peaks = {name: value for name, value in dataclasses.asdict(chip.peaks).items() if value}
    return {name: Constant(value=value, source=source) for name, value in {**peaks, "links": chip.links}.items()}


def _about(errors: Sequence[StepError], memory: Sequence[float], *, apart: bool, fast: bool) -> str:
    """One line that says which runs a calibration is based on, shown by every plan that uses it."""
    mean = statistics.mean(abs(each.after) for each in errors)
    steps = sum(each.steps for each in errors)
    today = datetime.datetime.now(datetime.UTC).date()
    how = "each by the others" if apart else "seen"
    text = f"{WRITER}, {today}: {len(errors)} runs, {steps} steps, off by {mean:.0%} ({how})"
    text += ", by the closed form" if fast else ""
    if memory:
        text += f"; memory {min(memory):.2f} to {max(memory):.2f} of the planned"
    return text
