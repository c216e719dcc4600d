r"""Sets of real numbers as inequalities and as intervals: `-1 \le x \le 1` is `[-1, 1]`, `x < -2 or x > 3` a union.

Texts come in plain notation (`podium.tasks.notation`). Both ends of every interval are kept as text, and the caller
says when two ends are equal. Linear in the length of the text; never raises.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_RELATIONS = {
    "<": "<", ">": ">", "<=": "<=", ">=": ">=", r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\leq": "<=",
    r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", "!=": "!=",
}  # fmt: skip
_RELATION = re.compile(r"(<=|>=|!=|<|>|\\(?:leqslant|leq?|lt|geqslant|geq?|gt|neq?)(?![A-Za-z]))")
_OPPOSITE = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:theta|alpha|beta|lambda|phi)")
_OR = re.compile(r"\\text\s?\{\s*or\s*\}|\bor\b|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])|\\cup(?![A-Za-z])")
_AND = re.compile(r"\\text\s?\{\s*and\s*\}|\band\b|\\land(?![A-Za-z])|\\wedge(?![A-Za-z])")
_INTERVAL = re.compile(r"([(\[])([^,()\[\]]+),([^,()\[\]]+)([)\]])")
_MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_SET_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in\s*(?:\\mathbb\s?\{?\s*R\s*\}?|\\R)\s*)?(?:\\mid|\\vert|\||:)\s*(.+?)\s*\\\}"
)
_REALS = re.compile(r"\\mathbb\s?\{?\s*R\s*\}?|\\R|(?:\\text\s?\{)?\s*(?:the set of )?all reals?(?: numbers?)?\s*\}?")
_MINUS_INFINITY, _INFINITY = r"-\infty", r"\infty"


class Interval(NamedTuple):
    """An interval of real numbers."""

    low: str
    high: str
    has_low: bool
    """Whether the lower end belongs to it."""
    has_high: bool


class RealSet(NamedTuple):
    """A union of intervals, as it was written."""

    intervals: Sequence[Interval]
    variable: str | None
    """The letter that inequalities name, empty for `all real numbers`; None of intervals."""


def read_set(text: str) -> RealSet | None:
    """The set that inequalities, intervals or `all real numbers` describe; None if the text is something else."""
    text = _MEMBER.sub("", text.strip())
    if _REALS.fullmatch(text):
        return RealSet([Interval(_MINUS_INFINITY, _INFINITY, False, False)], "")
    if builder := _SET_BUILDER.fullmatch(text):
        described = read_set(builder[2])
        return described if described and described.variable == builder[1] else None
    parts = [_read_part(part.strip()) for part in _OR.split(text)]
    read = [part for part in parts if part is not None]
    variables = {part.variable for part in read}
    if len(read) < len(parts) or len(variables) != 1:
        return None
    return RealSet([interval for part in read for interval in part.intervals], variables.pop())


def same_set(expected: RealSet, found: RealSet, equal: Callable[[str, str], bool]) -> bool:
    """Whether two sets have the same intervals, in any order, by `equal(expected, found)` of their ends.

    Inequalities in different variables differ; an interval names no variable and equals an inequality in any.
    """
    if expected.variable and found.variable and expected.variable != found.variable:
        return False
    left = list(found.intervals)
    for wanted in expected.intervals:
        match = next((interval for interval in left if _same_interval(wanted, interval, equal)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same_interval(expected: Interval, found: Interval, equal: Callable[[str, str], bool]) -> bool:
    closed = (expected.has_low, expected.has_high) == (found.has_low, found.has_high)
    return closed and equal(expected.low, found.low) and equal(expected.high, found.high)


def _read_part(text: str) -> RealSet | None:
    """One interval, one inequality, or two that hold together: `x > 1 and x < 2`."""
    if found := _INTERVAL.fullmatch(text):
        low, high = _end(found[2]), _end(found[3])
        return RealSet([Interval(low, high, found[1] == "[", found[4] == "]")], None)
    read = [_read_inequality(part) for part in _AND.split(text)]
    if len(read) == 1:
        return read[0]
    if len(read) != 2 or read[0] is None or read[1] is None or read[0].variable != read[1].variable:
        return None
    return _both(read[0], read[1])


def _both(first: RealSet, second: RealSet) -> RealSet | None:
    """The interval between a lower and an upper bound; None if the two are not one of each."""
    if len(first.intervals) != 1 or len(second.intervals) != 1:
        return None
    bounds = {first.intervals[0], second.intervals[0]}
    below = [interval for interval in bounds if interval.high == _INFINITY and interval.low != _MINUS_INFINITY]
    above = [interval for interval in bounds if interval.low == _MINUS_INFINITY and interval.high != _INFINITY]
    if len(below) != 1 or len(above) != 1:
        return None
    return RealSet([Interval(below[0].low, above[0].high, below[0].has_low, above[0].has_high)], first.variable)


def _read_inequality(text: str) -> RealSet | None:
    r"""`x < 3`, `3 > x`, `1 < x \\le 3`, `x \\ne 3`; None of anything else."""
    pieces = [piece.strip() for piece in _RELATION.split(text)]
    sides, relations = pieces[::2], [_RELATIONS[piece] for piece in pieces[1::2]]
    if len(relations) == 1 and _VARIABLE.fullmatch(sides[1]) and not _VARIABLE.fullmatch(sides[0]):
        sides, relations = sides[::-1], [_OPPOSITE[relations[0]]]  # 3 > x
    if len(relations) == 2 and relations[0] in (">", ">="):
        sides, relations = sides[::-1], [_OPPOSITE[relation] for relation in relations[::-1]]  # 3 > x > 1
    match sides, relations:
        case [variable, end], [relation]:
            intervals = _one_sided(relation, _end(end))
            ends = [end]
        case [low, variable, high], [("<" | "<=") as first, ("<" | "<=") as second]:
            intervals = [Interval(_end(low), _end(high), first == "<=", second == "<=")]
            ends = [low, high]
        case _:
            return None
    names_variable = re.compile(rf"(?<![A-Za-z\\]){re.escape(variable)}(?![A-Za-z])")
    if not _VARIABLE.fullmatch(variable) or any(not end or names_variable.search(end) for end in ends):
        return None
    return RealSet(intervals, variable)


def _one_sided(relation: str, end: str) -> list[Interval]:
    below = Interval(_MINUS_INFINITY, end, False, relation == "<=")
    above = Interval(end, _INFINITY, relation == ">=", False)
    return {"<": [below], "<=": [below], ">": [above], ">=": [above], "!=": [below, above]}[relation]


def _end(text: str) -> str:
    """An end of an interval, infinity in one spelling."""
    end = text.strip().removeprefix("+").strip()
    infinite = re.fullmatch(r"(-?)\s*(?:\\infty|infinity|inf|oo)", end)
    return f"{infinite[1]}{_INFINITY}" if infinite else end
