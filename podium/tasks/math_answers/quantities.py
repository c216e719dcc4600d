"""Amounts in several units, `3 hours 30 minutes`, and amounts stated twice, `3 hours 30 minutes, or 210 minutes`.

An amount in one unit is a number (`podium.tasks.math_answers.number_text`). Exact; never raises.
"""

import itertools
import re
from fractions import Fraction
from typing import NamedTuple

from podium.tasks.math_answers.number_text import read_number
from podium.tasks.math_answers.units import Unit, read_unit

_AMOUNT = r"[0-9][0-9,]{0,20}(?:\.[0-9]{1,20})?(?:\s?/\s?[0-9]{1,6})?\s?(?:[A-Za-z]{1,12})\b"
_QUANTITY = rf"{_AMOUNT}(?:(?:,? and |,\s?|\s){_AMOUNT}){{0,3}}"
_PART = re.compile(r"([0-9][0-9,]*(?:\.[0-9]+)?(?:\s?/\s?[0-9]+)?)\s?([A-Za-z]+)")
_SECOND = rf"(?:,? or |\s?=\s?|,? that is,? |,? which is )(?P<second>{_QUANTITY})|\s?\((?:or )?(?P<aside>{_QUANTITY})\)"
_RESTATED = re.compile(rf"(?P<first>{_QUANTITY})(?:{_SECOND})[\s.!*]*$")
_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s?\{([^{}]*)\}")


class Quantity(NamedTuple):
    """An amount of a quantity that is measured in units."""

    amount: Fraction
    """The amount in the base unit."""
    unit: Unit
    """The unit of the first part."""
    num_parts: int
    """Number of parts with a unit: 2 for `3 hours 30 minutes`."""

    def equals(self, other: "Quantity") -> bool:
        """Whether both are the same amount of the same thing."""
        return (self.amount, self.unit.dimensions) == (other.amount, other.unit.dimensions)


def read_quantity(text: str) -> Quantity | None:
    """Read an amount with one unit, or with several of the same kind in descending order: `3 hours 30 minutes`.

    None if the text is anything else.
    """
    text = _words(text).strip(" .*")
    if not re.fullmatch(_QUANTITY, text):
        return None
    amount, units = Fraction(0), list[Unit]()
    for figures, name in _PART.findall(text):
        number, unit = read_number(figures), read_unit(name)
        if number is None or unit is None:
            return None
        units.append(unit)
        amount += number.value * unit.factor
    alike = len({unit.dimensions for unit in units}) == 1
    if not alike or any(later.factor >= earlier.factor for earlier, later in itertools.pairwise(units)):
        return None
    return Quantity(amount, units[0], len(units))


def restated_quantity(text: str) -> str | None:
    """If a text ends with the same amount written twice, the version in a single unit; otherwise None.

    `3 hours 30 minutes, or 210 minutes` gives `210 minutes`. If both have a single unit, the one outside the brackets
    counts, or without brackets the second. Two amounts that differ are two answers, so the result is None.
    """
    found = _RESTATED.search(_words(text))
    if not found:
        return None
    pair = (found["first"], found["second"] or found["aside"])
    first, second = read_quantity(pair[0]), read_quantity(pair[1])
    if not first or not second or not first.equals(second):
        return None
    preferred = pair if found["aside"] else pair[::-1]
    single = {pair[0]: first.num_parts == 1, pair[1]: second.num_parts == 1}
    return next((each for each in preferred if single[each]), None)


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", _TEXT_COMMAND.sub(r" \1 ", text))
