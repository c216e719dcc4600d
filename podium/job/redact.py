"""Removes secret values and terminal control sequences from text before it is written.

A value is found in every form that `_forms` lists: unchanged, URL-quoted, hexadecimal, base64 alone or after a user
name; also with spaces, line ends, quotes or table borders inside, as in tracebacks that wrap lines. Only letters and
digits are compared, in lower case. Standard library only.
"""

import base64
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping

SHORTEST = 8
"""Minimum letters and digits of a secret: shorter values occur in any text."""
HELD = 4
"""Minimum letters and digits at the end of a text that are held back because a secret starts with them."""
HIDDEN = "[redacted]"
SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
"""Names of variables whose values are secrets."""
_OTHER = re.compile(r"[^0-9A-Za-z]+")
_SEQUENCE = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, screen
    r"|[\]PX^_].{0,4096}?(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC: titles, links, clipboard
    r"|[ -/]*[0-~])"  # two and three characters
    r"|\x9b[0-?]*[ -/]*[@-~]|[\x90\x98\x9d-\x9f].{0,4096}?(?:\x07|\x1b\\|\x9c)"  # the same with one character in front
)
_CONTROL = re.compile(rf"{_SEQUENCE}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", re.DOTALL)
_BEGUN = re.compile(
    r"(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x9c]*|[ -/]*)?|\x9b[0-?]*[ -/]*|[\x90\x98\x9d-\x9f][^\x07\x9c]*|\r)\Z"
)
LONGEST_SEQUENCE = 4096
"""Characters after which the beginning of a control sequence counts as text."""


def without_controls(text: str) -> str:
    """Remove control characters and terminal sequences; tabs stay, and a carriage return ends a line."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


class Redactor:
    """Removes the values of secrets from texts."""

    def __init__(self, values: Iterable[str]) -> None:
        """Set the values; one with fewer letters and digits than `SHORTEST` is ignored."""
        found = {form for value in values if len(_plain(value)) >= SHORTEST for form in _forms(value)}
        self.forms = tuple(sorted(found, key=len, reverse=True))
        """Letters and digits of every form of a value, longest first."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], more: Iterable[str] = ()) -> "Redactor":
        """A redactor for all environment variables with a secret's name, and for `more`."""
        return cls([*(value for name, value in environ.items() if SECRET_NAME.search(name)), *more])

    def redact(self, text: str) -> str:
        """The text without the values."""
        return "".join(self.stream([text]))

    def found_in(self, text: str) -> bool:
        """Whether the text contains one of the values."""
        return any(form in _plain(text) for form in self.forms)

    def stream(self, parts: Iterable[str]) -> Iterator[str]:
        """Yield the parts without secrets, even ones split over several parts; yields one more piece at the end."""
        if not self.forms:
            yield from parts
            return
        longest = len(self.forms[0])
        before = ""  # letters and digits that were yielded
        held = ""  # text that was held back, since a secret may begin there
        for part in parts:
            text = held + part
            plain = before + _plain(text)
            start = len(plain) - self._begun(plain)
            out, held = self._hide(text, plain, len(before), start)
            before = plain[: len(plain) - len(_plain(held))][-longest:]
            yield out
        yield HIDDEN if len(_plain(held)) >= SHORTEST else held

    def _begun(self, plain: str) -> int:
        """Number of letters and digits at the end of `plain` that may begin a secret's form, if at least `HELD`;
        otherwise 0.
        """
        longest = min(len(plain), len(self.forms[0]) - 1)
        lengths = range(longest, HELD - 1, -1)
        return next((n for n in lengths if any(form.startswith(plain[-n:]) for form in self.forms if len(form) > n)), 0)

    def _hide(self, text: str, plain: str, offset: int, start: int) -> tuple[str, str]:
        """Redact the text up to a form that begins at `start` of `plain`; return that, and the rest of the text.

        The first `offset` letters and digits of `plain` precede the text.
        """
        spans = [span for form in self.forms for span in _found(form, plain)]
        if len(plain) == offset or (not spans and start == len(plain)):
            return text, ""
        places = [match.start() for match in re.finditer("[0-9A-Za-z]", text)]
        cut = places[max(0, start - offset)] if start < len(plain) else len(text)
        out, end = [], 0
        for first, last in _merged(spans):
            if last <= offset:
                continue
            here, there = places[max(0, first - offset)], places[last - offset - 1] + 1
            out += [text[end:here], HIDDEN + "\n" * ("\n" in text[here:there])]
            end = there
        cut = max(cut, end)
        return "".join([*out, text[end:cut]]), text[cut:]


def filtered(parts: Iterable[str], redactor: Redactor) -> Iterator[str]:
    """Yield text without secrets and control sequences, even if either is spread over several parts."""
    return redactor.stream(_uncontrolled(parts))


def own_redactor() -> Redactor:
    """A redactor of this process's environment."""
    return Redactor.from_environment(os.environ)


def _uncontrolled(parts: Iterable[str]) -> Iterator[str]:
    held = ""
    for part in parts:
        text = held + part
        begun = _BEGUN.search(text, max(0, len(text) - LONGEST_SEQUENCE))
        held = begun[0] if begun else ""
        yield without_controls(text[: len(text) - len(held)])
    yield without_controls(held)


def _forms(value: str) -> set[str]:
    """The ways in which a secret may be written (plain, hex, URL-quoted, escaped, base64), letters and digits only.

    Forms that are too short to search for are left out.
    """
    data = value.encode()
    escaped = "".join(f"x{byte:02x}" for byte in data), "".join(f"u{ord(character):04x}" for character in value)
    # base64 of a longer text that contains the value encodes it at an offset of 0, 1 or 2 bytes; its first and last
    # characters depend on the neighbouring bytes.
    shifted = (base64.b64encode(b"\0" * shift + data).decode() for shift in range(3))
    inner = [text[-(-8 * shift // 6) : -4] for shift, text in enumerate(shifted)]
    quoted = [urllib.parse.quote(value, safe=""), urllib.parse.quote(value)]
    written = {_plain(text) for text in (value, data.hex(), *quoted, *escaped, *inner)}
    return {form for form in written if len(form) >= SHORTEST}


def _plain(text: str) -> str:
    return _OTHER.sub("", text).lower()


def _found(form: str, plain: str) -> Iterator[tuple[int, int]]:
    place = plain.find(form)
    while place >= 0:
        yield place, place + len(form)
        place = plain.find(form, place + 1)


def _merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans in order; overlapping ones are merged."""
    spans = sorted(spans)
    while spans:
        first, last = spans.pop(0)
        while spans and spans[0][0] < last:
            last = max(last, spans.pop(0)[1])
        yield first, last
