"""Checks an answer or conversation of the watched run: computes its end, replies and rewards from its tokens."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from podium.algorithms.recipes import Recipe
from podium.certify.naive_draws import environment_seed
from podium.certify.naive_step import Episode
from podium.certify.numbers_task import (
    MOST_CALLS,
    TURNS,
    LetterBackend,
    as_read,
    asked_tokens,
    calls_in,
    fails,
    final_pay,
    following,
    grade,
    has_ended,
    is_open,
    letters,
    pay,
    reply_to,
)
from podium.certify.small_run import MOST_DRAWN, OVERLONG_TOKENS
from podium.certify.subject import MAX_NEW_TOKENS, Subject
from podium.certify.training import Training
from podium.rollout.transcript import Span, Transcript
from podium.tasks.task import Prompt, Reward


class Asked(NamedTuple):
    """The question of an answer or a conversation, and the seed of the conversation's environment."""

    question: str
    """The question's id."""
    environment: int
    """Not read by single answers, which have no environment."""
    fails: bool = True
    """Whether the environment may fail, as in training."""


def asked(training: Training, question: str, seed: int, place: int, *, fails: bool = True) -> Asked:
    """What the `place`-th answer to a question was asked; `seed` is that of the question's request."""
    own = training.config.environments.group_seed == "own"
    return Asked(question, environment_seed(seed, place, own=own), fails)


def is_right(subject: Subject, training: Training, asked: Asked, transcript: Transcript, reward: Reward) -> bool:
    """Whether an answer to a question, or a conversation about it, ends where it should and got the reward that its
    text earns.
    """
    if subject.converses:
        return _is_right_talk(subject, training, asked, transcript, reward)
    _, *spans = transcript.spans
    if len(spans) != 1 or not spans[0].drawn:
        return False
    tokens = spans[0].tokens.tolist()
    ended, whole = has_ended(tokens), len(tokens) == MAX_NEW_TOKENS and is_open(tokens)
    if not (ended or whole) or (transcript.finish_reason != "stop") != whole:
        return False
    parts = parts_of(training, grade(asked.question, letters(tokens)), len(tokens))
    paid = {name: reward.parts.get(name) == value for name, value in parts.items()}
    (task,) = training.config.tasks
    return all(paid.values()) and reward.weights == task.rewards and _near(reward.total, weighted(training, parts))


def _is_right_talk(subject: Subject, training: Training, asked: Asked, transcript: Transcript, reward: Reward) -> bool:
    """Whether a conversation has its replies in their places, ends where it must, and has its turns' rewards."""
    spans = transcript.spans[1:]
    drawn = spans[::2]
    texts = [letters(span.tokens.tolist()) for span in drawn]
    right = all(span.source == ("environment", "drawn")[place % 2] for place, span in enumerate(spans, start=1))
    for turn, span in enumerate(spans[1::2]):
        answer = drawn[turn].tokens.tolist()
        right &= tuple(span.tokens.tolist()) == following(answer, turn, subject.decoder.vocab, asked.environment)
    right &= not any(map(fails, range(TURNS), texts[:-1])) or not asked.fails
    right &= all(map(_ended, drawn[:-1])) and not any(_asks_too_often(texts[:end]) for end in range(1, len(texts)))
    if transcript.finish_reason == "failed":
        return right and asked.fails and _heard(drawn[-1], texts) and fails(len(drawn) - 1, texts[-1]) and reward.failed
    right &= _ends(subject, transcript, texts, asked)
    right &= _said(transcript) == _expected_messages(subject, asked, drawn[-1], texts)
    return right and _paid(training, asked.question, drawn, texts, reward)


Said = tuple[str, tuple[int, ...] | str, int]
"""A message: its role, what it says, as tokens if it is a reply, and how many calls it has."""


def _said(transcript: Transcript) -> list[Said]:
    """The messages of a conversation that were recorded."""
    encode = LetterBackend().encode
    return [
        (
            str(each["role"]),
            tuple(encode(str(each["content"]))) if each["role"] != "assistant" else "",
            len(list(calls)) if isinstance(calls := each.get("tool_calls"), list) else 0,
        )
        for each in transcript.messages
    ]


def _expected_messages(subject: Subject, asked: Asked, last: Span, texts: Sequence[str]) -> list[Said]:
    """The messages of a conversation with these answers, the last of which is `last`, and with the replies to them.

    A reply that did not fit is among them.
    """
    replied = len(texts) if _heard(last, texts) and len(texts) < TURNS else len(texts) - 1
    found: list[Said] = []
    for turn, text in enumerate(texts):
        calls = len(calls_in(turn, text))
        found.append(("assistant", "", calls))
        replies = reply_to(turn, text, subject.decoder.vocab, asked.environment) if turn < replied else []
        found += [("tool" if calls else "user", tuple(as_read(each)), 0) for each in replies]
    return found


