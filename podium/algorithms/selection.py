"""Which tokens of an optimizer step a term of the loss is for, chosen among all its trained tokens at once. Numpy only.

A choice over the whole optimizer step does not depend on how the step is cut into micro-batches, rows and devices.
"""

import math

import numpy as np

TIE = 1e-4
"""Entropies that differ by no more than this many nats count as equal: the first tokens of a prompt's completions have
the same distribution, and rounding must not decide between them."""


def top_entropy_tokens(entropy: np.ndarray, *, share: float) -> np.ndarray:
    """Whether each token is among the most uncertain of its optimizer step, [n] bool (arXiv:2506.01939).

    As in TRL, a token is chosen if its entropy is at least the (1 - share) quantile, which n - ceil((1 - share)(n - 1))
    tokens reach; those within TIE below the least of these are chosen too.

    Args:
        entropy: [n], of the distributions that the step's trained tokens were drawn from, in nat.
        share: the share of tokens to choose, above 0 and at most 1.
    """
    n = len(entropy)
    if not n:
        return np.zeros(0, bool)
    below = math.ceil((1 - share) * (n - 1) - 1e-9)  # less 1e-9: 1 - share is rounded
    return entropy >= np.partition(entropy, below)[below] - TIE
