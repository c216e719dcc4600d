"""What a certificate says: each check with its difference and its bar, and the causes among those that are red."""

import dataclasses

BAR = 1e-5
"""Of a relative difference in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    claim: str
    """What is so where the check is green."""
    difference: float
    bar: float = BAR
    after: tuple[str, ...] = ()
    """Checks that make this one red too when they are red."""

    @property
    def ok(self) -> bool:
        """Whether the difference is within the bar; one that is not a number is not."""
        return self.difference <= self.bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """All checks of a config."""

    config: str
    subject: str
    """The model that was checked, in words."""
    device: str
    checks: tuple[Check, ...]
    skipped: tuple[str, ...]
    """What this machine or this model cannot check, and why."""
    seconds: float

    @property
    def green(self) -> bool:
        """Whether every check is."""
        return all(check.ok for check in self.checks)

    @property
    def causes(self) -> tuple[Check, ...]:
        """Red checks that do not follow from other red ones."""
        red = {check.name for check in self.checks if not check.ok}
        return tuple(check for check in self.checks if not check.ok and red.isdisjoint(check.after))
