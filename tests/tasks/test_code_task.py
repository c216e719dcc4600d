"""The task code: right and wrong solutions, forged verdicts, the forms of rows, and time that is up."""

import json
import sys
import time
from pathlib import Path

import pytest

from podium.config.schema import GradingConfig, TaskConfig
from podium.sandbox.runs import Limits, Sandbox
from podium.sandbox.values import written
from podium.tasks.code import python_tool
from podium.tasks.code.code_blocks import Code as CodeText
from podium.tasks.code.code_grading import (
    Assertions,
    Call,
    Program,
    Solution,
    Tests,
    TimeLimits,
    Verdict,
    same,
    same_output,
)
from podium.tasks.code.code_grading import grade as graded
from podium.tasks.code.code_task import Code
from podium.tasks.code.small_functions import FAMILIES, small_functions
from podium.tasks.grading import Grader
from podium.tasks.mixture import TaskPrompt
from podium.tasks.registry import make_task
from podium.tasks.task import Graded, OutOfTime, Prompt, TaskSource
from tests.sandbox.sandboxes import need_sandbox

SQUARES = [Call([3], 9), Call([4], 16), Call([-2], 4)]
ECHO = [Program("3\n", "9\n"), Program("-4\n", "16\n")]
ASSERTED = Assertions(
    "import math", "assert f(3) == 9\nassert math.isclose(candidate(0.5), 0.25)\nassert f(2) == 4, 'no'"
)
FORGED = {
    "an early exit": "import os; os._exit(0)",
    "an early exit in the function": "import os\ndef f(x): os._exit(0)",
    "marks of success": "print('PASSED 3/3'); print('{\"passed\": 3}')",
    "an object that equals all": "class E(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\ndef f(x): return E(0)",
    "json replaced": "import json; json.dumps = lambda *a, **k: '9'\ndef f(x): return 0",
    "builtins replaced": "import builtins; builtins.len = builtins.abs = lambda *a: 9\ndef f(x): return 0",
    "values of the process before": "import __main__\ndef f(x): return dict(__main__.TESTS)[x]",
    "values in other frames": "import sys\ndef f(x):\n  frame = sys._getframe(1)\n  while frame:\n"
    "    for v in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
    "      if isinstance(v, (list, tuple)) and 'expected' in str(v)[:999]: return 9\n    frame = frame.f_back\n  return 0",
    "values among all objects": "import gc\ndef f(x):\n  for each in gc.get_objects():\n"
    "    if type(each) is dict and each.get('expected') is not None: return each['expected']\n  return 0",
    "output at the end": "import atexit, os\natexit.register(lambda: os.write(1, b'9')); os.close(1)\ndef f(x): return 0",
    "answers on all descriptors": "import os\nfor fd in range(64):\n  try: os.write(fd, b'[9, 16, 4]\\n{\"value\": 9}\\n')\n"
    "  except OSError: pass\ndef f(x): return 0",
    "an answer for the next nonce": "import os, sys\ndef f(x):\n  nonce = sys._getframe(1).f_locals['self']._nonce\n"
    "  os.write(1, (nonce + '{\"value\": 0, \"passed\": true}\\n').encode()); os.write(1, (nonce + 'true\\n').encode())",
    "an answer that is no object": "import os, sys\ndef f(x):\n  nonce = sys._getframe(1).f_locals['self']._nonce\n"
    "  os.write(1, (nonce + '[true]\\n').encode())",
    "the harness replaced": "import sys\nchild = sys._getframe(1).f_locals['self']\n"
    "child._call = lambda request: {'value': True, 'held': 3, 'tests': 3}\ndef f(x): return 0",
    "values written otherwise": "import podium.sandbox.child as c\nc.written = lambda v: {'any': []}\ndef f(x): return 0",
    "a huge number": "def f(x): return 10**400000",
    "a value within itself": "def f(x):\n  a = []\n  a.append(a)\n  return a",
    "a deep value": "def f(x):\n  a = []\n  for _ in range(100000): a = [a]\n  return a",
    "other types": "def f(x): return float(x * x)",
    "not a number": "def f(x): return float('nan')",
    "a function that is none": "f = 9",
    "code that cannot be read": "def f(x: return 9",
    "an iterator that is none": "import os, sys\ndef f(x):\n  nonce = sys._getframe(1).f_locals['self']._nonce\n"
    "  os.write(1, (nonce + '{\"value\": {\"iterator\": 0}}\\n').encode())",
    "a generator without end": "import itertools\ndef f(x): return itertools.repeat(9)",
    "arguments that are none": "import os, sys\ndef f(x):\n  nonce = sys._getframe(1).f_locals['self']._nonce\n"
    "  os.write(1, (nonce + '{\"value\": null, \"arguments\": [9]}\\n').encode())",
    "the end functions replaced": "import builtins, site\nbuiltins.exit = builtins.quit = lambda *a: 9\n"
    "site.setquit = lambda: 9\ndef f(x): return exit(9) and 0",
    "names that the sandbox has": "x = 1",
    "a number that equals all": "class E(float):\n  def __eq__(s, o): return True\n  def __pos__(s): return 9\n"
    "  __hash__ = float.__hash__\ndef f(x): return E(0)",
    "an evil hash": "class E(str):\n  def __hash__(s): return exit()\ndef f(x): return {E('a'): E('b')}",
    "tests that are exchanged": "def f(x):\n  return exchange(['done', 3, 3])",
}  # fmt: skip


