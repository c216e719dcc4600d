"""Rules that hold over the whole package: who imports whom, which settings exist and are read, which configs load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from podium.config import schema
from podium.config.load import load
from podium.config.schema import Config, Section

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "podium"
CONFIGS = sorted((ROOT / "configs").glob("**/*.yaml"))

HEAVY = ("jax", "transformers", "datasets", "torch")
FLOORS: tuple[tuple[str, ...], ...] = (
    ("config", "accelerators", "files", "rollout.request", "rollout.scheduler"),
    (
        "prices",
        "models.architecture",
        "models.params",
        "models.names",
        "models.gguf",
        "models.source",
        "models.presets",
    ),
    ("tasks", "algorithms.advantages", "algorithms.recipes"),
    ("observe",),
    ("settings", "tools"),
    ("job",),
    ("pods",),
    ("sharding", "hlo"),
    ("models",),
    ("rollout", "algorithms"),
    ("train",),
    ("plan",),
    ("cli",),
)
"""The parts of Podium from the ground up: each imports what stands on lower floors, inside functions too."""
WITHOUT_JAX = {part for floor in FLOORS[:7] for part in floor} | {"cli", "plan.cli"}
STILL_UPWARD = frozenset(
    line.strip() for line in (ROOT / "tests" / "still_upward.txt").read_text(encoding="utf-8").splitlines()
)  # shrinks to nothing


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.glob("**/*.py"))}


PLACES = {part: height for height, floor in enumerate(FLOORS) for part in floor}


def part_of(module: str) -> str:
    """The part of the longest name that a module belongs to."""
    inner = module.removeprefix("podium.")
    return max((part for part in PLACES if f"{inner}.".startswith(f"{part}.")), key=len, default="")


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of modules of this package that are imported anywhere below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("podium."):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("podium."))


def imported_modules(tree: ast.AST) -> set[str]:
    """Modules that are imported, those that are named after `import` among them."""
    found = set(imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name for each in node.names if (name := f"{node.module}.{each.name}") in MODULES}
    return {name for name in found & set(MODULES) if MODULES[name].body}  # a package alone is an empty file


def test_every_module_has_its_floor():
    assert {module for module in MODULES if module != "podium" and not part_of(module)} == set()


@pytest.mark.parametrize("module", [module for module in MODULES if module != "podium"])
def test_imports_go_downwards(module):
    floor, package = PLACES[part_of(module)], module.split(".")[1]
    others = {name for name in imported_modules(MODULES[module]) if PLACES[part_of(name)] >= floor}
    upward = sorted(
        f"{module} -> {name}" for name in others if PLACES[part_of(name)] > floor or name.split(".")[1] != package
    )
    assert not set(upward) - STILL_UPWARD


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, over any number of steps."""
    reach = {module: set(targets) for module, targets in edges.items()}
    for middle in reach:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    return sorted({tuple(sorted(m for m in reach[a] if a in reach[m])) for a in reach if a in reach[a]})


def test_no_module_imports_itself_over_others():
    edges = {module: imported_modules(tree) - {module} for module, tree in MODULES.items()}
    assert cycles(edges) == [] or STILL_UPWARD


def test_what_reads_settings_and_text_knows_no_jax():
    names = [module for module in MODULES if module != "podium" and part_of(module) in WITHOUT_JAX] + [
        "podium.plan.cli"
    ]
    assert len(names) > 30
    code = (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        f"    found = [heavy for heavy in {HEAVY} if heavy in sys.modules]\n"
        "    assert not found, f'{name} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_makes_no_devices():
    names = [module for module in MODULES if module != "podium.cli"]
    code = (
        f"import importlib\nfor name in {names}:\n    importlib.import_module(name)\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SECTIONS = {
    name: value for name, value in vars(schema).items() if isinstance(value, type) and issubclass(value, Section)
}


def inner_section(annotation: object) -> type[Section] | None:
    """The section that a field holds, or has a list of."""
    parts = (annotation, *get_args(annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


def settings(section: type[Section], path: str) -> Iterator[tuple[str, str, str]]:
    """(path, class, name) of every setting below a section; a task stands for all tasks."""
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        if inner is None:
            yield f"{path}{name}", section.__name__, name
        else:
            yield from settings(inner, f"{path}{name}.")


SETTINGS = {path: (owner, name) for path, owner, name in settings(Config, "")}
CARRIER = {"AlgorithmConfig": "Recipe"}
"""Classes that carry a section's settings on, under the same names."""


def readings(tree: ast.AST) -> set[str]:
    """Attributes that a module reads."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def texts(tree: ast.AST) -> set[object]:
    """Names of settings that a module treats by a list of them."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def without_rules(module: str) -> ast.Module:
    """A module but for functions that only say what cannot be combined: to check a setting is not to use it."""
    body = [each for each in MODULES[module].body if not getattr(each, "name", "").endswith("_rules")]
    return ast.Module(body, [])


USERS = [
    without_rules(module)
    for module in MODULES
    if not module.startswith("podium.config") or module == "podium.config.sizes"
]
USES = [(readings(tree), names(tree), texts(tree)) for tree in USERS]


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_is_read(path):
    """Outside podium.config, but for its sizes, `.name` is read in a module that has to do with its section."""
    owner, name = SETTINGS[path]
    near = {owner, CARRIER.get(owner, owner), path.split(".")[-2] if "." in path else "config"}
    read = any(name in attributes and near & (attributes | words) for attributes, words, _ in USES)
    listed = any(name in constants and owner in words for _, words, constants in USES)
    assert read or listed, f"nothing reads {path}"


def annotated(function: ast.FunctionDef) -> dict[str, type[Section]]:
    """Parameters of a function that are sections of the config."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {
        each.arg: SECTIONS[each.annotation.id]
        for each in arguments
        if isinstance(each.annotation, ast.Name) and each.annotation.id in SECTIONS
    }


def chain(node: ast.expr) -> list[str]:
    """`a.b.c` as its names, empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = chain(node.value) if isinstance(node, ast.Attribute) else []
    return [*inner, node.attr] if inner and isinstance(node, ast.Attribute) else []


def first_unknown(section: type[Section], attributes: list[str]) -> str | None:
    """The first of a chain of attributes that is neither a setting nor a method of pydantic's."""
    for name in attributes:
        if name not in section.model_fields:
            return None if hasattr(section, name) else name
        inner = section.model_fields[name].annotation
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            return None  # a value, or a list: its attributes are not settings
        section = inner
    return None


@pytest.mark.parametrize("module", MODULES)
def test_no_setting_is_read_that_does_not_exist(module):
    for function in ast.walk(MODULES[module]):
        if not isinstance(function, ast.FunctionDef):
            continue
        parameters = annotated(function)
        for node in ast.walk(function):
            path = chain(node) if isinstance(node, ast.Attribute) else []
            if path and path[0] in parameters:
                unknown = first_unknown(parameters[path[0]], path[1:])
                assert unknown is None, f"{module}:{node.lineno} reads {'.'.join(path)}: no setting {unknown}"


def test_a_chain_that_leaves_the_schema_is_noticed():
    assert first_unknown(Config, ["train", "optimizer", "momentum"]) == "momentum"
    assert first_unknown(Config, ["train", "optimizer", "beta1", "real"]) is None


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_begins_with_its_command(path):
    config = load([path], [], {}).config
    assert config.name == path.stem
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    verb = "plan" if path.parent.name == "seeds" else "train"
    assert first_line.startswith(f"# podium {verb} {path.relative_to(ROOT)}")
