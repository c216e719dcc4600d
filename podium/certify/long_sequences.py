"""Checks of long sequences: in the engine over many pages, in the trainer over many blocks, both past 256 positions."""

from collections.abc import Iterator

import numpy as np

from podium.certify.batches import OF_BATCH
from podium.certify.check_result import Check, largest
from podium.certify.formulas import CLAIMS
from podium.certify.subject import LONG, with_long_sequences
from podium.certify.updates import Form, Updates, gradient_difference, loss_difference

ROW_TOKENS = LONG.longest_prompt + 2 * LONG.completion
ROWS = 2
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
