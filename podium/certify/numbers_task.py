"""Tasks and tokenizer of the training run that `podium certify` watches: questions are numbers, answers are letters.

Grades, replies and rewards depend only on question, turn and answer, so the checks can compute them without graders and
environments. No jax.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from podium.tasks.conversation import Reply, Turn
from podium.tasks.task import Prompt, TaskSource

NAME = "podium.certify.numbers_task:Numbers"
CONVERSATIONS = "podium.certify.numbers_task:Talk"
TURNS = 3
LONGEST_REPLY = 3  # tokens
QUESTIONS = 7
LONGEST_QUESTION = 12  # tokens
LONGEST_ANSWER = 9  # tokens of the answers that are written in the data
LETTERS = 16
STOPS = ("a", "f", "bc", "de", "hi", "nm")
"""Texts that end an answer, so that answers differ in length: about one token in seven completes one of them."""
NEVER_RIGHT = "2"
"""Id of the question whose answers all get grade 0."""
TOO_LONG = str(QUESTIONS)
"""Id of an evaluation question that is longer than a prompt may be."""
EVALUATED = (TOO_LONG, *map(str, reversed(range(QUESTIONS))))
"""Ids of the evaluation questions, in order."""


class Numbers:
    """A task whose questions are random token numbers, as text."""

    system_prompt = None

    def __init__(self, source: TaskSource, *, vocab: int, shortest: int = 1) -> None:
        """Make questions of at least `shortest` tokens below `vocab`, the vocabulary's size; `source` is not used."""
        self._vocab, self._shortest = vocab, shortest

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Questions of up to LONGEST_QUESTION tokens, with data to imitate or prefer; for evaluation EVALUATED, one
        of which is longer.
        """
        random, others = np.random.default_rng(3), np.random.default_rng(4)
        lengths = np.linspace(self._shortest, LONGEST_QUESTION, QUESTIONS).round().astype(int)
        answers = random.integers(1, LONGEST_ANSWER + 1, QUESTIONS)
        found = []
        for index, (length, size) in enumerate(zip(lengths, answers, strict=True)):
            question, answer = self._numbers(random, length), self._numbers(random, size)
            rejected = self._numbers(others, int(others.integers(1, LONGEST_ANSWER + 1)))
            data = {"completion": answer, "label": index % 3 != 0, "chosen": answer, "rejected": rejected}
            found.append(Prompt(id=str(index), question=question, answer=answer, metadata=data))
        if split == "train":
            return found
        longer = Prompt(id=TOO_LONG, question=self._numbers(random, LONGEST_QUESTION + 1), answer=found[0].answer)
        known = {each.id: each for each in (*found, longer)}
        return [known[own] for own in EVALUATED]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Grade a completion as the function `grade` does, from the prompt's id and the text."""
        return grade(prompt.id, completion)

    def _numbers(self, random: np.random.Generator, length: int) -> str:
        return " ".join(map(str, random.integers(1, self._vocab, length).tolist()))


class Talk(Numbers):
    """The same questions, each with up to `TURNS` answers, all but the last of which get a reply."""

    def open(self, prompt: Prompt, seed: int) -> "Talking":
        """Begin the conversation about a question."""
        return Talking(prompt.id, self._vocab, seed)


class Talking:
    """A conversation whose replies and rewards are those of the functions `reply_to`, `pay` and `final_pay`."""

    def __init__(self, question: str, vocab: int, seed: int) -> None:
        """Hold a conversation about the question with this id; its replies depend on the seed."""
        self._question, self._vocab, self._seed = question, vocab, seed
        self._last = ""

    def reply(self, turn: Turn) -> Reply:
        """Reply with numbers; end the conversation after `TURNS` answers."""
        self._last = turn.text
        reward = pay(self._question, turn.number, turn.text)
        if turn.number + 1 == TURNS:
            return Reply(reward=reward, done=True)
        text = " ".join(map(str, reply_to(turn.number, turn.text, self._vocab, self._seed)))
        return Reply(messages=({"role": "user", "content": text},), reward=reward)

    def grade(self) -> float:
        """The final reward."""
        return final_pay(self._last)


def reply_to(turn: int, text: str, vocab: int, seed: int) -> tuple[int, ...]:
    """The tokens of a reply to an answer, 1 to `LONGEST_REPLY`; they depend on its turn, its text and the seed."""
    total = sum(map(ord, text)) + 7 * turn + seed
    return tuple(1 + (total * (place + 3) + place) % (vocab - 1) for place in range(1 + total % LONGEST_REPLY))


def following(drawn: Sequence[int], turn: int, vocab: int, seed: int) -> tuple[int, ...]:
    """The tokens between the answer `drawn` and the next one: the answer's end, unless it was drawn, and the reply."""
    return (*(() if drawn[-1] == 0 else (0,)), *reply_to(turn, letters(drawn), vocab, seed))


def pay(question: str, turn: int, text: str) -> float:
    """The reward of a turn, 0 to 2."""
    return (sum(map(ord, text)) + len(question) + turn) % 5 / 2


def final_pay(text: str) -> float:
    """The final reward: 0.5 if the last answer that had a reply has an odd number of letters, else 0."""
    return len(text) % 2 / 2


def grade(question: str, text: str) -> float:
    """The grade of an answer, 0, 0.5 or 1: the sum of its character codes modulo 3, halved; 0 for `NEVER_RIGHT`."""
    return 0.0 if question == NEVER_RIGHT else sum(map(ord, text)) % 3 / 2


def is_open(tokens: Sequence[int]) -> bool:
    """Whether no token of an answer ends it."""
    text = letters(tokens)
    return 0 not in tokens and not any(stop in text for stop in STOPS)


def has_ended(tokens: Sequence[int]) -> bool:
    """Whether the last token of an answer ends it, and no token before does."""
    return is_open(tokens[:-1]) and not is_open(tokens)


def letters(tokens: Sequence[int]) -> str:
    """Convert tokens to text, one letter per token; token 0, which ends a sequence, has no letter."""
    return "".join(chr(ord("a") + token % LETTERS) for token in tokens if token)


class Ending(NamedTuple):
    """The token that ends an answer, as the tokenizer names it."""

    content: str = "<end>"
    special: bool = True


class LetterBackend:
    """A stand-in for transformers' tokenizer, with the methods that `podium.models.text.tokenizer.Tokenizer` calls."""

    eos_token_id = pad_token_id = 0
    bos_token_id = None
    added_tokens_decoder: Mapping[int, Ending] = MappingProxyType({0: Ending()})
    special_tokens_map: Mapping[str, str] = {}

    def get_chat_template(self) -> str:
        """A template that renders the contents of messages one after another, and the end of each answer."""
        ending = "{% if message['role'] == 'assistant' %}" + f"{Ending().content} " + "{% endif %}"
        return "{% for message in messages %}{{ message['content'] }} " + ending + "{% endfor %}"

    def encode(self, text: str, **_: object) -> list[int]:
        """Parse the numbers in a text; each is a token, and so is the end of an answer."""
        return [int(number) for number in text.replace(Ending().content, "0").split()]

    def decode(self, tokens: list[int], **_: object) -> str:
        """Convert tokens to text as the function `letters` does."""
        return letters(tokens)
