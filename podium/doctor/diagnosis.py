"""What `podium doctor` finds: rows of facts and measurements, and what is wrong with some of them. No jax."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a fact in words, or a measurement with its expected value."""

    name: str
    text: str = ""
    """A fact, or a remark on the measurement."""
    unit: str = ""
    measured: float | None = None
    assumed: float | None = None
    """The value that plans assume; for a kernel, the time of the same computation by XLA. None: unknown."""
    problem: str = ""
    """What is wrong, and what to do about it; empty if there is no problem."""

    @property
    def ratio(self) -> float | None:
        """Measured / assumed; None if one of them is unknown."""
        return None if self.measured is None or not self.assumed else self.measured / self.assumed


def rate(name: str, unit: str, measured: float, assumed: float | None, *, least: float, way_out: str) -> Row:
    """A row for a quantity that should be large: a problem if it is below the share `least` of the assumed value."""
    row = Row(name=name, unit=unit, measured=measured, assumed=assumed)
    wrong = row.ratio is not None and row.ratio < least
    return dataclasses.replace(row, problem=f"{row.ratio:.0%} of what is assumed; {way_out}" if wrong else "")


def seconds(name: str, unit: str, measured: float, assumed: float | None, *, most: float, way_out: str) -> Row:
    """A row for a duration that should be small: a problem if it is above `most` times the assumed value."""
    row = Row(name=name, unit=unit, measured=measured, assumed=assumed)
    wrong = row.ratio is not None and row.ratio > most
    return dataclasses.replace(row, problem=f"{row.ratio:.1f} times what is assumed; {way_out}" if wrong else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of all probes on one machine."""

    machine: str
    sections: Mapping[str, tuple[Row, ...]]
    seconds: float

    @property
    def problems(self) -> tuple[tuple[str, Row], ...]:
        """The rows with a problem, each with its section."""
        return tuple((section, row) for section, rows in self.sections.items() for row in rows if row.problem)
