"""The number format of the rollout's copy of a model's matrices, and the correction that rounded weights need."""

from collections.abc import Mapping
from typing import Literal

RolloutWeights = Literal["dtype", "int8", "w8a8"]
CORRECTION: Mapping[str, str | float] = {
    "old_logprobs": "trainer",
    "correction": "mask",
    "correction_low": 0.5,
    "correction_high": 2.0,
}
"""Defaults of `algorithm` with rounded rollout weights, if neither `correction` nor `old_logprobs` is set: tokens are
masked if their probability under the trained weights is more than twice, or less than half, the sampler's, as in IcePop
(arXiv:2510.18855)."""
