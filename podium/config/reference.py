"""The settings of a moving reference: the frozen model of the KL, into which the policy is mixed from time to time."""

from typing import Annotated

from pydantic import Field

from podium.config.section import Positive, Section


class ReferenceConfig(Section):
    """How the reference of a KL term, or of a preference loss, follows the policy: TR-DPO, arXiv:2404.09656."""

    sync_every: Positive = 512
    """Training steps between two changes of the reference."""
    mixup: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    """Share of the policy in the changed reference; the rest is the previous reference. 1: the policy replaces the
    reference."""
