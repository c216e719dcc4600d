"""Units of measurement: `km/h`, `square meters`, `m/s^2`, `kilometers per hour`, as a dimension and a factor.

The unit of an answer is compared only if the reference has one too: `5 m` is wrong where the reference is `5 km`, and
`5000 m` is right; without a unit on one side, the numbers alone are compared.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

_PREFIXED = (
    ("length", "1", "m", "meter metre"),
    ("mass", "1", "g", "gram gramme"),
    ("volume", "1/1000", "L l", "liter litre"),
    ("energy", "1", "J", "joule"),
    ("energy", "4.184", "cal", "calorie"),
    ("energy", "3600", "Wh", ""),
    ("power", "1", "W", "watt"),
    ("force", "1", "N", "newton"),
    ("pressure", "1", "Pa", "pascal"),
    ("voltage", "1", "V", "volt"),
    ("current", "1", "", "ampere amp"),
    ("resistance", "1", "", "ohm"),
    ("amount", "1", "mol", "mole"),
    ("frequency", "1", "Hz", "hertz"),
    ("data", "1", "B", "byte"),
)
"""Dimension, size, symbols and names of units that take the prefixes of `_PREFIXES`."""
_PREFIXES = (
    ("k", "kilo", "1000"), ("M", "mega", "1000000"), ("G", "giga", "1000000000"), ("c", "centi", "1/100"),
    ("d", "deci", "1/10"), ("m", "milli", "1/1000"), ("u", "micro", "1/1000000"), ("n", "nano", "1/1000000000"),
)  # fmt: skip
_OTHERS = (
    ("time", "1", "s sec secs second seconds"),
    ("time", "60", "min mins minute minutes"),
    ("time", "3600", "h hr hrs hour hours"),
    ("time", "86400", "day days"),
    ("time", "604800", "week weeks"),
    ("time", "1/1000", "ms millisecond milliseconds"),
    ("months", "1", "month months"),
    ("months", "12", "yr yrs year years"),
    ("length", "0.0254", "in inch inches"),
    ("length", "0.3048", "ft foot feet"),
    ("length", "0.9144", "yd yard yards"),
    ("length", "1609.344", "mi mile miles"),
    ("area", "10000", "ha hectare hectares"),
    ("area", "4046.8564224", "acre acres"),
    ("mass", "1000000", "tonne tonnes"),
    ("mass", "28.349523125", "oz ounce ounces"),
    ("mass", "453.59237", "lb lbs pound pounds"),
    ("gallons", "1", "gal gallon gallons"),
    ("gallons", "1/4", "qt quart quarts"),
    ("gallons", "1/8", "pt pint pints"),
    ("dollars", "1/100", "cent cents"),
    ("dollars", "1", "dollar dollars USD $"),
    ("euros", "1", "euro euros EUR \u20ac"),
    ("sterling", "1", "GBP \u00a3"),
    ("rupees", "1", "rs rupee rupees INR \u20b9"),
    ("yen", "1", "yen JPY \u00a5"),
    ("percent", "1", "percent percentage %"),
    ("degrees", "1", "degree degrees deg \u00b0"),
    ("radians", "1", "radian radians rad"),
    ("Celsius", "1", "\u00b0C celsius"),
    ("Fahrenheit", "1", "\u00b0F fahrenheit"),
    ("kelvin", "1", "kelvin"),
    ("speed", "5/18", "kph kmh kmph"),
    ("speed", "0.44704", "mph"),
)
"""Dimension, size and names of the other units."""
_COMPOUND = {
    "area": (("length", 2),),
    "volume": (("length", 3),),
    "speed": (("length", 1), ("time", -1)),
    "frequency": (("time", -1),),
}
LETTERS = frozenset("mgshLlNJWV")
"""Units of one letter that are read after a number and a space: `5 m`. Others are variables: `5 x`."""

_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_PIECE = re.compile(
    r"\s*(?:([A-Za-z]+|\u00b0[CF]?(?![A-Za-z])|[%$\u20ac\u00a3\u00a5\u20b9])|(/)|\^\s*\{?\s*([+-]?[1-9])\s*\}?|(\\cdot|[*\u00b7.-]))"
)
_MAX_PIECES = 12


class Unit(NamedTuple):
    """A unit's dimension and size."""

    dimensions: tuple[tuple[str, int], ...]
    """Powers of base dimensions, sorted: `(("length", 1), ("time", -1))` for a speed."""
    factor: Fraction
    """Size in the base unit: metre, second, gram, dollar and so on."""


