"""A plan beside the run that it was made for: made at the run's start, compared when it runs, tabulated afterwards.

A run on TPU or GPU leaves both in its plan.json. No jax is imported here before `this_machine`.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podium.accelerators import GIB, Accelerator, accelerators
from podium.config.schema import Config
from podium.files import read_lines, to_json, write_atomically
from podium.models.architecture import DecoderConfig
from podium.observe.run_dir import METRICS
from podium.plan.compare import Answer
from podium.plan.estimate import far_too_large
from podium.plan.objects import plan_object
from podium.plan.planner import make_plan
from podium.plan.result import Plan, Seconds
from podium.plan.words import in_range, number, verdict_line

PLAN = "plan.json"
SETTLED_STEP = 3
"""The first step that is compared: those before it compile."""
# Beginnings of jax's `device_kind`, the longer ones first, and the kind of machine in an accelerator's name.
KINDS: Mapping[str, str] = {
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU v5 lite": "v5litepod",
    "TPU v5e": "v5litepod",
    "TPU v5": "v5p",
    "TPU v4": "v4",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
}
CORES = {"v4": 2, "v5p": 2}
"""Of a chip, where the name counts cores."""
MEASURED = {
    "sync": "time/train/sync_s",
    "rollout": "time/train/rollout_s",
    "score": "time/train/score_s",
    "update": "time/train/update_s",
}
"""The metric of each part of a step."""
STEP, PEAK = "time/train/step_s", "memory/train/peak_bytes_in_use_max_gib"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of a running process and of its fellows, as jax names them."""

    kind: str
    devices: int
    hosts: int
    memory_bytes: int | None
    """Of a device; None where it does not say."""


def this_machine() -> Machine:
    """The machine that this process runs on."""
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    return Machine(
        kind=device.device_kind,
        devices=jax.device_count(),
        hosts=jax.process_count(),
        memory_bytes=stats.get("bytes_limit"),
    )


def accelerator_of(machine: Machine) -> Accelerator | None:
    """The accelerator that a machine is, with the memory that it says it has; None: no plan can be made for it."""
    kind = next((name for start, name in KINDS.items() if machine.kind.startswith(start)), None)
    found = accelerators().get(f"{kind}-{machine.devices * CORES.get(kind or '', 1)}")
    if found is None or machine.memory_bytes is None:
        return found
    return dataclasses.replace(found, hbm_bytes=machine.memory_bytes)


def refuse_if_far_too_large(config: Config, decoder: DecoderConfig, machine: Machine) -> None:
    """Raises ValueError where the closed form needs more than 1.5 times the memory of the machine's devices."""
    accelerator = accelerator_of(machine)
    if accelerator is not None and (reason := far_too_large(config, decoder, accelerator)):
        raise ValueError(reason)


def plan_at_start(config: Config, decoder: DecoderConfig, machine: Machine) -> Plan | None:
    """The closed form's plan of a run that begins on a machine; None on a machine that none can be made for."""
    accelerator = accelerator_of(machine)
    return make_plan(config, accelerator, fast=True, decoder=decoder) if accelerator is not None else None


def compare_with_measured(plan: Plan, *, peak_bytes: float | None, step_seconds: float) -> tuple[dict[str, float], str]:
    """How far a plan is from what was measured: metrics (above 0: too much was planned), and a line to print.

    Args:
        plan: of the run.
        peak_bytes: the most that a device held; None where devices do not say.
        step_seconds: of a step in which nothing was compiled.
    """
    metrics, told = {}, []
    if peak_bytes:
        metrics["plan/memory_error"] = plan.worst.bytes / peak_bytes - 1
        memory = f"{plan.worst.bytes / GIB:.2f} GiB planned, {peak_bytes / GIB:.2f} measured"
        told.append(f"{memory} ({metrics['plan/memory_error']:+.1%})")
    if plan.step is not None and step_seconds:
        metrics["plan/step_error"] = plan.step.value / step_seconds - 1
        step = f"{in_range(plan.step)} s per step planned, {number(step_seconds)} measured"
        told.append(f"{step} ({metrics['plan/step_error']:+.1%})")
    return metrics, f"plan ({plan.accelerator}, closed form): {'; '.join(told)}"


