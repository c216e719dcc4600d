"""What one does with a run that is done: evaluate it, and the commands that its summary prints."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import STEPS, config_of, metrics_of, read_records

from podium import cli
from podium.observe.run_dir import Fork
from podium.observe.summary import next_commands
from podium.train.evaluate import evaluate_command

pytestmark = pytest.mark.usefixtures("one_device")


def test_an_evaluation_of_a_run_prints_one_object_on_stdout(undisturbed, capfd):
    config = config_of(undisturbed)
    assert evaluate_command(config, run=Fork(str(undisturbed), None), as_json=True) == 0
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    last = metrics_of(undisturbed)[-1]
    assert (found["target"], found["step"]) == (f"{undisturbed}@{STEPS}", STEPS)
    assert {name: value for name, value in found.items() if name.startswith("eval/")} == {
        name: value for name, value in last.items() if name.startswith("eval/")
    }


def test_an_evaluation_shows_and_writes_its_answers(undisturbed, tmp_path, capfd):
    config, out = config_of(undisturbed), tmp_path / "answers.jsonl"
    assert evaluate_command(config, run=Fork(str(undisturbed), None), as_json=False, show=2, out=out) == 0
    said = capfd.readouterr().err
    answers = read_records(out)
    assert (len(answers), said.count("question  "), said.count("expected  ")) == (8, 2, 2)
    assert f"question  {answers[0]['question']}\n" in said
    assert {answer["step"] for answer in answers} == {STEPS}


def test_an_evaluation_of_an_earlier_step_is_that_of_the_run(tiny_model, tmp_path, undisturbed, capfd):
    evaluate_command(config_of(undisturbed), run=Fork(str(undisturbed), 2), as_json=True)
    found = json.loads(capfd.readouterr().out)
    (expected,) = (each for each in metrics_of(undisturbed) if each["step"] == 2 and "eval/accuracy" in each)
    assert found["eval/arithmetic/avg_at_k"] == expected["eval/arithmetic/avg_at_k"]


@pytest.fixture
def copied(undisturbed, tmp_path) -> Path:
    """The run again, in a folder that may be changed."""
    run = tmp_path / "runs" / "run"
    shutil.copytree(undisturbed, run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(undisturbed.parent), str(run.parent)))
    return run


def test_the_commands_that_the_summary_prints_work(copied, monkeypatch):
    """In this process."""
    for command in next_commands(copied):
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code, command
    assert (copied.parent / "run-model" / "model.safetensors").exists()


@pytest.mark.long
def test_the_commands_that_the_summary_prints_work_as_they_are_printed(copied, tmp_path, monkeypatch):
    """The same by a shell that has no environment of ours active."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for command in next_commands(copied):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        environment["JAX_COMPILATION_CACHE_DIR"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
        environment["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
        done = subprocess.run(command, shell=True, cwd=Path.cwd(), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
