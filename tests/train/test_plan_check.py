"""A run plans itself at its start and compares after its ninth step, where it has a machine that can be planned for."""

import dataclasses
import json

import pytest
from tiny_runs import make_config, read_records

from podium.accelerators import find_accelerator
from podium.plan.report import deviation
from podium.plan.report.deviation import RunCheck, check_run
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")


def on(monkeypatch, **changed) -> None:
    """Has this process take itself for a machine with one chip."""
    machine = dataclasses.replace(find_accelerator("v6e-1"), **changed)
    monkeypatch.setattr(deviation, "this_accelerator", lambda: machine)


def test_a_run_leaves_its_plan_and_how_wrong_it_was(tiny_model, tmp_path, monkeypatch, capsys):
    on(monkeypatch)
    config = make_config(tiny_model, tmp_path, steps=9)
    assert train(config, plain=True, check=RunCheck(force=False)) == 0
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert json.loads((run / "plan.json").read_text())["tpu"] == "v6e-1"
    steps = [line for line in read_records(run / "metrics.jsonl") if "time/train/step_s" in line]
    assert ["plan/step_error" in line for line in steps] == [False] * 8 + [True]
    error = capsys.readouterr().err
    assert "plan: fits v6e-1 by closed-form estimate" in error and "s per step planned" in error
    assert {"step", "rollout", "update"} <= {row.name for row in check_run(run)}


def test_a_run_that_is_far_too_large_does_not_begin(tiny_model, tmp_path, monkeypatch):
    on(monkeypatch, hbm_bytes=1000)
    config = make_config(tiny_model, tmp_path)
    with pytest.raises(ValueError, match="--on v6e-1 --fit` finds the fastest settings that fit; --force trains any"):
        train(config, plain=True, check=RunCheck(force=False))
