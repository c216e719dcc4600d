"""Verdicts of programs, on a machine that has nothing else to do and beside four busy processes."""

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest

from podium.sandbox.runs import Limits, Sandbox
from podium.tasks.code.code_blocks import Code
from podium.tasks.code.code_grading import Call, Program, Solution, TimeLimits, grade
from tests.sandbox.sandboxes import need_sandbox
from tests.tasks.stdin_programs import PROBLEMS, WAYS, programs

TIMES = TimeLimits(test_s=3.0, all_s=30.0)
"""The defaults of the task."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    need_sandbox()
    with Sandbox(Limits()) as sandbox:
        yield sandbox


@contextlib.contextmanager
def four_busy_processes() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(4)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def failed(sandbox: Sandbox, names: list[str]) -> list[str]:
    """The programs of these names that do not pass all of their tests."""
    found = programs()
    verdicts = {
        name: grade(sandbox, Solution(Code(found[name][0])), [Program(*test) for test in found[name][1]], TIMES)
        for name in names
    }
    return [
        f"{name}: {verdict}" for name, verdict in verdicts.items() if verdict != (len(found[name][1]),) * 2 + (False,)
    ]


def test_a_hundred_programs_pass(sandbox: Sandbox):
    names = list(programs())
    assert len(names) >= 100
    assert failed(sandbox, names) == []


def test_each_way_and_each_problem_passes_beside_four_busy_processes(sandbox: Sandbox):
    ways = itertools.cycle(WAYS)
    names = [f"{next(ways)}, {problem}" for problem in [*PROBLEMS, *PROBLEMS]]
    with four_busy_processes():
        assert failed(sandbox, names) == []


@pytest.mark.long
def test_a_hundred_programs_pass_beside_four_busy_processes(sandbox: Sandbox):
    with four_busy_processes():
        assert failed(sandbox, list(programs())) == []


def test_eighty_tests_of_an_answer_pass_beside_four_busy_processes(sandbox: Sandbox):
    programs = [Program(f"{number}\n", f"{2 * number}\n") for number in range(80)]
    calls = [Call([number], 2 * number) for number in range(80)]
    with four_busy_processes():
        assert grade(sandbox, Solution(Code("print(2 * int(input()))")), programs, TIMES) == (80, 80, False)
        assert grade(sandbox, Solution(Code("def f(x): return 2 * x"), "f"), calls, TIMES) == (80, 80, False)
