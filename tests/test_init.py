"""`podium init` writes a project whose config loads and whose data and reward work; the sdist has all that it needs."""

import re
import tomllib
from pathlib import Path

import pytest

from podium.config import load as load_module
from podium.project import FILES, TEMPLATES, write_project
from podium.settings import load_settings
from podium.tasks.functions import RewardFunction
from podium.tasks.mixture import TaskMixture

ROOT = Path(__file__).parents[1]


def test_the_project_loads_and_its_data_and_reward_work(tmp_path, monkeypatch):
    written = write_project(tmp_path / "sums")
    assert {str(path.relative_to(tmp_path / "sums")) for path in written} == {
        "config.yaml",
        "rewards.py",
        "README.md",
        "data/train.jsonl",
        "data/test.jsonl",
    }
    monkeypatch.chdir(tmp_path / "sums")
    monkeypatch.syspath_prepend(str(tmp_path / "sums"))
    config = load_settings(["config.yaml"], [], {}).config
    assert config.name == "sums"
    mixture = TaskMixture(config.tasks, seed=0)
    (held_out,) = mixture.eval_prompts().values()
    trained = {mixture.prompt_at(index).prompt.question for index in range(60)}
    assert len(trained) == 60 and len(held_out) == 21 and not trained & {each.prompt.question for each in held_out}
    assert RewardFunction("rewards:short").call(num_tokens=1) == 0.95


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty"):
        write_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_readme_names_what_is_there():
    text = (TEMPLATES / "README.md").read_text()
    assert {"train", "report", "eval", "chat", "export", "plan"} <= set(
        re.findall(r"^podium (\w+)", text, re.MULTILINE)
    )


def test_templates_and_configs_are_in_wheel_and_sdist():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "project/*" in setuptools["package-data"]["podium"]
    shipped = {path for pattern in setuptools["data-files"]["share/podium/configs"] for path in ROOT.glob(pattern)}
    assert shipped == {path for path in (ROOT / "configs").iterdir() if path.is_file()}
    assert {path.name for path in TEMPLATES.iterdir() if path.is_file()} == {*FILES, "__init__.py"}
    sdist = (ROOT / "MANIFEST.in").read_text()
    assert {"configs", "docs", "tests", "examples", "benches", "tools"} <= set(re.findall(r"graft (\w+)", sdist))


def test_an_installed_podium_brings_its_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "share" / "configs").mkdir(parents=True)
    (tmp_path / "share" / "configs" / "shipped.yaml").write_text("model: a/b\ntasks: [{name: arithmetic}]\nsteps: 7\n")
    monkeypatch.setattr(load_module, "SHIPPED", tmp_path / "share")
    assert load_settings(["configs/shipped.yaml"], [], {}).config.steps == 7
