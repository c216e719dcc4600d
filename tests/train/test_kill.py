from pathlib import Path

import pytest

from benches.kill_resume import TALKING, Kill, table


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
