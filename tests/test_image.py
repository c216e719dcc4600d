"""The container image: what its Dockerfile copies and runs, without docker; the nightly workflow builds it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LINES = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]


def of(word: str) -> list[str]:
    """What follows a word of the Dockerfile, in each line that begins with it."""
    return [line.removeprefix(word).strip() for line in LINES if line.startswith(f"{word} ")]


def copied() -> list[str]:
    return [source for line in of("COPY") for source in line.split()[:-1]]


def test_what_the_image_copies_is_there_and_sent_to_the_builder():
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied()) == sorted(sent)
    assert [name for name in copied() if not (ROOT / name).exists()] == []


def test_the_image_installs_extras_that_there_are_and_the_demos_model_of_the_makefile():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (given,) = of("ARG")
    assert set(given.removeprefix("EXTRAS=").split(",")) <= set(project["optional-dependencies"])
    (model,) = re.findall(r"^DEMO_MODEL := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert model in "\n".join(of("RUN"))
    minor = int(re.findall(r"python:3\.(\d+)-slim", "".join(of("FROM")))[0])
    low, high = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    assert low <= minor < high


def test_the_nightly_workflow_builds_the_image_and_runs_the_first_example_in_it():
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]["image"]["steps"]
    runs = [step["run"] for step in steps if "run" in step]
    built = [found[1] for run in runs if (found := re.search(r"docker build .*-t (\S+) \.$", run))]
    started = [run.split(maxsplit=4) for run in runs if run.startswith("docker run --rm ")]
    assert [image for *_, image, _ in started] == built
    for *_, command in started:
        named = [word for word in command.split() if word.endswith((".py", ".yaml"))]
        assert named and all((ROOT / name).exists() and name.split("/")[0] in copied() for name in named)
    assert "python examples/first.py" in [command for *_, command in started]


@pytest.mark.long  # installs everything from a package registry
def test_what_the_image_runs_installs_podium_and_the_first_example_runs(tmp_path):
    folder, environment = tmp_path / "image", tmp_path / "venv"
    folder.mkdir()
    for name in copied():
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables = {
        **kept,
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "EXTRAS": "demo",
        "JAX_PLATFORMS": "cpu",
    }
    for command in (*of("RUN"), "podium --help", "python examples/first.py"):
        done = subprocess.run(["sh", "-c", command], cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
