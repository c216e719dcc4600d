"""Your own questions and answers, from a .jsonl or .parquet file."""

from collections.abc import Sequence
from typing import Literal

from podium.tasks.answers import is_correct
from podium.tasks.data import Columns, HubDataset, read_prompts
from podium.tasks.final_answer import answer_text, final_answer
from podium.tasks.task import Prompt, TaskSource


class Jsonl:
    """Rows with a question and an answer; the options name the columns, and how answers are compared.

    `match: math` compares numbers and formulas, `match: text` the final answer's words, up to case and outer spaces.
    """

    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        question: str = "question",
        answer: str = "answer",
        match: Literal["math", "text"] = "math",
        dataset: str | None = None,
        subset: str | None = None,
    ) -> None:
        self.source = source
        self.columns = Columns(question=question, answer=answer)
        self.dataset = HubDataset(dataset, subset) if dataset else None
        self.match = match

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All rows of a split."""
        return read_prompts("jsonl", split, self.source, self.columns, self.dataset)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the row's answer."""
        if self.match == "math":
            return float(is_correct(completion, prompt.answer))
        text = answer_text(completion)
        answer = final_answer(text)
        return float(_words(text if answer is None else answer) == _words(prompt.answer))


def _words(text: str) -> str:
    """The text without case, outer punctuation and differences of spacing."""
    return " ".join(text.casefold().split()).strip(" .!?\"'*")
