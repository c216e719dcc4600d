"""Who imports whom and counts that may only fall, which are tested; how large each part is, which is only printed.

    python -m tools.structure             # exit status 1 if an import points upward, or a count has risen
    python -m tools.structure --record    # records the counts, unless one has risen
    python -m tools.structure --way       # also runs the first example, and counts what it runs: minutes

Floors are the parts of Podium from the ground up: a module imports from lower floors, or from its own package. Imports
inside functions and for type checking count like all others.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.example_way import follow_example
from tools.structure_counts import count_all, read_golden, record, risen, totals

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "podium"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("patience",),
    ("buckets",),
    (
        "config",
        "accelerators",
        "chips",
        "files",
        "plain",
        "malloc",
        "terminal",
        "rollout.request",
        "sandbox",
    ),
    (
        "prices",
        "models.architecture",
        "models.attention.mask_rule",
        "models.blocks",
        "models.blocks.mathematics",
        "models.blocks.delta_rule",
        "models.blocks.routing",
        "models.families",
        "models.files",
        "models.family",
        "models.flops",
        "models.layouts",
        "models.params",
        "models.presets",
        "models.text",
    ),
    ("serve.bodies", "serve.documents"),
    (
        "tasks",
        "algorithms.advantages",
        "algorithms.recipes",
        "algorithms.recipe_options",
        "rollout.answer",
        "rollout.recorded_routes",
        "rollout.sequence",
        "rollout.pages",
        "rollout.scheduler",
        "rollout.transcript",
        "rollout.turn_format",
    ),
    ("run",),
    ("observe",),
    ("settings",),
    ("compat", "project"),
    ("job",),
    ("pods",),
    ("sharding", "hlo", "compiler"),
    ("compile_ahead",),
    ("models.linear", "models.quantised", "models.attention.blockwise", "models.attention.mask"),
    ("kernels",),
    ("models", "models.files.hf", "models.files.peft"),
    ("rollout", "rollout.engine", "algorithms"),
    ("hosts",),
    ("sampling",),
    ("train",),
    ("plan", "plan.request.workload"),
    ("certify",),
    ("doctor",),
    ("api",),
    ("serve",),
    ("cli",),
)
WHEN_APPLIED = {"models.blocks.mathematics", "models.blocks.delta_rule", "models.blocks.routing"}
"""Imported by layers only when they are applied, in functions that are traced: they need jax, and of Podium no more
than the layers do."""
WITHOUT_JAX = {part for floor in FLOORS[:10] for part in floor} - WHEN_APPLIED
WITHOUT_JAX |= {
    "hlo",
    "compiler",
    "cli",
    "plan.cli",
    "doctor.benchmarks.cli",
    "rollout.engine",
    "plan.request.workload",
}
HEIGHTS = {part: height for height, floor in enumerate(FLOORS) for part in floor}

Modules = Mapping[str, str]
"""Full name -> source text, of every module of the package."""


def read_modules(package: Path = PACKAGE) -> dict[str, str]:
    """Every module below a package's folder."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text(
            encoding="utf-8"
        )
        for path in sorted(package.glob("**/*.py"))
    }


def part_of(module: str) -> str:
    """The part of the longest name that a module belongs to; empty where it has no floor."""
    inner = module.partition(".")[2]
    return max((part for part in HEIGHTS if f"{inner}.".startswith(f"{part}.")), key=len, default="")


def imports(modules: Modules) -> dict[str, set[str]]:
    """The modules that each module imports anywhere, but for packages' own files that are empty or hold the version."""
    full = {name for name, text in modules.items() if text and "." in name}
    return {name: set(_imported(ast.parse(modules[name]))) & full - {name} for name in full}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward_imports(edges: Mapping[str, set[str]]) -> list[str]:
    """`a -> b` where b stands on a higher floor, or on the same floor in another package."""
    found = []
    for module, targets in edges.items():
        for target in targets:
            here, there = HEIGHTS[part_of(module)], HEIGHTS[part_of(target)]
            if there > here or (there == here and module.split(".")[1] != target.split(".")[1]):
                found.append(f"{module} -> {target}")
    return sorted(found)


def circles(edges: Mapping[str, set[str]]) -> list[str]:
    """Groups of modules that import each other, over any number of steps."""
    reach = {module: set(targets) for module, targets in edges.items()}
    for middle in reach:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    groups = {frozenset({m for m in reach[a] if a in reach[m]}) for a in reach if a in reach[a]}
    return sorted(" <-> ".join(sorted(group)) for group in groups)


def reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    """A module and all that it imports, over any number of steps."""
    found, todo = {start}, [start]
    while todo:
        new = edges[todo.pop()] - found
        found |= new
        todo += new
    return found


def main() -> int:
    """Print sizes and counts, and what breaks a rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record the counts, unless one has risen")
    parser.add_argument("--way", action="store_true", help="run the first example and count what it runs")
    arguments = parser.parse_args()
    modules = read_modules()
    lines = {name: text.count("\n") for name, text in modules.items()}
    edges = imports(modules)
    rooms = sorted({name.split(".")[1] for name in lines if "." in name})
    for room in rooms:
        inside = [name for name in lines if name.split(".")[1:2] == [room]]
        print(f"{room:14} {len(inside):4} files {sum(lines[name] for name in inside):7,} lines")
    path = reached(edges, "podium.train.loop")
    print(f"podium         {len(lines):4} files {sum(lines.values()):7,} lines")
    print(f"a training step and all that it imports: {len(path)} files, {sum(lines[name] for name in path):,} lines")
    broken = [f"upward import: {each}" for each in upward_imports(edges)]
    broken += [f"circle: {each}" for each in circles(edges)]
    for name, total in totals(count_all()).items():
        print(f"{total:5} {name}")
    if arguments.way:
        print("the first example runs", ", ".join(f"{n:,} {name}" for name, n in follow_example()._asdict().items()))
    broken += [f"risen: {each}" for each in (record() if arguments.record else risen(read_golden(), count_all()))]
    print(*broken, sep="\n", end="\n" if broken else "")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
