"""Grades code that a model wrote, in a sandbox that learns neither what is tested next nor the right result.

A function is called with one test's arguments after the other; a program gets one test's input on stdin. Values and
output come back and are compared here, as JSON, in time that the size of the right result limits. Assertions run in a
second sandbox (`podium.tasks.code.assertion_runner`), which has only the function's values. Whatever else the code
prints, raises or exits with decides nothing.

Time is CPU time, so that a verdict does not depend on what else the machine does; the wall's clock only ends code that
waits.
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from podium.sandbox.child import Answer
from podium.sandbox.runs import Ended, Run, Sandbox
from podium.sandbox.values import written
from podium.tasks.code.code_blocks import Code

REFEREE = Path(__file__).with_name("assertion_runner.py")
WALL_PER_CPU = 10.0
"""Seconds by the clock for each second of CPU time that code may take; it is enough to get a tenth of a core."""
OUTPUT_BYTES = 4 << 20
"""Bytes that code may write beyond twice the size of the right output."""
MOST_PARTS = 4_096
"""Most parts, of 32 items each, that assertions may read of a solution's iterators."""
SPACES = re.compile("( +)")
DECIMAL = re.compile(r"[+-]?(?:0|[1-9]\d*)(?:\.(?P<places>\d*))?(?P<exponent>[eE][+-]?\d{1,4})?", re.ASCII)
RELATIVE = 1e-9
ABSOLUTE = 1e-15
"""Differences of floats that count as rounding: RELATIVE to the right result, or ABSOLUTE where terms cancel out."""
MOST_DIGITS = 400
"""Longer numbers are compared as text."""
ROUNDED_DIGITS = 6
"""Least digits and decimal places of a number that may be a rounded one."""


class Call(NamedTuple):
    """A test of a function."""

    arguments: Sequence[object]
    """As `podium.sandbox.values.written` writes values."""
    expected: object
    in_place: bool = False
    """Whether the result is the first argument after the call, instead of the value that is returned."""


class Program(NamedTuple):
    """A test of a program."""

    stdin: str
    stdout: str


class Assertions(NamedTuple):
    """Tests of a function that are code."""

    setup: str
    code: str


Tests = Sequence[Call] | Sequence[Program] | Assertions


class Solution(NamedTuple):
    """Code that is tested."""

    code: Code
    name: str = ""
    """Of the function that is called; empty for programs."""
    before: str = ""
    """Code that runs before it in the same module, as imports that a question gives."""


class TimeLimits(NamedTuple):
    """CPU time in seconds."""

    test_s: float
    """Of each test; the first that takes longer is the last that is run."""
    all_s: float
    """Of all tests together."""

    @property
    def wall_s(self) -> float:
        """Seconds by the clock in which grading has ended, apart from the sandbox's own work."""
        return WALL_PER_CPU * self.all_s


class Verdict(NamedTuple):
    """The result of running a solution against its tests."""

    passed: int
    tests: int
    late: bool = False
    """Whether it was ended because it took too long; what it had passed by then counts."""


def grade(sandbox: Sandbox, solution: Solution, tests: Tests, times: TimeLimits) -> Verdict:
    """Run code against tests, which are all of one kind."""
    budget = _Budget(times)
    if isinstance(tests, Assertions):
        return _by_referee(sandbox, solution, tests, budget)
    passed, late = 0, False
    programs = [test for test in tests if isinstance(test, Program)]
    for test in programs:
        ok, late = _program(sandbox, solution, test, budget)
        passed += ok
        if late:
            break
    calls = [test for test in tests if isinstance(test, Call)]
    if calls:
        with sandbox.open() as run:
            try:
                _define(run, solution, budget)
                for test in calls:
                    expected = written(test.expected)
                    budget.limit(run, len(json.dumps(expected)))
                    passed += _is(run.call(solution.name, test.arguments), expected, in_place=test.in_place)
            except Ended as ended:
                late = ended.why == "time"
    return Verdict(passed, len(tests), late)


