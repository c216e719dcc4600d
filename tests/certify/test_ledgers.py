"""What the certificate records of conversations, from an engine whose tokens are written down here."""

import dataclasses

import numpy as np
import pytest

from podium.certify.ledgers import Ledger, Ledgers
from podium.rollout.request import Completion, Key, Request, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=4)


@dataclasses.dataclass
class Engine:
    """Holds tokens; `draw` adds some."""

    held: dict[Key, list[int]] = dataclasses.field(default_factory=dict)
    submitted: int = 0

    @property
    def keys(self) -> list[Key]:
        return list(self.held)

    def submit(self, request: Request) -> int:
        for index, begun in request.unfinished.items():
            drawn = [] if begun is None else begun.tokens.tolist()
            self.held[Key(self.submitted, index)] = [*request.ledgers.get(index, request.prompt), *drawn]
        self.submitted += 1
        return self.submitted - 1

    def extend(self, key: Key, tokens, sampling: SamplingParams, *, seed: int, keep: bool = False) -> None:
        self.held[key] += tokens

    def cancel(self, key: Key) -> None:
        self.held.pop(key, None)

    def ledger(self, key: Key) -> tuple[int, ...]:
        return tuple(self.held[key])

    def draw(self, key: Key, *tokens: int) -> None:
        self.held[key] += tokens


def request(prompt: tuple[int, ...], ledger: tuple[int, ...] = (), begun: tuple[int, ...] = ()) -> Request:
    """Of one completion, that may have begun."""
    zeros = np.zeros(len(begun), np.float32)
    drawn = Completion(
        tokens=np.array(begun, np.int32),
        sampled_logprobs=zeros,
        full_logprobs=zeros,
        versions=np.zeros(len(begun), np.int32),
        text="",
        finish_reason=None,
    )
    return Request(
        prompt=prompt,
        sampling=SAMPLING,
        seed=0,
        keep=True,
        begun={0: drawn} if begun else {},
        ledgers={0: ledger} if ledger else {},
    )


def ledger(given: str) -> Ledger:
    """From text: drawn tokens are in brackets."""
    tokens, drawn = [], []
    for word in given.split():
        tokens.append(int(word.strip("[]")))
        drawn.append(word.startswith("["))
    return Ledger(tuple(tokens), tuple(drawn))


def talked(engine: Engine) -> Key:
    """A conversation with a turn, a reply, and the beginning of another turn."""
    key = Key(engine.submit(request((1, 2))), 0)
    engine.draw(key, 3, 4)
    engine.extend(key, [5], SAMPLING, seed=1, keep=True)
    engine.draw(key, 6)
    return key


def test_what_was_given_and_what_was_drawn_are_told_apart():
    engine, ledgers = Engine(), Ledgers()
    with ledgers.recording(engine):
        engine.cancel(talked(engine))
    assert ledgers.dropped == [ledger("1 2 [3] [4] 5 [6]")]


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (request((1, 2), (1, 2, 3, 4, 5), (6,)), "1 2 [3] [4] 5 [6] [7]"),  # in the middle of its turn
        (request((1,), (1, 2, 3, 4, 5, 6, 8)), "1 2 [3] [4] 5 [6] 8 [7]"),  # with the reply that came meanwhile
    ],
)
def test_a_conversation_that_goes_on_after_an_update_is_one(again, expected):
    engine, ledgers = Engine(), Ledgers()
    with ledgers.recording(engine):
        engine.cancel(talked(engine))
        for _ in range(2):  # the second time in a run that was resumed before the update
            key = Key(engine.submit(again), 0)
            engine.draw(key, 7)
            engine.cancel(key)
    assert ledgers.dropped == [ledger(expected)] * 2


@pytest.mark.parametrize(
    "again",
    [
        request((1, 2), (1, 2, 3, 4, 5)),  # the beginning of its turn is lost
        request((1, 2), (1, 2, 3, 4, 9), (6,)),  # another reply
        request((1, 2), (1, 2, 3, 5), (6,)),  # a token is lost
    ],
)
def test_tokens_that_the_engine_did_not_draw_before_an_update_are_not_called_drawn(again):
    engine, ledgers = Engine(), Ledgers()
    with ledgers.recording(engine):
        engine.cancel(talked(engine))
        engine.cancel(Key(engine.submit(again), 0))
    assert not any(ledgers.dropped[-1].drawn)
