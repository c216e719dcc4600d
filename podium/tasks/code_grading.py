"""Grades code that a model wrote, in a sandbox that learns neither what is tested next nor the right result.

A function is called with one test's arguments after the other; a program gets one test's input on stdin. Values and
output come back and are compared here. Assertions run in a second sandbox (`podium.tasks.referee`), which has only the
function's values. Whatever else the code prints, raises or exits with decides nothing.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from podium.sandbox.child import Answer, read
from podium.sandbox.runs import Ended, Run, Sandbox

BLOCK = re.compile(r"```[ \t]*[\w+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|$)", re.DOTALL)
REFEREE = Path(__file__).with_name("referee.py")


class Call(NamedTuple):
    """A test of a function."""

    arguments: Sequence[object]
    """As `podium.sandbox.child.written` writes values."""
    expected: object


class Program(NamedTuple):
    """A test of a program."""

    stdin: str
    stdout: str


class Assertions(NamedTuple):
    """Tests of a function that are code."""

    setup: str
    code: str


Tests = Sequence[Call] | Sequence[Program] | Assertions


class Verdict(NamedTuple):
    """The result of running a solution against its tests."""

    passed: int
    tests: int
    late: bool = False
    """Whether it was ended because it took too long; what it had passed by then counts."""


def code_of(completion: str) -> str:
    """The code in an answer: its last block between fences, or all of it; nothing of what was thought before it."""
    answer = completion.rpartition("</think>")[2]
    blocks = BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def grade(sandbox: Sandbox, code: str, name: str, tests: Tests, timeout_s: float) -> Verdict:
    """Run code against tests.

    Args:
        sandbox: where to run it.
        code: of the solution.
        name: of the function that is called; empty for programs.
        tests: all of one kind.
        timeout_s: limit of all tests together.
    """
    clock = _Clock(time.monotonic() + timeout_s)
    if isinstance(tests, Assertions):
        return _by_referee(sandbox, code, name, tests, clock)
    passed, late = 0, False
    programs = [test for test in tests if isinstance(test, Program)]
    for test in programs:
        ok, late = _program(sandbox, code, test, clock)
        passed += ok
        if late:
            break
    calls = [test for test in tests if isinstance(test, Call)]
    if calls:
        with sandbox.open() as run:
            try:
                clock.limit(run)
                run.execute(code, name="solution")
                for test in calls:
                    clock.limit(run)
                    passed += _is(run.call(name, test.arguments), test.expected)
            except Ended as ended:
                late = ended.why == "time"
    return Verdict(passed, len(tests), late)


def same(found: object, expected: object) -> bool:
    """Whether two values are equal and of the same types throughout; floats up to rounding."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, float) and isinstance(expected, float):
        return found == expected or math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return _sorted(found) == _sorted(expected) and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, set | frozenset) and isinstance(expected, set | frozenset):
        return _sorted(found) == _sorted(expected)
    return found == expected


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are equal but for spaces at the ends of lines, and empty lines at the end."""
    return _lines(found) == _lines(expected)


class _Clock(NamedTuple):
    """The time that is left for a solution."""

    until: float

    def limit(self, run: Run) -> None:
        run.wall_s = self.until - time.monotonic()


def _is(answer: Answer, expected: object) -> bool:
    """Whether an answer has the expected value; answers may be forged, and be anything."""
    try:
        return same(read(answer["value"]), expected)
    except (LookupError, ValueError, TypeError, RecursionError):
        return False


def _program(sandbox: Sandbox, code: str, test: Program, clock: _Clock) -> tuple[bool, bool]:
    """Whether a program passed a test, and whether it was too late."""
    with sandbox.open(test.stdin) as run:
        clock.limit(run)
        try:
            output, answer = run.execute(code, errors=False)
        except Ended as ended:
            return ended.why == "ended" and same_output(ended.output, test.stdout), ended.why == "time"
    return "error" not in answer and same_output(output, test.stdout), False


def _by_referee(sandbox: Sandbox, code: str, name: str, tests: Assertions, clock: _Clock) -> Verdict:
    """Run assertions in a sandbox of their own, which asks for the function's values."""
    judging = f"{REFEREE.read_text('utf-8')}\njudge({tests.setup!r}, {tests.code!r}, {name!r}, exchange)\n"
    with sandbox.open() as run, sandbox.open() as referee:
        late = dead = False

        def called(ask: Callable[[], Answer]) -> Answer:
            nonlocal late, dead
            if dead:
                return {"error": "it has ended"}
            try:
                clock.limit(run)
                return ask()
            except Ended as ended:
                late, dead = late or ended.why == "time", True
                return {"error": ended.why}

        called(lambda: run.execute(code, name="solution")[1])
        try:
            said = referee.execute(judging, name="referee")[1]
            while True:
                match said.get("asks"):
                    case ["done", int(held), int(asserted)]:
                        return Verdict(held, asserted, late)
                    case ["call", list(arguments)]:
                        answer = called(lambda arguments=arguments: run.call(name, arguments))
                    case _:
                        break
                key = "value" if "value" in answer else "error"
                said = referee.ask({"value": {"dict": [[key, answer.get(key)]]}})[1]
        except Ended as ended:
            late = late or ended.why == "time"
        return Verdict(0, 1, late)


def _sorted(values: Iterable[object]) -> list[str]:
    return sorted(map(repr, values))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