def _ended(span: Span) -> bool:
    """Whether a turn ends at its first stop token, and within its limit."""
    return has_ended(span.tokens.tolist()) and len(span.tokens) <= MAX_NEW_TOKENS


def _asks_too_often(texts: Sequence[str]) -> bool:
    """Whether these answers have more calls than a conversation may have."""
    return sum(len(calls_in(turn, text)) for turn, text in enumerate(texts)) > MOST_CALLS


def _heard(last: Span, texts: Sequence[str]) -> bool:
    """Whether the environment gets to know the last of some answers: no limit has ended the conversation with it."""
    return _ended(last) and not _asks_too_often(texts)


def _ends(subject: Subject, transcript: Transcript, texts: Sequence[str], asked: Asked) -> bool:
    """Whether the last turn may end the conversation: it is the last one allowed, or a limit cut it."""
    last, drawn = transcript.spans[-1], transcript.num_drawn
    if not last.drawn:
        return False
    if not _ended(last):  # it was cut in its middle
        size = len(last.tokens)
        room = min(MAX_NEW_TOKENS, subject.longest - transcript.num_tokens + size, MOST_DRAWN - drawn + size)
        whole = size == room and is_open(last.tokens.tolist())
        return whole and transcript.finish_reason == ("drawn" if drawn == MOST_DRAWN else "length")
    if _asks_too_often(texts):
        return transcript.finish_reason == "calls"
    if asked.fails and fails(len(texts) - 1, texts[-1]):
        return False
    if transcript.num_turns == TURNS:
        return transcript.finish_reason == "stop"
    reply = following(last.tokens.tolist(), transcript.num_turns - 1, subject.decoder.vocab, asked.environment)
    full = transcript.num_tokens + len(reply) >= subject.longest
    return transcript.finish_reason == ("drawn" if drawn == MOST_DRAWN else "length" if full else None)


def _paid(training: Training, asked: str, drawn: Sequence[Span], texts: Sequence[str], reward: Reward) -> bool:
    """Whether each turn has the weighted reward that the environment gave it, and the last one also all the rest."""
    heard = texts if _heard(drawn[-1], texts) else texts[:-1]
    paid = [pay(asked, turn, text) for turn, text in enumerate(heard)] + [0.0] * (len(texts) - len(heard))
    final = final_pay(heard[-1] if heard else "")
    parts = parts_of(training, sum(paid) + final, sum(len(span.tokens) for span in drawn))
    total = weighted(training, parts)
    (task,) = training.config.tasks
    turns = [task.rewards["correct"] * each for each in paid]
    turns[-1] += total - sum(turns)
    return _near(reward.total, total) and np.allclose(reward.turns, turns, rtol=0, atol=1e-6)


def demonstrated(recipe: Recipe, prompt: Prompt) -> list[tuple[str, float]]:
    """The completions that the data has for a prompt, with their rewards."""
    if recipe.data_form == "pair":
        return [(prompt.metadata["chosen"], 1.0), (prompt.metadata["rejected"], -1.0)]
    if recipe.data_form == "label":
        return [(prompt.metadata["completion"], 1.0 if prompt.metadata["label"] else -1.0)]
    return [(prompt.answer, 1.0)]


def demonstration(prompt: Prompt, *, tools: bool) -> Episode:
    """A prompt with the answer that the data has for it."""
    answer = (*map(int, prompt.answer.split()), 0)
    nothing = (0.0,) * len(answer)
    return Episode(
        prompt=asked_tokens(prompt.question, tools=tools),
        tokens=answer,
        drawn=(True,) * len(answer),
        logprobs=nothing,
        drawn_logprobs=nothing,
        turns=(0,) * len(answer),
        truncated=False,
        reward=1.0,
    )


def parts_of(training: Training, correct: float, tokens: int) -> dict[str, float]:
    """The graded part, and if the task has it, DAPO's penalty (arXiv:2503.14476) for this many drawn tokens."""
    over = tokens - (MAX_NEW_TOKENS - OVERLONG_TOKENS)
    parts = {"correct": correct, "length": -min(1.0, max(0.0, over / OVERLONG_TOKENS))}
    (task,) = training.config.tasks
    return {name: parts[name] for name in task.rewards}


def weighted(training: Training, parts: Mapping[str, float]) -> float:
    """The weighted sum of the parts of a reward."""
    (task,) = training.config.tasks
    return sum(weight * parts[name] for name, weight in task.rewards.items())


def _near(found: float, expected: float) -> bool:
    return abs(found - expected) < 1e-6
