"""MATH (arXiv:2103.03874), its 500 test problems (MATH-500), and sets of the same shape."""

from collections.abc import Sequence

from podium.tasks.answers import is_correct
from podium.tasks.data import Columns, HubDataset, read_prompts
from podium.tasks.final_answer import final_answer
from podium.tasks.task import Prompt, TaskSource


class Math:
    r"""Problems with an answer in LaTeX, from the hub or a local path.

    The answer column may hold the answer itself or a solution that ends in `\boxed{}`. By default the set has 12,000
    problems to train on, and MATH-500 to test on.
    """

    system_prompt: str | None = r"Solve the problem step by step. Then write the final answer once, as \boxed{answer}."

    def __init__(
        self,
        source: TaskSource,
        *,
        dataset: str = "nlile/hendrycks-MATH-benchmark",
        subset: str | None = None,
        question: str = "problem",
        answer: str = "answer",
    ) -> None:
        self.source = source
        self.dataset = HubDataset(dataset, subset)
        self.columns = Columns(question=question, answer=answer, reference=_reference, rule="holds no answer")

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All problems of a split."""
        return read_prompts("math", split, self.source, self.columns, self.dataset)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the reference."""
        return float(is_correct(completion, prompt.answer))


def math500(source: TaskSource) -> Math:
    """MATH-500 alone: it has a test split only, so it is for evaluation."""
    return Math(source, dataset="HuggingFaceH4/MATH-500")


def _reference(answer: str) -> str | None:
    """The answer, or what its last box holds."""
    return final_answer(answer) if "\\boxed" in answer else answer.strip()