def _names() -> Iterator[tuple[str, str, Fraction]]:
    """Name, dimension and size of every unit."""
    for dimension, size, symbols, words in _PREFIXED:
        factor = Fraction(size)
        for symbol in symbols.split():
            yield symbol, dimension, factor
            yield from ((short + symbol, dimension, factor * Fraction(times)) for short, _, times in _PREFIXES)
        for word in words.split():
            for name in (word, f"{word}s"):
                yield name, dimension, factor
                yield from ((long + name, dimension, factor * Fraction(times)) for _, long, times in _PREFIXES)
    for dimension, size, words in _OTHERS:
        top, _, bottom = size.partition("/")
        yield from ((name, dimension, Fraction(top) / Fraction(bottom or "1")) for name in words.split())


_UNITS = {name: (dimension, factor) for name, dimension, factor in _names()}
_LOWER_CASE = {name.lower(): unit for name, unit in _UNITS.items() if len(name) > 3}


def is_unit(name: str) -> bool:
    """Whether one word names a unit: `km`, `Meters`."""
    return name in _UNITS or name.lower() in _LOWER_CASE


def read_unit(text: str) -> Unit | None:
    """The unit that a whole text names: `km/h`, `square feet`, `m s^-2`; None for anything else."""
    pieces = list(_pieces(text))
    whole = bool(pieces) and not text[pieces[-1][1] :].strip(" .")
    return _read(name for name, _ in pieces) if whole else None


def split_unit(text: str) -> tuple[Unit | None, str]:
    """The unit with which the text after a number begins, and the rest of the text: gram and ` of sugar`.

    A single letter is a unit only after a space, and only if it is one of LETTERS; None and the text if it begins with
    no unit.
    """
    pieces = list(_pieces(text))
    for length in range(len(pieces), 0, -1):
        names = [name for name, _ in pieces[:length]]
        first_is_letter = len(names[0]) == 1 and names[0].isalpha()
        if first_is_letter and not (names[0] in LETTERS and text[:1] == " "):
            break
        unit = _read(names)
        if unit is not None:
            return unit, text[pieces[length - 1][1] :]
    return None, text


def _pieces(text: str) -> Iterator[tuple[str, int]]:
    """The leading words, `/`, and powers such as `^2`, each with the position of its end."""
    position, is_after_unit = 0, False
    for _ in range(_MAX_PIECES):
        found = _PIECE.match(text, position)
        if not found or (is_after_unit and found[1] == "in"):  # 5 km in total
            return
        is_after_unit = bool(found[1]) and is_unit(found[1])
        position = found.end()
        if found[4] is None:
            yield found[1] or found[2] or f"^{found[3]}", position


def _read(pieces: Iterable[str]) -> Unit | None:
    """The unit composed of these pieces; None if a word is not a unit or an operator lacks an operand."""
    dimensions, factor = Counter[str](), Fraction(1)
    sign, ahead, last = 1, 1, ""
    for piece in pieces:
        word = piece.lower()
        if piece == "/" or word == "per":
            sign, last = -1, ""
        elif word in _POWERS and ahead == 1:
            ahead = _POWERS[word]
        elif piece[0] == "^" or word in ("squared", "cubed"):
            power = int(piece[1:]) if piece[0] == "^" else {"squared": 2, "cubed": 3}[word]
            if not last:
                return None
            dimension, size = _UNITS.get(last) or _LOWER_CASE[last.lower()]
            dimensions[dimension] += sign * (power - 1)
            factor *= size ** (sign * (power - 1))
            last = ""
        elif is_unit(piece):
            dimension, size = _UNITS.get(piece) or _LOWER_CASE[word]
            dimensions[dimension] += sign * ahead
            factor *= size ** (sign * ahead)
            ahead, last = 1, piece
        else:
            return None
    if ahead != 1 or not dimensions:
        return None
    base = Counter[str]()
    for dimension, power in dimensions.items():
        for part, times in _COMPOUND.get(dimension, ((dimension, 1),)):
            base[part] += times * power
    return Unit(tuple(sorted((name, power) for name, power in base.items() if power)), factor)
