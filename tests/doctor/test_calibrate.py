"""`podium calibrate` finds the shares with which runs were made, writes them for their machine, and plans use them."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from podium import cli
from podium.accelerators import find_accelerator, this_cpu
from podium.chips import user_file
from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.doctor.calibrate import KINDS, learn, middle, read_sample
from podium.hosts.platform import machine_text
from podium.plan.calibration import Chip, Factor, find_chip, find_machine, load_chip, uncalibrated
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import calibration_kind
from tests.plan.test_search import config as config_3b

V6E_8 = find_accelerator("v6e-8")
TRUE = {"update": 0.5, "prefill": 0.3, "decode": 0.4, "host_s": 0.002}
"""What the machine of the made runs reaches."""
LENGTHS = {"step": 9, "prompt_lengths": [100, 120, 140, 90] * 4, "completion_lengths": [150, 200, 250, 300] * 32}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "first": {},
    "slots": {"rollout": {"slots": 64}},
    "rows": {"train": {"rows_per_device": 2}},
}


def exact(value: float) -> Factor:
    return Factor(value=value, low=value, high=value, source="made")


def true_chip() -> Chip:
    chip = load_chip("v6e")
    return dataclasses.replace(
        chip, calibration=chip.calibration | {kind: exact(value) for kind, value in TRUE.items()}
    )


def config(**changed: Any) -> Config:
    return config_3b(model="Qwen/Qwen2.5-3B-Instruct", **changed)


def write_run(folder: Path, settings: Config, machine: str = "8 x TPU v6 lite", **changed_metrics: float) -> None:
    """A run whose ninth step took what the true machine takes."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(settings.document(), {}))
    (folder / "machine.json").write_text(json.dumps({"text": machine}))
    (folder / "lengths.jsonl").write_text(json.dumps(LENGTHS) + "\n")
    plan = make_plan(
        Planned.of(settings, V6E_8), by="closed_form", lengths=str(folder / "lengths.jsonl"), chip=true_chip()
    )
    assert plan.step is not None
    took = dict.fromkeys(KINDS, 0.0)
    for phase in plan.phases:
        took[calibration_kind(phase.name)] += phase.seconds.value if phase.seconds else 0.0
    metrics = {
        "time/train/step_s": plan.step.value,
        "rollout/prefill_s": took["prefill"],
        "rollout/decode_s": took["decode"],
        "time/train/update_s": took["update"],
        "memory/train/peak_bytes_in_use_max_gib": 1.05 * plan.worst.bytes / 2**30,
        **changed_metrics,
    }
    early = {"time/train/step_s": 60.0, "rollout/compilations": 1.0}
    lines = [{"step": step, **early} for step in range(1, 9)] + [{"step": 9, **metrics}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, settings in RUNS.items():
        write_run(tmp_path / name, config(**settings))
    return [tmp_path / name for name in RUNS]


def command(monkeypatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["podium", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_shares_of_runs_are_found_written_and_used(runs, monkeypatch, capsys):
    assert command(monkeypatch, "calibrate", *map(str, runs), "--fast", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert {kind: said["shares"][kind]["value"] for kind in TRUE} == pytest.approx(TRUE, rel=0.01)
    assert said["each_by_the_others"] and said["memory"] == pytest.approx([1.05] * 3)
    for run in said["runs"]:
        assert run["after_s"] == pytest.approx(run["measured_s"], rel=0.01)
        assert run["before_s"] < 0.9 * run["measured_s"]
    assert said["file"] == str(user_file("v6e"))
    written = json.loads(user_file("v6e").read_text())
    assert written["calibration"]["update"]["source"] == "Measured: 3 runs (first, slots, rows)"
    assert "3 runs, 3 steps, off by 0% (each by the others), by the closed form; memory 1.05" in written["about"]
    plan = make_plan(Planned.of(config(), V6E_8), by="closed_form")
    assert plan.calibration == written["about"]
    assert load_chip("v6e").calibration["ici"] == load_chip_without(monkeypatch).calibration["ici"]


def load_chip_without(monkeypatch) -> Chip:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/none")
    return load_chip("v6e")


def test_a_plan_without_the_users_figures_names_those_of_the_package(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/none")
    assert make_plan(Planned.of(config(), V6E_8), by="closed_form").calibration == "podium/chips/v6e.json"


def test_a_range_holds_what_runs_differ_by_and_one_run_has_that_of_the_package():
    known = Factor(value=0.7, low=0.35, high=1.4, source="")
    found = middle([0.4, 0.5, 0.625], known, "")
    assert found.value == pytest.approx(0.5) and found.low < 0.35 and found.high > 0.7
    one = middle([0.5], known, "one run")
    assert (one.low, one.high, one.source) == (0.25, 1.0, "one run; the range is assumed")
    assert middle([0.6], exact(1.0), "").low == pytest.approx(0.4)


def test_a_phase_that_only_waits_for_transfers_says_nothing_of_its_work(runs):
    sample = dataclasses.replace(read_sample(runs[0]), seconds={"prefill": 0.0, "decode": 1e-9, "update": 0.0})
    found = learn([sample], fast=True)
    assert set(found.file.calibration) == {"host_s"}


def test_what_cannot_be_calibrated_is_said(runs, tmp_path, monkeypatch, capsys):
    def error(*folders: Path) -> str:
        assert command(monkeypatch, "calibrate", *map(str, folders), "--fast") == 2
        return capsys.readouterr().err

    assert "nowhere has no config.yaml, so it is not a run's folder" in error(tmp_path / "nowhere")
    write_run(tmp_path / "other", config(), "4 x TPU v6 lite")
    assert "different machines: 4 x TPU v6 lite; 8 x TPU v6 lite" in error(runs[0], tmp_path / "other")
    write_run(tmp_path / "unknown", config(), "8 x TPU v9")
    assert "podium plan does not know the machine 8 x TPU v9" in error(tmp_path / "unknown")
    write_run(tmp_path / "cpu", config(), "1 x cpu (Another, 64 cores)")
    assert f"ran on 1 x cpu (Another, 64 cores), and this is {machine_text()}" in error(tmp_path / "cpu")
    write_run(tmp_path / "compiling", config(), **{"rollout/compilations": 1.0})
    assert "has no step from step 9 on in which nothing was compiled" in error(tmp_path / "compiling")
    (runs[1] / "machine.json").unlink()
    assert "does not say which machine it ran on" in error(runs[1])


def test_figures_that_a_user_wrote_are_not_replaced(runs, monkeypatch, capsys):
    assert command(monkeypatch, "calibrate", *map(str, runs), "--fast") == 0
    assert command(monkeypatch, "calibrate", *map(str, runs), "--fast") == 0
    mine = json.loads(user_file("v6e").read_text()) | {"about": "what I measured"}
    user_file("v6e").write_text(json.dumps(mine))
    capsys.readouterr()
    assert command(monkeypatch, "calibrate", *map(str, runs), "--fast") == 2
    assert "figures that podium calibrate did not write (what I measured); move it away" in capsys.readouterr().err
    assert json.loads(user_file("v6e").read_text()) == mine


def test_a_broken_file_of_the_user_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    user_file("v6e").parent.mkdir(parents=True)
    user_file("v6e").write_text('{"about": "mine", "constants": {}, "calibration": {"update": {"value": 1}}}')
    with pytest.raises(ValueError, match=r"v6e\.json is not a calibration \(calibration\.update\.low: .*delete it"):
        load_chip("v6e")


def test_a_cpu_can_be_planned_for_once_it_is_calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert find_chip("cpu") is None
    with pytest.raises(ValueError, match=r"--on cpu: .*After podium calibrate RUN, plans know this CPU"):
        find_machine("cpu")
    user_file("cpu").parent.mkdir(parents=True)
    constants = {"flops_bf16": 1e11, "flops_f32": 1e11, "hbm_bandwidth": 1e10, "link_bandwidth": 1.0, "links": 1}
    shares = uncalibrated(load_chip("v6e").peaks).calibration
    document = {
        "about": "two runs",
        "constants": {name: {"value": value, "source": ""} for name, value in constants.items()},
        "calibration": {kind: dataclasses.asdict(share) for kind, share in shares.items()},
    }
    user_file("cpu").write_text(json.dumps(document))
    chip = find_chip("cpu")
    assert find_machine("cpu") == this_cpu() and chip is not None and chip.peaks.flops_f32 == 1e11
