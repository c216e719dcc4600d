"""Selects the tokens of an optimizer step that a term of the loss applies to, among all its trained tokens. Numpy only.

A choice over the whole optimizer step does not depend on how the step is cut into micro-batches, rows and devices.
"""

import math
import zlib
from collections.abc import Mapping

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


def covariances(logprobs: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """How much each token lowers the entropy, [n]: (logprob - mean) x (advantage - mean) over the optimizer step.

    Their mean is the covariance that bounds the change of the entropy in arXiv:2505.22617. Both arguments are [n].
    """
    logprobs, advantages = (np.asarray(x, np.float64) for x in (logprobs, advantages))
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean()) if len(logprobs) else logprobs


def clip_cov_tokens(found: np.ndarray, tokens: np.ndarray, *, share: float, low: float, high: float) -> np.ndarray:
    """Whether each token is drawn from those whose covariance is between `low` and `high`, [n] bool: Clip-Cov.

    At most max(1, floor(share n)) of the n tokens are drawn uniformly (arXiv:2505.22617). The draw is seeded by the ids
    `tokens` [n], so that the same step always selects the same tokens.
    """
    n = len(found)
    inside = np.flatnonzero((found > low) & (found < high))
    random = np.random.default_rng(zlib.crc32(np.asarray(tokens, np.int32).tobytes()))
    chosen = np.zeros(n, bool)
    chosen[random.permutation(inside)[: max(1, int(share * n))]] = True
    return chosen


def kl_cov_tokens(found: np.ndarray, *, share: float) -> np.ndarray:
    """Whether each token is among the max(1, floor(share n)) of largest covariance, [n] bool (arXiv:2505.22617)."""
    n = len(found)
    chosen = np.zeros(n, bool)
    chosen[np.argsort(-found, kind="stable")[: max(1, int(share * n))]] = True
    return chosen


def covariant_tokens(
    loss: str, options: Mapping[str, float], logprobs: np.ndarray, advantages: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """The tokens that `loss` (clip_cov or kl_cov) treats differently from the rest of the optimizer step, [n] bool.

    Args:
        loss: its name.
        options: `cov_share`, and for clip_cov also `cov_low` and `cov_high`.
        logprobs: [n], under the policy that drew the tokens.
        advantages: [n].
        tokens: [n], their ids.
    """
    found = covariances(logprobs, advantages)
    if loss == "kl_cov":
        return kl_cov_tokens(found, share=options["cov_share"])
    return clip_cov_tokens(found, tokens, share=options["cov_share"], low=options["cov_low"], high=options["cov_high"])
