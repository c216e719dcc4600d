"""The result of `podium certify`: every check with its difference and tolerance, and the causes of failure."""

import dataclasses
import math
from collections.abc import Iterable

BAR = 1e-5
"""Default tolerance of a check: a relative difference in float32."""
RECURRENT_BAR = 3e-5
"""Tolerance of losses and gradients of a decoder with recurrent layers. A state passes float32's rounding on from token
to token: meshes that cut the same sums otherwise differ as much as one device does from float64 (1.1e-5)."""
RUN_BAR = 1e-4
"""Tolerance of losses and gradients in a run, where the policy has moved away from its sampler and from the models that
it is compared with. Their log-probabilities are rounded too, and a loss may multiply that rounding: by an exponential
(k3), or by the deviation of rewards that hardly differ (k1_reward). A CPU with AVX2 alone was off by up to 3.5e-5; bugs
that are planted in runs are red."""


def largest(differences: Iterable[float]) -> float:
    """The largest difference, at least 0; NaN if one is NaN, which `max` may pass over."""
    found = [0.0, *differences]
    return math.nan if any(map(math.isnan, found)) else max(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of a result with what is expected; green if `difference` is at most `bar`, otherwise red."""

    name: str
    claim: str
    """The statement that holds if the check is green."""
    difference: float
    bar: float = BAR
    after: tuple[str, ...] = ()
    """Names of the checks whose failure makes this one fail too."""

    @property
    def ok(self) -> bool:
        """Whether the difference is at most the bar; False if it is NaN."""
        return bool(self.difference <= self.bar)  # numpy's own booleans are not JSON


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """The results of all checks of a config."""

    config: str
    subject: str
    """The model that was checked, in words."""
    device: str
    checks: tuple[Check, ...]
    skipped: tuple[str, ...]
    """One line for each check that this machine or model does not allow, with the reason."""
    seconds: float

    @property
    def green(self) -> bool:
        """Whether every check is green."""
        return all(check.ok for check in self.checks)

    @property
    def causes(self) -> tuple[Check, ...]:
        """Red checks that are not explained by other red ones."""
        red = {check.name for check in self.checks if not check.ok}
        return tuple(check for check in self.checks if not check.ok and red.isdisjoint(check.after))
