r"""Reads numbers as models and data sets write them: signs, separators, decimals, fractions, powers of ten, units.

Only a written-out value counts as a number: `16-3`, `2^{10}`, `\sqrt{25}` and `26/2` are unfinished calculations,
whatever their value; `13/2` and `1 1/2` are numbers. Units, currencies and the percent sign do not change the number:
`50%` is 50, not 0.5. Everything here is exact, linear in the length of the text, and never raises.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from podium.tasks.notation import plain_notation

TAIL_CHARS = 2_000
"""Number of characters at the end of a text that are searched for its last number."""
MAX_NUMBER_CHARS = 400
"""Maximum digits of a number; a longer run of digits is not read as a number."""

_WHOLE = r"(?:[0-9]{1,3}+(?:,[0-9]{3})++(?!,?[0-9])|[0-9]++)"
_TIMES_TEN = r"\s?(?:[xX*]|\\times|\\cdot)\s{0,3}10\s?\^\s?\{?(?P<power>[-+]?[0-9]{1,3}+)\}?"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.%])[-+])?(?<![A-Za-z0-9_])(?<![0-9]\.)(?:"
    rf"(?:(?P<whole>{_WHOLE})\s{{0,3}})?\\frac\{{(?P<top>-?{_WHOLE})\}}\{{(?P<bottom>-?{_WHOLE})\}}"
    rf"|(?:(?P<whole2>{_WHOLE})\s)?(?P<top2>{_WHOLE})\s?/\s?(?P<bottom2>{_WHOLE})(?![.][0-9])"
    rf"|(?P<decimal>{_WHOLE}(?:\.[0-9]++)?|\.[0-9]++)(?:[eE](?P<e>[-+]?[0-9]{{1,3}}+)(?![0-9A-Za-z])|{_TIMES_TEN})?)"
)

_LETTER_UNIT = re.compile(  # inside \text a letter is a unit; outside it is a variable
    r"\\(?:text|mbox|textrm|mathrm)\s?\{\s*[a-z]?[ACFJLNVWcghlms](?:/(?:h|hr|min|s))?\s*\}(?:\s?\^\s?\{?[-0-9]{1,2}\}?)?"
)
_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s?\{([^{}]*)\}")
_DEGREES = re.compile(r"(?:\s?\^\s?\{?\s?\\circ\s?\}?|\s?\u00b0)(?:\s?[CFK]\b)?")
_CURRENCY = re.compile(r"([-+]?)[$\u00a3\u20ac\u20b9\u00a5]\s?")
_UNIT_POWER = re.compile(r"(?<![A-Za-z\\])([A-Za-z]{2,20})\s?\^\s?\{?[23]\}?")
_SPELLED_OUT = re.compile(  # `5 (five)`
    r"\(\s*(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)\b[a-z\s-]{0,60}\)",
    re.IGNORECASE,
)

_COMMAND = re.compile(r"\\[A-Za-z]{1,20}")
_NAME = re.compile(r"\s*[A-Za-z]\w{0,20}\s*")
_NAME_OR_SUM = re.compile(r"\s*(?:[A-Za-z]\w{0,20}\s*(?:\(\w*\)\s*)?|[^A-Za-z]*)")  # left of the last `=`
_LEADING_SIGN = re.compile(r"^\s*([-+])\s+")
_PROSE = re.compile(r"[A-Za-z\s.,:;'\"/()-]*")
_NO_HYPHEN = re.compile(r"-(?![A-Za-z]{2})|\s-")
_SHORT_UNIT_LIST = (
    "am cm cl dl ft gb hr hrs in kb kg kl km kw lb lbs mb mg mi ml mm mph ms oz pm pt qt rs sec sq us st nd rd th yd"
    " a an at by is it of on"
)
_SCALE_LIST = (
    "dozen hundred hundreds thousand thousands million millions billion billions trillion trillions half halves third"
    " thirds quarter quarters fourth fourths fifth fifths tenth tenths hundredths thousandths squared cubed"
)
_NO_UNIT_LIST = (
    "and or not nor plus minus times over divided multiplied base to pi sqrt sin cos tan log exp infty infinity"
    " factorial twice double triple choose two three four five six seven eight nine ten mod modulo power root between"
    " negative except maybe either unknown"
)
_SHORT_UNITS, _SCALES = frozenset(_SHORT_UNIT_LIST.split()), frozenset(_SCALE_LIST.split())
_NO_UNITS = _SCALES | frozenset(_NO_UNIT_LIST.split())
_OPERATORS = frozenset(("+", "-", "*", "/", "^", r"\times", r"\cdot"))
_LETTERS = frozenset("bcdefghjklmnopqrstuvwxyzBCDEFGHJKLMNOPQRSTUVWXYZ")  # `a`, `A` and `I` are words
_JOINS = _SCALES | _OPERATORS | _LETTERS | {"=", "(", ")", "or"}
"""Words that continue a formula: `16 - 3`, `x = 5`, `3 million`, `5 or 6`."""


class Number(NamedTuple):
    """A number and its written precision."""

    value: Fraction
    places: int
    """Decimal places as written; 0 for integers, fractions and powers of ten."""


def read_number(text: str) -> Number | None:
    r"""Read an answer as a number: `-1,200`, `\frac{3}{4}`, `1.2e3`, `5.4 \text{ cents}`, `x = 5`, `$5 a day`, `50%`.

    None if the answer is something else: a calculation, several numbers, or words that change the value.
    """
    return _read(_without_units(text))


def last_number(text: str) -> Number | None:
    """The number at the end of a text that states no answer; None if the text ends in a formula.

    `She sells 9 * 2 = 18 eggs.` ends with 18; `So 16 - 3.` ends with no number, neither 13 nor 3.
    """
    for line in reversed(text[-TAIL_CHARS:].splitlines()):
        if _has_digit(line) and (figures := _last_figures(_without_units(line).split())):
            return None if figures[0] in _OPERATORS else _read(" ".join(figures))  # 18 eggs - 3
    return None


def same_number(reference: Number, answer: Number) -> bool:
    """Whether two numbers are equal: exactly, or as a decimal with 4 or more places that truncates or rounds a
    fraction.

    0.3333 equals 1/3; 0.33 does not, and 17.9999 is not 18.
    """
    if reference.value == answer.value:
        return True
    rounded, exact = (reference, answer) if reference.places else (answer, reference)
    if rounded.places < 4 or exact.places or exact.value.denominator == 1:
        return False
    return abs(rounded.value - exact.value) < Fraction(1, 10**rounded.places)


def _without_units(text: str) -> str:
    """The text in plain notation, without units and currencies written as symbols."""
    text = _LETTER_UNIT.sub(" ", plain_notation(text))
    text = _DEGREES.sub(" ", _TEXT_COMMAND.sub(r" \1 ", text)).replace("%", " ").replace(r"\approx", "=")
    return _SPELLED_OUT.sub("", _UNIT_POWER.sub(r"\1", _CURRENCY.sub(r" \1", text)))


def _read(text: str) -> Number | None:
    """The number in a text; None if it has several, or if other parts of the text would change the number's value."""
    left, equals, right = text.rpartition("=")
    if equals and _NAME.fullmatch(right):  # 5 = x
        left, right = right, left
    if not _NAME_OR_SUM.fullmatch(_COMMAND.sub(" ", left)):
        return None
    right = _LEADING_SIGN.sub(r"\1", right)
    found = list(_NUMBER.finditer(right))
    if len(found) != 1:
        return None
    before, after = right[: found[0].start()], right[found[0].end() :]
    return _value(found[0]) if _are_units(before, after) else None


