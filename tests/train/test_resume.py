"""Runs that are continued, killed, forked: they end as those that nobody disturbed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from tiny_runs import (
    SHORT,
    STEPS,
    STEPWISE,
    assert_same_run,
    config_of,
    make_config,
    merged,
    metrics_of,
    read_records,
    trained,
    weights_of,
)

from podium.files import RunFileError
from podium.job.job_context import alone
from podium.observe.run_dir import Fork, RunDir, RunInUseError, read_config, run_home, saved_steps
from podium.train.checkpoints.checkpoint import restore_params
from podium.train.checkpoints.step_files import CheckpointError
from podium.train.loop import train
from podium.train.open import go_on_sampling, open_run
from podium.train.recorder import Recorder, unheard
from podium.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_device")


def test_the_same_config_gives_the_same_run(run_of, undisturbed):
    assert_same_run(run_of(**STEPWISE), undisturbed)


def test_another_seed_gives_another_run(run_of, undisturbed):
    other = run_of(**{**STEPWISE, "steps": 2}, seed=1)
    assert metrics_of(other)[1] != metrics_of(undisturbed)[1]


def test_a_run_of_two_steps_goes_on_to_four_as_if_it_had_never_stopped(run_of, undisturbed):
    run = run_of(**{**STEPWISE, "steps": 2})
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert train(config_of(run, steps=STEPS), plain=True) == 0
    assert_same_run(run, undisturbed)
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS


def test_a_resumed_sampler_has_the_saved_position_and_the_version_of_its_weights():
    class Sampler:
        feed = position = loaded = None

        def load(self, params, frozen=None, *, version=0):
            self.loaded = params, frozen, version

    sampler: Any = Sampler()
    go_on_sampling(sampler, {"cursor": 5, "versions": {}}, {"embed": jax.numpy.zeros(1)}, {}, done=3)
    assert sampler.position.cursor == 5
    assert sampler.loaded == ({"embed": jax.numpy.zeros(1)}, {}, 3)


def test_a_damaged_newest_checkpoint_is_told_and_the_run_goes_on_from_the_one_before(tmp_path, undisturbed, capfd):
    shutil.copytree(undisturbed, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "4"
    largest = max((newest / "optimizer").rglob("*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)
    assert train(config_of(tmp_path / "run", runs_dir=str(tmp_path)), plain=True) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "checkpoint 4 is damaged (optimizer/" in said
    assert "continuing from step 2" in said
    assert (newest.parent / "4.damaged").is_dir()
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_its_step_saved_and_to_be_continued(
    tiny_model, tmp_path, undisturbed, monkeypatch, capfd, number, status
):
    """Also where no checkpoint is due: after step 1 here."""
    config = make_config(tiny_model, tmp_path, **STEPWISE)
    run, write = tmp_path / "run", Recorder.write

    def write_and_signal(self, *arguments):
        os.kill(os.getpid(), number)
        write(self, *arguments)

    monkeypatch.setattr(Recorder, "write", write_and_signal)
    assert train(config, plain=True) == status
    monkeypatch.undo()
    assert f"podium train {run}/config.yaml" in capfd.readouterr().err
    assert saved_steps(run / "checkpoints") == [1]
    assert (run / "summary.json").exists()
    assert train(config, plain=True) == 0
    assert_same_run(run, undisturbed)


def test_what_was_recorded_after_the_last_checkpoint_is_recorded_again(tiny_model, tmp_path, undisturbed, monkeypatch):
    """As after a kill in step 4: the checkpoint is of step 2, metrics are there up to step 3."""
    config = make_config(tiny_model, tmp_path, **STEPWISE)
    update = Trainer.update

    def fail_in_step_4(self, state, batches, step, **options):
        if step == 3:
            raise KeyboardInterrupt
        return update(self, state, batches, step, **options)

    monkeypatch.setattr(Trainer, "update", fail_in_step_4)
    with pytest.raises(KeyboardInterrupt):
        train(config, plain=True)
    monkeypatch.undo()
    assert metrics_of(tmp_path / "run")[-1]["step"] == 3
    assert train(config, plain=True) == 0
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_run_that_is_done_stays_as_it_is(run_of, undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    assert train(config_of(run, runs_dir=str(tmp_path)), plain=True) == 0
    assert_same_run(run, undisturbed)


def test_records_that_were_damaged_since_the_checkpoint_are_said_or_repaired(undisturbed, tmp_path, capfd):
    shutil.copytree(undisturbed, tmp_path / "run")
    lines = (undisturbed / "metrics.jsonl").read_text().splitlines(keepends=True)
    hole = next(number for number, line in enumerate(lines) if '"step": 3,' in line)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:hole] + lines[hole + 1 :]))
    (tmp_path / "run" / "samples.jsonl").unlink()
    lengths = (undisturbed / "lengths.jsonl").read_text()
    (tmp_path / "run" / "lengths.jsonl").write_text(lengths.splitlines(keepends=True)[0] + lengths)
    assert train(config_of(tmp_path / "run", name="run", runs_dir=str(tmp_path)), plain=True) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "metrics.jsonl has changed since step 4 was saved" in said
    assert "step 3 is missing; the run continues; to record them again" in said
    assert "delete the checkpoints after step 2, and run the same command again" in said
    assert "samples.jsonl has changed since step 4 was saved: the file, which had" in said
    assert "lengths.jsonl had 1 doubled line: removed" in said
    assert (tmp_path / "run" / "lengths.jsonl").read_text() == lengths


def test_a_run_whose_checkpoints_are_gone_says_what_it_replaces(undisturbed, tmp_path, capfd):
    shutil.copytree(undisturbed, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    assert train(config_of(tmp_path / "run", name="run", runs_dir=str(tmp_path)), plain=True) == 0
    assert "has no checkpoint: the 4 recorded steps are trained again" in " ".join(capfd.readouterr().err.split())
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_run_that_another_process_trains_is_left_alone(undisturbed):
    before = (undisturbed / "metrics.jsonl").read_bytes()
    config = read_config(undisturbed)
    with (
        RunDir.open(run_home(config.runs_dir, config.name), config.document()),
        pytest.raises(RunInUseError, match=r"is in use by process .* wait for it, stop it"),
    ):
        train(config, plain=True)
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_the_checkpoints_and_the_identity_of_another_run_are_refused(run_of, undisturbed, tmp_path):
    """Also where the settings of both are the same, and where only the checkpoints came."""
    other = run_of(name="other", **{**STEPWISE, "steps": 2})
    for case, names in (("both", ("checkpoints", "identity.json")), ("checkpoints alone", ("checkpoints",))):
        run = tmp_path / case / "run"
        shutil.copytree(undisturbed, run)
        for name in ("checkpoints", "identity.json"):
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
        for name in names:
            copy = shutil.copytree if (other / name).is_dir() else shutil.copy
            copy(other / name, run / name)
        before = (run / "config.yaml").read_bytes()
        with pytest.raises(ValueError, match=r"is the folder of run .*run\.json.*start a run with another name"):
            train(config_of(run, runs_dir=str(run.parent)), plain=True)
        with pytest.raises(CheckpointError, match=r"it was saved by run .*, and .*/run\.json names"):
            restore_params(run / "checkpoints", None, {})
        assert case != "both" or (run / "config.yaml").read_bytes() == before


def test_a_checkpoint_of_other_settings_is_refused(undisturbed, tmp_path):
    """As after the run's own config.yaml was edited, which is also what the command is given."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.5"))
    with pytest.raises(RunFileError, match=r"(?s)step 4 in .*learning_rate: 0.003 there, 0.5 now.*start a run"):
        train(config_of(run, runs_dir=str(tmp_path), steps=6), plain=True)