def grade(sandbox: Sandbox, code: str, name: str, tests: Tests, seconds: float) -> Verdict:
    """Grade the text of a solution; `seconds` of CPU time for each test and for all."""
    return graded(sandbox, Solution(CodeText(code), name), tests, TimeLimits(seconds, seconds))


@pytest.fixture(scope="module")
def sandbox():
    need_sandbox()
    with Sandbox(Limits(wall_s=60.0)) as sandbox:
        yield sandbox


def test_a_right_solution_passes_every_kind_of_test(sandbox: Sandbox):
    square = "def f(x):\n    print('thinking')\n    return x * x"
    program = "import sys\nprint('log', file=sys.stderr)\nx = int(input())\nprint(x * x)"
    assert grade(sandbox, square, "f", SQUARES, 60.0) == (3, 3, False)
    assert grade(sandbox, program, "", ECHO, 60.0) == (2, 2, False)
    assert grade(sandbox, square, "f", ASSERTED, 60.0) == (3, 3, False)


@pytest.mark.parametrize("tests", [SQUARES, ASSERTED], ids=["calls", "assertions"])
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_verdict_passes_nothing(name: str, tests, sandbox: Sandbox):
    verdict = grade(sandbox, FORGED[name], "f", tests, 60.0)
    if name == "other types" and tests is ASSERTED:  # these assertions say nothing of types
        assert verdict == (3, 3, False)
    else:
        assert (verdict.passed, verdict.late) == (0, False)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_verdict_is_no_output(name: str, sandbox: Sandbox):
    assert grade(sandbox, FORGED[name], "", ECHO[:1], 60.0).passed == 0


def test_output_of_megabytes_is_right_or_wrong_as_any(sandbox: Sandbox):
    expected = "\n".join(str(number) for number in range(400_000))
    tests = [Program("400000", expected)]
    assert len(expected) > 2 << 20
    loop = "for number in range(int(input())): print(number)"
    assert grade(sandbox, loop, "", tests, 60.0).passed == 1
    assert grade(sandbox, f"{loop}\nprint(0)", "", tests, 60.0) == (0, 1, False)
    assert grade(sandbox, "while True: print('x' * 1000)", "", tests, 60.0) == (0, 1, False)
    assert grade(sandbox, "def f(x):\n  print('x' * 3_000_000)\n  return x * x", "f", SQUARES, 60.0).passed == 3


