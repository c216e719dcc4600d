"""How large the package is and who imports whom, with the goals beside.

    python -m tools.structure      # exit status 1 where a goal is missed

Floors are the parts of Podium from the ground up: a module imports what stands on lower floors, or its own package.
Imports inside functions and for types alone count as all others do.
"""

import ast
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "podium"

FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "config",
        "accelerators",
        "files",
        "malloc",
        "rollout.request",
        "rollout.lanes",
        "rollout.pages",
        "rollout.prefill",
        "rollout.scheduler",
    ),
    (
        "prices",
        "models.architecture",
        "models.layouts",
        "models.params",
        "models.flops",
        "models.names",
        "models.gguf",
        "models.source",
        "models.presets",
    ),
    ("tasks", "algorithms.advantages", "algorithms.recipes", "tools.seed_keys"),
    ("observe",),
    ("settings",),
    ("tools",),
    ("job",),
    ("pods",),
    ("sharding", "hlo", "compiler"),
    ("kernels",),
    ("models",),
    ("rollout", "algorithms"),
    ("train",),
    ("plan",),
    ("certify", "bench"),
    ("api",),
    ("cli",),
)
WITHOUT_JAX = {part for floor in FLOORS[:8] for part in floor} | {"hlo", "compiler", "cli", "plan.cli", "bench.cli"}
HEIGHTS = {part: height for height, floor in enumerate(FLOORS) for part in floor}

STEP = (
    "train.loop",
    "train.generate",
    "train.trainer",
    "train.step",
    "train.batch",
    "rollout.engine",
    "rollout.programs",
    "models.decoder",
    "algorithms.losses",
)
"""What one must read to follow a step."""
CAPABILITIES = {
    "observe.report": 1_200,
    "observe.watch": 300,
    "certify": 1_400,
    "kernels": 1_000,
    "bench": 700,
    "api": 800,
}
"""What one need not read to understand training: each counts for itself, with a goal of its own."""
FILE_LINES, FUNCTION_LINES, CLASS_LINES = 400, 60, 150

Modules = Mapping[str, str]
"""Full name -> source text, of every module of the package."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number with its goal."""

    name: str
    value: float
    goal: float
    """The most it may be."""
    found: Sequence[str] = ()
    """What makes the number, where that can be named."""

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.goal


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


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def long_definitions(modules: Modules, kinds: tuple[type[Definition], ...], limit: int) -> list[str]:
    """`module:line name (lines)` of functions or classes longer than the limit, decorators not counted."""
    return [
        f"{module}:{node.lineno} {node.name} ({lines})"
        for module, text in modules.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > limit
    ]


def measures(modules: Modules) -> list[Measure]:
    """All numbers that have a goal."""
    lines = {name.partition(".")[2]: text.count("\n") for name, text in modules.items()}
    rooms = {name: name.partition(".")[0] for name in lines}
    plan = sum(count for name, count in lines.items() if rooms[name] in ("plan", "hlo"))
    pods = sum(count for name, count in lines.items() if rooms[name] in ("pods", "job"))
    # Reading the seed system's files is no part of training: it stands outside the core, and counts for itself.
    tools = sum(count for name, count in lines.items() if rooms[name] == "tools")
    added = {part: sum(lines[name] for name in lines if (name + ".").startswith(f"{part}.")) for part in CAPABILITIES}
    core = sum(lines.values()) - plan - pods - tools - sum(added.values())
    files = [f"podium.{name} ({count})" for name, count in lines.items() if count > FILE_LINES]
    functions = long_definitions(modules, (ast.FunctionDef, ast.AsyncFunctionDef), FUNCTION_LINES)
    classes = long_definitions(modules, (ast.ClassDef,), CLASS_LINES)
    # Before GPUs, search by refusal, recovery off the laptop, buckets and pages of keys: 5,000, 4,300 and 12,000.
    # The last was 19,000 before groups larger than a host, the first 7,000 before copies from and to hosts were timed.
    edges = imports(modules)
    in_circles, upward = circles(edges), upward_imports(edges)
    return [
        Measure("lines of plan + hlo", plan, 7_080),
        Measure("lines of pods + job", pods, 6_000),
        Measure("lines of tools", tools, 500),
        *(Measure(f"lines of {part}", count, CAPABILITIES[part]) for part, count in added.items()),
        Measure("lines of everything else", core, 19_170),
        Measure("lines on the path of a step", sum(lines[name] for name in STEP), 2_500),
        Measure("lines of the median file", statistics.median(filter(None, lines.values())), 200),
        Measure("lines of the largest file", max(lines.values()), FILE_LINES, files),
        Measure(f"functions of more than {FUNCTION_LINES} lines", len(functions), 0, functions),
        Measure(f"classes of more than {CLASS_LINES} lines", len(classes), 0, classes),
        Measure("circles of imports", len(in_circles), 0, in_circles),
        Measure("upward imports", len(upward), 0, upward),
    ]


def main() -> int:
    """Print the numbers, and what misses a goal."""
    modules = read_modules()
    every = measures(modules)
    for measure in every:
        missed = "" if measure.met else "  missed"
        print(f"{measure.name:36} {measure.value:>8,.0f}   goal {measure.goal:>6,.0f}{missed}")
        for each in measure.found:
            print(f"    {each}")
    print("largest files:")
    by_size = sorted(((text.count("\n"), name) for name, text in modules.items()), reverse=True)
    for count, name in by_size[:10]:
        print(f"    {count:4} {name}")
    return 0 if all(measure.met for measure in every) else 1


if __name__ == "__main__":
    sys.exit(main())