@pytest.mark.long
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_saves_and_exits_by_the_signal_s_number(tiny_model, tmp_path, number, status):
    """The real command in its own process, with a grading worker, and continued by a second."""
    file = tmp_path / "run.yaml"
    config = make_config(tiny_model, tmp_path, steps=100_000, grading={"workers": 1}, eval={"at_start": False})
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    process = start(file)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 2, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    done = read_records(metrics)[-1]["step"]
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] == done
    assert f"podium train {tmp_path}/run/config.yaml" in err
    assert "Traceback" not in err
    again = start(file, "--set", f"steps={done + 1}")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert [record["step"] for record in trained(tmp_path / "run")] == list(range(1, done + 2))


def start(file: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "podium.cli", "train", str(file), "--plain", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run did not begin"
        time.sleep(0.05)


def test_a_fork_goes_on_from_the_step_it_is_told(tiny_model, tmp_path, undisturbed):
    """With the same settings its two steps are the last two of the other."""
    fork = Fork(str(undisturbed), 2)
    config = make_config(tiny_model, tmp_path, **{**STEPWISE, "steps": 2, "name": "forked"})
    assert train(config, fork=fork, plain=True) == 0
    run = tmp_path / "forked"
    expected = [{**each, "step": each["step"] - 2} for each in metrics_of(undisturbed) if each["step"] > 2]
    assert [each for each in metrics_of(run) if each["step"] > 0] == [
        each for each in expected if each["step"] in (1, 2)
    ]
    assert weights_of(run, 2) == weights_of(undisturbed, 4)
    assert (
        metrics_of(run)[0]["eval/accuracy"]
        == [
            each["eval/accuracy"] for each in metrics_of(undisturbed) if each["step"] == 2 and "eval/accuracy" in each
        ].pop()
    )
    assert json.loads((run / "fork.json").read_text())["step"] == 2


def test_moments_in_the_hosts_memory_change_nothing_wherever_they_were_before(tiny_model, tmp_path, undisturbed):
    """A fork of a run without goes on as that run does, and is continued as if it had never stopped."""
    for steps, fork in ((1, Fork(str(undisturbed), 2)), (2, None)):
        config = make_config(
            tiny_model,
            tmp_path,
            name="offloaded",
            steps=steps,
            eval={"at_start": False, "at_end": False},
            **merged(SHORT, {"train": {**STEPWISE["train"], "offload_optimizer": True}}),
        )
        assert train(config, fork=fork, plain=True) == 0
    assert weights_of(tmp_path / "offloaded", 2) == weights_of(undisturbed, 4)


@pytest.mark.parametrize("kept", [True, False])
def test_a_fork_keeps_the_moments_of_its_own_recipe_alone(tiny_model, tmp_path, undisturbed, kept, capfd):
    """Those of another loss would move the weights on in its way, whatever the rewards."""
    fork, own = Fork(str(undisturbed), 2), read_config(undisturbed).algorithm.recipe
    config = make_config(tiny_model, tmp_path, name="forked", algorithm={"recipe": own if kept else "rloo"})
    assert own != "rloo"
    opened = open_run(
        config, recipe=None, fork=fork, plain=True, job=alone(), check=None, on_step=unheard, profile=None
    )
    with opened as (_, state, done):
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
        assert len(moments) == 2 * len(state.params) and done == 0
        assert any(x.any() for x in moments) == kept
        weights = {name: np.asarray(value).tobytes() for name, value in state.params.items()}
    assert weights == weights_of(undisturbed, 2)
    assert ("the optimizer starts fresh" in capfd.readouterr().err) != kept


def test_a_fork_of_a_step_that_was_not_kept_names_those_that_were(tiny_model, tmp_path, undisturbed):
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has steps \[2, 4\]"):
        train(make_config(tiny_model, tmp_path), fork=Fork(str(undisturbed), 3), plain=True)


def test_a_fork_begins_its_own_schedule(tiny_model, tmp_path):
    optimizer = {"learning_rate": 1e-3, "schedule": "linear"}
    settings = {"eval": {"at_start": False, "at_end": False}, "train": {"optimizer": optimizer}}
    train(make_config(tiny_model, tmp_path, name="first", steps=2, **settings), plain=True)
    fork = Fork(str(tmp_path / "first"), None)
    train(make_config(tiny_model, tmp_path, name="second", steps=3, **settings), fork=fork, plain=True)
    lines = read_records(tmp_path / "second" / "metrics.jsonl")
    rates = [line["optimizer/learning_rate"] for line in lines if "optimizer/learning_rate" in line]
    assert rates == pytest.approx([1e-3, 5e-4, 0.0], abs=1e-9)
