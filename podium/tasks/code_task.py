"""The task `code`: functions and programs to write, run against tests in the sandbox."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.sandbox.check import check_machine
from podium.sandbox.child import read, written
from podium.sandbox.runs import Limits, Sandbox
from podium.tasks.code_grading import Assertions, Call, Program, Tests, code_of, grade
from podium.tasks.data import HubDataset, read_rows
from podium.tasks.small_functions import small_functions
from podium.tasks.task import OutOfTime, Prompt, TaskSource

Row = Mapping[str, Any]
FORMS = (
    "an own row has `question`, `tests` and for functions `name`; HumanEval's `prompt`, `test`, `entry_point`; MBPP's"
    " `text` or `prompt` and `test_list`; LiveCodeBench's `question_content` and `public_test_cases`"
)


class Code:
    """Functions and programs in Python, graded by tests that run in a sandbox (docs/sandbox.md).

    Without `path` or `dataset` the functions are generated: over 200 small ones with 8 hidden tests each, of which
    `eval_size` are held out. Rows of files are in the form of HumanEval, MBPP or LiveCodeBench, or your own
    (docs/tasks.md).

    `reward: share` pays the share of tests passed; `all` pays 1 if all are, else 0. All tests of an answer together may
    take `timeout_s` seconds, less than `grading.timeout_s`, after which an answer earns nothing at all.
    """

    system_prompt: str | None = "Write the solution in Python, in one block between ```python and ```."

    def __init__(
        self,
        source: TaskSource,
        *,
        reward: Literal["share", "all"] = "share",
        timeout_s: Annotated[float, Field(gt=0.0)] = 3.0,
        memory_mib: Annotated[int, Field(ge=64)] = 512,
        eval_size: Annotated[int, Field(ge=1, le=100)] = 50,
        dataset: str | None = None,
        subset: str | None = None,
    ) -> None:
        self.source = source
        self.reward = reward
        self.timeout_s = timeout_s
        self.eval_size = eval_size
        self._dataset = HubDataset(dataset, subset) if dataset else None
        limits = Limits(wall_s=timeout_s, cpu_s=int(timeout_s) + 1, memory_mib=memory_mib)
        self._sandbox = Sandbox(limits)

    check_machine = staticmethod(check_machine)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All questions of a split. ValueError, with its place, for a row that has none of the forms."""
        if self._dataset is None and not self.source.path:
            rows = [("", row) for row in generated()]
            rows = rows[: self.eval_size] if split == "eval" else rows[self.eval_size :]
        else:
            rows = read_rows("code", self.source, self._dataset, split)
        return [_prompt(f"code/{split}/{index}", place, row) for index, (place, row) in enumerate(rows)]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """The share of tests passed, or whether all are. OutOfTime if the code took too long."""
        _, name, tests, before = parsed(prompt.metadata)
        code = code_of(completion)
        if before and f"def {name}" not in code:
            code = before + code
        verdict = grade(self._sandbox, code, name, tests, self.timeout_s)
        passed = verdict.passed / max(1, verdict.tests)
        correct = float(passed == 1) if self.reward == "all" else passed
        if verdict.late:
            raise OutOfTime(f"the code took longer than {self.timeout_s:g} s", correct)
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


def parsed(row: Row) -> tuple[str, str, Tests, str]:
    """The question of a row, the function's name, the tests, and the beginning of the code that the question holds.

    Raises KeyError, ValueError or TypeError if the row has none of the forms.
    """
    if "question_content" in row:
        return _live_code_bench(row)
    if "entry_point" in row:
        name = row["entry_point"]
        return (
            row["prompt"],
            name,
            Assertions(row["prompt"] + "\n    pass", f"{row['test']}\ncheck(candidate)"),
            row["prompt"],
        )
    if "test_list" in row:
        return _mbpp(row)
    return row["question"], row.get("name", ""), _own_tests(row["tests"]), ""


def _own_tests(tests: Sequence[Row]) -> Tests:
    if not tests:
        raise ValueError("there are no tests")
    if "input" in tests[0]:
        return [Program(str(each["input"]), str(each["output"])) for each in tests]
    return [Call(each["arguments"], read(each["expected"])) for each in tests]


def _mbpp(row: Row) -> tuple[str, str, Tests, str]:
    tests: list[str] = list(row["test_list"])
    setup = "\n".join([*row.get("test_imports", []), row.get("test_setup_code", "")])
    name = tests[0].partition("(")[0].split()[-1] if tests[0].startswith("assert ") else ""
    for wrapped in (
        text for text in tests[0].replace("assert", " ").replace("(", " ( ").split() if text.isidentifier()
    ):
        if f"def {wrapped}(" in row.get("code", ""):
            name = wrapped
    question = f"{row.get('text') or row['prompt']}\nFor example, this holds: {tests[0].removeprefix('assert ')}"
    return question, name, Assertions(setup, "\n".join(tests)), ""


def _live_code_bench(row: Row) -> tuple[str, str, Tests, str]:
    tests: list[Row] = []
    for column in ("public_test_cases", "private_test_cases"):
        value = row.get(column) or "[]"
        try:
            tests += value if isinstance(value, list) else json.loads(value)
        except ValueError:
            raise ValueError(
                f"{column} is no JSON; decompress it first: it may be a pickle, which is not read"
            ) from None
    metadata = row.get("metadata") or {}
    name = (metadata if isinstance(metadata, dict) else json.loads(metadata)).get("func_name", "")
    question = "\n".join(filter(None, (row["question_content"], row.get("starter_code"))))
    if not tests:
        raise ValueError("there are no tests")
    if tests[0].get("testtype") != "functional":
        return question, "", [Program(each["input"], each["output"]) for each in tests], ""
    calls = [
        Call([json.loads(line) for line in each["input"].splitlines()], json.loads(each["output"])) for each in tests
    ]
    return question, name, calls, ""


def _prompt(prompt_id: str, place: str, row: Row) -> Prompt:
    try:
        question, _, _, before = parsed(row)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"code: {place}: not a question with tests ({error!r}); {FORMS}") from error
    solution = row.get("solution") or row.get("canonical_solution") or row.get("code") or ""
    answer = f"```python\n{before}{solution}\n```" if solution else ""
    return Prompt(id=prompt_id, question=question, answer=answer, metadata=row)
