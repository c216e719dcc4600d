"""Tasks and tokenizer of the training run that `podium certify` watches: questions are numbers, answers are letters.

Two of the letters call a tool in conversations, in place of being written. Grades, replies, failures and rewards depend
only on question, turn and answer, so the checks can compute them without graders and environments. No jax.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from podium.tasks.conversation import Reply, ToolCall, Turn, call_id
from podium.tasks.task import Prompt, TaskSource

NAME = "podium.certify.numbers_task:Numbers"
CONVERSATIONS = "podium.certify.numbers_task:Talk"
TURNS = 3
MOST_CALLS = 2
"""Tool calls of a conversation; an answer that asks for more ends it."""
LONGEST_MESSAGE = 3  # tokens; of a longer one, the middle is replaced by CUT
LONGEST_REPLY = MOST_CALLS * LONGEST_MESSAGE  # tokens
QUESTIONS = 7
SYSTEM_PROMPT, SYSTEM_PROMPT_OF_TALK = "9 4 8", "9 4"
LONGEST_QUESTION = 12  # tokens
LONGEST_PROMPT = LONGEST_QUESTION + 3
"""Tokens of the longest question, behind the system prompt, and in conversations the tool's name."""
LONGEST_ANSWER = 9  # tokens of the answers that are written in the data
WORDS = {"add": 5, "cut": 7}
"""Tokens of the words in prompts and replies that are not numbers: a tool's name, and the mark of what was cut out."""
LETTERS = 16
PIECES = (
    *"ABCDEFGHIJKLMN",
    *(f'<tool_call>{{"name": "add", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2)),
)
"""The texts of tokens, by their number modulo LETTERS. The last two are calls of the tool."""
STOPS = ("A", "F", "BC", "DE", "HI", "NM")
"""Texts that end an answer, so that answers differ in length: about one token in seven completes one of them."""
NEVER_RIGHT = "2"
"""Id of the question whose answers all get grade 0."""
TOO_LONG = str(QUESTIONS)
"""Id of an evaluation question that is longer than a prompt may be."""
HELD_OUT = "held_out"
"""Name of the column that only evaluation questions have."""
EVALUATED = (TOO_LONG, *map(str, reversed(range(QUESTIONS))))
"""Ids of the evaluation questions, in order."""
MOST_EVALUATED = QUESTIONS
"""How many of them an evaluation asks: the last one is left out."""


class Numbers:
    """A task whose questions are random token numbers, as text."""

    system_prompt = SYSTEM_PROMPT

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
        held_out = {each.id: {**each.metadata, HELD_OUT: True} for each in (*found, longer)}
        known = {each.id: dataclasses.replace(each, metadata=held_out[each.id]) for each in (*found, longer)}
        return [known[own] for own in EVALUATED]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Grade a completion as the function `grade` does, from the prompt's id and the text."""
        return grade(prompt.id, completion)

    def _numbers(self, random: np.random.Generator, length: int) -> str:
        return " ".join(map(str, random.integers(1, self._vocab, length).tolist()))


def add(x: int) -> int:
    """Stand in for a tool: the conversation answers its calls itself.

    Args:
        x: not used.
    """
    return x


class Talk(Numbers):
    """The same questions, each with up to `TURNS` answers, all but the last of which get a reply.

    Where `fails` says so, the environment raises an error, except in evaluations.
    """

    system_prompt = SYSTEM_PROMPT_OF_TALK
    tools = (add,)

    def open(self, prompt: Prompt, seed: int) -> "Talking":
        """Begin the conversation about a question."""
        return Talking(prompt.id, self._vocab, seed, fails=HELD_OUT not in prompt.metadata)


class Talking:
    """A conversation whose replies and rewards are those of the functions `reply_to`, `pay` and `final_pay`."""

    def __init__(self, question: str, vocab: int, seed: int, *, fails: bool) -> None:
        """Hold a conversation about the question with this id; its replies depend on the seed."""
        self._question, self._vocab, self._seed, self._fails = question, vocab, seed, fails
        self._last = ""

    def reply(self, turn: Turn) -> Reply:
        """Reply with numbers, to each call if there are calls; end the conversation after `TURNS` answers."""
        if self._fails and fails(turn.number, turn.text):
            raise RuntimeError("this answer makes the environment fail")
        self._last = turn.text
        reward = pay(self._question, turn.number, turn.text)
        if turn.number + 1 == TURNS:
            return Reply(reward=reward, done=True)
        texts = [" ".join(map(str, each)) for each in reply_to(turn.number, turn.text, self._vocab, self._seed)]
        if not turn.calls:
            return Reply(messages=({"role": "user", "content": texts[0]},), reward=reward)
        replies = {call: texts[place] for place, call in enumerate(calls_in(turn.number, turn.text))}
        messages = tuple(
            {"role": "tool", "name": each.name, "tool_call_id": each.id, "content": replies.get(_as_called(each), "1")}
            for each in turn.calls
        )
        return Reply(messages=messages, reward=reward)

    def grade(self) -> float:
        """The final reward."""
        return final_pay(self._last)


Called = tuple[str, str]
"""Id and argument of a call."""


def _as_called(call: ToolCall) -> Called:
    return call.id, str(call.arguments.get("x"))


def calls_in(turn: int, text: str) -> list[Called]:
    """The calls in an answer, in order."""
    written = [part[0] for part in text.split('"x": ')[1:]]
    return [(call_id(turn, place), x) for place, x in enumerate(written)]


def fails(turn: int, text: str) -> bool:
    """Whether an answer makes the environment fail: about one second answer in three does."""
    return turn == 1 and sum(map(ord, text)) % 3 == 1


def reply_to(turn: int, text: str, vocab: int, seed: int) -> list[tuple[int, ...]]:
    """The numbers of each message of the reply to an answer: one for each call, or one without calls.

    They depend on the turn, the text, the seed and the message's place.
    """
    total = sum(map(ord, text)) + 7 * turn + seed
    return [
        tuple(1 + ((total + 11 * message) * (place + 3) + place) % (vocab - 1) for place in range(size))
        for message in range(max(1, len(calls_in(turn, text))))
        for size in [1 + (total + message) % (LONGEST_MESSAGE + 2)]
    ]


def as_read(message: Sequence[int]) -> Iterator[int]:
    """Yield the tokens that the model reads of a message: the first and the last, if it is too long to be read."""
    yield from message if len(message) <= LONGEST_MESSAGE else (message[0], WORDS["cut"], message[-1])


def following(drawn: Sequence[int], turn: int, vocab: int, seed: int) -> tuple[int, ...]:
    """The tokens between the answer `drawn` and the next one: the answer's end, unless it was drawn, and the reply."""
    replies = [token for each in reply_to(turn, letters(drawn), vocab, seed) for token in as_read(each)]
    return (*(() if drawn[-1] == 0 else (0,)), *replies)


def pay(question: str, turn: int, text: str) -> float:
    """The reward of a turn, 0 to 0.5: most conversations earn less than 1, where a share of right answers is cut."""
    return (sum(map(ord, text)) + len(question) + turn) % 5 / 8


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
    """Convert tokens to text, a letter or a call per token; token 0, which ends a sequence, has no text."""
    return "".join(PIECES[token % LETTERS] for token in tokens if token)


def asked_tokens(question: str, *, tools: bool) -> tuple[int, ...]:
    """The tokens of a whole prompt: the tool's name if there are `tools`, the system prompt and the question."""
    system = SYSTEM_PROMPT_OF_TALK if tools else SYSTEM_PROMPT
    return (*([WORDS["add"]] if tools else []), *map(int, f"{system} {question}".split()))


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
        """A template that renders the names of tools, and then the contents of messages and the end of each answer."""
        tools = "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
        ending = "{% if message['role'] == 'assistant' %}" + f"{Ending().content} " + "{% endif %}"
        return tools + "{% for message in messages %}{{ message['content'] }} " + ending + "{% endfor %}"

    def encode(self, text: str, **_: object) -> list[int]:
        """Parse the numbers and known words in a text; each is a token, and so is the end of an answer."""
        words = text.replace(Ending().content, "0").split()
        return [int(word) if word.isdigit() else WORDS[word] for word in words if word.isdigit() or word in WORDS]

    def __call__(self, text: str, **_: object) -> dict[str, list[tuple[int, int]]]:
        """Where each token of a text begins and ends."""
        words = [found for found in re.finditer(r"\S+", text) if self.encode(found.group())]
        return {"offset_mapping": [found.span() for found in words]}

    def decode(self, tokens: list[int], **_: object) -> str:
        """Convert tokens to text as the function `letters` does."""
        return letters(tokens)
