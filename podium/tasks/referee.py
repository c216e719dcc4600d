"""Runs assertions about a function that is somewhere else; sent as text to a sandbox of its own.

It has the expected results, and sees of the function only the plain values that it returns. `exchange`, given by the
sandbox, asks for a call of the function, and at the end reports how many assertions held.
"""

import ast
from collections.abc import Callable
from typing import Any


class _Counted(ast.NodeTransformer):
    """Makes a call of each assertion, which counts it and goes on."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        test = ast.Lambda(args=none, body=node.test)
        call = ast.Call(func=ast.Name("_holds", ast.Load()), args=[test], keywords=[])
        return ast.copy_location(ast.Expr(call), node)


def judge(setup: str, tests: str, name: str, exchange: Callable[[object], Any]) -> None:
    """Count the assertions of `tests` that hold. An exception outside an assertion counts as one that does not.

    Args:
        setup: code before the tests.
        tests: code with assertions, which calls the function by its name, or as `candidate`.
        name: of the function.
        exchange: sends a value and returns the answer: for `["call", arguments]` a dict with `value` or `error`.
    """
    held = asserted = 0

    def candidate(*arguments: object) -> object:
        answer = exchange(["call", list(arguments)])
        if "value" not in answer:
            raise RuntimeError(answer.get("error"))
        return answer["value"]

    def holds(test: Callable[[], object]) -> None:
        nonlocal held, asserted
        asserted += 1
        try:
            held += bool(test())
        except Exception:
            return

    names: dict[str, object] = {"__name__": "tests"}
    try:
        exec(compile(setup, "setup", "exec"), names)
        names.update({name: candidate, "candidate": candidate, "_holds": holds})
        counted = ast.fix_missing_locations(_Counted().visit(ast.parse(tests)))
        exec(compile(counted, "tests", "exec"), names)
    except Exception:
        asserted += 1
    exchange(["done", held, asserted])
