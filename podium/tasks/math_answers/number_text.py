r"""Reads numbers as models and data sets write them: signs, separators, decimals, fractions, powers of ten, units.

Only a written-out value counts as a number: `16-3`, `2^{10}`, `\sqrt{25}` and `26/2` are unfinished calculations,
whatever their value; `13/2` and `1 1/2` are numbers. Units, currencies and the percent sign do not change the number:
`50%` is 50, not 0.5. Everything here is exact, linear in the length of the text, and never raises.
"""

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from podium.tasks.math_answers.notation import MATH_SPAN, plain_notation
from podium.tasks.math_answers.number_words import SCALES, in_figures
from podium.tasks.math_answers.units import Unit, is_unit, read_unit, split_unit

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

_LETTER_UNIT = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s?\{\s*[ACFKBcdtb]\s*\}")
r"""A letter that is a unit inside `\text`, where it cannot be a variable, but not outside of it."""
_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textrm|mathrm|operatorname)\s?\{([^{}]*)\}")
_DEGREES = re.compile(
    r"(?:\s?\^\s?\{?\s?\\circ\s?\}?|\s?\u00b0)\s?(?:\\(?:text|mathrm|mbox)\s?\{\s?([CF])\s?\}|([CF])\b)?"
)
_NUMBERS_ALONE = re.compile(r"\s*[-+.0-9]+(?:\s*[,;&]\s+[-+.0-9]+)+\s*")
_UNITS_AS_FRACTION = re.compile(r"\\frac\s?\{\s*([A-Za-z]{1,5})\s*\}\{\s*([A-Za-z]{1,5})\s*(\^\s?\{?[0-9]\}?)?\s*\}")
_POWER_OF_WORD = re.compile(r"^(\s*[A-Za-z]{2,20})\s?\^\s?\{?[23]\}?")
_SYMBOLS = (("\\pounds", "\u00a3"), ("\\Omega", " ohms "), ("\\approx", "="))
_CURRENCY = re.compile(r"([-+]?)([$\u00a3\u20ac\u20b9\u00a5])\s?(?=[-+.0-9])")
_NO_CURRENCY = re.compile(r"(?<![0-9])\s?\$(?![0-9])|(?<=[0-9])\$")
_IN_BRACKETS = re.compile(r"\([A-Za-z\s-]{3,80}\)")
_SIGN_WORD = re.compile(r"\b(?:negative|minus)\s+(?=[0-9.\\$])", re.IGNORECASE)
_SENTENCE_END = re.compile(
    r"(?<=[^\W\d][^\W\d])[.!?]\**\s+|(?<=[\d$)}\]%*\u00b0])[.!?]\**\s+(?=[A-Z$\\*(])|\u3002(?=.)"
)
_POWER_OF_TEN = re.compile(r"((?:^|=)\s*[-+]?\s?)10\s?(?=\^)")