def same(found: object, expected: object) -> bool:
    """Whether two values, as `podium.sandbox.values.written` writes them, are equal and of the same types throughout.

    Floats may differ by rounding; an int is accepted for a float, a tuple for a list, and any dict for a plain one.
    Neither value is made again, so that no set or dict is built of what the code may have chosen: that takes quadratic
    time.

    Raises RecursionError if `found` is nested too deeply.
    """
    if isinstance(expected, dict) and len(expected) == 1:
        return isinstance(found, dict) and len(found) == 1 and _same_form(found, expected)
    if isinstance(expected, list):
        elements = found["tuple"] if isinstance(found, dict) and found.keys() == {"tuple"} else found
        return isinstance(elements, list) and len(elements) == len(expected) and all(map(same, elements, expected))
    if isinstance(expected, float) and isinstance(found, float):
        return found == expected or math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    if isinstance(expected, float) and type(found) is int:
        return found == expected
    return type(found) is type(expected) and found == expected


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are equal but for spaces at the ends of lines, empty lines at the end, and how a line writes
    numbers with a decimal point: these may differ by rounding.
    """
    these, those = _lines(found), _lines(expected)
    return len(these) == len(those) and all(map(_same_line, these, those))


class _Budget:
    """The time that is left for a solution."""

    def __init__(self, times: TimeLimits) -> None:
        self._times = times
        self._left_s = times.all_s
        self._until = time.monotonic() + times.wall_s
        self._run: Run | None = None
        self._spent_s = 0.0

    def limit(self, run: Run, right_bytes: int = 0) -> None:
        """Set the limits of a run's next request; `right_bytes`: the size of the right result."""
        if self._run is not None:
            self._left_s -= self._run.spent_s - self._spent_s  # by the request before
        self._run, self._spent_s = run, run.spent_s
        cpu_s = max(0.0, min(self._times.test_s, self._left_s))
        wall_s = min(WALL_PER_CPU * cpu_s, self._until - time.monotonic())
        size = 2 * right_bytes + OUTPUT_BYTES
        run.limits = dataclasses.replace(run.limits, cpu_s=cpu_s, wall_s=wall_s, output_bytes=size)


def _define(run: Run, solution: Solution, budget: _Budget) -> None:
    """Run the module of a function, in which what runs before it leaves no function of its name."""
    before = f"{solution.before}\nglobals().pop({solution.name!r}, None)"
    for code, others in ((before, ()), (solution.code.text, solution.code.others)):
        budget.limit(run)
        run.define(code, "solution", others)


def _is(answer: Answer, expected: object, *, in_place: bool) -> bool:
    """Whether an answer has the expected value; answers may be forged, and be anything."""
    found = answer.get("value", ...)
    arguments = answer.get("arguments")
    if in_place and found is None and isinstance(arguments, list) and arguments:
        found = arguments[0]
    try:
        return same(found, expected)
    except RecursionError:
        return False


def _program(sandbox: Sandbox, solution: Solution, test: Program, budget: _Budget) -> tuple[bool, bool]:
    """Whether a program passed a test, and whether it was too late."""
    with sandbox.open(test.stdin) as run:
        try:
            if solution.before:
                budget.limit(run)
                run.define(solution.before, "__main__")
            budget.limit(run, len(test.stdout.encode()))
            code, others = solution.code
            output, answer = run.execute(code, others=others, errors=False, program=True)
        except Ended as ended:
            return ended.why == "ended" and same_output(ended.output, test.stdout), ended.why == "time"
    return "error" not in answer and same_output(output, test.stdout), False


