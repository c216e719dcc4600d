"""Runs assertions about a function that runs in another process; this module is sent as text to a separate sandbox.
That sandbox has the expected results, and sees only the plain values that the function returns. `exchange`, provided by
the sandbox, requests a call of the function, and at the end reports how many assertions held.
"""

import ast
import builtins
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class _Counted(ast.NodeTransformer):
    """Replaces each assertion in place by code that counts it instead of raising, so that names keep their scope.
    `assert True` tests nothing, and is left unchanged.
    """

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return node
        failed = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [_counts(ast.Constant(False))])
        return ast.copy_location(ast.Try([_counts(node.test)], [failed], [], []), node)


def _counts(value: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name("_holds", ast.Load()), [value], []))


def judge(setup: str, tests: str, name: str, exchange: Callable[[object], Any]) -> None:
    """Count the assertions of `tests` that hold. An exception outside an assertion counts as one that does not.

    Tests that finish without reaching an assertion count as one assertion, which holds if the function raised the
    expected exception, or if the tests contain no assertions and called the function. A loop over the function's result
    must not be empty.

    Args:
        setup: code before the tests.
        tests: code with assertions, which calls the function by its name, or as `candidate`.
        name: name of the function.
        exchange: sends a value and returns the answer: for `["call", arguments, keywords]` a dict with `value` or
            `error`, and for a value of None with the `arguments` after the call.
    """
    held = asserted = calls = raised = 0

    def candidate(*arguments: object, **keywords: object) -> object:
        nonlocal calls, raised
        calls += 1
        sent = [iter(list(each)) if isinstance(each, Iterator) else each for each in arguments]
        answer = exchange(["call", sent, keywords])
        if "value" not in answer:
            raised += 1
            raise _error(answer.get("error"))
        for before, after in zip(arguments, answer.get("arguments", ()), strict=False):
            _change(before, after)
        return answer["value"]

    def holds(value: object) -> None:
        nonlocal held, asserted
        held += bool(value)
        asserted += 1

    names: dict[str, object] = {"__name__": "tests"}
    try:
        exec(compile(setup, "setup", "exec"), names)
        names.update({name: candidate, "candidate": candidate, "_holds": holds})
        tree = ast.parse(tests)
        asserts = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
        counted = ast.fix_missing_locations(_Counted().visit(tree))
        exec(compile(counted, "tests", "exec"), names)
        if not asserted and (raised if asserts else calls):
            held = asserted = 1
    except Exception:
        asserted += 1
    exchange(["done", held, asserted])


def _error(said: object) -> Exception:
    """An exception like the one that the function raised, from its name and message."""
    name, _, message = str(said).partition(": ")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # this class cannot be created from a message alone
            return kind(message)
    return RuntimeError(said)


def _change(value: object, after: Any) -> None:
    """Copy the function's in-place changes to a list, dict or set, for functions that return None."""
    if type(value) is not type(after):
        return
    if isinstance(value, list | deque):
        value.clear()
        value.extend(after)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(after)