def test_what_a_signal_prints_after_the_time_is_no_output(sandbox: Sandbox):
    late = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: print(9, flush=True))\nwhile True: pass"
    assert grade(sandbox, late, "", ECHO[:1], 0.3) == (0, 1, True)


def test_names_that_run_before_an_answer_are_no_answer(sandbox: Sandbox):
    tests = [Call([1, 2], 3)]
    times = TimeLimits(60.0, 60.0)
    before = "from operator import *\ndef exchange(a, b): return 3"
    for name in ("add", "exchange"):
        assert graded(sandbox, Solution(CodeText("x = 1"), name, before), tests, times).passed == 0
    assert graded(sandbox, Solution(CodeText("from operator import add"), "add", before), tests, times).passed == 1


def test_values_made_to_be_slow_cost_the_grader_little():
    """Sets of integers with one hash: 40,000 of them in a set take about 10 s."""
    colliding = [number * (2**61 - 1) for number in range(40_000)]
    begun = time.process_time()
    assert not same({"set": colliding}, written({1, 2}))
    assert not same({"set": colliding}, {"set": [0, *colliding[:-1]]})
    assert same({"dict": [[each, 0] for each in colliding]}, {"dict": [[each, 0] for each in reversed(colliding)]})
    assert time.process_time() - begun < 3.0
    assert not same(10**308 * 10, 1.0)


@pytest.mark.parametrize("tests", [SQUARES[:1], Assertions("", "assert f(3) == 9")], ids=["calls", "assertions"])
def test_values_as_deep_as_can_be_read_stop_no_grader(tests: Tests, sandbox: Sandbox):
    forged = (
        "import os, sys\ndef f(x):\n  nonce = sys._getframe(1).f_locals['self']._nonce\n"
        "  os.write(1, (nonce + '{\"value\": ' + '[' * DEPTH + ']' * DEPTH + '}\\n').encode())"
    )
    for depth in range(sys.getrecursionlimit() - 60, sys.getrecursionlimit()):  # the last that can be sent, and read
        assert grade(sandbox, f"DEPTH = {depth}\n{forged}", "f", tests, 0.5)[::2] == (0, False)


def test_time_is_that_of_the_processor_and_each_test_has_its_own(sandbox: Sandbox):
    work = "import time\ndef f(x):\n  end = time.process_time() + 0.2\n  while time.process_time() < end: pass\n  return x * x"
    wait = "import time\ndef f(x):\n  time.sleep(0.5)\n  return x * x"
    limits = TimeLimits(test_s=0.45, all_s=60.0)
    assert graded(sandbox, Solution(CodeText(work), "f"), SQUARES, limits) == (3, 3, False)
    assert graded(sandbox, Solution(CodeText(wait), "f"), SQUARES, limits) == (3, 3, False)
    assert graded(sandbox, Solution(CodeText(work), "f"), SQUARES, TimeLimits(test_s=0.45, all_s=0.45)) == (2, 3, True)


def test_what_is_partly_right_gets_its_share(sandbox: Sandbox):
    wrong_below = "def f(x): return x * x if x > 0 else None"
    assert grade(sandbox, wrong_below, "f", SQUARES, 60.0) == (2, 3, False)
    assert grade(sandbox, "def f(x):\n  if x == 3: return 9\n  raise ValueError", "f", ASSERTED, 60.0) == (1, 3, False)
    assert grade(sandbox, "print(9)", "", ECHO, 60.0) == (1, 2, False)


