"""Checks of batches, without a model: every token of every completion is trained once, at its weight, and no other."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from podium.certify.naive import denominators
from podium.certify.result import Check
from podium.certify.subject import LONGEST, Subject
from podium.certify.updates import Form, Updates
from podium.train.batch import Batch

Prediction = tuple[int, int, int, float]
"""A token that is predicted, as whoever trains on it must know it: position, input, target, sampled log-probability."""
FORMS = (Form(packing="none"), Form(packing="sequences"), Form(), Form(rows=2))
MOST_SHIFT = 2


def batch_checks(updates: Updates) -> Iterator[Check]:
    """Of batches in every packing, whole and in micro-batches; what is compared with is read off the completions."""
    subject = updates.subject
    batches = [updates.batch(form) for form in FORMS]
    expected = predictions(subject)
    total = sum(expected.values())
    found = [_trained(batch) for batch in batches]
    yield Check(
        name="mask",
        claim="the trained positions are those of completions, not shifted",
        difference=max(abs(_shift(batch, expected)) for batch in batches),
        bar=0,
    )
    yield Check(
        name="every token once",
        claim="no token of a completion is left out",
        difference=max(sum((expected - each).values()) / total for each in found),
        bar=0,
        after=("mask",),
    )
    yield Check(
        name="prompts untrained",
        claim="nothing but completions is trained: no prompt, no padding, no token twice",
        difference=max(sum((each - expected).values()) / total for each in found),
        bar=0,
        after=("mask",),
    )
    weights = _weights(subject)
    yield Check(
        name="denominators",
        claim=f"weights of tokens are those of a mean by {subject.recipe.mean} over the whole step",
        difference=max(_weight_error(batch, weights) for batch in batches),
        after=("mask", "every token once"),
    )


def predictions(subject: Subject) -> Counter[Prediction]:
    """What is to be trained: each token of each completion that the recipe does not mask."""
    return Counter(_weights(subject).keys())


def _weights(subject: Subject) -> dict[Prediction, float]:
    """The weight of each prediction, by the formula."""
    valid = np.asarray(subject.sequences.valid)
    weights = np.asarray(denominators(subject.recipe, valid, LONGEST), np.float64)  # pyright: ignore[reportArgumentType]
    flat = [(group.tokens, each.drawn[0]) for group in subject.groups for each in group.transcripts]
    found: dict[Prediction, float] = {}
    for (prompt, completion), used, own in zip(flat, valid, weights, strict=True):
        inputs = (prompt[-1], *completion.tokens[:-1].tolist())
        for t, (before, target) in enumerate(zip(inputs, completion.tokens.tolist(), strict=True)):
            if used[t]:
                logprob = float(completion.full_logprobs[t])
                found[len(prompt) - 1 + t, before, target, logprob] = float(own[t])
    return found


def _fields(batch: Batch) -> tuple[np.ndarray, ...]:
    """Positions, inputs, targets, sampled log-probabilities, mask and weights of the used rows, [R, T] each."""
    used = int(batch.num_micro_batches)
    fields = (batch.positions, batch.tokens, batch.targets, batch.sampled_logprobs, batch.mask, batch.weights)
    return tuple(np.concatenate(np.asarray(x)[:used]) for x in fields)


def _trained(batch: Batch) -> Counter[Prediction]:
    """The predictions that count."""
    *what, mask, weights = _fields(batch)
    chosen = (mask != 0) | (weights != 0)
    return Counter(zip(*(x[chosen].tolist() for x in what), strict=True))


def _shift(batch: Batch, expected: Counter[Prediction]) -> int:
    """By how many positions the mask has to be moved to agree best with where completions are; 0 where that is best."""
    *what, mask, _ = _fields(batch)
    rows, T = mask.shape
    cells = zip(*(x.ravel().tolist() for x in what), strict=True)
    wanted = np.array([cell in expected for cell in cells]).reshape(rows, T)

    def agreement(shift: int) -> int:
        return int(np.sum(np.roll(mask > 0, shift, axis=1) == wanted))

    return max((0, *range(-MOST_SHIFT, 0), *range(1, MOST_SHIFT + 1)), key=agreement)


def _weight_error(batch: Batch, expected: dict[Prediction, float]) -> float:
    """The largest relative error of a weight."""
    *what, _, weights = _fields(batch)
    cells = zip(zip(*(x.ravel().tolist() for x in what), strict=True), weights.ravel().tolist(), strict=True)
    return max((abs(own - expected[cell]) / expected[cell] for cell, own in cells if cell in expected), default=1.0)
