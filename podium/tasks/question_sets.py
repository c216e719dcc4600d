"""Tasks that are sets of questions with answers: GSM8K, MATH, and your own .jsonl or .parquet file."""

from typing import Literal

from podium.tasks.data import Columns, HubDataset, QuestionSet
from podium.tasks.final_answer import answer_text, final_answer
from podium.tasks.task import Prompt, TaskSource


class Gsm8k(QuestionSet):
    """Problems whose reference answer follows `####`, from the hub (`openai/gsm8k`) or a local path."""

    # arXiv:2110.14168: 7,473 problems in words to train on and 1,319 to test on
    system_prompt = r"Solve the problem step by step. Then write the result, a single number, as \boxed{number}."

    def __init__(self, source: TaskSource) -> None:
        rule = "has no '#### result' line"
        columns = Columns(question="question", answer="answer", reference=_after_hashes, rule=rule)
        super().__init__("gsm8k", source, columns, HubDataset("openai/gsm8k", "main"))


def _after_hashes(answer: str) -> str | None:
    """What follows the last `####`."""
    _, hashes, result = answer.rpartition("####")
    return result.strip() if hashes else None


class Math(QuestionSet):
    r"""Problems with an answer in LaTeX, from the hub or a local path.

    The answer column may hold the answer itself or a solution that ends in `\boxed{}`. By default the set has 12,000
    problems to train on, and MATH-500 to test on.
    """

    # arXiv:2103.03874
    system_prompt = r"Solve the problem step by step. Then write the final answer once, as \boxed{answer}."

    def __init__(
        self,
        source: TaskSource,
        *,
        dataset: str = "nlile/hendrycks-MATH-benchmark",
        subset: str | None = None,
        question: str = "problem",
        answer: str = "answer",
    ) -> None:
        columns = Columns(question=question, answer=answer, reference=_boxed, rule="holds no answer")
        super().__init__("math", source, columns, HubDataset(dataset, subset))


def math500(source: TaskSource) -> Math:
    """MATH-500 alone: it has a test split only, so it is for evaluation."""
    return Math(source, dataset="HuggingFaceH4/MATH-500")


def _boxed(answer: str) -> str | None:
    """The answer, or what its last box holds."""
    return final_answer(answer) if "\\boxed" in answer else answer.strip()


class Jsonl(QuestionSet):
    """Rows with a question and an answer; the options name the columns, and how answers are compared.

    `match: math` compares numbers and formulas, `match: text` the final answer's words, up to case and outer spaces.
    """

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
        columns = Columns(question=question, answer=answer)
        super().__init__("jsonl", source, columns, HubDataset(dataset, subset) if dataset else None)
        self.match = match

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the row's answer, as `match` says."""
        if self.match == "math":
            return super().grade(prompt, completion)
        text = answer_text(completion)
        answer = final_answer(text)
        return float(_bare(text if answer is None else answer) == _bare(prompt.answer))


def _bare(text: str) -> str:
    """The text without case, outer punctuation and differences of spacing."""
    return " ".join(text.casefold().split()).strip(" .!?\"'*")