def test_time_that_is_up_is_told_apart_from_a_wrong_answer(sandbox: Sandbox):
    slow = "def f(x):\n  while x == -2: pass\n  return x * x"
    assert grade(sandbox, slow, "f", SQUARES, 0.3) == (2, 3, True)
    assert grade(sandbox, "while True: pass", "", ECHO, 0.3).late
    task = Code(TaskSource(), timeout_s=0.3)
    row = {"question": "?", "name": "f", "tests": [{"arguments": [x], "expected": x * x} for x in (3, -2)]}
    prompt = Prompt(id="a", question="?", answer="", metadata=row)
    with pytest.raises(OutOfTime, match=r"longer than 0\.3 s for a test") as late:
        task.grade(prompt, slow)
    assert late.value.correct == 0.5
    config = TaskConfig(name="code", options={"timeout_s": 0.3})
    grader = Grader([config], GradingConfig(workers=0), max_new_tokens=8)
    asked = TaskPrompt(task=0, prompt=prompt, system_prompt=None)
    texts = (slow, "def f(x): return 0", "def f(x): return x * x")
    late, wrong, right = grader.grade([(asked, Graded(text=text, tokens=(1,))) for text in texts])
    grader.close()
    assert (late.timed_out, late.total) == (True, 0.5)
    assert (wrong.timed_out, wrong.total) == (False, 0.0)
    assert (right.timed_out, right.total) == (False, 1.0)


def test_hidden_tests_enter_no_sandbox(sandbox: Sandbox):
    searched = """
import re
def f(x):
    found = set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(start)
                found |= set(re.findall(b"[w]anted-value|[i]nput-two|[z]ygote", memory.read(end - start)))
    return sorted(each.decode() for each in found)
"""
    tests = [Call(["input-one"], ["zygote"]), Call(["input-two"], ["wanted-value"])]  # the first word must be found
    assert grade(sandbox, searched, "f", tests, 60.0).passed == 1


def test_generated_functions_are_many_and_right(sandbox: Sandbox):
    functions = small_functions()
    assert len(functions) >= 200
    assert len({each.question for each in functions}) == len(functions)
    assert {each.name for each in functions} == {family.name for family in FAMILIES}
    task = make_task(TaskConfig(name="code"))
    held_out, train = task.prompts("eval"), task.prompts("train")
    assert len(held_out) == 50
    assert not {each.question for each in held_out} & {each.question for each in train}
    by_name = {str(each.metadata["name"]): each for each in train}
    for prompt in by_name.values():
        assert task.grade(prompt, f"So:\n{prompt.answer}") == 1.0
        assert len(prompt.metadata["tests"]) == 8
        first = json.dumps(prompt.metadata["tests"][0]["arguments"][0])
        assert f"{prompt.metadata['name']}({first})" not in prompt.question
        constant = f"def {prompt.metadata['name']}(x): return {prompt.metadata['tests'][0]['expected']!r}"
        assert task.grade(prompt, constant) < 1.0


def test_a_generated_reference_agrees_with_one_written_for_the_test():
    by_name = {each.name: each for each in small_functions() if " 3" in each.question}
    for (values,), want in ((test, want) for test, want in [((a,), b) for a, b in by_name["every_nth"].tests]):
        assert want == [value for place, value in enumerate(values) if place % 3 == 0]
    for argument, want in by_name["digit_powers"].tests:
        assert want == sum(int(digit) * int(digit) * int(digit) for digit in f"{argument}")
    for argument, want in by_name["largest"].tests:
        assert want == sorted(argument)[::-1][:3]


