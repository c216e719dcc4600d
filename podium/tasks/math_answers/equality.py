r"""Whether two answers that were read as formulas are equal: numbers, lists, sets, points, equations, ratios.

A list is equal in any order, a point in its own; `x = 5` is 5, `x = 2, y = 3` the point `(2, 3)`, `\pm 3` is `3, -3`;
inequalities and intervals are sets of real numbers (`podium.tasks.math_answers.real_sets`); two equations are equal if
one is a multiple of the other. Units are compared only if both sides have one.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

from podium.tasks.math_answers.formula import (
    ALL,
    CHAIN,
    LIST,
    MATRIX,
    RATIO,
    ROW,
    SET,
    TUPLES,
    UNION,
    Apply,
    Measured,
    Node,
    Number,
    Symbol,
    is_list,
)
from podium.tasks.math_answers.formula_values import constant, proportional, rational, same_value, variables
from podium.tasks.math_answers.number_text import rounds_to
from podium.tasks.math_answers.real_sets import describes_reals, read_set, same_set
from podium.tasks.math_answers.units import Unit, read_unit

_NOTHING = Symbol("")
_ORDERED_BY_POSITION = frozenset((*TUPLES, MATRIX, ROW))
_APPROXIMATELY = "~"
_STRICT = {"<": True, ">": True, "<=": False, ">=": False}


def same_answer(expected: Node, found: Node) -> bool:
    """Whether an answer equals the reference."""
    if expected == found:
        return True
    expected, found = _signs_apart(expected), _signs_apart(found)
    if describes_reals(expected) or describes_reals(found):
        wanted, given = read_set(expected), read_set(found)
        if wanted is not None and given is not None:
            return same_set(wanted, given, same_scalar)
        return _same_relation(expected, found)
    if is_list(expected) or is_list(found) or _is(expected, SET) or _is(found, SET):
        return _same_items(expected, found)
    if _is(expected, CHAIN) or _is(found, CHAIN):
        return _same_equation(expected, found)
    return _same_measured(expected, found)


def same_scalar(expected: Node, found: Node) -> bool:
    """Whether two numbers or formulas are equal, or one is a decimal of at least four places that rounds the other.

    A number equals only a number that is written out, also in lists and intervals: `6/2` is not 3.
    """
    if (
        is_written_out(expected, powers_of_ten=False)
        and not is_written_out(found)
        and isinstance(constant(found), Fraction)
    ):
        return expected == found
    if same_value(expected, found):
        return True
    for decimal, other in ((_decimal(expected), found), (_decimal(found), expected)):
        value = constant(other) if decimal and not _decimal(other) else None
        exact = None if value is None else rational(value)
        if decimal and exact is not None and rounds_to(exact, decimal.value, decimal.places):
            return True
    return False


def _is(node: Node, name: str) -> bool:
    return isinstance(node, Apply) and node.name == name


def _decimal(node: Node) -> Number | None:
    """The number, if a formula is only a decimal with an optional sign."""
    match node:
        case Number():
            return node
        case Apply("-", (Number(value, places),)):
            return Number(-value, places)
    return None


def is_written_out(node: Node, *, powers_of_ten: bool = True) -> bool:
    r"""Whether it is a number rather than a calculation: `-3`, `\frac{3}{4}`, `1\frac12`, `5 \cdot 10^3`, but not
    `6/2`.
    """
    match node:
        case Apply("-", (value,)) if not (isinstance(value, Apply) and value.name == "-"):
            return is_written_out(value, powers_of_ten=powers_of_ten)
        case Number():
            return True
        case Apply("^", (Number(value=base), exponent)):
            return powers_of_ten and base == 10 and _decimal(exponent) is not None
        case Apply("*" | "frac" | "/", (Number(), Apply("^") as power)):
            return is_written_out(power, powers_of_ten=powers_of_ten)
        case Apply("frac" | "/", (above, below)):
            top, bottom = _decimal(above), _decimal(below)
            if not top or not bottom or top.places or bottom.places or not bottom.value:
                return False
            return (top.value / bottom.value).denominator != 1
        case Apply("+", (Number(value=value), Apply("frac") as part)):
            return value.denominator == 1 and is_written_out(part, powers_of_ten=False)
    return False


# units


def _same_measured(expected: Node, found: Node) -> bool:
    """Whether two values are equal; in the same unit, if both have one."""
    (wanted, unit), (given, other) = _unit(expected), _unit(found)
    if unit and other:
        if unit.dimensions != other.dimensions:
            return False
        if unit.factor != other.factor:
            times = other.factor / unit.factor
            number = _decimal(given)
            given = Number(number.value * times) if number else Apply("*", (Number(times), given))
    elif "degree" in (_outermost(expected), _outermost(found)) and not (unit and other):
        return _same_ordered(wanted, given) or same_scalar(expected, found)  # 90 degrees are \pi/2
    return _same_ordered(wanted, given)


def _unit(node: Node) -> tuple[Node, Unit | None]:
    match node:
        case Measured(value, unit):
            return value, unit
        case Apply("degree" | "percent" as name, (value,)):
            return value, read_unit(name)
        case Apply("-", (Apply("degree" | "percent" as name, (value,)),)):
            return Apply("-", (value,)), read_unit(name)
    return node, None


def _outermost(node: Node) -> str:
    return node.name if isinstance(node, Apply) else ""


def _same_ordered(expected: Node, found: Node) -> bool:
    """Points, matrices and ratios, part by part; anything else as a value."""
    expected, found = _as_point(expected, found), _as_point(found, expected)
    match expected, found:
        case Apply(name, wanted), Apply(other, given) if name in _ORDERED_BY_POSITION and name == other:
            return len(wanted) == len(given) and all(map(same_answer, wanted, given))
        case Apply(name), Apply(other) if name in _ORDERED_BY_POSITION or other in _ORDERED_BY_POSITION:
            return False
        case (Apply(name), _) | (_, Apply(name)) if name in _ORDERED_BY_POSITION:
            return False
        case Apply("union" | "intersection" as name, wanted), Apply(other, given) if name == other:
            return _matched(wanted, given, same_answer)
        case (Apply("ratio"), _) | (_, Apply("ratio")):
            return _same_ratio(_parts(expected), _parts(found))
    return same_scalar(expected, found)


def _as_point(node: Node, other: Node) -> Node:
    """A matrix of one row or one column, converted to a point if it is compared with a point."""
    if not (isinstance(node, Apply) and node.name == MATRIX and _is(other, "()")):
        return node
    rows = [row.arguments for row in node.arguments if isinstance(row, Apply)]
    if len(rows) == 1:
        return Apply("()", rows[0])
    return Apply("()", tuple(row[0] for row in rows)) if all(len(row) == 1 for row in rows) else node


def _parts(node: Node) -> Sequence[Node]:
    """The parts of a ratio; a fraction or a number x is the ratio x : 1."""
    if isinstance(node, Apply) and node.name == RATIO:
        return node.arguments
    return (node, Number(Fraction(1)))


def _same_ratio(expected: Sequence[Node], found: Sequence[Node]) -> bool:
    if len(expected) != len(found) or Symbol("...") in (*expected, *found):
        return tuple(expected) == tuple(found)
    shares = [[Apply("/", (part, parts[-1])) for part in parts] for parts in (expected, found)]
    return all(map(same_value, *shares))


# equations


def _assigned(node: Node) -> tuple[Node, Node]:
    r"""Name and value of `x = 5`, `5 = x`, `f(x) = x^2`, `16 + 2 = 18`; the name is empty if absent. For a value with
    an approximation (`\sqrt 2 \approx 1.41`) the exact value counts. The value is a chain if the equation
    gives no name a value.
    """
    if not (isinstance(node, Apply) and node.name == CHAIN and isinstance(node.arguments[0], Symbol)):
        return _NOTHING, node
    signs, sides = node.arguments[0].name.split(), list(node.arguments[1:])
    if not set(signs) <= {"=", _APPROXIMATELY, "in"}:
        return _NOTHING, node
    if signs[-1] == _APPROXIMATELY and (len(sides) > 2 or not _is_name(sides[0])):
        sides.pop()
    if len(sides) == 1:
        return _NOTHING, sides[0]
    if _is_name(sides[0]):
        return sides[0], sides[-1]
    if _is_name(sides[-1]) and len(sides) == 2:
        return sides[-1], sides[0]
    computed = "..." in variables(sides[0]) or (len(sides) > 2 and _has_letters_only(sides[0]))  # a + b = 3 + 4 = 7
    if computed or not any(variables(side) for side in sides):
        return _NOTHING, sides[-1]
    return _NOTHING, node


def _has_letters_only(node: Node) -> bool:
    """Whether it is a name, or a sum, product or quotient of names."""
    match node:
        case Apply("+" | "-" | "*" | "frac", arguments):
            return all(map(_has_letters_only, arguments))
    return isinstance(node, Symbol)


def _is_name(node: Node) -> bool:
    """Whether it is a variable, `f(x)`, `(x, y)`, words, or nothing."""
    match node:
        case Symbol():
            return bool(variables(node)) and not node.name[:1].isdigit()
        case Apply("()", names):
            return all(map(_is_name, names))
        case Apply("frac", (Apply("*", (Symbol("d"), Symbol())), Apply("*", (Symbol("d"), Symbol())))):
            return True  # dy/dx
        case Apply(name, (argument,)) if name.startswith("function "):
            return _is_name(argument) or _is(argument, "()")
    return False


def _same_names(first: Node, second: Node) -> bool:
    """Whether two names may mean the same; different letters do not, but `y` and `f(x)` both name a function's
    value.
    """
    both_letters = all(isinstance(node, Symbol) and len(node.name) == 1 for node in (first, second))
    both_points = _is(first, "()") and _is(second, "()")
    return first == second or not (both_letters or both_points)


def _same_equation(expected: Node, found: Node) -> bool:
    """Whether two equations are equal, or an equation gives a name the other's value."""
    (name, wanted), (other, given) = _assigned(expected), _assigned(found)
    if not _is(wanted, CHAIN) and not _is(given, CHAIN) and _same_names(name, other) and same_answer(wanted, given):
        return True
    return _same_relation(expected, found)


