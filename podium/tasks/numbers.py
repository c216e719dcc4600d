"""Numbers as models and data sets write them: signs, thousands separators, decimals, fractions, percent, units.

Everything here is exact (fractions), linear in the length of the text, and never raises.
"""

import dataclasses
import re
from fractions import Fraction

TAIL_CHARS = 2_000
"""How much of the end of a text is searched for its last number."""
MAX_NUMBER_CHARS = 400
"""A longer run of digits is no number."""

_DIGITS = r"(?:[0-9]{1,3}+(?:,[0-9]{3})++(?!,?[0-9])|[0-9]++)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]++)?|\.[0-9]++)"
_SIGN = r"(?:(?<![\w)\]}.%])[-+]|(?<=[=:(])\s{0,3}[-+]\s)"  # not the minus of `16-3` or of a list item `- 3`
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?\$?(?<![A-Za-z0-9_])(?<![0-9]\.)"
    rf"(?:(?:(?P<whole>{_DIGITS})\s{{0,3}})?\\frac\{{(?P<top>-?{_UNSIGNED})\}}\{{(?P<bottom>{_UNSIGNED})\}}"
    rf"|(?P<whole2>{_DIGITS})\s(?P<top2>[0-9]++)/(?P<bottom2>[0-9]++)"
    rf"|(?P<top3>{_UNSIGNED})\s?/\s?(?P<bottom3>{_UNSIGNED})"
    rf"|(?P<plain>{_UNSIGNED}))"
    r"(?P<percent>\s?(?:%|percent(?:age)?\b))?"
)

_REPLACEMENTS = (
    *((dash, "-") for dash in "\u2212\u2012\u2013\u2014\uff0d\ufe63"),
    *((space, " ") for space in "\u00a0\u2007\u2009\u202f"),
    (r"{,}", ","),
    (r"\$", "$"),
    (r"\%", "%"),
    (r"\!", ""),
)
_SMALL_SPACE = re.compile(r"(?<!\\)\\[,;: ]|~")
_SPLIT_THOUSANDS = re.compile(r"(?<=[0-9]),\\! ?(?=[0-9]{3})")
_FRACTION_COMMAND = re.compile(r"\\[dt]frac(?![A-Za-z])")
_BARE_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")

_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|mathbf|textrm|rm)\s?\{([^{}]*)\}")
_UNIT_POWER = re.compile(r"(?<![A-Za-z\\])([A-Za-z]{2,20})\s?\^\s?\{?[23]\}?")
_DEGREES = re.compile(r"\s?\^\s?\{?\s?\\circ\s?\}?|\u00b0")
_COMMAND = re.compile(r"\\[A-Za-z]{1,20}")
_NAME_OR_SUM = re.compile(r"\s*(?:[A-Za-z]\w{0,20}\s*(?:\(\w*\)\s*)?|[^A-Za-z]*)")  # left of the last `=`
_LEADING_SIGN = re.compile(r"^\s*([-+])\s+")
_WORDS_ONLY = re.compile(r"[A-Za-z\s.,:;'\"$/()-]*")
_SHORT_UNITS = (
    "am cm cl dl ft gb hr hrs in kb kg kl km kw lb lbs mb mg mi ml mm mph ms oz pm pt qt sec sq st nd rd th yd"
    " a an at by is it of on"
)
_NOT_UNITS = (
    "and or not nor plus minus times over divided multiplied base to pi sqrt sin cos tan log exp infty infinity"
    " squared cubed factorial half halves third thirds quarter quarters fourth fourths fifth fifths tenth tenths"
    " dozen hundred hundreds thousand thousands million millions billion billions trillion trillions"
    " two three four five six seven eight nine ten mod modulo power root between negative except maybe either unknown"
)
_SHORT_UNIT_SET, _NOT_UNIT_SET = frozenset(_SHORT_UNITS.split()), frozenset(_NOT_UNITS.split())


@dataclasses.dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: Fraction
    """Without its percent sign: 50 for `50%`."""
    percent: bool
    places: int
    """Decimal places that were written; 0 for whole numbers and fractions."""