ROWS = {
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": 'def double(x):\n    """Twice x."""\n', "entry_point": "double",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    for x in range(3):\n        assert candidate(x) == x + x\n",
    },
    "mbpp": {
        "text": "Write a function to sort a tuple.", "code": "def sort(t):\n    return tuple(sorted(t))", "test_setup_code": "",
        "test_list": ["assert set(sort((3, 1))) == {1, 3}", "assert sort((2, 1)) == (1, 2)", "assert sort(()) == ()"],
    },
    "livecodebench": {
        "question_content": "Add the numbers.", "starter_code": "class Solution:\n    def add(self, a, b):",
        "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
        "private_test_cases": json.dumps([{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "add"}),
        "solution": "class Solution:\n    def add(self, a, b):\n        return a + b",
    },
    "programs": {
        "question": "Print twice the number.", "tests": [{"input": "2", "output": "4"}, {"input": "5", "output": "10\n"}],
        "solution": "print(2 * int(input()))",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS)
def test_rows_of_each_form_are_asked_and_graded(form: str, tmp_path: Path):
    need_sandbox()
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[form]))
    task = Code(TaskSource(path=str(tmp_path / "rows.jsonl"), eval_path=str(tmp_path / "rows.jsonl")), timeout_s=60.0)
    (prompt,) = task.prompts("train")
    assert prompt.question
    assert task.grade(prompt, prompt.answer) == 1.0
    assert task.grade(prompt, "```python\ndef double(x): return 3\n```") < 1.0
    if form == "humaneval":  # the rest of the function alone, as base models write it
        assert task.grade(prompt, "    return x + x") == 1.0
    if form == "mbpp":
        assert prompt.question.endswith("For example, this holds: set(sort((3, 1))) == {1, 3}")
        assert task.grade(prompt, "def sort(t): return sorted(t)") == pytest.approx(1 / 3)
        task.reward = "all"
        assert task.grade(prompt, "def sort(t): return sorted(t)") == 0.0


RAISES = "def f(x):\n    if x < 0: raise ValueError('neg')\n    return 2 * x"
OWN_CLASS = f"class Neg(ValueError): pass\n{RAISES.replace('ValueError', 'Neg')}"
EXPECTS = "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    held = str(error) == 'neg'\n"
LOOPS = "for each in f(1):\n    assert each > 0"
WALRUS = "assert (y := f(2)) == 4\nassert y == 4\nclass C:\n    z = f(1)\n    assert z == 2"
UNSAID = "if f(2) != 4:\n    raise AssertionError"


@pytest.mark.parametrize(
    ("tests", "code", "passed", "number"),
    [
        (EXPECTS, RAISES, 1, 1), (EXPECTS, OWN_CLASS, 1, 1), (f"{EXPECTS}assert held", OWN_CLASS, 1, 1),
        (EXPECTS, "def f(x): return 0", 0, 1), (EXPECTS, "def f(x): raise TypeError", 0, 1),
        (LOOPS, "def f(x): return []", 0, 0), (LOOPS, "def f(x): return [1]", 1, 1), (LOOPS, RAISES, 0, 1),
        (WALRUS, RAISES, 3, 3), (WALRUS, "def f(x): return 4", 2, 3), (UNSAID, RAISES, 1, 1), (UNSAID, "def f(x): return 0", 0, 1),
        ("pass", RAISES, 0, 0),
    ],
)  # fmt: skip
def test_assertions_mean_what_they_mean_where_they_stand(tests: str, code: str, passed: int, number: int):
    need_sandbox()
    with Sandbox(Limits(life_cpu_s=20)) as sandbox:
        verdict = graded(sandbox, Solution(CodeText(code), "f"), Assertions("", tests), TimeLimits(5.0, 20.0))
    assert verdict == Verdict(passed, number)


def test_streams_of_a_program_have_the_modes_that_the_interpreter_gives_them():
    need_sandbox()
    with Sandbox(Limits(life_cpu_s=20)) as sandbox:
        assert sandbox.run("import sys\nprint(sys.stdin.mode, sys.stdout.mode, sys.stderr.mode)").output == "r w w\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, r"rows.jsonl:1: not a question with tests \(KeyError\('tests'\)\); an own row has"),
        ({"question": "?", "tests": []}, "the row has no tests"),
        (
            {"question_content": "?", "private_test_cases": "eJxr"},
            "private_test_cases: neither JSON nor LiveCodeBench's packed tests",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row: dict[str, object], message: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        Code(TaskSource(path=str(tmp_path / "rows.jsonl"))).prompts("train")


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        (1, 1, True), (1, True, False), (1.0, 1, False), (1, 1.0, True), (True, 1.0, False), (0.1 + 0.2, 0.3, True), (float("nan"), float("nan"), False),
        ([1, (2,)], [1, (2,)], True), ([1, [2]], [1, (2,)], False), ((1, [2]), [1, [2]], True),
        ({"a": 1.0}, {"a": 1}, False),
        ({1: "a", 2: "b"}, {2: "b", 1: "a"}, True), ({1}, {True}, False), (set(), frozenset(), False), (None, 0, False),
    ],
)  # fmt: skip
def test_values_are_compared_with_their_types(found: object, expected: object, equal: bool):
    assert same(written(found), written(expected)) is equal


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        ("0.30000000000000004", "0.3", True), ("2.50", "2.5", True), ("1e-05", "0.00001", True), ("3.0", "3", True),
        ("-0.0", "0.0", True), ("0.5 x 1.0", "0.50 x 1", True), ("1.0  2", "1.0 2", True), ("1.2246e-16", "0.0", True),
        ("0.333333", "0.3333333333333333", True), ("0.3333333333333333", "0.333333", True),
        ("3.14", "3.14159", False), ("0.3", "0.333333", False), ("1e-10", "2e-10", False), ("0.000000", "0.0000001", False),
        ("1234568.0", "1234567.123456789", False), ("1000001.00", "1000000.25", False), ("0.333334", "0.333333", False),
        ("7", "007", False), ("11", "0011", False), ("1_0", "10", False), ("nan", "nan", True), ("nan", "0.5", False),
        ("inf", "1e999", False), ("1.0", "1.0 2.0", False), ("a  b", "a b", False), ("YES", "Yes", False),
        ("9" * 500 + ".0", "9" * 500, False), ("1e9999", "1e9998", False), ("\uff11.0", "1.0", False),
    ],
)  # fmt: skip
def test_numbers_of_outputs_may_be_written_differently(found: str, expected: str, equal: bool):
    assert same_output(found, expected) is equal


def test_outputs_are_compared_but_for_spaces_at_ends():
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a\n\nb", "a\nb")
    assert not same_output(" a", "a")


def test_a_run_says_how_code_is_graded_or_that_it_cannot_be(monkeypatch: pytest.MonkeyPatch):
    need_sandbox()
    grader = Grader(
        [TaskConfig(name="code"), TaskConfig(name="arithmetic")], GradingConfig(workers=0), max_new_tokens=8
    )
    prompts = [TaskPrompt(task=n, prompt=Prompt(id="a", question="?", answer="1"), system_prompt=None) for n in (0, 1)]
    (line,) = grader.check(prompts)
    assert line.startswith("sandbox: namespaces")

    def refuse() -> str:
        raise ValueError("this machine permits no sandbox")

    monkeypatch.setattr(Code, "check_machine", staticmethod(refuse))
    assert grader.check(prompts[1:]) == []
    with pytest.raises(ValueError, match="permits no sandbox"):
        grader.check(prompts)
    grader.close()


@pytest.mark.parametrize(
    "talk", [{"tools": ["python"]}, {"environment": "podium.tasks.code.python_tool:PythonSession"}]
)
def test_a_machine_without_a_sandbox_is_found_before_a_tool_is_called(monkeypatch, talk):
    def refuse() -> str:
        raise ValueError("this machine permits no sandbox")

    monkeypatch.setattr(python_tool.python, "check_machine", refuse)
    task = TaskConfig(name="arithmetic", **talk)
    grader = Grader([task], GradingConfig(workers=0), max_new_tokens=8)
    prompt = TaskPrompt(task=0, prompt=Prompt(id="a", question="?", answer="1"), system_prompt=None)
    with pytest.raises(ValueError, match="permits no sandbox"):
        grader.check([prompt])
    grader.close()
