"""Rules that hold over the whole package: who imports whom, how large it is, what needs no jax, which configs load."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from podium.settings import load_settings
from tools.structure import (
    ROOT,
    WITHOUT_JAX,
    circles,
    imports,
    part_of,
    reached,
    read_modules,
    upward_imports,
)

CONFIGS = sorted((ROOT / "configs").glob("**/*.yaml"))
HEAVY = ("jax", "transformers", "datasets", "torch", "wandb", "tensorboard", "trackio")
MODULES = read_modules()
NAMES = [module for module in MODULES if module != "podium"]


def test_every_module_has_its_floor():
    assert [module for module in NAMES if not part_of(module)] == []


def test_no_import_points_upward_and_none_closes_a_circle():
    edges = imports(MODULES)
    assert upward_imports(edges) == []
    assert circles(edges) == []


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


def test_what_a_module_reaches_is_followed_to_its_end():
    assert reached({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, "a") == {"a", "b", "c"}


def test_what_reads_settings_and_text_knows_no_jax():
    names = [module for module in NAMES if part_of(module) in WITHOUT_JAX]
    names += ["podium.plan.cli", "podium.models.text.tokenizer"]
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
    learning = "dpo" if config.algorithm.recipe == "dpo" else "train"
    verb = "plan" if path.parent.name == "seeds" else learning
    assert first_line.startswith(f"# podium {verb} {path.relative_to(ROOT)}")


def test_what_compares_with_others_code_is_run_by_make_parity():
    """Such a test asks `others_code` for the library, which `make parity` does not skip, and is marked `parity`."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("**/test_*.py")}
    asking = {path.name: text.count("mark.parity") for path, text in sources.items() if "others_code(" in text}
    del asking["test_architecture.py"]
    assert len(asking) >= 6
    assert all(asking.values()), asking
    own = re.compile(r"importorskip\(\"(torch|peft|trl|transformers)\"")
    assert [path.name for path, text in sources.items() if own.search(text)] == []
