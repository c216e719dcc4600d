"""Prompts of a task that is an environment: rows of data, each passed to its `reset`; or, without data, numbers."""

from collections.abc import Sequence

from podium.tasks.math_answers.correctness import is_correct
from podium.tasks.question_files import answer_text, is_missing, question_column, question_of, read_rows
from podium.tasks.task import Count, Prompt, TaskSource


class EnvironmentRows:
    """Rows for an environment: `tasks: [{environment: mymodule:Wordle, path: rows.jsonl}]`.

    A row's `question`, or `prompt`, is the first message: text, or a list of messages; `reset` may add to it. If rows
    have both, the option `question` names the column. Without path or dataset there are `episodes` prompts to train on
    and `eval_episodes` others for evaluation, and a prompt's number seeds its environment.
    """

    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        episodes: Count = 1000,
        eval_episodes: Count = 100,
        question: str | None = None,
        dataset: str | None = None,
        subset: str | None = None,
    ) -> None:
        self.source = source.on_hub(dataset, subset)
        self.episodes = episodes
        self.eval_episodes = eval_episodes
        self.columns = ASKED if question is None else (question,)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One prompt per row, or per number."""
        if self.source.path is None and not self.source.dataset:
            count = self.eval_episodes if split == "eval" else self.episodes
            return [Prompt(id=f"environment/{split}/{number}", question="", answer="") for number in range(count)]
        rows = read_rows("environment", self.source, split)
        column = question_column("environment", self.columns, rows)
        if self.columns is not ASKED and column not in rows[0][1]:
            raise ValueError(
                f"environment: {rows[0][0]}: no column {column!r} (the question); choose one of {', '.join(rows[0][1])}"
            )
        return [_prompt(f"environment/{split}/{index}", *each, column) for index, each in enumerate(rows)]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the last answer equals the row's `answer`, for environments that give no reward."""
        if not prompt.answer:
            raise ValueError("the environment has no get_reward, and the row has no answer; set a reward function")
        return float(is_correct(completion, prompt.answer))


ASKED = ("question", "prompt")
"""Columns that may hold the first message."""


def _prompt(prompt_id: str, location: str, row: dict[str, object], column: str) -> Prompt:
    asked, answer = (None if is_missing(value) else value for value in (row.get(column), row.get("answer")))
    where = f"environment: {location}: the prompt (column {column!r})"
    question, messages = ("", None) if asked in (None, "") else question_of(where, asked)
    # Other columns are read only by the environment, which gets the whole row.
    is_reference = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    reference = answer_text(f"environment: {location}: the answer", answer) if is_reference else ""
    return Prompt(id=prompt_id, question=question, answer=reference, metadata=row, messages=messages)
