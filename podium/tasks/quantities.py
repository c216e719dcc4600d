"""Amounts with units, where the unit decides: `3 hours 30 minutes` is 210 minutes, `6 cm, 8 cm` is a list of lengths.

A number alone is compared without its unit (`podium.tasks.numbers`). Exact and linear in the length of the text; never
raises.
"""

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from podium.tasks.numbers import Number, read_number

_UNITS = (
    ("time", 1, "second seconds sec secs s"),
    ("time", 60, "minute minutes min mins"),
    ("time", 3_600, "hour hours hr hrs h"),
    ("time", 86_400, "day days"),
    ("time", 604_800, "week weeks"),
    ("length", 1, "mm millimeter millimeters millimetre millimetres"),
    ("length", 10, "cm centimeter centimeters centimetre centimetres"),
    ("length", 1_000, "m meter meters metre metres"),
    ("length", 1_000_000, "km kilometer kilometers kilometre kilometres"),
    ("imperial length", 1, "inch inches"),
    ("imperial length", 12, "foot feet ft"),
    ("imperial length", 36, "yard yards yd"),
    ("weight", 1, "gram grams g"),
    ("weight", 1_000, "kilogram kilograms kg"),
    ("imperial weight", 1, "ounce ounces oz"),
    ("imperial weight", 16, "pound pounds lb lbs"),
    ("money", 1, "cent cents"),
    ("money", 100, "dollar dollars"),
)
"""Kind, how many of the smallest unit of the kind, and names."""
_UNIT = {name: (kind, size) for kind, size, names in _UNITS for name in names.split()}

_AMOUNT = r"[0-9][0-9,]{0,20}(?:\.[0-9]{1,20})?(?:\s?/\s?[0-9]{1,6})?\s?(?:[A-Za-z]{1,12})\b"
_QUANTITY = rf"{_AMOUNT}(?:(?:,? and |,\s?|\s){_AMOUNT}){{0,3}}"
_PART = re.compile(r"([0-9][0-9,]*(?:\.[0-9]+)?(?:\s?/\s?[0-9]+)?)\s?([A-Za-z]+)")
_SECOND = rf"(?:,? or |\s?=\s?|,? that is,? |,? which is )(?P<second>{_QUANTITY})|\s?\((?:or )?(?P<aside>{_QUANTITY})\)"
_RESTATED = re.compile(rf"(?P<first>{_QUANTITY})(?:{_SECOND})[\s.!*]*$")
_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s?\{([^{}]*)\}")
_SEPARATOR = re.compile(r",?\s*\\text\s?\{\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+|[,;]\s+")
_FIGURES = re.compile(r"[-+]?[0-9][0-9.,/]*")


class NumberList(NamedTuple):
    """Numbers with the same unit."""

    numbers: Sequence[Number]
    unit: str
    """The unit or counted thing, as written in lower case; empty if there is none."""


class Quantity(NamedTuple):
    """An amount of time, length, weight or money."""

    kind: str
    amount: Fraction
    """In the smallest unit of the kind."""
    num_parts: int
    """Number of parts with a unit: 2 for `3 hours 30 minutes`."""


def read_quantity(text: str) -> Quantity | None:
    """Read an amount with one unit, or with several of the same kind in descending order: `3 hours 30 minutes`.

    None if the text is anything else.
    """
    text = re.sub(r"\s+", " ", _TEXT_COMMAND.sub(r" \1 ", text)).strip(" .*")
    if not re.fullmatch(_QUANTITY, text):
        return None
    amount = Fraction(0)
    kinds = set[str]()
    sizes = list[int]()
    for figures, name in _PART.findall(text):
        number = read_number(figures)
        if number is None or name.lower() not in _UNIT:
            return None
        kind, size = _UNIT[name.lower()]
        kinds.add(kind)
        sizes.append(size)
        amount += number.value * size
    if len(kinds) != 1 or any(later >= earlier for earlier, later in itertools.pairwise(sizes)):
        return None
    return Quantity(kinds.pop(), amount, len(sizes))


def restated_quantity(text: str) -> str | None:
    """If a text ends with the same amount written twice, the version in a single unit; otherwise None.

    `3 hours 30 minutes, or 210 minutes` gives `210 minutes`. If both have a single unit, the one outside the brackets
    counts, or without brackets the second. Amounts that differ are two answers, so the result is None.
    """
    found = _RESTATED.search(re.sub(r"\s+", " ", _TEXT_COMMAND.sub(r" \1 ", text)))
    if not found:
        return None
    pair = (found["first"], found["second"] or found["aside"])
    first, second = read_quantity(pair[0]), read_quantity(pair[1])
    if not first or not second or (first.kind, first.amount) != (second.kind, second.amount):
        return None
    preferred = pair if found["aside"] else pair[::-1]
    single = {pair[0]: first.num_parts == 1, pair[1]: second.num_parts == 1}
    return next((each for each in preferred if single[each]), None)


def read_list(text: str) -> NumberList | None:
    """Read two or more numbers whose unit is the same for all, or follows only the last: `6 cm, 8 cm`, `6 and 8 cm`.

    The unit may be missing: `6, 8`. None for anything else, such as `x = 6, y = 8`.
    """
    items = [item.strip() for item in _SEPARATOR.split(text.strip(" ."))]
    if len(items) == 1 and "," in text:
        items = [item.strip() for item in text.split(",")]
    numbers = [read_number(item) for item in items]
    words = [_TEXT_COMMAND.sub(r" \1 ", item) for item in items]
    units = [" ".join(_FIGURES.sub("", word, count=1).lower().split()) for word in words]
    read = [number for number in numbers if number is not None]
    alike = len(set(units)) == 1 or (not any(units[:-1]) and "=" not in units[-1])
    if len(items) < 2 or len(read) < len(items) or not alike:
        return None
    return NumberList(read, units[-1])
