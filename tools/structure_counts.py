"""What the structure costs its reader, in counts that may only fall; `tests/golden/structure.json` holds them.

Each count is over the files of `podium/` and is kept by file, so that a test can name the file in which one has risen.
`tools.structure` prints them.
"""

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "structure.json"
MOST_PARAMETERS, MOST_ATTRIBUTES, MOST_LINES, MOST_POSITIONAL = 8, 12, 60, 5

LONG_SIGNATURES = f"functions with more than {MOST_PARAMETERS} parameters"
"""Kernels are counted apart: Pallas gives them a parameter for each operand, result and scratch."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Trees = Mapping[str, ast.Module]
"""Path of a file below the root -> its syntax tree."""
ByFile = Mapping[str, int]


def read_trees(root: Path = ROOT) -> dict[str, ast.Module]:
    """The syntax tree of every file of `podium/`, by its path."""
    paths = sorted((root / "podium").rglob("*.py"))
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def count_all(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Every count, by its name and then by file; files in which it is 0 are left out."""
    trees = read_trees(root)
    found = {name: {path: count(tree) for path, tree in trees.items()} for name, count in COUNTS.items()}
    found |= {name: _naming(root, trees, pattern) for name, pattern in CONCEPTS.items()}
    found["file names in two rooms"] = _shared_names(trees)
    long = found[LONG_SIGNATURES]
    found[f"kernels with more than {MOST_PARAMETERS} parameters"] = {
        path: n for path, n in long.items() if _room(path) == "kernels"
    }
    found[LONG_SIGNATURES] = {path: n for path, n in long.items() if _room(path) != "kernels"}
    found["functions outside config/ and run/ that take Config"] = {
        path: number
        for path, number in found["functions outside config/ and run/ that take Config"].items()
        if _room(path) not in ("config", "run")
    }
    return {name: {path: number for path, number in by_file.items() if number} for name, by_file in found.items()}


def totals(counts: Mapping[str, ByFile]) -> dict[str, int]:
    """The sum of each count over its files."""
    return {name: sum(by_file.values()) for name, by_file in counts.items()}


def risen(recorded: Mapping[str, ByFile], found: Mapping[str, ByFile]) -> list[str]:
    """A line for each count whose total has risen, with the files in which it rose."""
    lines = []
    before, now = totals(recorded), totals(found)
    for name, total in now.items():
        if total > before[name]:
            by_file = found[name].items()
            where = [
                f"{path} ({recorded[name].get(path, 0)} -> {n})"
                for path, n in by_file
                if n > recorded[name].get(path, 0)
            ]
            lines.append(f"{name}: {before[name]} -> {total}, in {', '.join(where)}")
    return lines


def read_golden() -> dict[str, dict[str, int]]:
    """The recorded counts."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def record() -> list[str]:
    """Record today's counts, unless one has risen; returns what has."""
    found = count_all()
    problems = risen(read_golden(), found) if GOLDEN.exists() else []
    if not problems:
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return problems


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def parameters(function: Function) -> list[ast.arg]:
    """The parameters of a function, without `self` and `cls`."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [each for each in every if each.arg not in ("self", "cls")]


def _takes_config(function: Function) -> bool:
    """Whether a parameter's type names `Config`."""
    types = [ast.unparse(each.annotation) for each in parameters(function) if each.annotation is not None]
    return any(re.search(r"\bConfig\b", text) for text in types)


def _attributes(node: ast.ClassDef) -> set[str]:
    """The names that a class's body or its methods' `self.NAME = ...` assign."""
    found: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.AnnAssign | ast.Assign):
            targets = [each.target] if isinstance(each, ast.AnnAssign) else each.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(each, Function):
            found |= {
                part.attr
                for part in ast.walk(each)
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                if isinstance(part.value, ast.Name) and part.value.id == "self"
            }
    return found


def _number_of(test: Callable[[ast.AST], bool]) -> Callable[[ast.Module], int]:
    return lambda tree: sum(test(node) for node in ast.walk(tree))


def _long(node: ast.AST) -> bool:
    return isinstance(node, Function) and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES


COUNTS: Mapping[str, Callable[[ast.Module], int]] = {
    "functions outside config/ and run/ that take Config": _number_of(
        lambda node: isinstance(node, Function) and _takes_config(node)
    ),
    LONG_SIGNATURES: _number_of(lambda node: isinstance(node, Function) and len(parameters(node)) > MOST_PARAMETERS),
    f"classes with more than {MOST_ATTRIBUTES} attributes": _number_of(
        lambda node: isinstance(node, ast.ClassDef) and len(_attributes(node)) > MOST_ATTRIBUTES
    ),
    f"functions over {MOST_LINES} lines": _number_of(_long),
    f"calls with more than {MOST_POSITIONAL} positional arguments": _number_of(
        lambda node: (
            isinstance(node, ast.Call)
            and sum(not isinstance(each, ast.Starred) for each in node.args) > MOST_POSITIONAL
        )
    ),
}
CONCEPTS: Mapping[str, str] = {
    "files that name a teacher": r"\bteachers?\b|teacher_|_teacher",
    "files that name a critic": r"\bcritics?\b|critic_|_critic",
    "files that name a reward model": r"reward[ _]?models?",
    "files that name a reference": r"\breferences?\b|\breference_|_reference",
}
"""In code, comments and docstrings, in upper or lower case, outside of `tasks/`, where a reference is an answer."""
FREE_NAMES = ("__init__.py", "cli.py", "command.py", "report.py")
"""File names that every room may have."""


def _room(path: str) -> str:
    """The folder below `podium/` that holds a file; empty for the package's own files."""
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else ""


def _naming(root: Path, trees: Trees, pattern: str) -> dict[str, int]:
    texts = {path: (root / path).read_text(encoding="utf-8") for path in trees if _room(path) != "tasks"}
    return {path: int(bool(re.search(pattern, text, re.I))) for path, text in texts.items()}


def _shared_names(trees: Trees) -> dict[str, int]:
    """1 for each file whose name another room has too."""
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for path in trees:
        rooms[Path(path).name].add(_room(path))
    shared = {name for name, found in rooms.items() if len(found) > 1} - set(FREE_NAMES)
    return Counter(path for path in trees if Path(path).name in shared)
