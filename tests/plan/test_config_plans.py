"""Every config of the repository has a plan by the closed form, on a TPU and on GPUs."""

import math
from pathlib import Path

import pytest

from podium.accelerators import find_accelerator
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.settings import load_settings

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
DEVICES = {"gsm8k_qwen3_30b_a3b": 64}
"""Numbers of devices of configs that do not divide over 8."""


@pytest.mark.parametrize("generation", ["v6e", "h100"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_has_a_plan_by_the_closed_form(path: Path, generation: str):
    config, machine = load_settings([path], [], {}).config, f"{generation}-{DEVICES.get(path.stem, 8)}"
    plan = make_plan(Planned.of(config, find_accelerator(machine)), by="closed_form")
    assert plan.step is not None and 0 < plan.step.low <= plan.step.value <= plan.step.high < math.inf
    assert all(sum(phase.parts.values()) == phase.bytes > 0 for phase in plan.phases)
    assert plan.verdict in ("fits", "too_close", "does_not_fit")
