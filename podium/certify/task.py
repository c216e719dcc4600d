"""The task and the tokenizer of a certificate's own training run: questions that are numbers, answers that are letters.

The reward of an answer follows from its text alone, so that it can be computed again without the grader. No jax.
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
"""A sixteenth of the tokens end an answer, so that answers are of unequal length."""
NEVER_RIGHT = "2"
"""The question whose answers all earn the same."""


class Numbers:
    """Questions of random tokens."""

    system_prompt = None

    def __init__(self, source: TaskSource, *, vocab: int) -> None:
        """`vocab`: of the model."""
        self._vocab = vocab

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The questions; the first is one token long."""
        random = np.random.default_rng(3)
        lengths = np.linspace(1, LONGEST_QUESTION, QUESTIONS).round().astype(int)
        answers = random.integers(1, LONGEST_ANSWER + 1, QUESTIONS)
        return [
            Prompt(id=str(index), question=self._numbers(random, length), answer=self._numbers(random, answer))
            for index, (length, answer) in enumerate(zip(lengths, answers, strict=True))
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """0, a half or 1, by the letters of the answer."""
        return grade(prompt.id, completion)

    def _numbers(self, random: np.random.Generator, length: int) -> str:
        return " ".join(map(str, random.integers(1, self._vocab, length).tolist()))


def grade(question: str, text: str) -> float:
    """The grade of a text: 0, a half or 1."""
    return 0.0 if question == NEVER_RIGHT else sum(map(ord, text)) % 3 / 2


def letters(tokens: Sequence[int]) -> str:
    """The text of tokens, a letter each; token 0 ends a sequence and has none."""
    return "".join(chr(ord("a") + token % LETTERS) for token in tokens if token)


class LetterBackend:
    """What `podium.models.tokenizer.Tokenizer` asks of transformers' tokenizer."""

    eos_token_id = pad_token_id = 0
    bos_token_id = None
    added_tokens_decoder: Mapping[int, object] = {}
    special_tokens_map: Mapping[str, str] = {}

    def get_chat_template(self) -> str:
        """The last message alone."""
        return "{{ messages[-1]['content'] }}"

    def encode(self, text: str, **_: object) -> list[int]:
        """The numbers in a text."""
        return [int(number) for number in text.split()]

    def decode(self, tokens: list[int], **_: object) -> str:
        """A letter for each token."""
        return letters(tokens)
