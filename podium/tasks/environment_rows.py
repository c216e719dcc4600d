"""Prompts of a task that is an environment: rows of data, each passed to its `reset`; or numbers without data."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from podium.tasks.answers import is_correct
from podium.tasks.data import HubDataset, read_messages, read_rows
from podium.tasks.task import Prompt, TaskSource

Count = Annotated[int, Field(ge=1)]


class EnvironmentRows:
    """Rows for an environment: `tasks: [{environment: mymodule:Wordle, path: rows.jsonl}]`.

    A row's `question`, or `prompt`, is the first message: text, or a list of messages; `reset` may add to it. Without
    path or dataset there are `episodes` prompts to train on and `eval_episodes` others for evaluation, whose number is
    the seed of the environment.
    """

    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        episodes: Count = 1000,
        eval_episodes: Count = 100,
        dataset: str | None = None,
        subset: str | None = None,
    ) -> None:
        self.source = source
        self.episodes = episodes
        self.eval_episodes = eval_episodes
        self.dataset = HubDataset(dataset, subset) if dataset else None

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One prompt per row, or per number."""
        if self.source.path is None and self.dataset is None:
            count = self.eval_episodes if split == "eval" else self.episodes
            return [Prompt(id=f"environment/{split}/{number}", question="", answer="") for number in range(count)]
        rows = read_rows("environment", self.source, self.dataset, split)
        return [_prompt(f"environment/{split}/{index}", *each) for index, each in enumerate(rows)]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the last answer equals the row's `answer`, for environments that pay no reward themselves."""
        if not prompt.answer:
            raise ValueError("the environment has no get_reward, and the row no answer: name a reward function")
        return float(is_correct(completion, prompt.answer))


def _prompt(prompt_id: str, location: str, row: dict[str, object]) -> Prompt:
    asked = row.get("question", row.get("prompt", ""))
    answer = row.get("answer", "")
    messages = read_messages(f"environment: {location}: the prompt", asked) if isinstance(asked, list) else None
    question = str(asked) if messages is None else messages[-1]["content"]
    return Prompt(id=prompt_id, question=question, answer=str(answer), metadata=row, messages=messages)
