"""The test files whose imports, over any number of steps, reach a file that has changed.

    python -m tools.changed_tests            # against HEAD, uncommitted and new files
    python -m tools.changed_tests main       # against the common ancestor with a branch

Prints their paths, one to a line. A changed file that is not Python selects the tests of documents and configs.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tools.structure import reached

ROOT = Path(__file__).parents[1]
ROOMS = ("podium", "tests", "benches", "tools")
OF_TEXTS = ("tests/test_docs.py", "tests/test_pages.py", "tests/test_architecture.py")
"""The tests that read documents, configs and results."""


def changed_files(base: str | None) -> list[str]:
    """Paths of the files that differ from a revision (None: HEAD), and of those that git does not know yet."""
    since = "HEAD" if base is None else _git("merge-base", "HEAD", base)[0]
    return sorted({*_git("diff", "--name-only", since), *_git("ls-files", "--others", "--exclude-standard")})


def tests_of(changed: Iterable[str], sources: dict[str, str]) -> list[str]:
    """The test files to run: `sources` are the texts of all Python files by path."""
    given = set(changed)
    names = {_module(path): path for path in sources}
    # Tests import their helpers by bare names: their folders are on the path.
    names |= {Path(path).stem: path for path in sources if path.startswith("tests/")}
    edges = {path: {names[name] for name in _imported(text) if name in names} for path, text in sources.items()}
    for path in sources:  # every test gets the conftest.py files above it
        edges[path] |= {other for other in sources if _is_conftest_of(other, path)}
    for path, text in sources.items():  # a package that is searched for its modules imports all of them
        if path.endswith("/__init__.py") and "iter_modules(__path__)" in text:
            edges[path] |= {other for other in sources if Path(other).parent == Path(path).parent and other != path}
    tests = [path for path in sources if Path(path).name.startswith("test_")]
    found = {path for path in tests if given & reached(edges, path)}
    if any(not path.endswith(".py") for path in given):
        found |= set(OF_TEXTS) & set(tests)
    return sorted(found)


def _is_conftest_of(path: str, other: str) -> bool:
    folder = str(Path(path).parent)
    return Path(path).name == "conftest.py" and other.startswith(f"{folder}/") and path != other


def _module(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


def _imported(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1]


def main() -> None:
    """Print the test files."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    print(*tests_of(changed_files(sys.argv[1] if len(sys.argv) > 1 else None), sources), sep="\n")


if __name__ == "__main__":
    main()
