"""What the columns of published data sets mean: where the reference is, and which task reads the rows.

Sets of the hub are known by name where their columns do not say enough; everything else follows from the columns, so a
copy of a set in a file is read in the same way.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from podium.tasks.math_answers.final_answer import final_answer

logger = logging.getLogger(__name__)

Row = Mapping[str, object]

QUESTIONS = ("question", "prompt", "problem")
"""Columns that hold the question in published sets: GSM8K's, TRL's and verl's (DAPO-17k), MATH's."""
ANSWER = "answer"
SUBSETS: Mapping[str, str] = {
    "openai/gsm8k": "main",
    "open-r1/DAPO-Math-17k-Processed": "all",
    "google-research-datasets/mbpp": "full",
}
"""The configuration to read, for sets of the hub that have several, if the task names none."""
CODE_SETS = frozenset(
    {
        "openai/openai_humaneval",
        "google-research-datasets/mbpp",
        "livecodebench/code_generation",
        "livecodebench/code_generation_lite",
    }
)
"""Sets of the hub whose rows are code to write, for task `code`."""
CODE_COLUMNS = (
    frozenset({"prompt", "test", "entry_point"}),  # HumanEval
    frozenset({"test_list"}),  # MBPP
    frozenset({"question_content", "public_test_cases"}),  # LiveCodeBench
)
NO_ANSWER = frozenset({"proof", "notfound"})
"""What NuminaMath-1.5 has in place of an answer."""


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """Where the reference of a row is."""

    column: str
    reference: Callable[[str], str | None]
    """Extracts the reference from the column's text; returns None if there is no reference."""
    rule: str = "is empty"
    """End of the error message for a row without a reference."""
    key: str | None = None
    """In a column of objects, the name of the entry that holds the answer."""
    is_without: Callable[[Row], bool] = lambda row: False
    """Whether a row is left out, because its publisher gives no answer to compare with."""
    without: str = ""
    """A sentence about rows that are left out; empty if there are none."""

    def value(self, row: Row) -> object:
        """The value that holds the answer; None if there is none."""
        value = row[self.column]
        if self.key is None:
            return value
        return value.get(self.key) if isinstance(value, Mapping) else None


def is_code(row: Row) -> bool:
    """Whether a row has the columns of code with tests."""
    return any(columns <= row.keys() for columns in CODE_COLUMNS)


def published_form(task: str, column: str, rows: Sequence[Row]) -> AnswerForm:
    """How the references of a set are written, by its columns and what they hold; a choice that is made is logged.

    Args:
        task: begins errors and log lines.
        column: of the answer. If it is `answer` and the set has no such column, the reference is where published sets
            have it: verl's `reward_model.ground_truth`, or the box that ends MATH's `solution`.
        rows: all of them, at least one.

    Raises ValueError if the rows are code with tests.
    """
    first = rows[0]
    if column not in first and is_code(first):
        raise ValueError(
            f"{task}: these are rows of code with tests (columns {', '.join(first)}), which have no answer to compare;"
            " read them with task `code`"
        )
    if column != ANSWER or any(row.get(ANSWER) is not None for row in rows):
        return _in_answers(task, column, rows)
    if first.get("reward_model") is not None:
        logger.warning("%s: the reference is `reward_model.ground_truth`", task)
        return AnswerForm("reward_model", str.strip, "has no ground_truth", key="ground_truth")
    if first.get("solution") is not None:
        return _in_solutions(task, rows)
    return AnswerForm(column, str.strip)


def after_hashes(answer: str) -> str | None:
    """The text after the last `####`, as in GSM8K; None if there is no `####`."""
    _, hashes, result = answer.rpartition("####")
    return result.strip() if hashes else None


def boxed(answer: str) -> str | None:
    """The content of the answer's last box, as in MATH, or the whole answer if it has no box."""
    return final_answer(answer) if "\\boxed" in answer else answer.strip()


def _in_answers(task: str, column: str, rows: Sequence[Row]) -> AnswerForm:
    """References in their own column; what precedes `####` or surrounds a box is not part of them."""
    if all("####" in str(row.get(column)) for row in rows):
        logger.warning("%s: the reference is what follows #### in column %r", task, column)
        return AnswerForm(column, after_hashes, "has nothing after ####")
    if "problem_is_valid" not in rows[0]:
        return AnswerForm(column, boxed, "is empty")

    def unanswered(row: Row) -> bool:  # NuminaMath-1.5
        return str(row.get(column)).strip().casefold() in NO_ANSWER

    left_out = sum(map(unanswered, rows))
    without = f"{left_out} of {len(rows)} rows have `proof` or `notfound` as their answer and are left out"
    return AnswerForm(column, boxed, "is empty", is_without=unanswered, without=without if left_out else "")


def _in_solutions(task: str, rows: Sequence[Row]) -> AnswerForm:
    """References at the end of worked solutions, in boxes; or if no solution has a box, the solutions themselves."""
    with_box = ["\\boxed" in str(row.get("solution")) for row in rows]
    if not any(with_box):
        logger.warning("%s: there is no column 'answer'; the reference is the whole of column 'solution'", task)
        return AnswerForm("solution", str.strip)
    logger.warning("%s: the reference is the last box in column 'solution'", task)

    def unanswered(row: Row) -> bool:  # proofs, in NuminaMath-CoT
        return not boxed_result(row)

    left_out = sum(map(unanswered, rows))
    without = f"{left_out} of {len(rows)} solutions have no box with a result, such as proofs, and are left out"
    return AnswerForm("solution", boxed, is_without=unanswered, without=without if left_out else "")


def boxed_result(row: Row) -> str:
    """What the box of a row's solution holds; empty if it has none."""
    solution = row.get("solution")
    return (final_answer(solution) or "") if isinstance(solution, str) and "\\boxed" in solution else ""
