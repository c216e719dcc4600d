"""What a process in the sandbox does once it has given up everything: it runs code, and answers what it is asked.

A request is a line of JSON on a pipe. Its answer is written to the output after a nonce that came with the request,
which separates it from what the code prints. The code can forge answers, so callers must check them.
"""

import ast
import importlib
import io
import json
import linecache
import os
import random
import sys
import traceback
import types
from collections.abc import Mapping
from typing import Any, NoReturn, TextIO, TypedDict

FILE = "<code>"
OFTEN_USED = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "heapq", "itertools", "math", "operator", "re",
    "statistics", "string", "typing",
)  # fmt: skip
"""Modules that the zygote imports before it forks, so that runs need not."""
for module in OFTEN_USED:
    importlib.import_module(module)
Answer = dict[str, object]


class RunRequest(TypedDict):
    """Code to run as a module, and what of it is output."""

    name: str
    code: str
    shown: bool
    errors: bool


class CallRequest(TypedDict):
    """A function to call."""

    name: str
    arguments: list[object]


def written(value: Any) -> object:
    """A value as JSON: plain values and lists as they are, others under their type's name. ValueError for the rest."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [written(each) for each in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [written(each) for each in value]}
    if kind is dict:
        return {"dict": [[written(key), written(each)] for key, each in value.items()]}
    raise ValueError(f"a value of type {kind.__name__} cannot be sent")


def read(value: object) -> object:
    """The value that `written` wrote. LookupError, ValueError or TypeError if `written` cannot have written this."""
    if isinstance(value, list):
        return [read(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "dict":
        return {read(key): read(each) for key, each in inner}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[name](map(read, inner))


class Child:
    """The state of a run: the names that its code has made."""

    def __init__(self, requests: TextIO) -> None:
        self._requests = requests
        self._nonce = ""
        self._module = types.ModuleType("__main__")
        self._names: dict[str, Any] = vars(self._module)
        self._names["exchange"] = self._exchange

    def serve(self) -> NoReturn:
        """Answer requests until there are no more."""
        while True:
            request = self._next()
            self._answer(self._run(request) if request["do"] == "run" else self._call(request))

    def _next(self) -> Any:
        line = self._requests.readline()
        if not line:
            os._exit(0)
        request = json.loads(line)
        self._nonce = request["nonce"]
        return request

    def _answer(self, value: Mapping[str, object]) -> None:
        try:
            text = json.dumps(value)
        except (ValueError, RecursionError) as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.flush()
        left = f"{self._nonce}{text}\n".encode()
        while left:
            left = left[os.write(1, left) :]

    def _exchange(self, value: object) -> object:
        """For code that asks back: answer the request that it runs for, and return what comes next."""
        self._answer({"asks": written(value)})
        return read(self._next()["value"])

    def _run(self, request: RunRequest) -> Answer:
        """Run code as a program under a name; names are kept. `shown`: print the value of a last expression."""
        code = request["code"]
        self._names["__name__"] = request["name"]
        sys.modules[request["name"]] = self._module
        if not request["errors"]:
            os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)  # for tracebacks
        try:
            tree = ast.parse(code, FILE)
            last = tree.body.pop() if request["shown"] and tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, FILE, "exec"), self._names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), FILE, "eval"), self._names)
                if value is not None:
                    print(repr(value))
        except SystemExit as error:
            return {"exit": _status(error.code)}
        except BaseException as error:
            traceback.print_exception(type(error), error, _from_own_line(error.__traceback__))
            return {"error": f"{type(error).__name__}: {error}"[:1000]}
        return {}

    def _call(self, request: CallRequest) -> Answer:
        """Call a function, or a method of a class `Solution`, and answer with its value."""
        try:
            name = request["name"]
            function = self._names[name] if name in self._names else getattr(self._names["Solution"](), name)
            return {"value": written(function(*map(read, request["arguments"])))}
        except BaseException as error:
            return {"error": f"{type(error).__name__}: {error}"[:1000]}


def _status(code: object) -> int:
    """The exit status of `sys.exit(code)`; a code that is no number is written to stderr, as Python does."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _from_own_line(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback from the code's own lines on."""
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    return trace


def serve(requests: int) -> NoReturn:
    """Answer what comes by the descriptor `requests`."""
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "replace", write_through=True)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), "utf-8", "replace")
    random.seed(0)
    with open(requests, encoding="utf-8") as lines:
        Child(lines).serve()
