"""The planner reads programs: what it has never seen is planned without a line about it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from podium.accelerators import find_accelerator
from podium.plan.compiled.compile import worker_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
@pytest.mark.parametrize("remat", ["layer", "none"])
def test_a_layer_kind_and_a_way_to_recompute_are_traced_as_they_are_compiled(remat, tmp_path):
    """With `layer`, a policy of jax that no setting has takes its place."""
    ran = subprocess.run(
        [sys.executable, ROOT / "tests" / "plan" / "unseen_kinds.py", remat, tmp_path],
        env=worker_environment(find_accelerator("v6e-1")),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == 2  # a frozen model that scores, and the update
    for each in found:
        assert each["traced"] == pytest.approx(each["compiled"], rel=0.1)
