"""Tasks with questions and answers from data: GSM8K, MATH, your own files, and chats."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from podium.tasks.known_sets import QUESTIONS, after_hashes, boxed
from podium.tasks.math_answers.correctness import is_correct
from podium.tasks.math_answers.final_answer import final_answer, stated_text
from podium.tasks.messages import Message, read_messages, refuse_tools, said_by_assistant, text_of
from podium.tasks.question_files import Columns, QuestionSet, read_rows
from podium.tasks.task import Prompt, TaskSource


class Gsm8k(QuestionSet):
    """Word problems whose reference answer follows `####`, from the hub (`openai/gsm8k`) or a local path."""

    # arXiv:2110.14168: 7,473 problems in words to train on and 1,319 to test on
    system_prompt = r"Solve the problem step by step. Then write the result, a single number, as \boxed{number}."

    def __init__(self, source: TaskSource) -> None:
        rule = "has no '#### result' line"
        columns = Columns(question=("question",), answer="answer", reference=after_hashes, rule=rule)
        super().__init__("gsm8k", source.on_hub("openai/gsm8k", "main"), columns)


class Math(QuestionSet):
    r"""Problems with a LaTeX answer, from the hub or a local path.

    The answer column holds the answer itself, or a solution that ends in `\boxed{}`. The default data set has 12,000
    training problems, and MATH-500 as the test split.
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
        columns = Columns(question=(question,), answer=answer, reference=boxed, rule="holds no answer")
        super().__init__("math", source.on_hub(dataset, subset), columns)


def math500(source: TaskSource) -> Math:
    """MATH-500 alone, for evaluation: it has only a test split."""
    return Math(source, dataset="HuggingFaceH4/MATH-500")


class Jsonl(QuestionSet):
    """Rows with a question and an answer; options set the columns, and how answers are compared.

    The question is in column `question`, `prompt` or `problem`: text, or a conversation as a list of `{role, content}`
    whose last message is to be answered. If a set has several of these columns, the option must name one. The answer is
    in column `answer`. Published sets are read without conversion: GSM8K's result after `####`, the box that ends
    MATH's and NuminaMath's `solution`, DAPO's `reward_model.ground_truth`.

    `match: math` compares numbers and formulas; `match: text` compares the final answer's words, ignoring case and
        outer spaces. With `answer: null` rows need no answer; functions then compute the reward, and one of them is the
        task's `correct`.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        question: str | None = None,
        answer: str | None = "answer",
        match: Literal["math", "text"] = "math",
        dataset: str | None = None,
        subset: str | None = None,
    ) -> None:
        names = QUESTIONS if question is None else (question,)
        columns = Columns(question=names, answer=answer)
        super().__init__("jsonl", source.on_hub(dataset, subset), columns)
        self.match = match

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the row's answer, compared according to `match`."""
        return math_equal(completion, prompt.answer) if self.match == "math" else text_equal(completion, prompt.answer)


class Chat:
    """Conversations to imitate with `podium sft`: rows with `messages`, from which every assistant message is learned.

    A row's `messages` is a list of `{role, content}`; the option `messages` names another column. Evaluation asks for
    the same messages, and counts exact matches.
    """

    system_prompt: str | None = None

    def __init__(
        self, source: TaskSource, *, messages: str = "messages", dataset: str | None = None, subset: str | None = None
    ) -> None:
        self.source, self.column = source.on_hub(dataset, subset), messages

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One prompt per assistant message: the messages before it, with the message as the answer."""
        rows = read_rows("chat", self.source, split)
        return [
            Prompt(id=f"chat/{split}/{index}/{turn}", question=text_of(before[-1]), answer=answer, messages=before)
            for index, (location, row) in enumerate(rows)
            for turn, (before, answer) in enumerate(_turns(f"chat: {location}", self.column, row))
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the completion matches the row's message word for word, ignoring case and spacing; else 0."""
        return float(_bare(completion) == _bare(prompt.answer))


def _turns(location: str, column: str, row: Mapping[str, object]) -> Iterator[tuple[list[Message], str]]:
    """Yield (messages before, text) for each assistant message. Raises ValueError for invalid messages."""
    refuse_tools(location, row)
    conversation = read_messages(f"{location}: column {column!r}", row.get(column))
    found = [index for index, each in enumerate(conversation) if index and each["role"] == "assistant"]
    if not found:
        raise ValueError(f"{location}: column {column!r} is {conversation!r:.200}; an assistant must answer in it")
    for index in found:
        yield conversation[:index], said_by_assistant(f"{location}: column {column!r}", conversation[index])


def math_equal(completion: str, answer: str) -> float:
    """1 if the completion's final answer equals the reference, a number or a formula; else 0 (docs/tasks.md)."""
    return float(is_correct(completion, answer))


def text_equal(completion: str, answer: str) -> float:
    """1 if the final answer (or else the whole completion) equals the reference up to case, punctuation and spacing."""
    text = stated_text(completion)
    found = final_answer(text)
    return float(_bare(text if found is None else found) == _bare(answer))


def _bare(text: str) -> str:
    """The text in lower case, without outer punctuation, and with single spaces."""
    return " ".join(text.casefold().split()).strip(" .!?\"'*")
