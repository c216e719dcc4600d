"""How much of Podium the first example runs: what a reader has to open to follow a run from its command to its end."""

import ast
import inspect
import os
import runpy
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from _typeshed import TraceFunction

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT / 'podium'}{os.sep}"
EXAMPLE = ROOT / "examples" / "first.py"


class Way(NamedTuple):
    """What one run of the example executes, imports apart."""

    files: int
    """Files of which a function runs."""
    functions: int
    """Functions and methods whose body runs."""
    statements: int
    """Statements in them that run."""
    lines: int
    """Lines of those functions, docstrings and blank lines included."""


def follow_example() -> Way:
    """Run the example in this process, in an empty folder, and count; takes minutes."""
    seen: defaultdict[CodeType, set[int]] = defaultdict(set)

    def trace(frame: FrameType, event: str, argument: object) -> "TraceFunction | None":
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
            return None  # the code of a module or a class runs when it is imported
        if event == "line":
            seen[code].add(frame.f_lineno)
        return trace

    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        os.chdir(folder)
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        finally:
            sys.settrace(None)
            threading.settrace(None)  # pyright: ignore[reportArgumentType] (what the documentation asks for)
            os.chdir(before)
    return _counted(seen)


def _counted(seen: dict[CodeType, set[int]]) -> Way:
    ran: defaultdict[str, set[int]] = defaultdict(set)
    for code, lines in seen.items():
        ran[code.co_filename] |= lines
    files = functions = statements = lines = 0
    for path, executed in ran.items():
        own: set[int] = set()  # lines of statements that run; a comprehension of a module runs when it is imported
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = {part.lineno for each in node.body for part in ast.walk(each) if isinstance(part, ast.stmt)}
                if inside & executed:
                    functions += 1
                    lines += (node.end_lineno or 0) - node.lineno + 1
                    own |= inside & executed
        files += bool(own)
        statements += len(own)
    return Way(files, functions, statements, lines)
