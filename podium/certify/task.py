"""Task and tokenizer of the training run that `podium certify` watches: questions are numbers, answers are letters.

The grade depends only on question and answer, so the checks can compute it without the grader. No jax.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from podium.tasks.task import Prompt, TaskSource

NAME = "podium.certify.task:Numbers"
QUESTIONS = 7
LONGEST_QUESTION = 12  # tokens
LONGEST_ANSWER = 9  # tokens of the answers that are written in the data
LETTERS = 16
STOP = "a"
"""One token in `LETTERS` has this text and ends an answer, so that answers differ in length."""
NEVER_RIGHT = "2"
"""Id of the question whose answers all get grade 0."""


class Numbers:
    """A task whose questions are random token numbers, as text."""

    system_prompt = None

    def __init__(self, source: TaskSource, *, vocab: int) -> None:
        """Ask about tokens below `vocab`, the model's vocabulary size; `source` is not used."""
        self._vocab = vocab

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The same questions for every split, of 1 to LONGEST_QUESTION tokens."""
        random = np.random.default_rng(3)
        lengths = np.linspace(1, LONGEST_QUESTION, QUESTIONS).round().astype(int)
        answers = random.integers(1, LONGEST_ANSWER + 1, QUESTIONS)
        return [
            Prompt(id=str(index), question=self._numbers(random, length), answer=self._numbers(random, answer))
            for index, (length, answer) in enumerate(zip(lengths, answers, strict=True))
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Grade a completion as the function `grade` does, from the prompt's id and the text."""
        return grade(prompt.id, completion)

    def _numbers(self, random: np.random.Generator, length: int) -> str:
        return " ".join(map(str, random.integers(1, self._vocab, length).tolist()))


def grade(question: str, text: str) -> float:
    """The grade of an answer, 0, 0.5 or 1: the sum of its character codes modulo 3, halved; 0 for `NEVER_RIGHT`."""
    return 0.0 if question == NEVER_RIGHT else sum(map(ord, text)) % 3 / 2


def letters(tokens: Sequence[int]) -> str:
    """Convert tokens to text, one letter per token; token 0, which ends a sequence, has no letter."""
    return "".join(chr(ord("a") + token % LETTERS) for token in tokens if token)


class LetterBackend:
    """A stand-in for transformers' tokenizer, with the methods that `podium.models.tokenizer.Tokenizer` calls."""

    eos_token_id = pad_token_id = 0
    bos_token_id = None
    added_tokens_decoder: Mapping[int, object] = {}
    special_tokens_map: Mapping[str, str] = {}

    def get_chat_template(self) -> str:
        """A template that renders only the last message's content."""
        return "{{ messages[-1]['content'] }}"

    def encode(self, text: str, **_: object) -> list[int]:
        """Parse the numbers in a text; each is a token."""
        return [int(number) for number in text.split()]

    def decode(self, tokens: list[int], **_: object) -> str:
        """Convert tokens to text as the function `letters` does."""
        return letters(tokens)
