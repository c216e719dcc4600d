"""`--search KEY`: find the largest value of a setting that fits, from the memory of a few values.

The closed form, corrected by what was found, chooses the values to probe; traces or the compiler decide whether they
fit. Programs that the setting does not change come from the planner's cache.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence

from podium.plan.request.candidate import Case, Change
from podium.plan.result import Peak
from podium.plan.search.study import Outcome, Study
from podium.plan.search.tunable_settings import SearchRange, search_range

MOST_PROBES = 16  # most values that one search probes
FAR = 0.05  # share above the memory limit: one more row was seen to take 2 % less once compiled, never this much less

Probes = Callable[[Sequence[int]], list[Peak]]
"""Returns the peak memory of each value; compiles two values at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """The result of a search: the values tried, and the largest that fits."""

    key: str
    range: SearchRange
    tried: dict[int, Peak]  # by value, ascending
    hbm_bytes: int

    @property
    def best(self) -> int | None:
        """The largest value tried that fits; None if the smallest does not."""
        return max((value for value, peak in self.tried.items() if peak.fits(self.hbm_bytes)), default=None)

    @property
    def with_room(self) -> int | None:
        """The largest value tried that fits by more than the margin of error."""
        return max((value for value, peak in self.tried.items() if peak.has_room(self.hbm_bytes)), default=None)

    @property
    def too_large(self) -> int | None:
        """The smallest tried value above `best`."""
        return next((value for value in self.tried if value > (self.best or 0)), None)

    @property
    def proven(self) -> bool:
        """Whether the next value above `best` was tried too, or does not exist."""
        first_unknown = (self.best or 0) + self.range.unit
        return first_unknown >= (self.too_large or self.range.most + 1)

    @property
    def compiled(self) -> bool:
        """Whether the results come from the compiler."""
        return all(peak.compiled for peak in self.tried.values())


def find_largest(study: Study, key: str, now: Case) -> tuple[Outcome, Largest]:
    """The plan with the largest value of a setting that fits (the smallest if none does), and the search for it.

    Raises ValueError if the setting cannot be searched, or a value contradicts other settings.
    """
    values = search_range(key, study.run(now))

    def case(value: int) -> Case:
        return now.but(Change(key=key, value=value))

    phases = study.moved([case(values.unit), case(values.most // values.unit * values.unit)])
    found = search(
        key,
        values,
        closed_form=lambda value: study.estimated_peak(case(value), phases).bytes,
        probe=lambda wanted: study.peaks([(case(value), phases) for value in wanted]),
        hbm_bytes=now.machine.hbm_bytes,
    )
    chosen = case(found.best or min(found.tried))
    whole = () if study.fast or not found.best else tuple(study.programs(chosen, phases))
    return study.of(chosen, whole=whole), found


def search(
    key: str, values: SearchRange, *, closed_form: Callable[[int], int], probe: Probes, hbm_bytes: int
) -> Largest:
    """Find the largest value of a setting that fits, with at most 16 probes.

    First, bracket the limit: find neighbouring values of which one fits and one does not, guided by the closed form as
    corrected by earlier probes. Memory is not monotonic, because near its limit the compiler recomputes more; so then
    probe larger values until they are 5 % too large. Finally, probe smaller values until one leaves room to spare.

    Args:
        key: the setting.
        values: the candidates.
        closed_form: estimated peak bytes for a value.
        probe: the peak memory of some values.
        hbm_bytes: usable memory of a device.
    """
    units = _Units(values, closed_form, probe, hbm_bytes)
    _bracket(units)
    _look_above(units)
    _look_for_room(units)
    tried = {number * values.unit: units.found[number] for number in sorted(units.found)}
    return Largest(key=key, range=values, tried=tried, hbm_bytes=hbm_bytes)


class _Units:
    """A search's values as multiples of its range's unit, from 1 to `end`, with the memory found so far."""

    def __init__(self, values: SearchRange, closed_form: Callable[[int], int], probe: Probes, hbm_bytes: int) -> None:
        self.unit = values.unit
        self.end = values.most // values.unit
        self.closed_form = closed_form
        self.probe = probe
        self.hbm_bytes = hbm_bytes
        self.found: dict[int, Peak] = {}

    @property
    def best(self) -> int:
        """The largest value known to fit; 0 if none is."""
        return max((units for units, peak in self.found.items() if peak.fits(self.hbm_bytes)), default=0)

    def ask(self, *wanted: int) -> bool:
        """Probe the values that are not known yet; False if all are known or no probes are left."""
        new = [units for units in dict.fromkeys(wanted) if 1 <= units <= self.end and units not in self.found]
        new = new[: MOST_PROBES - len(self.found)]
        if new:
            self.found |= zip(new, self.probe([units * self.unit for units in new]), strict=True)
        return bool(new)

    def expected(self, low: int, high: int) -> int:
        """The last value between two that fits by the closed form, corrected by the known value nearest the limit."""
        near = min(self.found, key=lambda units: abs(self.found[units].bytes - self.hbm_bytes), default=None)
        correction = self.found[near].bytes / self._estimate(near) if near else 1.0
        return low + bisect.bisect_right(range(low + 1, high), self.hbm_bytes / correction, key=self._estimate)

    def _estimate(self, units: int) -> int:
        return self.closed_form(units * self.unit)


def _bracket(units: _Units) -> None:
    """Find neighbouring values of which the lower fits and the higher does not."""
    low, high = 0, units.end + 1
    misled = False
    while high - low > 1:
        expected = min(max(units.expected(low, high), low + 1), high - 1)
        pair = (expected, min(expected + 1, high - 1))
        if not units.ask(*(((low + high) // 2,) if misled else pair)):
            return
        width = high - low
        low = units.best
        high = min((each for each in units.found if each > low), default=units.end + 1)
        misled = high - low > width // 2


def _look_above(units: _Units) -> None:
    """Probe larger values until two in a row are far too large."""
    number, far = units.best + 1, 0
    while number <= units.end and far < 2:
        if number not in units.found and not units.ask(number, number + 1):
            return
        far = far + 1 if units.found[number].bytes > (1 + FAR) * units.hbm_bytes else 0
        number += 1


def _look_for_room(units: _Units) -> None:
    """Probe smaller values until one leaves room to spare."""
    number = units.best
    while number >= 1 and (number in units.found or units.ask(number, number - 1)):
        if units.found[number].has_room(units.hbm_bytes):
            return
        number -= 1
