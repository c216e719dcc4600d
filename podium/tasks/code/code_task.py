"""The task `code`: functions and programs to write, run against tests in the sandbox."""

import ast
import builtins
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from podium.sandbox.check import check_machine
from podium.sandbox.runs import Limits, Sandbox
from podium.sandbox.values import read, written
from podium.tasks.code.code_blocks import code_of, defines
from podium.tasks.code.code_grading import Assertions, Call, Program, Solution, Tests, TimeLimits, grade
from podium.tasks.code.packed_tests import unpacked
from podium.tasks.code.small_functions import small_functions
from podium.tasks.question_files import read_rows
from podium.tasks.task import OutOfTime, Prompt, TaskSource

Row = Mapping[str, Any]
SANDBOX_S = 60.0
"""Wall-clock seconds for starting and ending all runs in the sandbox, in addition to the time of an answer's code."""
FORMS = (
    "an own row has `question`, `tests` and for functions `name`; HumanEval's `prompt`, `test`, `entry_point`; MBPP's"
    " `text` or `prompt` and `test_list`; LiveCodeBench's `question_content` and `public_test_cases`"
)
STAR_IMPORTS = (
    "typing", "bisect", "collections", "copy", "datetime", "functools", "heapq", "io", "itertools", "json", "math",
    "operator", "random", "re", "statistics", "string", "sys", "builtins",
)  # fmt: skip
MODULES = (*STAR_IMPORTS[:-1], "array", "decimal", "fractions", "os", "time")
COMPETITION = "\n".join(
    (
        *(f"from {name} import *" for name in STAR_IMPORTS),
        f"import {', '.join(MODULES)}",
        "sys.setrecursionlimit(50_000)",
    )
)
"""What LiveCodeBench's own harness runs before an answer: imports of names that starter code uses, and a recursion
limit for depth-first searches. Where names collide, a builtin replaces a module's function, and a module replaces
both."""


class Question(NamedTuple):
    """A row as this task reads it."""

    text: str
    name: str
    """Name of the function to write; empty for a program."""
    tests: Tests
    before: str = ""
    """Code that runs before an answer, as in the original harness of the row's format."""
    beginning: str = ""
    """The beginning of the function; an answer may continue it instead of repeating it."""


