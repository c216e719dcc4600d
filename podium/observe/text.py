"""Text for terminals: escapes what a model wrote, draws values as bars, formats seconds."""

import itertools
import math
import unicodedata
from collections.abc import Sequence

BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""A blank, and one to eight eighths of a cell."""
LINE_END = "\u21b5"
ELLIPSIS = " [...] "
_HARMFUL = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories to escape: control, format (text direction), surrogate, private, unassigned, separator."""


def printable(text: str) -> str:
    """Escape everything in the text that could move the cursor, change colours or confuse a terminal."""
    return "".join(_visible(character) for character in text)


def harmless(text: str) -> str:
    """Text as `printable` makes it, but with its line ends and tabs: for what is shown as it was written."""
    return "".join(each if each in "\n\t" else _visible(each) for each in text)


def _visible(character: str) -> str:
    if character == "\n":
        return LINE_END
    if unicodedata.category(character) in _HARMFUL:
        return character.encode("unicode_escape").decode("ascii")
    return character


def cut(text: str, length: int) -> str:
    """Shorten the text to at most `length` characters, keeping its start and its end."""
    if len(text) <= length:
        return text
    head = (length - len(ELLIPSIS)) * 3 // 5
    tail = length - len(ELLIPSIS) - head
    return text[:head] + ELLIPSIS + text[len(text) - tail :]


def shown(text: str, length: int) -> str:
    """The text as one printable line of at most about `length` characters."""
    return cut(printable(cut(text.strip(), 4 * length)), length)


def bucket_means(values: Sequence[float], buckets: int) -> list[float]:
    """The finite values in order, averaged to at most `buckets` numbers."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(buckets, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)] if count else [0]
    return [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as at most `width` bars on one line, scaled from the smallest to the largest."""
    means = bucket_means(values, width)
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = high - low or 1.0
    return "".join(BARS[1 + round((value - low) / span * 7)] for value in means)


def clock(seconds: float) -> str:
    """Format seconds as `4:05` or `1:04:05`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def ago(seconds: float) -> str:
    """Format how long ago something was, in the largest unit of which it is two: `90 s ago`, `3 h ago`."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(0, round(seconds))} s ago"