_COMMAND = re.compile(r"\\[A-Za-z]{1,20}")
_NAME = re.compile(r"\s*[A-Za-z]\w{0,20}\s*")
_NAME_OR_SUM = re.compile(r"\s*(?:\|[A-Z]\|\s*|[A-Za-z]\w{0,20}\s*(?:\(\w*\)\s*)?|[^A-Za-z]*)")  # left of the first `=`
_TWO_EQUATIONS = re.compile(r"[,;]\s|\b(?:and|or)\b|\\(?:implies|Rightarrow)\b|=[^=]*[0-9]\s+[A-Za-z]\s*$")
_CALCULATION = re.compile(r"\s*\\(?:[a-z]?int|sum|prod|lim|gcd|max|min|det)(?![A-Za-z])")
_FUNCTION = re.compile(r"\\(?:log|ln|sin|cos|tan|exp)(?![A-Za-z])|(?<=[0-9])\s?[xX]\s?(?=[$0-9])")  # 7 x 12
_LEADING_SIGN = re.compile(r"^\s*([-+])\s+")
_PROSE = re.compile(r"[^\d_#&@\\|<>^={}\[\]!?*+~\u00ac]*")
_NO_HYPHEN = re.compile(r"-(?![A-Za-z]{2})|\s-")
_SHORT_WORD_LIST = "am pm us st nd rd th a an at by is it of on in to sq fl we he so my"
_SHORT_WORDS = frozenset(_SHORT_WORD_LIST.split())
_ATTACHED_LIST = "gb kb mb tb st nd rd th rs am pm"
_ATTACHED = frozenset(_ATTACHED_LIST.split())
"""Letters that may follow a number directly, besides units: `5GB`, `5th`."""
_CHANGING_LIST = (  # scales of the adjacent value
    "hundreds thousands millions billions trillions half halves third thirds quarter quarters fourth fourths fifth"
    " fifths tenth tenths hundredths thousandths squared cubed and or not nor plus times over divided multiplied base"
    " pi sqrt sin cos tan log exp infty infinity factorial twice double triple choose mod modulo power root between"
    " maybe either unknown cannot never no except anything wrong incorrect false impossible neither instead rather none"
    " different differs far unlikely nowhere"
    " minus negative"
)
_CHANGING = frozenset((*_CHANGING_LIST.split(), *SCALES))
_CHANGING_WIDE = re.compile(
    "[\u4e0d\u975e\u6216\u548c\u6ca1\u65e0\u4e07\u4ebf\u5343\u767e\u534a\u5230\u81f3\u4e8e\u9664]"
)
"""Chinese for not, or, and, none, ten thousand, hundred million, thousand, hundred, half, to, than, except."""
_BOUND_LIST = (
    "least most than above below over under almost nearly except without but within exceeds exceeding beyond < >"
    r" <= >= \lt \gt \le \leq \leqslant \ge \geq \geqslant"
)
_BOUNDS = frozenset(_BOUND_LIST.split())
"""A number right after them is a bound or an exception, not the answer: `at least 5`, `anything but 5`."""
_VERB_LIST = (
    "is are was were be been being has have had equals equal = gives give leaves leave makes make left get gets"
    " remains remain becomes becomes pays paid costs cost es ist sind est sont son \u662f \u4e3a"
)
_VERBS = frozenset(_VERB_LIST.split())
_MODALS = frozenset(
    ("does", "do", "did", "fails", "fail", "failed", "would", "could", "should", "must", "can", "might", "will")
)
_DENIAL_LIST = (
    "not cannot never neither nor no without except excepting besides apart doubt impossible false wrong incorrect"
    " mistake none unlike unlikely refuse avoid reject rejected deny exclude excludes excluded excluding extraneous"
    " invalid nowhere fails fail failed nicht kein keine pas non n\u00e3o nao nunca jamais ni niet nie inte"
    " \u043d\u0435"
    " \\ne \\neq \\not != \\lnot"
)
_DENIALS = frozenset(_DENIAL_LIST.split())
"""Words before a number at the end of a text that deny that it is the answer, if no verb intervenes."""
_DENIAL_WIDE = re.compile(
    "[\u4e0d\u975e]|\u81f3[\u5c11\u591a]|\u6700\u591a|[\u5927\u5c0f\u591a\u5c11]\u4e8e|\u8d85\u8fc7|\u4ee5[\u4e0a\u4e0b]"
)
"""Chinese for not, at least, at most, more or less than, over, and up or down."""
_NO_WAY = re.compile(
    r"\b(?:no (?:way|chance)|not (?:true|the case|possible)|far from|nowhere near"
    r"|differ(?:s|ent) from|between(?:\b.* and)?$|(?:times|twice|double|triple|half|third|quarter|square|roots?"
    r"|derivative|reciprocal|multiples?|one of)(?: of)?(?: the)?$"
    r"|(?:false|wrong|mistake|unlikely|impossible) (?:to|that))\b"
)
_CONDITIONS = frozenset(("if", "when", "for", "with", "since", "as", "at", "let", "given", "because", "from"))
_CONTRASTS = (("not",), ("rather", "than"), ("instead", "of"))
"""Beginnings of clauses that say what the answer is not: `It is 6, not 5.`"""
_OPERATORS = frozenset(("+", "-", "*", "/", "^", r"\times", r"\cdot"))
_LETTERS = frozenset("bcdefghjklmnopqrstuvwxyzBCDEFGHJKLMNOPQRSTUVWXYZ")  # `a`, `A` and `I` are words
_JOINS = _OPERATORS | _LETTERS | {"=", "(", ")", "or"} | set(SCALES)
"""Words that continue a formula: `16 - 3`, `x = 5`, `3 million`, `5 or 6`."""


