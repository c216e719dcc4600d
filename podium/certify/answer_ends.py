"""Checks where answers end, without a model: made-up tokens, given to a sequence as decode calls give theirs."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from podium.certify.check_result import Check
from podium.certify.numbers_task import LETTERS, PIECES, STOPS, LetterBackend, has_ended, is_open
from podium.models.text.tokenizer import Tokenizer
from podium.rollout.request import Completion, Request, SamplingParams
from podium.rollout.sequence import sequences_of

LIMIT = 9  # tokens of the longest answer
CALLS = (1, 2, 4)
"""Tokens of a decode call: stop texts begin in one and end in the next, or in the middle of one."""
CARRIED = (0, 3)
"""Tokens that were drawn before the request, as of an answer that goes on after an update."""


def ends_check() -> Check:
    """Count the made-up answers that end elsewhere than the naive ones, or for another reason."""
    tokenizer = Tokenizer(LetterBackend(), eos_tokens=())
    cases = itertools.product(_answers(), CALLS, CARRIED)
    return Check(
        name="ends of answers",
        claim="an answer ends at its first stop token or stop text, in its last place too, and else at its limit",
        difference=float(sum(_is_wrong(tokenizer, *case) for case in cases)),
        bar=0,
    )


def _answers() -> Iterator[Sequence[int]]:
    """Yield tokens longer than the limit, for each end and each place at which it can be complete, or come too late."""
    random = np.random.default_rng(0)
    ends = [[0], *([LETTERS + PIECES.index(letter) for letter in stop] for stop in STOPS)]
    for end, place in itertools.product(ends, range(1, LIMIT + 2)):
        before: list[int] = []
        while len(before) < place - len(end):
            more = [*before, int(random.integers(LETTERS, 2 * LETTERS))]
            before = more if is_open([*more, *end[:-1]]) else before[:-1]
        yield [*before, *end, *[LETTERS] * LIMIT]  # what follows ends it too


def _is_wrong(tokenizer: Tokenizer, tokens: Sequence[int], call: int, carried: int) -> bool:
    """Whether an answer of these tokens ends wrongly; `carried` are drawn before, and `call` in each decode call."""
    stops = (n for n in range(1, LIMIT + 1) if has_ended(tokens[:n]))
    length, reason = next(((n, "stop") for n in stops), (LIMIT, "length"))
    if carried >= length:
        return False  # it has ended before
    begun = {0: _drawn(tokens[:carried])} if carried else {}
    sampling = SamplingParams(max_new_tokens=LIMIT, stop=STOPS)
    (sequence,) = sequences_of(Request(prompt=(1,), sampling=sampling, seed=0, begun=begun), 0)
    while sequence.finish_reason is None and len(sequence.drawn) < LIMIT:
        first = len(sequence.drawn)
        new = list(tokens[first : min(first + call, LIMIT)])
        new = new[: new.index(0) + 1] if 0 in new else new  # the device stops at a stop token
        numbers = [float(place) for place in range(first, first + len(new))]
        sequence.append(new, numbers, numbers, tokenizer)
    found, expected = sequence.completion(tokenizer), _drawn(tokens[:length])
    arrays = ("tokens", "sampled_logprobs", "full_logprobs", "versions")
    same = all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in arrays)
    return not same or found.finish_reason != reason


def _drawn(tokens: Sequence[int]) -> Completion:
    """These tokens, drawn so far; the log-probability of each is its place."""
    places = np.arange(len(tokens), dtype=np.float32)
    return Completion(
        tokens=np.array(tokens, np.int32),
        sampled_logprobs=places,
        full_logprobs=places,
        versions=np.zeros(len(tokens), np.int32),
        text="",
        finish_reason=None,
    )
