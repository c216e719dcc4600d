"""Grades code that a model wrote, in a sandbox that knows neither the next test nor any expected result.

A function is called with the arguments of one test at a time; a program gets one test's input on stdin. Values and
output come back and are compared here, as JSON, in time bounded by the size of the expected result. Assertions run in a
second sandbox (`podium.tasks.code.assertion_runner`), which has only the function's values. Anything else that the code
prints, raises or exits with does not affect the verdict. Time limits are CPU time, so that a verdict does not depend on
other load on the machine; wall-clock time only ends code that waits.
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
"""Wall-clock seconds allowed for each second of the CPU time limit; enough for code that gets a tenth of a core."""
OUTPUT_BYTES = 4 << 20
"""Bytes that code may write in addition to twice the size of the expected output."""
MOST_PARTS = 4_096
"""Maximum number of chunks, of 32 items each, that assertions may read from a solution's iterators."""
SPACES = re.compile("( +)")
DECIMAL = re.compile(r"[+-]?(?:0|[1-9]\d*)(?:\.(?P<places>\d*))?(?P<exponent>[eE][+-]?\d{1,4})?", re.ASCII)
RELATIVE = 1e-9
ABSOLUTE = 1e-15
"""Differences of floats that count as rounding: RELATIVE to the expected result, or ABSOLUTE where terms cancel out."""
MOST_DIGITS = 400
"""Maximum number of characters of a number that is compared as one; longer ones are compared as text."""
ROUNDED_DIGITS = 6
"""Minimum digits and decimal places of a number that may be accepted as a rounded one."""


class Call(NamedTuple):
    """A test of a function."""

    arguments: Sequence[object]
    """Encoded by `podium.sandbox.values.written`."""
    expected: object
    in_place: bool = False
    """Whether the result is the first argument after the call (changed in place) instead of the return value."""


class Program(NamedTuple):
    """A test of a program."""

    stdin: str
    stdout: str


class Assertions(NamedTuple):
    """Tests of a function, written as assertions."""

    setup: str
    code: str


Tests = Sequence[Call] | Sequence[Program] | Assertions


class Solution(NamedTuple):
    """Code to test."""

    code: Code
    name: str = ""
    """Name of the function to call; empty for programs."""
    before: str = ""
    """Code that runs first in the same module, such as imports from the question."""


class TimeLimits(NamedTuple):
    """CPU time in seconds."""

    test_s: float
    """Limit of each test; after a test that exceeds it, no further test is run."""
    all_s: float
    """Limit of all tests together."""

    @property
    def wall_s(self) -> float:
        """Upper bound on wall-clock seconds of grading, without the sandbox's own work."""
        return WALL_PER_CPU * self.all_s


class Verdict(NamedTuple):
    """The result of running a solution against its tests."""

    passed: int
    tests: int
    late: bool = False
    """Whether it was ended because it took too long; tests passed by then still count."""


def grade(sandbox: Sandbox, solution: Solution, tests: Tests, times: TimeLimits) -> Verdict:
    """Run code against tests, all of which must be of the same type."""
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
    """Whether two values, encoded by `podium.sandbox.values.written`, are equal and have the same types at every level.

    Floats may differ by rounding; an int is accepted for a float, a tuple for a list, and any dict for a plain one.
    Values are compared in encoded form: building a set or dict from elements that the code chose could take quadratic
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
    """Whether two outputs are equal. Spaces at the ends of lines and empty lines at the end are ignored, and numbers
    with a decimal point may differ by rounding.
    """
    these, those = _lines(found), _lines(expected)
    return len(these) == len(those) and all(map(_same_line, these, those))


class _Budget:
    """The CPU time that a solution has left."""

    def __init__(self, times: TimeLimits) -> None:
        self._times = times
        self._left_s = times.all_s
        self._until = time.monotonic() + times.wall_s
        self._run: Run | None = None
        self._spent_s = 0.0

    def limit(self, run: Run, right_bytes: int = 0) -> None:
        """Set the limits of a run's next request; `right_bytes`: the size of the expected result."""
        if self._run is not None:
            self._left_s -= self._run.spent_s - self._spent_s  # exceeded by the previous request
        self._run, self._spent_s = run, run.spent_s
        cpu_s = max(0.0, min(self._times.test_s, self._left_s))
        wall_s = min(WALL_PER_CPU * cpu_s, self._until - time.monotonic())
        size = 2 * right_bytes + OUTPUT_BYTES
        run.limits = dataclasses.replace(run.limits, cpu_s=cpu_s, wall_s=wall_s, output_bytes=size)


def _define(run: Run, solution: Solution, budget: _Budget) -> None:
    """Run the module that defines a function; a function of that name from the code before it is removed first."""
    before = f"{solution.before}\nglobals().pop({solution.name!r}, None)"
    for code, others in ((before, ()), (solution.code.text, solution.code.others)):
        budget.limit(run)
        run.define(code, "solution", others)


def _is(answer: Answer, expected: object, *, in_place: bool) -> bool:
    """Whether an answer has the expected value. Answers may be forged, so any JSON is possible."""
    found = answer.get("value", ...)
    arguments = answer.get("arguments")
    if in_place and found is None and isinstance(arguments, list) and arguments:
        found = arguments[0]
    try:
        return same(found, expected)
    except RecursionError:
        return False


def _program(sandbox: Sandbox, solution: Solution, test: Program, budget: _Budget) -> tuple[bool, bool]:
    """Whether a program passed a test, and whether it exceeded its time limit."""
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
    """Run assertions in a separate sandbox, which requests the function's values."""
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
                answer: Answer = {
                    "error": "RuntimeError: the code's process has ended, or the code's iterators do not end"
                }
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
    """Send the referee the result of its request; returns its next request."""
    told = [[key, answer[key]] for key in ("value", "arguments", "error") if key in answer]
    try:
        return referee.ask({"value": {"dict": told}}, kept=False)[1]
    except RecursionError:  # the answer was shallow enough to be read, but is too deep to be written again
        told = [["error", "RecursionError: the value is nested too deeply"]]
        return referee.ask({"value": {"dict": told}}, kept=False)[1]


DICTS = ("dict", "OrderedDict", "Counter", "defaultdict")
SETS = ("set", "frozenset")


def _same_form(found: dict[str, object], expected: dict[str, object]) -> bool:
    """Whether two encoded values are equal, each an object whose only key is the name of its type."""
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
    """Whether two lines are equal; numbers with a decimal point may be written differently."""
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
