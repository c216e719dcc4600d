r"""Sets of real numbers as inequalities and as intervals: `-1 \le x \le 1` is `[-1, 1]`, `x < -2 or x > 3` a union."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from podium.tasks.math_answers.formula import (
    ALL,
    ANY,
    CHAIN,
    DIFFERENCE,
    TUPLES,
    UNION,
    Apply,
    Node,
    Symbol,
)
from podium.tasks.math_answers.formula_values import constant, rational, variables

_INFINITY = Symbol("infinity")
_MINUS_INFINITY = Apply("-", (_INFINITY,))
_ALL_REALS = "field R"
_OPPOSITE = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}


class Interval(NamedTuple):
    """An interval of real numbers."""

    low: Node
    high: Node
    has_low: bool
    """Whether the lower end belongs to it."""
    has_high: bool


class RealSet(NamedTuple):
    """A union of intervals, as it was written."""

    intervals: Sequence[Interval]
    variable: Node | None
    """The variable of inequalities; None for intervals."""


_EVERYTHING = RealSet([Interval(_MINUS_INFINITY, _INFINITY, False, False)], None)


def describes_reals(node: Node) -> bool:
    """Whether it is an inequality, a set with a condition, all real numbers, or a combination of these; not an interval
    alone.
    """
    match node:
        case Symbol(name):
            return name == _ALL_REALS
        case Apply("chain", (Symbol(signs), *sides)):
            return not set(signs.split()).isdisjoint(_OPPOSITE) or any(map(describes_reals, sides))
        case Apply("where"):
            return True
        case Apply("-", (first, Apply("set"))):
            return describes_reals(first)
        case Apply(name, (first, *_)) if name in (UNION, DIFFERENCE):
            return describes_reals(first) or _is_interval(first)
        case Apply(name, (first, *_)) if name in (ALL, ANY):
            return describes_reals(first)
    return False


def read_set(node: Node) -> RealSet | None:
    """The set of real numbers that an answer describes; None if it describes no such set."""
    match node:
        case Symbol(name) if name == _ALL_REALS:
            return _EVERYTHING
        case Apply(name, (low, high)) if name in TUPLES:
            return RealSet([Interval(low, high, name[0] == "[", name[1] == "]")], None)
        case Apply("chain", (Symbol("in"), variable, described)):
            return _about(variable, read_set(described))
        case Apply("where", (variable, condition)):
            return _where(variable, read_set(condition))
        case Apply("chain", (Symbol(signs), *sides)):
            return _inequality(signs.split(), sides)
        case Apply("difference" | "-", (whole, Apply("set", points))):
            return _without(read_set(whole), points)
        case Apply(name, parts) if name in (UNION, ANY):
            return _union(map(read_set, parts))
        case Apply("all", (first, second)):
            return _both(read_set(first), read_set(second))
    return None


def same_set(expected: RealSet, found: RealSet, equal: Callable[[Node, Node], bool]) -> bool:
    """Whether two sets have the same intervals, in any order, by `equal(expected, found)` of their ends.

    Inequalities in different variables differ; an interval names no variable and equals an inequality in any.
    """
    if expected.variable is not None and found.variable is not None and expected.variable != found.variable:
        return False
    left = list(found.intervals)
    for wanted in expected.intervals:
        match = next((interval for interval in left if _same_interval(wanted, interval, equal)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same_interval(expected: Interval, found: Interval, equal: Callable[[Node, Node], bool]) -> bool:
    closed = (expected.has_low, expected.has_high) == (found.has_low, found.has_high)
    return closed and equal(expected.low, found.low) and equal(expected.high, found.high)


def _is_interval(node: Node) -> bool:
    return isinstance(node, Apply) and node.name in TUPLES and len(node.arguments) == 2


def _about(variable: Node, described: RealSet | None) -> RealSet | None:
    r"""The set S of a statement `x \in S`."""
    return described and described._replace(variable=variable)


def _where(variable: Node, condition: RealSet | None) -> RealSet | None:
    r"""The set of `\{x \mid ...\}`, if the condition is about `x`."""
    if isinstance(variable, Apply) and variable.name == CHAIN:  # x \in \mathbb{R}
        variable = variable.arguments[1]
    return condition if condition and condition.variable == variable else None


def _union(parts: Iterable[RealSet | None]) -> RealSet | None:
    intervals, names = list[Interval](), set[Node | None]()
    for part in parts:
        if part is None:
            return None
        intervals += part.intervals
        names.add(part.variable)
    return RealSet(intervals, names.pop()) if len(names) == 1 else None


def _both(first: RealSet | None, second: RealSet | None) -> RealSet | None:
    """The interval between a lower and an upper bound of one variable; None if the two are not one of each."""
    if first is None or second is None or first.variable != second.variable:
        return None
    if len(first.intervals) != 1 or len(second.intervals) != 1:
        return None
    bounds = (first.intervals[0], second.intervals[0])
    below = [interval for interval in bounds if interval.high == _INFINITY and interval.low != _MINUS_INFINITY]
    above = [interval for interval in bounds if interval.low == _MINUS_INFINITY and interval.high != _INFINITY]
    if len(below) != 1 or len(above) != 1:
        return None
    return RealSet([Interval(below[0].low, above[0].high, below[0].has_low, above[0].has_high)], first.variable)


def _without(whole: RealSet | None, points: Sequence[Node]) -> RealSet | None:
    """The real numbers without some points."""
    if whole is None or whole.intervals != _EVERYTHING.intervals:
        return None
    values = [(_order(point), point) for point in points]
    if any(order is None for order, _ in values):
        return None
    ends = [point for _, point in sorted(values, key=lambda each: each[0] or Fraction(0))]
    lows, highs = [_MINUS_INFINITY, *ends], [*ends, _INFINITY]
    return RealSet([Interval(low, high, False, False) for low, high in zip(lows, highs, strict=True)], whole.variable)


def _order(point: Node) -> Fraction | None:
    """The approximate value of a real number; None for anything else."""
    value = constant(point)
    return Fraction(0) if value == 0 else None if value is None else rational(value)


def _inequality(signs: list[str], sides: list[Node]) -> RealSet | None:
    r"""`x < 3`, `3 > x`, `1 < x \le 3`, `x \ne 3`, `|x| < 3`; None for anything else."""
    if not set(signs) <= set(_OPPOSITE):
        return None
    match signs, sides:
        case [sign], [left, right] if not _is_variable(left):
            if isinstance(left, Apply) and left.name == "abs":
                return _absolute(sign, left.arguments[0], right)
            signs, sides = [_OPPOSITE[sign]], [right, left]  # 3 > x
        case [(">" | ">=") as first, (">" | ">=") as second], [high, variable, low]:
            signs, sides = [_OPPOSITE[second], _OPPOSITE[first]], [low, variable, high]  # 3 > x > 1
    match signs, sides:
        case [sign], [variable, end]:
            intervals, ends = _one_sided(sign, end), [end]
        case [("<" | "<=") as first, ("<" | "<=") as second], [low, variable, high]:
            intervals, ends = [Interval(low, high, first == "<=", second == "<=")], [low, high]
        case _:
            return None
    if not _is_variable(variable) or any(variables(end) & variables(variable) for end in ends):
        return None
    return RealSet(intervals, variable)


def _absolute(sign: str, variable: Node, end: Node) -> RealSet | None:
    if not _is_variable(variable) or variables(end):
        return None
    minus, closed = Apply("-", (end,)), sign in ("<=", ">=")
    if sign in ("<", "<="):
        return RealSet([Interval(minus, end, closed, closed)], variable)
    if sign in (">", ">="):
        outside = [Interval(_MINUS_INFINITY, minus, False, closed), Interval(end, _INFINITY, closed, False)]
        return RealSet(outside, variable)
    return None


def _is_variable(node: Node) -> bool:
    return isinstance(node, Symbol) and bool(variables(node)) and node != _INFINITY and node.name.strip() == node.name


def _one_sided(sign: str, end: Node) -> list[Interval]:
    below = Interval(_MINUS_INFINITY, end, False, sign == "<=")
    above = Interval(end, _INFINITY, sign == ">=", False)
    return {"<": [below], "<=": [below], ">": [above], ">=": [above], "!=": [below, above]}[sign]