class RunCheck:
    """What a training run does about its plan: `begin` before its first step, `after_step` after each."""

    def __init__(self, *, force: bool) -> None:
        """Nothing yet.

        Args:
            force: go on with a config that is far too large for the machine.
        """
        self.force = force
        self._plan: Plan | None = None
        self._steps = 0

    def begin(
        self, config: Config, decoder: DecoderConfig, folder: Path | None, machine: Machine | None = None
    ) -> str | None:
        """Refuse what cannot fit, plan the rest, and leave the plan in the run's folder; a line to print, or None.

        Args:
            config: of the run.
            decoder: of its model.
            folder: of the run; None in processes that do not write there.
            machine: unset: this one.

        Raises:
            ValueError: the run needs far more memory than there is, and nobody forced it.
        """
        machine = machine or this_machine()
        if not self.force:
            refuse_if_far_too_large(config, decoder, machine)
        self._plan = plan_at_start(config, decoder, machine)
        if self._plan is None:
            return None
        if folder is not None:
            write_atomically(folder / PLAN, to_json(plan_object(Answer(plan=self._plan)), indent=2) + "\n")
        return f"plan: {verdict_line(self._plan)}"

    def after_step(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """Metrics to add to a step's, and a line to print: of this process's third step; of others nothing.

        Args:
            metrics: of the step, with its seconds and, where devices tell, the peak of their memory.
        """
        self._steps += 1
        if self._plan is None or self._steps != SETTLED_STEP:
            return {}, None
        peak = metrics.get(PEAK)
        return compare_with_measured(self._plan, peak_bytes=peak * GIB if peak else None, step_seconds=metrics[STEP])


class Row(NamedTuple):
    """One figure of a run."""

    name: str
    unit: str
    planned: Seconds
    measured: float | None
    """Median of the steps; of memory the most. None: not measured."""

    @property
    def error(self) -> float | None:
        """Part of the measured figure by which the plan is above it."""
        return self.planned.value / self.measured - 1 if self.measured else None


def check_run(folder: Path) -> list[Row]:
    """Planned beside measured, of a run that `podium train` wrote on TPU or GPU.

    Raises:
        ValueError: the folder has no plan, or no step from the third on.
    """
    path = folder / PLAN
    if not path.is_file():
        raise ValueError(f"--check {folder}: there is no {PLAN}; podium train leaves one in runs on TPU and GPU")
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        worst = max(plan["phases"], key=lambda phase: phase["gib"])
        planned = {name: Seconds(**time) for name, time in plan["step_parts"].items()}
        step, tokens = Seconds(**plan["step_seconds"]), float(plan["rollout"]["completion_tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--check {folder}: {path} is not a plan of podium train ({error!r}); delete it") from None
    steps = [line for line in read_lines(folder / METRICS) if STEP in line][SETTLED_STEP - 1 :]
    if not steps:
        raise ValueError(f"--check {folder}: {SETTLED_STEP} steps at least are needed, as the first ones compile")
    memory = [line[PEAK] for line in steps if line.get(PEAK)]
    return [
        Row(f"memory, {worst['name']}", "GiB", _exactly(worst["gib"]), max(memory, default=None)),
        Row("step", "s", step, _median(steps, STEP)),
        *(
            Row(name, "s", planned[name], _median(steps, metric))
            for name, metric in MEASURED.items()
            if name in planned
        ),
        Row("completion tokens", "", _exactly(tokens), _median(steps, "rollout/completion_tokens")),
    ]


def check_object(run: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The same as an object for --json."""
    figures = [
        {
            "name": row.name,
            "unit": row.unit or None,
            "planned": dataclasses.asdict(row.planned),
            "measured": row.measured,
            "error": row.error,
        }
        for row in rows
    ]
    return {"run": run, "rows": figures}


def _median(steps: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    found = [line[metric] for line in steps if line.get(metric) is not None]
    return statistics.median(found) if found else None


def _exactly(value: float) -> Seconds:
    return Seconds(value=value, low=value, high=value)
