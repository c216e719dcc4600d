"""Compare a training run with its plan: at one of the run's first steps, and afterwards with `podium plan --check`.

A run on TPU or GPU saves its plan in plan.json. `this_accelerator` is the first function here that imports jax.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from podium.accelerators import GIB, Accelerator, recognise
from podium.config.schema import Config
from podium.files import to_json, write_atomically
from podium.models.architecture import DecoderConfig
from podium.observe.records import MetricsRecord, read_metrics
from podium.observe.run_dir import METRICS
from podium.plan.estimate import far_too_large, offer
from podium.plan.formatting import number, verdict_line, with_range
from podium.plan.json_answer import Object, as_object, plan_object
from podium.plan.planner import make_plan
from podium.plan.result import Plan, Seconds
from podium.plan.study import Case, Outcome

PLAN = "plan.json"
SETTLED_STEP = 3  # first step to compare; earlier ones compile most programs
MEASURED = {
    "sync": "time/train/sync_s",
    "rollout": "time/train/rollout_s",
    "reward": "time/train/reward_model_s",
    "score": "time/train/score_s",
    "update": "time/train/update_s",
}
"""The metric that measures each part of a step."""
STEP, PEAK = "time/train/step_s", "memory/train/peak_bytes_in_use_max_gib"
COMPILED = "rollout/compilations"


def this_accelerator() -> Accelerator | None:
    """The accelerator of the current run, with the memory its devices report; None if no plan can be made for it."""
    import jax

    device = jax.local_devices()[0]
    found, memory = recognise(device.device_kind, jax.device_count()), device.memory_stats() or {}
    return found and dataclasses.replace(found, hbm_bytes=memory.get("bytes_limit") or found.hbm_bytes)


def compare_with_measured(plan: Plan, *, peak_bytes: float | None, step_seconds: float) -> tuple[dict[str, float], str]:
    """The errors of a plan, as metrics (positive if the plan is too high) and as a line to print.

    Args:
        plan: the plan of the run.
        peak_bytes: the peak memory of the fullest device; None if devices do not report it.
        step_seconds: seconds of a step without compilation.
    """
    metrics, lines = {}, []
    if peak_bytes:
        metrics["plan/memory_error"] = plan.worst.bytes / peak_bytes - 1
        memory = f"{plan.worst.bytes / GIB:.2f} GiB planned, {peak_bytes / GIB:.2f} measured"
        lines.append(f"{memory} ({metrics['plan/memory_error']:+.1%})")
    if plan.step is not None and step_seconds:
        metrics["plan/step_error"] = plan.step.value / step_seconds - 1
        step = f"{with_range(plan.step)} s per step planned, {number(step_seconds)} measured"
        lines.append(f"{step} ({metrics['plan/step_error']:+.1%})")
    return metrics, f"plan ({plan.accelerator}, closed form): {'; '.join(lines)}"


class RunCheck:
    """Plan a training run and check the plan: call `begin` before the first step and `after_step` after each step."""

    def __init__(self, config: Config, *, force: bool) -> None:
        """Do nothing yet; with `force`, `begin` accepts a run that is far too large for the machine."""
        self.config, self.force = config, force
        self._plan: Plan | None = None
        self._steps, self._compared = 0, False

    def begin(self, decoder: DecoderConfig, folder: Path | None) -> str | None:
        """Plan the run, or refuse one that cannot fit. Returns a line to print; None if no plan can be made.

        Args:
            decoder: the model's architecture.
            folder: where to write plan.json; None in processes that do not write it.

        Raises:
            ValueError: the run needs far more memory than the machine has, and `force` is False.
        """
        if (accelerator := this_accelerator()) is None:
            return None
        if not self.force and (reason := far_too_large(self.config, decoder, accelerator)):
            raise ValueError(reason)
        self._plan = make_plan(self.config, accelerator, fast=True, decoder=decoder)
        if folder is not None:
            write_atomically(
                folder / PLAN, to_json(plan_object(Outcome(case=Case(accelerator), known=self._plan)), indent=2) + "\n"
            )
        way_out = f"; {offer(accelerator)}" if self._plan.verdict == "does_not_fit" else ""
        return f"plan: {verdict_line(self._plan)}{way_out}"

    def after_step(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """The plan's errors as metrics and a line to print, once; ({}, None) after all other steps.

        This is after the first of this process's steps, from the third on, in whose rollout no program was compiled.
        """
        self._steps += 1
        if self._compared or self._plan is None or self._steps < SETTLED_STEP or metrics.get(COMPILED):
            return {}, None
        self._compared = True
        peak = metrics.get(PEAK)
        return compare_with_measured(self._plan, peak_bytes=peak * GIB if peak else None, step_seconds=metrics[STEP])


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """One planned figure of a run beside its measurement."""

    name: str
    unit: str
    planned: Seconds
    measured: float | None  # median over steps for times, maximum for memory; None: not measured

    @property
    def error(self) -> float | None:
        """The plan's error as a share of the measurement; None if there is no measurement."""
        return self.planned.value / self.measured - 1 if self.measured else None


def check_run(folder: Path) -> list[CheckRow]:
    """Planned and measured figures of a run that `podium train` recorded on TPU or GPU.

    Raises:
        ValueError: the folder has no plan, or fewer than three steps.
    """
    path = folder / PLAN
    if not path.is_file():
        raise ValueError(f"--check {folder}: there is no {PLAN}; podium train writes one on TPU and GPU")
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        worst = max(plan["phases"], key=lambda phase: phase["gib"])
        planned = {name: Seconds(**time) for name, time in plan["step_parts"].items()}
        step, tokens = Seconds(**plan["step_seconds"]), float(plan["rollout"]["completion_tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--check {folder}: {path} is not a plan of podium train ({error!r}); delete it") from None
    steps = [line for line in read_metrics(folder / METRICS) if STEP in line][SETTLED_STEP - 1 :]
    if not steps:
        raise ValueError(f"--check {folder}: at least {SETTLED_STEP} steps are needed, because the first ones compile")
    memory = [value for line in steps if (value := line.get(PEAK))]
    return [
        CheckRow(f"memory, {worst['name']}", "GiB", _exactly(worst["gib"]), max(memory, default=None)),
        CheckRow("step", "s", step, _median(steps, STEP)),
        *(CheckRow(part, "s", planned[part], _median(steps, MEASURED[part])) for part in MEASURED if part in planned),
        CheckRow("completion tokens", "", _exactly(tokens), _median(steps, "rollout/completion_tokens")),
    ]


def _median(steps: Sequence[MetricsRecord], metric: str) -> float | None:
    found = [line[metric] for line in steps if metric in line and math.isfinite(line[metric])]
    return statistics.median(found) if found else None


def _exactly(value: float) -> Seconds:
    return Seconds(value=value, low=value, high=value)


def check_object(run: str, rows: Sequence[CheckRow]) -> Object:
    """Planned and measured figures of a run, as the object for --json."""
    return {"run": run, "rows": [as_object(row) | {"unit": row.unit or None, "error": row.error} for row in rows]}