class Code:
    """Functions and programs in Python, graded by tests that run in a sandbox (docs/sandbox.md).

    Without `path` or `dataset` the functions are generated: over 200 small ones with 8 hidden tests each, of which
    `eval_size` are held out. Rows of files are in the form of HumanEval, MBPP or LiveCodeBench, or your own
    (docs/tasks.md).

    `reward: share` pays the share of tests passed; `all` pays 1 if all are, else 0. Each test may take `timeout_s`
    seconds of CPU time, and all tests of an answer `total_timeout_s`; after a test that takes longer, no further test
    is run.
    """

    system_prompt: str | None = "Write the solution in Python, in one block between ```python and ```."

    def __init__(
        self,
        source: TaskSource,
        *,
        reward: Literal["share", "all"] = "share",
        timeout_s: Annotated[float, Field(gt=0.0)] = 3.0,
        total_timeout_s: Annotated[float, Field(gt=0.0)] = 30.0,
        memory_mib: Annotated[int, Field(ge=64)] = 512,
        eval_size: Annotated[int, Field(ge=1, le=100)] = 50,
        dataset: str | None = None,
        subset: str | None = None,
    ) -> None:
        self.source = source.on_hub(dataset, subset)
        self.reward = reward
        self.eval_size = eval_size
        self._times = TimeLimits(test_s=min(timeout_s, total_timeout_s), all_s=total_timeout_s)
        self._sandbox = Sandbox(Limits(life_cpu_s=math.ceil(total_timeout_s) + 1, memory_mib=memory_mib))
        self.grading_limit_s = self._times.wall_s + SANDBOX_S

    check_machine = staticmethod(check_machine)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All questions of a split. Raises ValueError, with the row's location, if a row has none of the known
        formats.
        """
        if not (self.source.path or self.source.dataset):
            rows = [("", row) for row in generated()]
            rows = rows[: self.eval_size] if split == "eval" else rows[self.eval_size :]
        else:
            rows = read_rows("code", self.source, split)
        return [_prompt(f"code/{split}/{index}", place, row) for index, (place, row) in enumerate(rows)]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """The share of tests passed, or 1 if all pass and else 0. Raises OutOfTime if the code took too long."""
        question = parsed(prompt.metadata)
        code = code_of(completion, question.name)
        if question.beginning and not defines(code.text, question.name):
            code = code._replace(text=question.beginning + code.text)
        solution = Solution(code, question.name, question.before)
        verdict = grade(self._sandbox, solution, question.tests, self._times)
        passed = verdict.passed / max(1, verdict.tests)
        correct = float(passed == 1) if self.reward == "all" else passed
        if verdict.late:
            limits = f"{self._times.test_s:g} s for a test, or {self._times.all_s:g} s for all"
            raise OutOfTime(f"the code took longer than {limits}, of CPU time", correct)
        return correct


def generated() -> list[Row]:
    """Rows of the generated functions."""
    return [
        {
            "question": each.question,
            "name": each.name,
            "tests": [{"arguments": [written(argument)], "expected": written(value)} for argument, value in each.tests],
            "solution": each.solution,
        }
        for each in small_functions()
    ]


def parsed(row: Row) -> Question:
    """The question of a row. Raises KeyError, ValueError or TypeError if the row has none of the known formats."""
    if "question_content" in row:
        return _live_code_bench(row)
    if "entry_point" in row:
        return _human_eval(row)
    if "test_list" in row:
        return _mbpp(row)
    return Question(row["question"], row.get("name", ""), _own_tests(row["tests"]))


def _own_tests(tests: Sequence[Row]) -> Tests:
    if not tests:
        raise ValueError("the row has no tests")
    if "input" in tests[0]:
        return [Program(str(each["input"]), str(each["output"])) for each in tests]
    return [Call(each["arguments"], read(each["expected"])) for each in tests]


def _human_eval(row: Row) -> Question:
    prompt, name = row["prompt"], row["entry_point"]
    head = re.search(rf"^(?:async )?def {re.escape(name)}\b", prompt, re.MULTILINE)
    tests = Assertions(prompt + "\n    pass", f"{row['test']}\ncheck(candidate)")
    return Question(prompt, name, tests, before=prompt[: head.start()] if head else "", beginning=prompt)


def _mbpp(row: Row) -> Question:
    tests: list[str] = list(row["test_list"])
    imports = "\n".join(row.get("test_imports", []))
    setup = f"{imports}\n{row.get('test_setup_code') or ''}"
    question = f"{row.get('text') or row['prompt']}\nFor example, this holds: {tests[0].removeprefix('assert ')}"
    return Question(question, _tested(tests, row.get("code", "")), Assertions(setup, "\n".join(tests)), before=imports)


def _tested(tests: Sequence[str], code: str) -> str:
    """The name of the function that assertions test: one that `code` defines, or else one that is not a builtin."""
    calls = [node.func for node in ast.walk(ast.parse("\n".join(tests))) if isinstance(node, ast.Call)]
    names = [each.id for each in calls if isinstance(each, ast.Name)]
    made = [name for name in names if re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE)]
    others = [name for name in names if not hasattr(builtins, name)]
    return (made or others or names)[0]


def _tests_in(column: str, text: str) -> list[Row]:
    """The tests in a column's text: JSON, or packed as LiveCodeBench publishes private tests."""
    try:
        return json.loads(text if text.lstrip().startswith("[") else unpacked(text))
    except ValueError as error:
        raise ValueError(f"{column}: {error}") from None


def _live_code_bench(row: Row) -> Question:
    tests: list[Row] = []
    for column in ("public_test_cases", "private_test_cases"):
        value = row.get(column) or "[]"
        tests += value if isinstance(value, list) else _tests_in(column, value)
    metadata = row.get("metadata") or {}
    name = (metadata if isinstance(metadata, dict) else json.loads(metadata)).get("func_name", "")
    starter = row.get("starter_code") or ""
    question = "\n".join(filter(None, (row["question_content"], starter)))
    if not tests:
        raise ValueError("the row has no tests")
    if tests[0].get("testtype") != "functional":
        return Question(question, "", [Program(each["input"], each["output"]) for each in tests], COMPETITION)
    in_place = re.search(rf"def {re.escape(name)}\b[^#]*?->\s*None\s*:", starter) is not None
    calls = [
        Call([json.loads(line) for line in each["input"].splitlines()], json.loads(each["output"]), in_place)
        for each in tests
    ]
    return Question(question, name, calls, COMPETITION)


def _prompt(prompt_id: str, place: str, row: Row) -> Prompt:
    try:
        question = parsed(row)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, SyntaxError) as error:
        raise ValueError(f"code: {place}: not a question with tests ({error!r}); {FORMS}") from error
    solution = row.get("solution") or row.get("canonical_solution") or row.get("code") or ""
    answer = f"```python\n{question.beginning}{solution}\n```" if solution else ""
    return Prompt(id=prompt_id, question=question.text, answer=answer, metadata=row)
