"""Runs assertions about a function that is somewhere else; sent as text to a sandbox of its own.

It has the expected results, and sees of the function only the plain values that it returns. `exchange`, given by the
sandbox, asks for a call of the function, and at the end reports how many assertions held.
"""

import ast
import builtins
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class _Counted(ast.NodeTransformer):
    """Makes a call of each assertion, which counts it and goes on; `assert True` says nothing, and is left as it is."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return node
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
        exchange: sends a value and returns the answer: for `["call", arguments, keywords]` a dict with `value` or
            `error`, and for a value of None with the `arguments` after the call.
    """
    held = asserted = 0

    def candidate(*arguments: object, **keywords: object) -> object:
        sent = [iter(list(each)) if isinstance(each, Iterator) else each for each in arguments]
        answer = exchange(["call", sent, keywords])
        if "value" not in answer:
            raise _error(answer.get("error"))
        for before, after in zip(arguments, answer.get("arguments", ()), strict=False):
            _change(before, after)
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


def _error(said: object) -> Exception:
    """The exception that the function raised, by its name and message."""
    name, _, message = str(said).partition(": ")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # it is not made of a message alone
            return kind(message)
    return RuntimeError(said)


def _change(value: object, after: Any) -> None:
    """Make a list, dict or set what the function has made of it, where it returns nothing but changes it in place."""
    if type(value) is not type(after):
        return
    if isinstance(value, list | deque):
        value.clear()
        value.extend(after)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(after)