class Number(NamedTuple):
    """A number, its written precision, and its unit and name."""

    value: Fraction
    places: int
    """Decimal places as written; 0 for integers, fractions and powers of ten."""
    unit: Unit | None = None
    """Unit of the number, if known."""
    name: str = ""
    """The variable whose value it is: `x` in `x = 5`."""


def read_number(text: str) -> Number | None:
    r"""Read an answer as a number: `-1,200`, `\frac{3}{4}`, `1.2e3`, `5.4 \text{ cents}`, `x = 5`, `$5 a day`, `50%`.

    None if the answer is something else: a calculation, several numbers, or words that change the value.
    """
    return _read(text if _has_digit(text) else in_figures(text)) if len(text) <= TAIL_CHARS else None


def last_number(text: str) -> Number | None:
    """The number at the end of a text that states no answer; None if the text ends in a formula or denies the number.

    `She sells 9 * 2 = 18 eggs.` ends with 18; `So 16 - 3.` ends with no number, neither 13 nor 3, and neither does
    `It is not 5.`
    """
    sentence = last_sentence(text)
    in_words = [] if _has_digit(sentence) else _all_figures(in_figures(sentence).split())
    if (
        len(in_words) == 1
        and in_words[0].formula != ["1"]
        and not _VERBS.isdisjoint(in_words[0].clause[: in_words[0].position][-3:])
    ):
        return None if in_words[0].denied() else _read(" ".join(in_words[0].with_unit()))
    for line in reversed(text[-TAIL_CHARS:].splitlines()):
        if _NUMBERS_ALONE.fullmatch(line):
            return None
        figures = _last_figures(_SIGN_WORD.sub("-", _plain(line)).split()) if _has_digit(line) else None
        if figures is not None:
            return None if not figures or figures[0] in _OPERATORS else _read(" ".join(figures))  # 18 eggs - 3
    return None


def last_sentence(text: str) -> str:
    """The last sentence of the last line. A full stop ends a sentence if a word precedes it, or a capital letter or
    formula follows.
    """
    return _SENTENCE_END.split(text[-TAIL_CHARS:].strip(" \n#").rpartition("\n")[2].strip())[-1]


def same_number(reference: Number, answer: Number) -> bool:
    """Whether two numbers are equal: exactly, or one is a decimal of four or more places that truncates or rounds the
    other, which is a fraction; and in the same unit, if both have one.

    0.3333 equals 1/3; 0.33 does not, and 17.9999 is not 18. 5000 m is 5 km; 5 m is not, and 5 is both.
    """
    if reference.name and answer.name and reference.name != answer.name:
        return False
    if reference.unit and answer.unit:
        if reference.unit.dimensions != answer.unit.dimensions:
            return False
        if reference.unit.factor != answer.unit.factor:
            return reference.value * reference.unit.factor == answer.value * answer.unit.factor
    if reference.value == answer.value:
        return True
    rounded, exact = (reference, answer) if reference.places else (answer, reference)
    return not exact.places and rounds_to(exact.value, rounded.value, rounded.places)


def rounds_to(exact: Fraction, decimal: Fraction, places: int) -> bool:
    """Whether a decimal of at least four places and four significant digits equals a fraction that was rounded or
    truncated.
    """
    if places < 4 or abs(decimal) * 10**places < 1_000 or exact.denominator == 1 or (exact < 0) != (decimal < 0):
        return False
    above = (abs(exact) - abs(decimal)) * 10**places
    return abs(above) * 2 <= 1 or 0 <= above < 1


def _plain(text: str) -> str:
    r"""The text in plain notation, without `\text{}`."""
    text = MATH_SPAN.sub(lambda found: f" {found[1] or found[2] or found[3]} ", text)
    text = _DEGREES.sub(lambda found: f" \u00b0{found[1] or found[2] or ''} ", plain_notation(text))
    text = _UNITS_AS_FRACTION.sub(r" \1/\2\3", _TEXT_COMMAND.sub(r" \1 ", _LETTER_UNIT.sub(" ", text)))
    text = re.sub(r"\\mu\s*", "u", re.sub(r"(?<=[A-Za-z])\s+(?=\^)", "", text))
    for symbol, written in _SYMBOLS:
        text = text.replace(symbol, written)
    return _IN_BRACKETS.sub(lambda found: "" if _has_digit(in_figures(found[0])) else found[0], text)  # 5 (five)


