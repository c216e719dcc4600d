"""A run is continued by its own config.yaml wherever its folder is, and from whatever folder the command is given."""

import os
import shutil
from pathlib import Path

import pytest
import yaml
from tiny_runs import STEPS, STEPWISE, assert_same_run, make_config, merged, trained

import podium
from podium.api.run_handle import load_run
from podium.cli import app
from podium.config.errors import ConfigError, UsageError
from podium.observe.run_dir import read_config, saved_steps
from podium.settings import load_settings
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another working directory."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def half(run_of) -> Path:
    """A run of two steps, saved, with two more to come. Nobody changes it."""
    return run_of(**{**STEPWISE, "steps": 2})


def with_relative_place(run: Path, folder: Path) -> Path:
    """A copy of the run at `folder/runs/run` whose config says so as it does where `runs_dir` is the default."""
    copy = folder / "runs" / "run"
    shutil.copytree(run, copy)
    settings = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump({**settings, "runs_dir": "runs", "name": "run"}))
    return copy


def go_on(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        app(["train", *arguments, "--plain"], prog_name="podium")
    return int(stopped.value.code or 0)


def test_the_own_config_continues_its_run_from_another_folder(half, undisturbed, tmp_path, elsewhere):
    run = with_relative_place(half, tmp_path)
    assert go_on(str(run / "config.yaml"), "--set", f"steps={STEPS}") == 0
    assert_same_run(run, undisturbed)
    assert list(elsewhere.iterdir()) == []


def test_the_own_config_continues_a_run_that_was_moved_and_renamed(half, undisturbed, tmp_path, elsewhere, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = with_relative_place(half, tmp_path)
    (tmp_path / "x").mkdir()
    run.rename(tmp_path / "x" / "b")
    assert go_on("x/b/config.yaml", "--set", f"steps={STEPS}") == 0
    assert_same_run(tmp_path / "x" / "b", undisturbed)
    assert list((tmp_path / "runs").iterdir()) == []
    monkeypatch.chdir(tmp_path / "x" / "b")
    (tmp_path / "x" / "b").rename(tmp_path / "c")
    assert load_settings(["config.yaml"], [], {}).config.name == "c"


def test_in_its_own_place_nothing_of_the_config_changes(half, tmp_path, monkeypatch):
    run = with_relative_place(half, tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latest").symlink_to(run)
    for file in ("runs/run/config.yaml", str(run / "config.yaml"), "latest/config.yaml"):
        config = load_settings([file], [], {}).config
        assert (config.runs_dir, config.name) == ("runs", "run")


def test_a_link_to_a_runs_config_continues_that_run(half, tmp_path, elsewhere):
    run = with_relative_place(half, tmp_path)
    (elsewhere / "mine.yaml").symlink_to(run / "config.yaml")
    config = load_settings(["mine.yaml"], [], {}).config
    assert (config.runs_dir, config.name) == (str(tmp_path / "runs"), "run")
    with pytest.raises(ConfigError, match=r"runs/run: is a folder; to continue the run in it, give .*/run/config.yaml"):
        load_settings([run], [], {})


def test_settings_of_the_command_line_still_begin_another_run(half, tmp_path, elsewhere):
    run = with_relative_place(half, tmp_path)
    named = load_settings([run / "config.yaml"], ["name=other"], {}).config
    assert (named.runs_dir, named.name) == (str(tmp_path / "runs"), "other")
    moved = load_settings([run / "config.yaml"], ["runs_dir=mine"], {}).config
    assert (moved.runs_dir, moved.name) == ("mine", "run")


def test_an_environment_that_leads_elsewhere_is_an_error(half, tmp_path, elsewhere):
    run = with_relative_place(half, tmp_path)
    with pytest.raises(ConfigError, match=r"config.yaml is a run's own config and continues the run in .*unset the"):
        load_settings([run / "config.yaml"], [], {"PODIUM_RUNS_DIR": str(elsewhere)})
    loaded = load_settings([run / "config.yaml"], [], {"PODIUM_RUNS_DIR": str(tmp_path / "runs")})
    assert loaded.config.name == "run"


def test_a_project_with_a_config_of_this_name_is_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("model: demo\nname: mine\ntasks: [{name: arithmetic}]\n")
    assert load_settings(["config.yaml"], [], {}).config.runs_dir == "runs"


@pytest.mark.parametrize(("command", "recipe"), [("sft", "sft"), ("dpo", "dpo")])
def test_imitation_and_preferences_continue_a_run_that_was_renamed(tmp_path, monkeypatch, command, recipe):
    """And begin one beside it from the config of a run of another kind."""
    called: list[tuple[str, str]] = []

    def stub(config, **options):
        called.append((config.runs_dir, config.name))
        return 0

    monkeypatch.setattr("podium.train.loop.train", stub)
    for name, own in (("renamed", recipe), ("first", "grpo")):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"model": "demo", "runs_dir": "runs", "name": "x", "tasks": [{"name": "arithmetic"}]}
        changes = {"algorithm": {"recipe": own}, "group_size": 8 if own == "grpo" else 1 + (own == "dpo")}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings | changes))
        (folder / "run.lock").touch()
        with pytest.raises(SystemExit):
            app([command, str(folder / "config.yaml")], prog_name="podium")
    assert called == [(str(tmp_path), "renamed"), (str(tmp_path), f"first-{recipe}")]


