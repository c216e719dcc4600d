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
"""What `algorithm` has with rounded weights if it sets neither `correction` nor `old_logprobs`: only tokens count whose
probability the trained weights at most double or halve, a mask as in IcePop (arXiv:2510.18855)."""