def clean_latex(text: str) -> str:
    r"""The text with plain signs and spaces, and with every fraction as `\frac{a}{b}`."""
    text = _SPLIT_THOUSANDS.sub(",", text)
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    text = _FRACTION_COMMAND.sub(r"\\frac", _SMALL_SPACE.sub(" ", text))
    return _BARE_FRACTION.sub(
        lambda found: rf"\frac{{{(found[1] or found[2] or '').strip()}}}{{{(found[3] or found[4] or '').strip()}}}",
        text,
    )


def last_number(text: str) -> Number | None:
    """The last number of a text, wherever it stands; None if there is none."""
    found = list(_NUMBER.finditer(clean_latex(text[-TAIL_CHARS:])))
    return _value(found[-1]) if found else None


def read_number(text: str) -> Number | None:
    r"""The number that an answer is: `-1,200`, `\frac{3}{4}`, `5.4 \text{ cents}`, `x = 5`, `$18 per day`, `50%`.

    Returns:
        None where the answer is something else: an expression, several numbers, words that change the value.
    """
    left, _, text = clean_latex(text).rpartition("=")
    if not _NAME_OR_SUM.fullmatch(_COMMAND.sub(" ", left)):
        return None
    text = _TEXT_COMMAND.sub(r" \1", _DEGREES.sub(" ", text))
    text = _LEADING_SIGN.sub(r"\1", _UNIT_POWER.sub(r"\1", text))
    found = list(_NUMBER.finditer(text))
    if len(found) != 1:
        return None
    before, after = text[: found[0].start()], text[found[0].end() :]
    return _value(found[0]) if _is_unit(before, after) else None


def same_number(reference: Number, answer: Number) -> bool:
    """Whether two numbers are equal.

    Exactly equal, with two allowances. A percent sign on one side only may mean either reading: 50% equals 50 (a
    question for percent) and 0.5. A decimal of four or more places equals the fraction that it cuts or rounds: 0.3333
    equals 1/3.
    """
    if reference.percent == answer.percent:
        return _equal(reference, answer)
    hundredth = Fraction(1, 100)
    percent, other = (reference, answer) if reference.percent else (answer, reference)
    as_fraction = Number(percent.value * hundredth, False, percent.places + 2 if percent.places else 0)
    return _equal(percent, other) or _equal(as_fraction, other)


def _equal(a: Number, b: Number) -> bool:
    if a.value == b.value:
        return True
    rounded, exact = (a, b) if a.places else (b, a)
    if rounded.places < 4 or exact.places or exact.value.denominator == 1:
        return False
    return abs(rounded.value - exact.value) < Fraction(1, 10**rounded.places)


def _is_unit(before: str, after: str) -> bool:
    """Whether what stands around a number leaves its value alone: units, currency, plain words."""
    if not (_WORDS_ONLY.fullmatch(before) and _WORDS_ONLY.fullmatch(after)):
        return False
    if before[-1:].isalpha() or before.strip()[-1:] in tuple("-/)"):
        return False
    attached = re.match(r"[A-Za-z]*", after)
    if attached and attached[0] and attached[0].lower() not in _SHORT_UNIT_SET:
        return False
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", f"{before} {after}")]
    return all(word not in _NOT_UNIT_SET and (len(word) > 2 or word in _SHORT_UNIT_SET) for word in words)


def _value(found: re.Match[str]) -> Number | None:
    """The number that the pattern found; None if it is too long or divides by 0."""
    if len(found[0]) > MAX_NUMBER_CHARS:
        return None
    whole = _fraction(found["whole"] or found["whole2"] or "0")
    top = _fraction(found["top"] or found["top2"] or found["top3"] or found["plain"])
    bottom = _fraction(found["bottom"] or found["bottom2"] or found["bottom3"] or "1")
    if bottom == 0:
        return None
    sign = -1 if found["sign"] and "-" in found["sign"] else 1
    places = len((found["plain"] or "").partition(".")[2])
    return Number(sign * (whole + top / bottom), bool(found["percent"]), places)


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
