"""Text for terminals: printable one-line excerpts, bars for values, and durations."""

import itertools
import math
from collections.abc import Sequence

from podium.terminal import printable

BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Bars of zero to eight eighths of a cell."""
ELLIPSIS = " [...] "


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
    """Format how long ago something was, in the largest unit that fits at least twice: `90 s ago`, `3 h ago`."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(0, round(seconds))} s ago"
