r"""Answers that are neither a number nor a formula: lettered choices, no solution, numbers in a base, times, dates.

Texts must be in plain notation (`podium.tasks.math_answers.notation`). Linear in the length of the text; never raises.
"""

import re
from typing import NamedTuple

_TEXT = r"\\(?:text|mbox|textrm|mathrm|textbf)\s?"
_TEXT_COMMAND = re.compile(_TEXT + r"\{([^{}]*)\}")
_LABEL = re.compile(
    r"(?:the )?(?:(?:correct )?(?:option|choice|answer|alternative) (?:is )?)?"
    r"(?:\(([A-J])\)|([A-J])(?:[).:](?=\s|$)| - (?=[A-Za-z]{2})| +(?=\([A-Za-z]{3}))|(?:option|choice) ([A-J])\b)\s*",
    re.IGNORECASE,
)
_NAMED_LETTER = re.compile(
    r"(?:the )?(?:correct )?(?:option|choice|alternative|letter) \(?([A-J])\)?[.:]?", re.IGNORECASE
)
_NO_VALUE = re.compile(
    r"(?:is|was|has|does|can|cannot|fails)\b|[=<>+*/^_]|\\(?:cup|cap|le|ge|lt|gt|ne|times|cdot|setminus|in|to|and|or)\b"
)
"""How no value after a letter begins, so that `(A) \\cup (B)` is not read as a choice."""
_ANOTHER_LABEL = re.compile(r"\([A-J]\)|\b[B-J][).:](?:\s|$)|\b(?:or|and) [A-J]\b|\bor\b|\bnot\b")

_EMPTY = re.compile(
    r"\\(?:emptyset|varnothing)|\\\{\s*\\\}|(?:the )?empty set"
    r"|(?:(?:there (?:is|are)|(?:the|this) [a-z ]{1,40} has) )?"
    r"no (?:real )?solutions?(?: exists?)?|no (?:real )?values? of [a-z]",
    re.IGNORECASE,
)

_BASE_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASES = {name: str(base) for base, name in enumerate(_BASE_NAMES, 2)} | {"sixteen": "16"}
_BASE = rf"[0-9]{{1,2}}|{'|'.join(_BASES)}"
_IN_BASE = re.compile(
    r"\(?\s*(?P<digits>[0-9A-F]+)\s*\)?\s*"
    rf"(?:_\s*\{{?\s*\(?(?:base )?(?P<base>{_BASE})\)?\s*\}}?|,?\s\(?(?:in )?base[ -](?P<named>{_BASE})\)?)"
)

_TIME = re.compile(
    r"(?:at )?(?P<hour>[0-9]{1,2})\s?:\s?(?P<minute>[0-9]{2})(?:\s?:\s?(?P<second>[0-9]{2}))?"
    r"(?:\s?(?P<half>[ap])\.?\s?m\.?)?",
    re.IGNORECASE,
)

_MONTHS = "janfebmaraprmayjunjulaugsepoctnovdec"
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?:,? (?P<year>[0-9]{4}))?"
_DATES = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        r"(?P<year>[0-9]{4})([-/.])(?P<month>[0-9]{1,2})\2(?P<day>[0-9]{1,2})",
        rf"(?:on )?{_MONTH} {_DAY}{_YEAR}",
        rf"(?:on )?(?:the )?{_DAY} (?:of )?{_MONTH}{_YEAR}",
        r"(?P<year>[0-9]{4}) ?\u5e74 ?(?P<month>[0-9]{1,2}) ?\u6708 ?(?P<day>[0-9]{1,2}) ?\u65e5?",
    )
)
_WEEKDAY = re.compile(r"^(?:mon|tues|wednes|thurs|fri|satur|sun)day,? ", re.IGNORECASE)


class Choice(NamedTuple):
    """A lettered choice with its value: `(B) 12`."""

    label: str
    value: str


class ClockTime(NamedTuple):
    """A time of day, or a reading of a clock."""

    hour: int
    minute: int
    second: int
    half: str
    """`a` for a.m., `p` for p.m.; empty if the text does not say."""


class Date(NamedTuple):
    """A date; the year is empty if the text does not say."""

    year: str
    month: int
    day: int


def read_choice(text: str) -> Choice | None:
    r"""Read letter and value of `\textbf{(B) } 12`, `(B) Paris`, `B. 12`, `option B`; None for anything else."""
    words = " ".join(_TEXT_COMMAND.sub(r"\1", text).split()).strip(" $*")
    named = _NAMED_LETTER.fullmatch(words)
    if named:
        return Choice(named[1].upper(), "")
    found = _LABEL.match(words)
    label = found and (found[1] or found[2] or found[3])
    if not found or not label or not label.isupper():
        return None
    value = words[found.end() :].strip(" $*")
    if not value or _NO_VALUE.match(value) or _ANOTHER_LABEL.search(value):
        return None
    original = text.strip(" $*")[-len(value) :]  # with its commands
    return Choice(label, original if original.endswith(value) else value)


def is_empty_set(text: str) -> bool:
    r"""Whether a text says that there is no solution: `\emptyset`, `\{\}`, `no solution`."""
    return bool(_EMPTY.fullmatch(_words(text)))


def number_in_base(text: str) -> tuple[str, str] | None:
    r"""Digits and base of `1011_2`, `1011_{\text{two}}`, `1011 base 2`; None for anything else."""
    found = _IN_BASE.fullmatch(_words(text))
    if not found:
        return None
    base = found["base"] or found["named"]
    return found["digits"], _BASES.get(base, base)


def read_time(text: str) -> ClockTime | None:
    """Read a time such as `3:45`, `03:45`, `3:45 p.m.`; None for anything else."""
    found = _TIME.fullmatch(_words(text))
    if not found or int(found["minute"]) > 59 or int(found["second"] or 0) > 59:
        return None
    return ClockTime(int(found["hour"]), int(found["minute"]), int(found["second"] or 0), (found["half"] or "").lower())


def same_time(reference: ClockTime, answer: ClockTime) -> bool:
    """Whether two times are equal; if the reference has a.m. or p.m., the answer must have it too, or use the 24-hour
    clock.
    """
    if reference.half == "p" and not answer.half and answer.hour > 12:
        return (reference.hour % 12 + 12, *reference[1:3]) == answer[:3]
    return reference[:3] == answer[:3] and reference.half in ("", answer.half)


def read_date(text: str) -> Date | None:
    """Read a date such as `2024-03-05`, `March 5, 2024`, `5 March`; None for anything else: `3/5/2024` may be in
    May.
    """
    words = _WEEKDAY.sub("", _words(text))
    for form in _DATES:
        found = form.fullmatch(words)
        if found:
            month = found["month"].lower()
            number = int(month) if month.isdigit() else _MONTHS.index(month[:3]) // 3 + 1
            return Date(found["year"] or "", number, int(found["day"]))
    return None


def _words(text: str) -> str:
    """The text without commands around words, and with single spaces."""
    return re.sub(r"\s+", " ", _TEXT_COMMAND.sub(r"\1", text)).strip(" .$")