def _same_relation(expected: Node, found: Node) -> bool:
    """Whether both are equations or inequalities, and one is a multiple of the other."""
    match expected, found:
        case (
            Apply("chain", (Symbol(sign), left, right)),
            Apply("chain", (Symbol(other), other_left, other_right)),
        ):
            pass
        case _:
            return False
    if sign == other == "=":
        return proportional(Apply("-", (left, right)), Apply("-", (other_left, other_right)))
    if sign not in _STRICT or other not in _STRICT or _STRICT[sign] != _STRICT[other]:
        return False
    wanted = Apply("-", (left, right) if sign[0] == ">" else (right, left))
    given = Apply("-", (other_left, other_right) if other[0] == ">" else (other_right, other_left))
    return proportional(wanted, given, positive=True)


# lists and sets


def _same_items(expected: Node, found: Node) -> bool:
    """Whether two lists or sets have equal items, or a list of names with values is a point."""
    (name, wanted), (other, given) = _named(expected), _named(found)
    named, values = _assignments(wanted), _assignments(given)
    if named and values:
        return len(named) == len(values) and all(
            any(key == each and same_answer(value, item) for each, item in values) for key, value in named
        )
    if named or values:
        point, rest = (named, given) if named else (values, wanted)
        items = rest.arguments if isinstance(rest, Apply) and (rest.name == "()" or is_list(rest)) else ()
        ordered = [value for _, value in (point or ())]
        pairs = zip(ordered, items, strict=False) if named else zip(items, ordered, strict=False)
        return len(ordered) == len(items) and all(same_answer(*pair) for pair in pairs)
    if not _same_names(name, other) or _different_things(wanted) != _different_things(given):
        return False
    first, second = _items(wanted), _items(given)
    if Symbol("...") in (*first, *second):
        return len(first) == len(second) and all(map(same_answer, first, second))
    return len(first) == len(second) and _matched(first, second, same_answer)