def test_rows_that_the_run_keeps_move_with_it(tiny_model, tmp_path, monkeypatch):
    """Those given in Python are in the run's folder: training, evaluation and the agreement of settings find them."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {n}", "answer": str(n)} for n in range(8)]
    tiny = make_config(tiny_model, "runs", name="unused").model_dump(mode="json")
    settings = {key: tiny[key] for key in ("prompts_per_step", "group_size", "rollout", "grading", "train", "metrics")}
    settings = merged(settings, {"train": {"optimizer": {"schedule": "constant"}}, "eval": {"questions": 4}})
    run = podium.grpo(str(tiny_model), rows, eval_data=rows, name="a", steps=1, **settings)
    assert str(read_config(run.path).tasks[0].path).startswith("runs/a/data/")
    (tmp_path / "runs" / "a").rename(tmp_path / "b")
    assert go_on("b/config.yaml", "--set", "steps=2") == 0
    assert [line["step"] for line in trained(tmp_path / "b")] == [1, 2]
    assert list((tmp_path / "runs").iterdir()) == []
    assert 0.0 <= load_run("b").evaluate().accuracy <= 1.0
    config = read_config(tmp_path / "b")
    assert Path(str(config.tasks[0].path)).parent == tmp_path / "b" / "data"


def test_fewer_steps_than_are_done_are_refused_and_change_nothing(half, tmp_path, elsewhere):
    run = with_relative_place(half, tmp_path)
    before = (run / "config.yaml").read_bytes()
    config = load_settings([run / "config.yaml"], ["steps=1"], os.environ).config
    rule = r"steps: 2 steps of run .*runs/run are done and saved, and only 1 are asked for, .* set steps above 2"
    with pytest.raises(UsageError, match=rule):
        train(config, plain=True)
    assert (run / "config.yaml").read_bytes() == before
    assert saved_steps(run / "checkpoints") == [2]


def test_fewer_steps_than_are_done_name_the_step_to_begin_from(half, tmp_path, elsewhere):
    run = with_relative_place(half, tmp_path)
    shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / "1")
    config = load_settings([run / "config.yaml"], ["steps=1"], os.environ).config
    with pytest.raises(
        UsageError, match=r"or start another run from an earlier step: --from .*/runs/run@1 --set name="
    ):
        train(config, plain=True)


def test_questions_that_changed_under_a_run_are_told(run_of, tmp_path, capsys):
    data, held_out = tmp_path / "sums.jsonl", tmp_path / "held_out.jsonl"
    rows = [f'{{"question": "1 + {n}", "answer": "{1 + n}"}}\n' for n in range(1, 9)]
    data.write_text("".join(rows))
    held_out.write_text(rows[0])
    task = {"name": "jsonl", "path": str(data), "eval_path": str(held_out)}
    run = run_of(tasks=[task], steps=1)
    config = str(run / "config.yaml")
    assert go_on(config, "--set", "steps=2") == 0
    assert "have changed" not in capsys.readouterr().err
    data.write_text("".join(rows[:-1]))
    assert go_on(config, "--set", "steps=3") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "training questions of jsonl have changed since the checkpoint was saved: 8 questions with digest" in said
    assert "7 questions with digest" in said
    assert len(trained(run)) == 3
