"""What training does about its plan, and the table of both afterwards."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from podium.accelerators import GIB, Accelerator, find_accelerator, recognise
from podium.files import RunFileError
from podium.plan.planner import make_plan
from podium.plan.report import deviation as check
from podium.plan.report.deviation import RunCheck, check_run, compare_with_measured, this_accelerator
from podium.plan.report.deviation_causes import DRAWN, MEASURED, PEAK, STEP
from podium.plan.report.formatting import step_parts
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import Plan
from podium.run.run_spec import RunSpec
from tests.plan.estimated import QWEN_3B
from tests.plan.made_plans import plan
from tests.plan.test_search import config as config_3b

V6E_8 = find_accelerator("v6e-8")


@pytest.fixture(autouse=True)
def on_v6e_8(monkeypatch):
    run_on(monkeypatch, V6E_8)


def run_on(monkeypatch, accelerator: Accelerator | None) -> None:
    monkeypatch.setattr(check, "this_accelerator", lambda: accelerator)


def spec_3b() -> RunSpec:
    return Planned.of(config_3b(), V6E_8, QWEN_3B).sizes.spec


def made_at_start() -> Plan:
    return make_plan(Planned.of(config_3b(), V6E_8, QWEN_3B), by="closed_form")


@pytest.mark.parametrize(
    ("kind", "devices", "name"),
    [
        ("TPU v6 lite", 8, "v6e-8"),
        ("TPU v5 lite", 16, "v5litepod-16"),
        ("TPU v5p", 32, "v5p-64"),
        ("TPU v5", 4, "v5p-8"),
        ("TPU v4", 8, "v4-16"),
        ("NVIDIA H100 80GB HBM3", 8, "h100-8"),
        ("NVIDIA H200", 1, "h200-1"),
    ],
)
def test_a_machine_is_recognised_by_its_devices(kind, devices, name):
    found = recognise(kind, devices)
    assert found is not None and found.name == name and found.devices == devices


@pytest.mark.parametrize(("stats", "size"), [({"bytes_limit": 30 * GIB}, 30 * GIB), (None, V6E_8.hbm_bytes)])
def test_a_machine_has_the_memory_that_it_says(monkeypatch, stats, size):
    device = SimpleNamespace(device_kind="TPU v6 lite", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert this_accelerator() == dataclasses.replace(V6E_8, hbm_bytes=size)


def test_nothing_is_planned_on_other_machines(tmp_path, monkeypatch):
    run_on(monkeypatch, this_accelerator())  # a CPU
    check = RunCheck(force=False)
    assert check.begin(spec_3b(), tmp_path) is None
    assert [check.after_step({"time/train/step_s": 1.0}) for _ in range(10)] == [({}, None)] * 10
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_far_too_large_is_refused_unless_forced(tmp_path, monkeypatch):
    run_on(monkeypatch, dataclasses.replace(V6E_8, hbm_bytes=6 * GIB))
    with pytest.raises(ValueError, match=r"needs about .* GiB on each device .* --fit` finds .* --force trains anyway"):
        RunCheck(force=False).begin(spec_3b(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    line = RunCheck(force=True).begin(spec_3b(), tmp_path)
    assert line is not None and line.startswith("plan: does not fit v6e-8 by closed-form estimate")


def test_measured_figures_stand_beside_the_plan_after_the_first_settled_step_that_compiled_nothing(tmp_path):
    check = RunCheck(force=False)
    line = check.begin(spec_3b(), tmp_path)
    made = made_at_start()
    assert made.step is not None
    assert line is not None and line.startswith("plan: fits v6e-8 by closed-form estimate")
    peak, took = made.worst.bytes / 1.1, made.step.value / 0.5
    metrics = {"time/train/step_s": took, "memory/train/peak_bytes_in_use_max_gib": peak / GIB}
    assert [check.after_step(metrics) for _ in range(8)] == [({}, None)] * 8
    assert check.after_step({**metrics, "rollout/compilations": 1}) == ({}, None)
    found, line = check.after_step(metrics)
    assert found == pytest.approx({"plan/memory_error": 0.1, "plan/step_error": -0.5})
    assert line is not None and "measured (+10.0%); " in line and "measured (-50.0%)\nplan: " in line
    assert check.after_step(metrics) == ({}, None)


def test_what_is_not_measured_is_left_out():
    metrics, line = compare_with_measured(plan(), {"time/train/step_s": 3.1})
    assert list(metrics) == ["plan/step_error"] and "GiB" not in line


def as_planned(made: Plan, **changed: float) -> dict[str, float]:
    """The metrics of a step that is as planned but for these parts, by their names, and `step`."""
    assert made.step is not None
    parts = {name: time.value for name, time in step_parts(made)}
    took = {name: changed.get(name, parts[name]) for name in MEASURED if name in parts}
    late = sum(took.values()) - sum(parts[name] for name in took)
    return {MEASURED[name]: seconds for name, seconds in took.items()} | {
        "time/train/step_s": changed.get("step", made.step.value + late),
        "rollout/completion_tokens": changed.get("tokens", made.workload.completion_tokens),
        "memory/train/peak_bytes_in_use_max_gib": changed.get("gib", made.worst.bytes / GIB),
    }


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({}, None),
        ({"rollout": 1.1}, None),  # times what was planned
        ({"rollout": 3}, "the rollout took .* s instead of .*: `podium doctor` measures this machine"),
        ({"update": 8}, "the update took .* s instead of .*: `podium doctor`"),
        ({"rollout": 0.2}, "the rollout took .* s instead of .*: `podium doctor`"),
        ({"rollout": 3, "tokens": 3}, r"as completions have 3.00 times the planned tokens: plan with --lengths"),
        ({"rollout": 3, "tokens": 1.1}, "the rollout took .*: `podium doctor`"),
        ({"step": 2}, "s of the difference are in what the plan has no programs for, such as grading"),
        ({"gib": 1.5}, "what differs is the memory of .*: `podium plan` without --fast compiles its programs"),
    ],
)
def test_the_likeliest_cause_is_named_where_step_or_memory_are_far_off(changed, cause):
    made = made_at_start()
    planned = as_planned(made)
    names = MEASURED | {"step": STEP, "tokens": DRAWN, "gib": PEAK}
    measured = as_planned(made, **{name: times * planned[names[name]] for name, times in changed.items()})
    metrics, said = compare_with_measured(made, measured)
    assert set(metrics) >= {"plan/rollout_error", "plan/update_error", "plan/memory_error", "plan/step_error"}
    if "update" in changed:
        assert metrics["plan/update_error"] == pytest.approx(-0.875) and metrics["plan/rollout_error"] == 0
    _, _, second = said.partition("\nplan: ")
    assert re.search(cause, second) if cause else not second


def write_run(folder: Path, steps: int = 11, **changed: Any) -> None:
    """A run whose steps take 4 s, and long ones at first."""
    with pytest.MonkeyPatch.context() as patched:
        run_on(patched, V6E_8)
        RunCheck(force=False).begin(spec_3b(), folder)
    lines = [
        {
            "step": step,
            "time/train/step_s": 60.0 if step < 9 else 4.0 + 0.1 * (step - 10),
            "time/train/rollout_s": 2.5,
            "time/train/update_s": 1.0,
            "memory/train/peak_bytes_in_use_max_gib": 19.4 + step / 10,
            "rollout/completion_tokens": 20_000,
        }
        | changed
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_tabulated_with_the_median_of_its_settled_steps(tmp_path):
    write_run(tmp_path)
    rows = {row.name: row for row in check_run(tmp_path)}
    made = made_at_start()
    assert made.step is not None
    assert rows["step"].measured == 4.0 and rows["step"].planned == made.step
    assert rows["step"].error == pytest.approx(made.step.value / 4.0 - 1)
    memory = rows[f"memory, {made.worst.name}"]
    assert (memory.measured, memory.planned.value) == (20.5, pytest.approx(made.worst.bytes / GIB))
    assert (rows["rollout"].measured, rows["update"].measured, rows["sync"].measured) == (2.5, 1.0, None)
    assert rows["completion tokens"].planned.value == made.workload.completion_tokens


def test_a_check_without_steps_or_with_a_broken_plan_is_told(tmp_path):
    write_run(tmp_path, steps=8)
    with pytest.raises(ValueError, match="at least 9 steps are needed"):
        check_run(tmp_path)
    (tmp_path / "plan.json").write_text('{"phases": []}')
    with pytest.raises(ValueError, match="is not a plan of podium train"):
        check_run(tmp_path)
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("no json\n" * 3)
    with pytest.raises(RunFileError):
        check_run(tmp_path)
