"""GSM8K (arXiv:2110.14168): grade-school problems in words; 7,473 to train on and 1,319 to test on."""

from collections.abc import Sequence

from podium.tasks.answers import is_correct
from podium.tasks.data import Columns, HubDataset, read_prompts
from podium.tasks.task import Prompt, TaskSource


class Gsm8k:
    """Problems whose reference answer follows `####`, from the hub (`openai/gsm8k`) or a local path."""

    system_prompt: str | None = (
        r"Solve the problem step by step. Then write the result, a single number, as \boxed{number}."
    )

    def __init__(self, source: TaskSource) -> None:
        self.source = source

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All problems of a split."""
        columns = Columns(
            question="question", answer="answer", reference=_after_hashes, rule="has no '#### result' line"
        )
        return read_prompts("gsm8k", split, self.source, columns, HubDataset("openai/gsm8k", "main"))

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the reference."""
        return float(is_correct(completion, prompt.answer))


def _after_hashes(answer: str) -> str | None:
    """What follows the last `####`."""
    _, hashes, result = answer.rpartition("####")
    return result.strip() if hashes else None
