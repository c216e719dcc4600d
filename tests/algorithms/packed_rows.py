"""Rows of packed sequences with random log-probabilities, for tests of losses."""

from typing import Any

import numpy as np

from podium.algorithms.losses import Tokens

Batch = dict[str, Any]  # arrays [B, T] by the name of their argument

LAYOUT = ((4, 3), (1,), (2, 2, 3), (8,))  # lengths of the sequences in each of B = 4 rows of T = 12 tokens


def packed(seed: int = 0, spread: float = 0.4) -> Batch:
    """Rows of sequences with an unmasked token (a prompt) before each, and noise wherever the mask is 0: [B, T]."""
    random = np.random.default_rng(seed)
    shape = (len(LAYOUT), 12)
    lp = -1e-3 - random.exponential(1.0, shape)
    segments, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    advantages = random.normal(size=shape)
    for row, lengths in enumerate(LAYOUT):
        start = 0
        for number, length in enumerate(lengths, start=1):
            segments[row, start : start + length + 1] = number
            mask[row, start + 1 : start + length + 1] = True
            advantages[row, start : start + length + 1] = random.normal()
            start += length + 1
    old = np.minimum(lp + spread * random.normal(size=shape), -1e-3)
    arrays = {"logprobs": lp, "old_logprobs": old, "advantages": advantages}
    return {name: array.astype(np.float32) for name, array in arrays.items()} | {"segments": segments, "mask": mask}


def drawn(batch: Batch) -> Tokens:
    """The tokens that `policy_loss` takes: their old log-probabilities are the sampler's."""
    given = {name: x for name, x in batch.items() if name != "sampled_logprobs"}
    return Tokens(**given, old_logprobs=batch["sampled_logprobs"])
