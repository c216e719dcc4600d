r"""Answers that are neither a number nor a formula: lettered choices, no solution, numbers in a base, times of day.

Texts come in plain notation (`podium.tasks.notation`). Linear in the length of the text; never raises.
"""

import re
from typing import NamedTuple

_TEXT = r"\\(?:text|mbox|textrm|mathrm|textbf)\s?"
_TEXT_COMMAND = re.compile(_TEXT + r"\{([^{}]*)\}")
_LABEL = re.compile(
    rf"\s*\$?\s*(?:{_TEXT}\{{\s*\(([A-J])\)\s*\}}|\(([A-J])\)(?=[\s$])|([A-J])[).:](?=\s))\s*(?:\\?\s)*\$?\s*"
)
_LABELLED = re.compile(r"-?\s*(?:\$\s*)?-?\s*(?:[0-9.]|\\frac|\\sqrt|\\pi|\\text|\\mathrm)")
"""The start of a value after a letter; so `(A) \\cup (B)` is not read as a choice."""
_ANOTHER_LABEL = re.compile(r"\([A-J]\)|\b[B-J][).:](?:\s|$)|\bor\b|\bnot\b")

_EMPTY = re.compile(
    r"\\(?:emptyset|varnothing)|\\\{\s*\\\}|(?:the )?empty set"
    r"|(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?|no (?:real )?values? of [a-z]",
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


class Choice(NamedTuple):
    """A lettered choice with what it says: `(B) 12`."""

    label: str
    value: str


class ClockTime(NamedTuple):
    """A time of day, or of a clock."""

    hour: int
    minute: int
    second: int
    half: str
    """`a` for a.m., `p` for p.m.; empty if the text does not say."""


def read_choice(text: str) -> Choice | None:
    r"""Read letter and value of `\textbf{(B) } 12`, `(B) 12`, `B. 12`; None for a bare letter or other text."""
    found = _LABEL.match(text)
    if not found:
        return None
    value = text[found.end() :].strip(" $")
    if not _LABELLED.match(value) or _ANOTHER_LABEL.search(value):
        return None
    return Choice(found[1] or found[2] or found[3], value)


def is_empty_set(text: str) -> bool:
    r"""Whether a text says that there is no solution: `\emptyset`, `\{\}`, `no solution`."""
    return bool(_EMPTY.fullmatch(_words(text)))


def number_in_base(text: str) -> tuple[str, str] | None:
    r"""Digits and base of `1011_2`, `1011_{\text{two}}`, `1011 base 2`; None of anything else."""
    found = _IN_BASE.fullmatch(_words(text))
    if not found:
        return None
    base = found["base"] or found["named"]
    return found["digits"], _BASES.get(base, base)


def read_time(text: str) -> ClockTime | None:
    """A time as `3:45`, `03:45`, `3:45 p.m.`; None of anything else."""
    found = _TIME.fullmatch(_words(text))
    if not found or int(found["minute"]) > 59 or int(found["second"] or 0) > 59:
        return None
    return ClockTime(int(found["hour"]), int(found["minute"]), int(found["second"] or 0), (found["half"] or "").lower())


def same_time(reference: ClockTime, answer: ClockTime) -> bool:
    """Whether two times are equal: where the reference says a.m. or p.m., the answer must say the same."""
    return reference[:3] == answer[:3] and reference.half in ("", answer.half)


def _words(text: str) -> str:
    """The text without commands around words, its spaces single."""
    return re.sub(r"\s+", " ", _TEXT_COMMAND.sub(r"\1", text)).strip(" .$")
