"""Checks of long sequences: in the engine over many pages, in the trainer over many blocks, both past 256 positions."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from podium.certify.batches import OF_BATCH
from podium.certify.check_result import Check, largest
from podium.certify.formulas import CLAIMS
from podium.certify.subject import LONG, LONG_PAGE_TOKENS, Subject, one_device, with_long_sequences
from podium.certify.updates import Form, Updates, gradient_difference, loss_difference
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Key

ROW_TOKENS = LONG.longest_prompt + 2 * LONG.completion
ROWS = 2
CROWDED_TOKENS = 40 * LONG_PAGE_TOKENS
"""Tokens of a cache that is too small for all conversations at once; all prompts together have 38 pages."""
TURN_TOKENS = 9
REPLY = (3, 1, 4, 1, 5)
"""What is given between two turns of at most TURN_TOKENS each: to the first completion of a prompt the first token, to
the next one a token more, and so on."""
OF_FORMS = ("packing", "shared prompts", "micro-batches", "as configured")


def long_checks(updates: Updates) -> Iterator[Check]:
    """Compare the engine's log-probabilities, and an update, with the naive ones."""
    subject = with_long_sequences(updates.subject)
    naive = subject.naive_scores(subject.sequences.tokens, subject.sequences.starts, subject.weights).logprobs
    sampled = [each.full_logprobs for group in subject.sampled for each in group]
    errors = [np.abs(own - naive[row, : len(own)]).max() for row, own in enumerate(sampled)]
    yield Check(
        name="long completions",
        claim="the sampler's log-probabilities after prompts of up to 250 tokens are those of the naive model",
        difference=float(max(errors) / np.abs(naive).max()),
        after=("sampling", "log-probabilities", "temperature", "sampler"),
    )
    kept = ("later turns", "conversations that are parked while an environment replies", subject)
    evicted = (
        "evicted turns",
        "parked conversations that have lost their pages and recurrent states",
        _crowded(subject),
    )
    causes = ("sampling", "log-probabilities", "temperature", "sampler", "long completions")
    for name, where, own in (kept, evicted):
        yield Check(
            name=name,
            claim=f"the sampler's log-probabilities in the second turn of {where} are those of the naive model",
            difference=_later_turns_error(own),
            after=causes,
        )
        causes = (*causes, name)
    long = Updates(subject, updates.recipe)
    (found,), expected = long.run(Form(rows=ROWS, row_tokens=ROW_TOKENS, train={})), long.naive(subject.weights)
    difference = largest(
        (
            loss_difference(found.loss, expected.loss, expected.sizes),
            gradient_difference(found.gradient, expected.gradient, expected.sizes),
        )
    )
    yield Check(
        name="long sequences",
        claim="loss and gradient of sequences of up to 274 tokens, in rows of several blocks, equal the formula's",
        difference=difference,
        bar=long.bar(difference),
        after=(*OF_BATCH, *CLAIMS, "log-probabilities", "temperature", "scoring models", "loss", "gradient", *OF_FORMS),
    )


def _crowded(subject: Subject) -> Subject:
    """The same subject with a cache that has room for some of its conversations."""
    few = {"slots": subject.config.rollout.slots // 2, "cache_tokens": CROWDED_TOKENS, "reproducible": False}
    rollout = subject.config.rollout.model_copy(update=few)
    return dataclasses.replace(subject, config=subject.config.model_copy(update={"rollout": rollout}))


def _later_turns_error(subject: Subject) -> float:
    """The largest error of a log-probability in conversations of two turns, relative to the largest one.

    Between the turns the engine parks them, as while an environment replies.
    """
    mesh = one_device()
    subject.rollouts.load(subject.trained(mesh), subject.frozen(mesh))
    engine, requests = subject.rollouts.engine, subject.requests
    settings = dataclasses.replace(requests[0].sampling, max_new_tokens=TURN_TOKENS)
    asked = {engine.submit(dataclasses.replace(each, sampling=settings, keep=True)): each.prompt for each in requests}
    first = _turns(engine)
    for key in first:
        engine.extend(key, _reply(key), settings, seed=key.request)
    second = _turns(engine)
    tokens = np.zeros((len(second), subject.room.prompt + subject.room.continuation), np.int32)
    starts = np.array([len(asked[key.request]) for key in second], np.int32)
    for row, (key, last) in enumerate(second.items()):
        whole = (*asked[key.request], *first[key].tokens.tolist(), *_reply(key), *last.tokens.tolist())
        tokens[row, : len(whole)] = whole
    naive = subject.naive_scores(tokens, starts, subject.weights).logprobs
    errors: list[float] = []
    for row, (key, last) in enumerate(second.items()):
        begin = len(first[key].tokens) + len(_reply(key))
        errors.append(float(np.abs(last.full_logprobs - naive[row, begin : begin + len(last.tokens)]).max()))
    return largest(errors) / float(np.abs(naive).max())


def _reply(key: Key) -> tuple[int, ...]:
    return REPLY[: 1 + key.completion % len(REPLY)]


def _turns(engine: RolloutEngine) -> dict[Key, Completion]:
    """The turns that end until the engine has no more to do."""
    while engine.busy:
        engine.step()
    return dict(engine.poll())