def _read(text: str) -> Number | None:
    """The number in a text; None if it has several, or if other parts of the text would change the number's value."""
    text = _POWER_OF_TEN.sub(r"\g<1>1*10", _SIGN_WORD.sub("-", _plain(text)))
    currency = _CURRENCY.search(text)
    left, equals, right = _NO_CURRENCY.sub(" ", _CURRENCY.sub(r" \1", text)).rpartition("=")
    if equals and _NAME.fullmatch(right):  # 5 = x
        left, right = right, left
    if _TWO_EQUATIONS.search(left) or not is_evaluated(left):
        return None
    right = _LEADING_SIGN.sub(r"\1", right)
    found = _NUMBER.search(right)
    number = _value(found) if found else None
    if found is None or number is None:
        return None
    before, after = right[: found.start()], right[found.end() :]
    unit, rest = split_unit(after)
    rest, times = _without_scale(rest if unit else _POWER_OF_WORD.sub(r"\1", after))
    if not _is_prose(before, rest, attached=not unit) or (
        times > 1 and number.places == 0 and number.value.denominator > 1
    ):
        return None
    unit = read_unit(currency[2]) if currency else unit
    name = left.partition("=")[0].strip() if equals else ""
    name = name if len(name) == 1 and name.isalpha() else ""
    return number._replace(value=number.value * times, places=number.places * (times == 1), unit=unit, name=name)


def is_evaluated(left: str) -> bool:
    """Whether the first side of an equation is a name or a calculation, so that the last side is its value; not so for
    `2x`.
    """
    first, *others = re.split(r"=(?![^{}]*\})", left, maxsplit=1)
    computed = bool(others) and not _has_digit(first)  # m + n = 9 + 4 = 13
    return computed or bool(
        _CALCULATION.match(first) or _NAME_OR_SUM.fullmatch(_COMMAND.sub(" ", _FUNCTION.sub("0", first)))
    )


def _without_scale(after: str) -> tuple[str, int]:
    """The text after a scale word such as `million`, and the scale; 1 if no such word follows."""
    found = re.match(r"\s+([a-z]+)\b", after)
    if found and found[1] in SCALES:
        return after[found.end() :], SCALES[found[1]]
    return after, 1


def _last_figures(words: list[str]) -> list[str] | None:
    """The last words of a line that belong to one formula or number, and are not denied.

    Empty if they are denied and the line states nothing else; None if the line has no digit.
    """
    if words and words[0] in ("-", "+", "*"):
        words = words[1:]  # a list item's number
    found = _all_figures(words)
    for index, figures in reversed(list(enumerate(found))):
        if not figures.denied():
            return [] if index and figures.continues(found[index - 1]) else figures.with_unit()
        if not figures.is_contrast():
            break
    return [] if found else None


def _all_figures(words: list[str]) -> "list[_Figures]":
    """The numbers and formulas of a line, each with the words around it up to the next comma, stop or `but`."""
    found = list[_Figures]()
    formula, clause = list[str](), list[str]()
    for word in [*words, "."]:
        bare = word.rstrip(",;:.!?")
        belongs = _has_digit(bare) or bare in _JOINS
        if belongs:
            formula.append(bare)
        if formula and (not belongs or bare != word):
            if _has_digit("".join(formula)):
                found.append(_Figures(formula, clause, len(clause)))
            else:
                clause.extend(formula)
            formula = []
        if bare == "but" and not (clause and clause[-1].lower() in _ALL_WORDS):
            clause = []
        elif not belongs:
            clause.append(bare)
        if bare != word:
            clause = []
    return found


_ALL_LIST = "anything everything all any nothing none whatever number numbers value"
_ALL_WORDS = frozenset(_ALL_LIST.split())


