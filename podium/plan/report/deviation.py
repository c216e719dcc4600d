"""Compare a training run with its plan: at one of the run's first steps, and afterwards with `podium plan --check`.

A run on TPU or GPU saves its plan in plan.json. `this_accelerator` is the first function here that imports jax.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from podium.accelerators import GIB, Accelerator, find_accelerator, recognise
from podium.files import to_json, write_atomically
from podium.observe.records import MetricsRecord, read_metrics
from podium.observe.run_dir import METRICS
from podium.plan.closed_form.estimate import far_too_large, offer
from podium.plan.planner import plan_run
from podium.plan.report.deviation_causes import DRAWN, MEASURED, PEAK, STEP, likeliest_cause, timed_parts
from podium.plan.report.formatting import number, verdict_line, with_range
from podium.plan.report.json_answer import Object, as_object, plan_object
from podium.plan.request.phase_sizes import sizes_on
from podium.plan.result import Plan, Seconds
from podium.plan.search.study import Case, Outcome
from podium.run.run_spec import RunSpec
from podium.train.batches.shapes import LATER

PLAN = "plan.json"
COMPILED = "rollout/compilations"
STEP_ERROR, MEMORY_ERROR = "plan/step_error", "plan/memory_error"
PART_ERROR = "plan/<part>_error"


def settled_step(platform: str) -> int:
    """The first step to compare with a plan: earlier ones compile most programs, and on an accelerator their
    micro-batches have the config's own shape.
    """
    return 3 if platform == "cpu" else LATER + 1


def this_accelerator() -> Accelerator | None:
    """The accelerator of the current run, with the memory its devices report; None if no plan can be made for it."""
    import jax

    device = jax.local_devices()[0]
    found, memory = recognise(device.device_kind, jax.device_count()), device.memory_stats() or {}
    return found and dataclasses.replace(found, hbm_bytes=memory.get("bytes_limit") or found.hbm_bytes)


def compare_with_measured(plan: Plan, measured: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """Compare a plan with the metrics of a step that compiled nothing. What was not measured is left out.

    Returns:
        the plan's errors as metrics, as shares of what was measured: positive if the plan is too high; and the same to
        print, with a second line on the likeliest cause if step or memory are far off.
    """
    metrics, said = {}, []
    if peak := measured.get(PEAK):
        metrics[MEMORY_ERROR] = plan.worst.bytes / GIB / peak - 1
        said.append(f"{plan.worst.bytes / GIB:.2f} GiB planned, {peak:.2f} measured ({metrics[MEMORY_ERROR]:+.1%})")
    if plan.step is not None and (took := measured.get(STEP)):
        metrics[STEP_ERROR] = plan.step.value / took - 1
        step = f"{with_range(plan.step)} s per step planned, {number(took)} measured"
        said.append(f"{step} ({metrics[STEP_ERROR]:+.1%})")
    for part in timed_parts(plan, measured):
        metrics[PART_ERROR.replace("<part>", part.name)] = part.planned / part.took - 1
    line = f"plan ({plan.accelerator}, closed form): {'; '.join(said)}"
    cause = likeliest_cause(plan, measured)
    return metrics, f"{line}\nplan: {cause}" if cause else line


class RunCheck:
    """Plan a training run and check the plan: call `begin` before the first step and `after_step` after each step."""

    def __init__(self, *, force: bool) -> None:
        """Prepare a check; with `force`, `begin` accepts a run that is far too large for the machine."""
        self.force = force
        self._plan: Plan | None = None
        self._steps, self._settled, self._compared = 0, 0, False

    def begin(self, spec: RunSpec, folder: Path | None) -> str | None:
        """Plan the run, or refuse one that cannot fit. Returns a line to print; None if no plan can be made.

        Args:
            spec: the run, resolved.
            folder: where to write plan.json; None in processes that do not write it.

        Raises:
            ValueError: the run needs far more memory than the machine has, and `force` is False.
        """
        if (accelerator := this_accelerator()) is None:
            return None
        run, self._settled = sizes_on(spec, accelerator), settled_step(accelerator.platform)
        if not self.force and (reason := far_too_large(run)):
            raise ValueError(reason)
        self._plan = plan_run(run)
        if folder is not None:
            write_atomically(
                folder / PLAN, to_json(plan_object(Outcome(case=Case(accelerator), known=self._plan)), indent=2) + "\n"
            )
        way_out = f"; {offer(accelerator)}" if self._plan.verdict == "does_not_fit" else ""
        return f"plan: {verdict_line(self._plan)}{way_out}"

    def after_step(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """The plan's errors as metrics and a line to print, once; ({}, None) after all other steps.

        This is after the first of this process's settled steps in whose rollout no program was compiled.
        """
        self._steps += 1
        if self._compared or self._plan is None or self._steps < self._settled or metrics.get(COMPILED):
            return {}, None
        self._compared = True
        return compare_with_measured(self._plan, metrics)


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """One planned figure of a run with its measurement."""

    name: str
    unit: str
    planned: Seconds
    measured: float | None  # median over steps for times, maximum for memory; None: not measured

    @property
    def error(self) -> float | None:
        """The plan's error as a share of the measurement; None without a measurement."""
        return self.planned.value / self.measured - 1 if self.measured else None


def check_run(folder: Path) -> list[CheckRow]:
    """Planned and measured figures of a run that `podium train` recorded on TPU or GPU.

    Raises:
        ValueError: the folder has no plan, or too few steps.
    """
    path = folder / PLAN
    if not path.is_file():
        raise ValueError(f"--check {folder}: {PLAN} is missing; podium train writes it on TPU and GPU")
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        worst = max(plan["phases"], key=lambda phase: phase["gib"])
        planned = {name: Seconds(**time) for name, time in plan["step_parts"].items()}
        first = settled_step(find_accelerator(plan["tpu"]).platform)
        step, tokens = Seconds(**plan["step_seconds"]), float(plan["rollout"]["completion_tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--check {folder}: {path} is not a plan of podium train ({error!r}); delete it") from None
    steps = [line for line in read_metrics(folder / METRICS) if STEP in line][first - 1 :]
    if not steps:
        raise ValueError(
            f"--check {folder}: at least {first} steps are needed, because the first ones compile, and have other"
            " micro-batches"
        )
    memory = [value for line in steps if (value := line.get(PEAK))]
    return [
        CheckRow(f"memory, {worst['name']}", "GiB", Seconds.exactly(worst["gib"]), max(memory, default=None)),
        CheckRow("step", "s", step, _median(steps, STEP)),
        *(CheckRow(part, "s", planned[part], _median(steps, MEASURED[part])) for part in MEASURED if part in planned),
        CheckRow("completion tokens", "", Seconds.exactly(tokens), _median(steps, DRAWN)),
    ]


def _median(steps: Sequence[MetricsRecord], metric: str) -> float | None:
    found = [line[metric] for line in steps if metric in line and math.isfinite(line[metric])]
    return statistics.median(found) if found else None


def check_object(run: str, rows: Sequence[CheckRow]) -> Object:
    """Planned and measured figures of a run, as the object for --json."""
    return {"run": run, "rows": [as_object(row) | {"unit": row.unit or None, "error": row.error} for row in rows]}
