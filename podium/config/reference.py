"""The settings of a reference that moves: the frozen model of the KL, now and then mixed with the policy."""

from typing import Annotated

from pydantic import Field

from podium.config.section import Positive, Section


class ReferenceConfig(Section):
    """How the reference of a KL, or of a loss of pairs, follows the policy: TR-DPO, arXiv:2404.09656."""

    sync_every: Positive = 512
    """Steps of the run between two changes of the reference."""
    mixup: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    """Share of the policy in the changed reference; the rest is the reference before. 1: the policy replaces it."""
