"""Rules that hold over the whole package: who imports whom, how large it is, what needs no jax, which configs load."""

import subprocess
import sys
from pathlib import Path

import pytest

from podium.settings import load_settings
from tools.structure import (
    FILE_LINES,
    ROOT,
    WITHOUT_JAX,
    Measure,
    circles,
    imports,
    measures,
    part_of,
    read_modules,
    upward_imports,
)

CONFIGS = sorted((ROOT / "configs").glob("**/*.yaml"))
HEAVY = ("jax", "transformers", "datasets", "torch")
MODULES = read_modules()
NAMES = [module for module in MODULES if module != "podium"]


def test_every_module_has_its_floor():
    assert [module for module in NAMES if not part_of(module)] == []


@pytest.mark.parametrize("measure", measures(MODULES), ids=lambda measure: measure.name)
def test_the_package_keeps_its_limits(measure: Measure):
    assert measure.met, f"{measure.name}: {measure.value:g}, at most {measure.goal:g}; {'; '.join(measure.found)}"


@pytest.mark.parametrize("folder", ["tests", "benches", "tools", "examples"])
def test_files_beside_the_package_are_no_longer_than_its_own(folder: str):
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).glob("**/*.py")}
    assert lines
    assert {path.name: count for path, count in lines.items() if count > FILE_LINES} == {}


MADE_UP = {
    "podium.config.load": "def load():\n    from podium.train import loop\n",
    "podium.train.loop": "if TYPE_CHECKING:\n    from podium.config.load import load\n",
    "podium.observe": "",
    "podium.observe.writers": "import podium.models.params, podium.observe\n",
    "podium.models.params": "import podium.tasks.task\n",
    "podium.tasks.task": "from podium.algorithms import recipes\n",
    "podium.algorithms.recipes": "RECIPES = {}\n",
}


def test_lazy_and_type_only_imports_count():
    edges = imports(MADE_UP)
    assert upward_imports(edges) == [
        "podium.config.load -> podium.train.loop",
        "podium.models.params -> podium.tasks.task",
        "podium.tasks.task -> podium.algorithms.recipes",
    ]
    assert circles(edges) == ["podium.config.load <-> podium.train.loop"]


def test_a_circle_over_several_modules_is_one():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}) == ["a <-> b <-> c"]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"podium.plan.report": "x = 1\n" * 7_081}, {"lines of plan + hlo", "lines of the largest file"}),
        (
            {"podium.tasks.long": "def long():\n" + "    pass\n" * 60},
            {"functions of more than 60 lines"},
        ),
        (
            {"podium.tasks.long": "class Long:\n" + "    x = 1\n" * 150},
            {"classes of more than 150 lines"},
        ),
    ],
)
def test_what_is_too_large_is_missed(change: dict[str, str], missed: set[str]):
    small = dict.fromkeys(MODULES, "x = 1\n")
    assert {measure.name for measure in measures(small | change) if not measure.met} == missed


def test_what_reads_settings_and_text_knows_no_jax():
    names = [module for module in NAMES if part_of(module) in WITHOUT_JAX] + ["podium.plan.cli"]
    assert len(names) > 30
    code = (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        f"    found = [heavy for heavy in {HEAVY} if heavy in sys.modules]\n"
        "    assert not found, f'{name} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_makes_no_devices():
    names = [module for module in NAMES if module != "podium.cli"]
    code = (
        f"import importlib\nfor name in {names}:\n    importlib.import_module(name)\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_begins_with_its_command(path: Path):
    config = load_settings([path], [], {}).config
    assert config.name == path.stem
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    verb = "plan" if path.parent.name == "seeds" else "train"
    assert first_line.startswith(f"# podium {verb} {path.relative_to(ROOT)}")
