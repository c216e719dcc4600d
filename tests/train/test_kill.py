import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from held_steps import CARRIED
from processes import below, runs
from tiny_runs import assert_same_run, trained

from benches.children.talking import HOLDS
from benches.kill_resume import CARRIED_TALKS, TALKING, Kill, table
from podium.observe.run_dir import METRICS
from podium.train.loop import train

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0


def test_run_killed_while_tools_run_and_conversations_are_in_flight_is_continued_bit_for_bit(
    talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed after the first step, whose conversations go on; its tools have started processes, and one still runs."""
    task = {"name": "arithmetic", "environment": "benches.children.talking:Talking"}
    changes = {
        "tasks": [task],
        "rollout": {**CARRIED, "reproducible": True},
        "environments": {"workers": 2},
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 1},
    }
    configs = {name: talk(**changes, steps=3, runs_dir=str(tmp_path / name)) for name in ("whole", "killed")}
    whole, killed = (tmp_path / name / "run" for name in configs)
    (job := tmp_path / "job").mkdir()
    monkeypatch.setenv("PODRUN_JOB_DIR", str(job))
    (file := tmp_path / "killed.yaml").write_text(yaml.safe_dump(configs["killed"].model_dump(mode="json")))
    command = [sys.executable, "-m", "podium.cli", "train", str(file), "--plain"]
    with (tmp_path / "log").open("wb") as log:
        own = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT), HOLDS: str(killed / METRICS)}
        process = subprocess.Popen(command, env=own, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not ((killed / METRICS).exists() and (killed / METRICS).read_text() and [*job.glob("tools/*")]):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.001)
        children = below(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(children) >= 2  # of the environments and of their tools
    assert len((killed / METRICS).read_text().splitlines()) < 3
    for config in configs.values():
        assert train(config, plain=True) == 0
    assert_same_run(killed, whole)
    assert sum(record["async/crossed_share"] for record in trained(whole)) > 0
    assert not any(map(runs, children))


@pytest.mark.long
def test_run_killed_inside_a_save_and_again_while_continued_ends_as_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    (row,) = table(tmp_path, [Kill(lines=6, delay_s=0.005, in_save=True, again_s=4.0)])
    assert len(row["phases"]) == 2
    assert (row["differences"], row["orphans"]) == ([], [])


@pytest.mark.long
def test_run_killed_while_tools_run_ends_as_an_undisturbed_one_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    kills = [Kill(lines=lines, delay_s=0.01, in_tool=True) for lines in (0, 7)]
    rows = table(tmp_path, kills, TALKING)
    assert [(row["differences"], row["orphans"]) for row in rows] == [([], []), ([], [])]


@pytest.mark.long
def test_run_killed_while_tools_of_carried_conversations_run_ends_as_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    kills = [Kill(lines=lines, delay_s=0.01, in_tool=True) for lines in (1, 4, 8)]
    kills.append(Kill(lines=5, delay_s=0.0, in_tool=True, again_s=6.0))
    rows = table(tmp_path, kills, CARRIED_TALKS)
    assert [(row["differences"], row["orphans"]) for row in rows] == [([], [])] * len(kills)
    assert all("tools running" in row["phases"][0] for row in rows)
    assert sum(record["async/crossed_share"] for record in trained(tmp_path / "undisturbed")) > 0