class _Figures(NamedTuple):
    """A number or formula with the words of its clause."""

    formula: list[str]
    clause: list[str]
    position: int
    """Number of words before it."""

    def with_unit(self) -> list[str]:
        """The formula and the unit after it; a dash between them is dropped: `18` of `18 - she sells them`."""
        end = len(self.formula)
        while end and self.formula[end - 1] == "-":
            end -= 1
        after = " " + " ".join(self.clause[self.position :])
        return [*self.formula[:end], *after[: len(after) - len(split_unit(after)[1])].split()]

    def continues(self, other: "_Figures") -> bool:
        """Whether both belong to the same answer, as the minutes of `3 hours and 20 minutes`, 3 of `x = 2, y = 3`."""
        same = other.clause is self.clause
        words = other.clause[other.position : self.position if same else None]
        between = " ".join(words if same else words + self.clause[: self.position]).strip()
        before = {word.lower() for word in other.clause[: other.position]}
        if len(self.formula) == len(other.formula) == 3 and self.formula[1] == other.formula[1] == "=":
            return self.formula[0] != other.formula[0] and between in ("", "and") and before.isdisjoint(_CONDITIONS)
        larger = read_unit(between.removesuffix(" and"))
        smaller = split_unit(" " + " ".join(self.clause[self.position :]))[0]
        if not larger or not smaller:
            return False
        return larger.dimensions == smaller.dimensions and larger.factor > smaller.factor

    def is_contrast(self) -> bool:
        """Whether the clause says what the answer is not, while another clause says what it is."""
        return any(
            tuple(word.lower() for word in self.clause[: self.position][: len(start)]) == start for start in _CONTRASTS
        )

    def denied(self) -> bool:
        """Whether the clause says that the number is not the answer, or is only a bound."""
        words = [lower for word in self.clause[: self.position] if not (lower := _lower(word)).endswith("ly")]
        verb = max((index for index, word in enumerate(words) if word in _VERBS), default=-1)
        if is_changed_after(words) and (words[-1] in _BOUNDS or "=" not in self.formula):  # half of 10 = 5
            return True
        governing = words[max(verb - 1, 0) :] if verb >= 0 else words
        if any(word in _DENIALS or word.endswith("n't") or _denies_wide(word) for word in governing):
            return True
        after = [_lower(word) for word in self.clause[self.position : self.position + 3]]
        if not after:
            return False
        denied = after[0] in _VERBS | _MODALS and not _DENIALS.isdisjoint(after)
        return denied or after[0].endswith("n't") or after[0] == "cannot" or _denies_wide(after[0])


def is_changed_after(words: list[str]) -> bool:
    """Whether words before a value make it a bound, a part or a multiple of the answer: `up to`, `twice`."""
    return bool(words) and (words[-1] in _BOUNDS or words[-2:] == ["up", "to"] or bool(_NO_WAY.search(" ".join(words))))


def _lower(word: str) -> str:
    return word.lower().strip("\"'*_()")


def _denies_wide(word: str) -> bool:
    return bool(_DENIAL_WIDE.search(word))


def _has_digit(text: str) -> bool:
    return any(character.isdigit() or unicodedata.category(character) == "No" for character in text)


def _is_prose(before: str, after: str, *, attached: bool) -> bool:
    """Whether the text around a number and its unit leaves its value unchanged: plain words, punctuation.

    `attached`: letters directly after the number must be a short unit: `5 GB` is one, and `5x` is not.
    """
    if not (_PROSE.fullmatch(before) and _PROSE.fullmatch(after)) or "/" in before:
        return False
    if _NO_HYPHEN.search(f"{before}|{after}") or before[-1:].isalpha() or before.rstrip()[-1:] in ("-", ")"):
        return False
    if re.search(r"[A-Za-z]\($", before) or re.search(r"^\s*a\W*$", after) or _CHANGING_WIDE.search(before + after):
        return False  # f(5), 5a
    beside = re.match(r"[A-Za-z]*", after)
    if attached and beside and beside[0] and beside[0].lower() not in _ATTACHED:
        return False
    leading = [word.lower() for word in re.findall(r"[A-Za-z]+", before)]
    if is_changed_after(leading):
        return False
    words = [*leading, *(word.lower() for word in re.findall(r"[A-Za-z]+", after))]
    return all(
        word not in _CHANGING and (len(word) > 2 or word in _SHORT_WORDS | _ATTACHED or is_unit(word)) for word in words
    )


def _value(found: re.Match[str]) -> Number | None:
    """The matched number; None if it is too long, divides by 0, or is a division without a remainder, such as `6/3`."""
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