def _named(node: Node) -> tuple[Node, Node]:
    """A list without the name shared by all its items, or given only with the first: `x = 1, x = 2` and `n = 2, 3,
    4`.
    """
    if not is_list(node):
        return _assigned(node)
    pairs = [_assigned(item) for item in node.arguments]
    names = [name for name, _ in pairs if name != _NOTHING]
    if not names or not (len(set(names)) == 1 and (len(names) == len(pairs) or pairs[0][0] != _NOTHING)):
        return _NOTHING, node
    if any(_is(value, CHAIN) for _, value in pairs):
        return _NOTHING, node
    return names[0], Apply(node.name, tuple(value for _, value in pairs))


def _assignments(node: Node) -> list[tuple[Node, Node]] | None:
    """Names and values of `x = 2, y = 3`; None if an item is something else."""
    if not is_list(node) or len(node.arguments) < 2:
        return None
    pairs = [_assigned(item) for item in node.arguments]
    names = {name for name, _ in pairs}
    if _NOTHING in names or len(names) < len(pairs) or any(_is(value, CHAIN) for _, value in pairs):
        return None
    return pairs


def _items(node: Node) -> Sequence[Node]:
    """The items of a list, a set, or a union of sets with items; anything else is one item."""
    match node:
        case Apply(name, arguments) if name in (SET,) or is_list(node):
            return [item for argument in arguments for item in _spread(argument)]
        case Apply("union", (first, second)) if _is(first, SET) or _is(second, SET) or _is(first, UNION):
            return [*_items(first), *_items(second)]
    return [node]