def _last_figures(words: list[str]) -> list[str]:
    """The trailing words of a line that belong to one formula or number; empty if the line has no digit."""
    last: list[str] = []
    formula: list[str] = []
    if words and words[0] in ("-", "+", "*"):
        words = words[1:]  # a list item's number
    for word in [*words, "."]:
        bare = word.rstrip(",;:.!?")
        belongs = _has_digit(bare) or bare in _JOINS
        if belongs:
            formula.append(bare)
        if bare != word or not belongs:  # the formula ends here
            last = formula if _has_digit("".join(formula)) else last
            formula = []
    while last and last[-1] == "-":  # a dash: 18 - she sells them
        last.pop()
    return last


def _has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)


def _are_units(before: str, after: str) -> bool:
    """Whether the text around a number leaves its value unchanged: units, plain words, punctuation."""
    if not (_PROSE.fullmatch(before) and _PROSE.fullmatch(after)) or "/" in before:
        return False
    if _NO_HYPHEN.search(f"{before}|{after}") or before[-1:].isalpha() or before.rstrip()[-1:] in ("-", ")"):
        return False
    if re.search(r"[A-Za-z]\($", before):
        return False  # a function: f(5)
    attached = re.match(r"[A-Za-z]*", after)
    if attached and attached[0] and attached[0].lower() not in _SHORT_UNITS:
        return False
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", f"{before} {after}")]
    return all(word not in _NO_UNITS and (len(word) > 2 or word in _SHORT_UNITS) for word in words)


def _value(found: re.Match[str]) -> Number | None:
    """The matched number; None if it is too long, divides by 0, or is a division without remainder."""
    if len(found[0]) > MAX_NUMBER_CHARS:
        return None
    sign = -1 if found["sign"] == "-" else 1
    if found["decimal"]:
        power = int(found["e"] or found["power"] or 0)
        places = 0 if power else len(found["decimal"].partition(".")[2])
        return Number(sign * _fraction(found["decimal"]) * Fraction(10) ** power, places)
    whole = found["whole"] or found["whole2"]
    top, bottom = _fraction(found["top"] or found["top2"]), _fraction(found["bottom"] or found["bottom2"])
    if bottom == 0 or (top / bottom).denominator == 1 or (whole and not 0 < top < bottom):
        return None
    return Number(sign * (_fraction(whole or "0") + top / bottom), 0)


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
