"""The part of a sandboxed process that runs code and answers requests, after the process has given up all rights.

A request is a line on a pipe: a nonce, and JSON. Its answer is written to the output after the same nonce, which
separates it from what the code prints. The code can forge answers, so callers must check them.
"""

import ast
import atexit
import contextlib
import gc
import importlib
import io
import itertools
import json
import linecache
import os
import random
import signal
import site
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TextIO, TypedDict

from podium.sandbox.definitions import wanted
from podium.sandbox.values import read, written

FILE = "<code>"
OFTEN_USED = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
    "math", "operator", "random", "re", "statistics", "string", "typing",
)  # fmt: skip
"""Modules that the zygote imports before it forks, so that runs need not."""
for module in OFTEN_USED:
    importlib.import_module(module)
for make_names in (site.setquit, site.setcopyright, site.sethelper):  # builtins that Python has unless started with -S
    make_names()
SENT_AT_ONCE = 32
"""Items of an iterator that are sent together."""
NONCE_CHARACTERS = 32
FLUSH = signal.SIGXCPU
"""Signal for code that has exceeded its time limit: it writes its buffered output."""
Answer = dict[str, object]


class RunRequest(TypedDict):
    """Code to run as a module, and which parts of its output are returned."""

    name: str
    code: str
    others: Sequence[str]
    shown: bool
    errors: bool
    program: bool


class CallRequest(TypedDict):
    """A function to call."""

    name: str
    arguments: list[object]
    keywords: dict[str, object]


class Child:
    """The state of a run: the names that its code has defined."""

    def __init__(self, requests: TextIO) -> None:
        self._requests = requests
        self._nonce = ""
        self._process = os.getpid()
        self._module = types.ModuleType("__main__")
        self._names: dict[str, Any] = vars(self._module)
        self._names["exchange"] = self._exchange
        self._iterators: list[Iterator[object]] = []

    def serve(self) -> NoReturn:
        """Answer requests until there are no more."""
        answers = {"run": self._run, "call": self._call, "next": self._next_items}
        while True:
            request = self._next()
            self._answer(answers[request["do"]](request))

    def _next(self) -> Any:
        line = self._requests.readline()
        if not line:
            os._exit(0)
        self._nonce = line[:NONCE_CHARACTERS]  # kept even if the rest, which may be forged, cannot be read
        return json.loads(line[NONCE_CHARACTERS:])

    def _answer(self, value: Mapping[str, object]) -> None:
        _flush()
        if os.getpid() != self._process:
            os._exit(0)  # the code has forked; its first process answers
        try:
            text = json.dumps(value)
        except (ValueError, RecursionError) as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        left = f"{self._nonce}{text}\n".encode()
        while left:
            left = left[os.write(1, left) :]

    def _exchange(self, value: object) -> object:
        """For code that sends a request itself: answer the pending request, and return the next one."""
        self._answer({"asks": written(value)})
        return read(self._next()["value"], self._elsewhere)

    def _elsewhere(self, number: int) -> Iterator[object]:
        """The items of an iterator that the other side of `_exchange` holds."""
        more = True
        while more:
            answer = self._exchange(["next", number])
            assert isinstance(answer, dict)
            if "value" not in answer:
                raise RuntimeError(answer.get("error"))
            items, more = answer["value"]
            yield from items

    def _run(self, request: RunRequest) -> Answer:
        """Run code as a module of this name; the names that it defines are kept."""
        code = request["code"]
        self._names["__name__"] = request["name"]
        self._names["__file__"] = "/box/code.py"
        sys.modules[request["name"]] = self._module
        if not request["errors"]:
            sys.stderr = sys.__stderr__ = open("/dev/null", "w")  # noqa: SIM115
            os.dup2(sys.stderr.fileno(), 2)
        linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)  # for tracebacks
        try:
            answer = self._executed(request)
        except SystemExit as error:
            answer: Answer = {"exit": _status(error.code)}
        except BaseException as error:
            traceback.print_exception(type(error), error, _from_own_line(error.__traceback__))
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        if request["program"]:
            self._end()
        return answer

    def _executed(self, request: RunRequest) -> Answer:
        """Run code; with `shown`, print the value of its last expression."""
        tree = ast.parse(request["code"], FILE)
        if request["others"]:
            with contextlib.suppress(Exception):
                exec(compile(ast.fix_missing_locations(wanted(tree, request["others"])), FILE, "exec"), self._names)
        last = tree.body.pop() if request["shown"] and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILE, "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), FILE, "eval"), self._names)
            if value is not None:
                print(repr(value))
        return {}

    def _end(self) -> None:
        """What the interpreter does at the end of a program: it waits for threads, runs hooks, and closes files."""
        for step in (threading._shutdown, atexit._run_exitfuncs, _flush, self._names.clear, gc.collect):  # pyright: ignore[reportAttributeAccessIssue]
            with contextlib.suppress(BaseException):
                step()

    def _call(self, request: CallRequest) -> Answer:
        """Call a function, or a method of a class `Solution`, and answer with its value.

        If it returns None, answer with the arguments too, which it may have changed in place.
        """
        try:
            name = request["name"]
            function = self._names[name] if name in self._names else getattr(self._names["Solution"](), name)
            arguments = [read(each) for each in request["arguments"]]
            value = function(*arguments, **{key: read(each) for key, each in request["keywords"].items()})
            answer: Answer = {"value": written(value, self._iterators)}
            if value is None:
                with contextlib.suppress(ValueError):
                    answer["arguments"] = [written(each) for each in arguments]
            return answer
        except BaseException as error:
            return _raised(error)

    def _next_items(self, request: dict[str, int]) -> Answer:
        """The next items of an iterator that was returned earlier, and whether more may follow."""
        try:
            items = list(itertools.islice(self._iterators[request["number"]], SENT_AT_ONCE))
            return {"value": [[written(each, self._iterators) for each in items], len(items) == SENT_AT_ONCE]}
        except BaseException as error:
            return _raised(error)


def _raised(error: BaseException) -> Answer:
    """The answer for a function that raised: the nearest builtin class of the exception, which the caller also has."""
    known = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
    return {"error": f"{known.__name__}: {error}"[:1000]}


def _flush() -> None:
    """Flush stdout, which the code may have replaced."""
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(Exception):  # stdout is closed, replaced, or in the middle of a write
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]


def _status(code: object) -> int:
    """The exit status of `sys.exit(code)`; a code that is not a number is written to stderr, as Python does."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _from_own_line(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the first line of the sandboxed code on."""
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    return trace


def serve(requests: int) -> NoReturn:
    """Answer the requests that arrive on the descriptor `requests`."""
    output = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "replace")
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = output  # one, so that lines keep their order
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), "utf-8", "replace")
    for stream, mode in ((sys.stdin, "r"), (output, "w")):
        vars(stream)["mode"] = mode  # as the interpreter does; programs with fast input and output of their own read it
    sys.argv = [FILE]
    signal.signal(FLUSH, lambda *_: _flush())
    random.seed(0)
    with open(requests, encoding="utf-8") as lines:
        Child(lines).serve()