def _spread(item: Node) -> Sequence[Node]:
    r"""Both values of `\pm 3` in a list."""
    apart = _signs_apart(item)
    return apart.arguments if is_list(apart) and not is_list(item) else [item]


def _different_things(node: Node) -> bool:
    """Whether the items of a list have different units or count different things: `6 apples and 8 pears`."""
    if not is_list(node):
        return False
    return len({item.words for item in node.arguments if isinstance(item, Measured)}) > 1


def _matched(expected: Sequence[Node], found: Sequence[Node], same: Callable[[Node, Node], bool]) -> bool:
    """Whether the items can be paired so that each pair is equal."""
    left = list(found)
    for item in expected:
        match = next((index for index, other in enumerate(left) if same(item, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


# plus and minus


def _signs_apart(node: Node) -> Node:
    r"""Expand a formula with `\pm` into the list of its two values."""
    if is_list(node) or _is(node, SET) or not _has_both_signs(node):
        return node
    name, value = _assigned(node)
    if _is(value, CHAIN):
        return node
    both = tuple(_with_sign(value, plus) for plus in (True, False))
    if name != _NOTHING:
        both = tuple(Apply(CHAIN, (Symbol("="), name, each)) for each in both)
    return Apply(ALL if name == _NOTHING else LIST, both)


def _has_both_signs(node: Node) -> bool:
    left = [node]
    while left:
        match left.pop():
            case Apply("pm" | "mp"):
                return True
            case Apply(arguments=arguments):
                left.extend(arguments)
            case Measured(value=value):
                left.append(value)
            case _:
                pass
    return False


def _with_sign(node: Node, plus: bool) -> Node:
    r"""A formula with `+` for `\pm` and `-` for `\mp`, or the other way round."""
    match node:
        case Apply("pm" | "mp" as name, arguments):
            sign = "+" if (name == "pm") is plus else "-"
            inner = tuple(_with_sign(argument, plus) for argument in arguments)
            return inner[0] if sign == "+" and len(inner) == 1 else Apply(sign, inner)
        case Apply(name, arguments):
            return Apply(name, tuple(_with_sign(argument, plus) for argument in arguments))
        case Measured(value, unit, words):
            return Measured(_with_sign(value, plus), unit, words)
    return node