def _by_referee(sandbox: Sandbox, solution: Solution, tests: Assertions, budget: _Budget) -> Verdict:
    """Run assertions in their own sandbox, which asks for the function's values."""
    text = REFEREE.read_text("utf-8")
    judging = f"{text}\njudge({tests.setup!r}, {tests.code!r}, {solution.name!r}, exchange)\n"
    with sandbox.open() as run, sandbox.open() as referee:
        ended: Ended | None = None
        parts = 0
        try:
            _define(run, solution, budget)
        except Ended as error:
            ended = error
        try:
            budget.limit(referee)
            said = referee.define(judging, "referee")
            while True:
                asked = said.get("asks")
                if isinstance(asked, list) and asked[0] == "done":
                    return Verdict(asked[1], asked[2], ended is not None and ended.why == "time")
                if not isinstance(asked, list):
                    return Verdict(0, 1)
                answer: Answer = {"error": "RuntimeError: its process has ended, or its iterators do not end"}
                if ended is None:
                    budget.limit(run)
                    try:
                        if asked[0] == "next" and parts < MOST_PARTS:
                            parts += 1
                            answer = run.next_items(asked[1])
                        elif asked[0] == "call":
                            answer = run.call(solution.name, asked[1], dict(asked[2]["dict"]))
                    except Ended as error:
                        ended = error
                budget.limit(referee)
                said = _told(referee, answer)
        except Ended as error:
            return Verdict(0, 1, error.why == "time")


def _told(referee: Run, answer: Answer) -> Answer:
    """Tell the referee what came of its question; returns its next."""
    told = [[key, answer[key]] for key in ("value", "arguments", "error") if key in answer]
    try:
        return referee.ask({"value": {"dict": told}}, kept=False)[1]
    except RecursionError:  # when it is written, the answer was nested deeply enough to be read, but no deeper
        told = [["error", "RecursionError: the value is nested too deeply"]]
        return referee.ask({"value": {"dict": told}}, kept=False)[1]


DICTS = ("dict", "OrderedDict", "Counter", "defaultdict")
SETS = ("set", "frozenset")


def _same_form(found: dict[str, object], expected: dict[str, object]) -> bool:
    """Whether two values that are no plain JSON are equal, each an object with the name of the type as its only key."""
    ((kind, parts),) = expected.items()
    ((found_kind, found_parts),) = found.items()
    alike = kind == found_kind or (kind in DICTS and found_kind in DICTS)
    if not alike or kind not in (*DICTS, *SETS):
        return alike and same(found_parts, parts)
    if not isinstance(found_parts, list) or not isinstance(parts, list) or len(found_parts) != len(parts):
        return False
    return all(map(same, sorted(found_parts, key=json.dumps), sorted(parts, key=json.dumps)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(found: str, expected: str) -> bool:
    """Whether two lines are equal; numbers that have a decimal point may be written differently."""
    if found == expected:
        return True
    these, those = SPACES.split(found), SPACES.split(expected)
    numbers = all(map(DECIMAL.fullmatch, (*these[::2], *those[::2])))
    spaced = these[1::2] == those[1::2] or numbers
    return spaced and len(these) == len(those) and all(map(_same_word, these[::2], those[::2]))


def _same_word(found: str, expected: str) -> bool:
    """Whether two words are equal, or the same decimal number up to rounding."""
    if found == expected:
        return True
    if max(len(found), len(expected)) > MOST_DIGITS:
        return False
    this, that = DECIMAL.fullmatch(found), DECIMAL.fullmatch(expected)
    if not this or not that or not (set(".eE") & {*found, *expected}):
        return False
    distance = abs(Decimal(found) - Decimal(expected))
    close = max(Decimal(ABSOLUTE), Decimal(RELATIVE) * abs(Decimal(expected)))
    return distance <= close or any(_rounds(each, distance) for each in (this, that))


def _rounds(number: re.Match[str], distance: Decimal) -> bool:
    """Whether a number at this distance rounds to `number`, which must have enough digits written out."""
    places = len(number["places"] or "")
    digits = number[0].lstrip("+-").replace(".", "").lstrip("0")
    written_out = not number["exponent"] and min(places, len(digits)) >= ROUNDED_DIGITS
    return written_out and distance <= Decimal("0.5000001").scaleb(-places)
