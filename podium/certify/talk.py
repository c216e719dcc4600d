"""What a conversation of the watched run must be: replies, ends, and rewards of its turns, computed from its tokens."""

from collections.abc import Sequence

import numpy as np

from podium.certify.subject import MAX_NEW_TOKENS, OVERLONG_TOKENS, Subject
from podium.certify.task import TURNS, final_pay, has_ended, is_open, letters, pay, reply_to
from podium.certify.training import Training
from podium.rollout.transcript import Span, Transcript
from podium.tasks.task import Reward


def is_right(subject: Subject, training: Training, asked: str, transcript: Transcript, reward: Reward) -> bool:
    """Whether a conversation has its replies in their places, ends where it must, and has its turns' rewards."""
    spans = transcript.spans[1:]
    drawn = spans[::2]
    texts = [letters(span.tokens.tolist()) for span in drawn]
    right = all(span.source == ("environment", "drawn")[place % 2] for place, span in enumerate(spans, start=1))
    for turn, span in enumerate(spans[1::2]):
        right &= tuple(span.tokens.tolist()) == reply_to(turn, texts[turn], subject.decoder.vocab)
    right &= all(_ended(span) for span in drawn[:-1]) and _ends(subject, transcript)
    return right and _paid(training, asked, drawn, texts, reward)


def _ended(span: Span) -> bool:
    """Whether a turn ends at its first stop token, and within its limit."""
    return has_ended(span.tokens.tolist()) and len(span.tokens) <= MAX_NEW_TOKENS


def _ends(subject: Subject, transcript: Transcript) -> bool:
    """Whether the last turn ends the conversation: the last one there can be, or one that a limit cut."""
    last = transcript.spans[-1]
    if transcript.finish_reason == "stop":
        return last.drawn and transcript.num_turns == TURNS and _ended(last)
    if transcript.finish_reason != "length" or not last.drawn:
        return False
    if not _ended(last):  # it was cut in its middle
        room = min(MAX_NEW_TOKENS, subject.longest - transcript.num_tokens + len(last.tokens))
        tokens = last.tokens.tolist()
        return len(tokens) == room and is_open(tokens)
    reply = reply_to(transcript.num_turns - 1, letters(last.tokens.tolist()), subject.decoder.vocab)
    return transcript.num_turns < TURNS and transcript.num_tokens + len(reply) >= subject.longest


def _paid(training: Training, asked: str, drawn: Sequence[Span], texts: Sequence[str], reward: Reward) -> bool:
    """Whether each turn has what the environment paid for it, weighted, and the last one all the rest."""
    heard = [_ended(span) for span in drawn]  # a turn that was cut is not heard by the environment
    paid = [
        pay(asked, turn, text) if ended else 0.0 for turn, (text, ended) in enumerate(zip(texts, heard, strict=True))
    ]
    final = final_pay(next((text for text, ended in zip(reversed(texts), reversed(heard), strict=True) if ended), ""))
    tokens = sum(len(span.tokens) for span in drawn)
    total = weighted(training, sum(paid) + final, tokens - (MAX_NEW_TOKENS - OVERLONG_TOKENS))
    (task,) = training.config.tasks
    turns = [task.rewards["correct"] * each for each in paid]
    turns[-1] += total - sum(turns)
    return abs(reward.total - total) < 1e-6 and np.allclose(reward.turns, turns, rtol=0, atol=1e-6)


def weighted(training: Training, correct: float, over: int) -> float:
    """The weighted sum of the graded part and DAPO's penalty (arXiv:2503.14476) for `over` tokens too many."""
    parts = {"correct": correct, "length": -min(1.0, max(0.0, over / OVERLONG_TOKENS))}
    (task,) = training.config.tasks
    return sum(weight * parts[name] for name, weight in task.rewards.items())
