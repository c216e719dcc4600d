r"""Values of formulas, and whether two formulas are equal: exactly where they are rational, else to 1,024 bits.

Formulas with variables are equal if they agree at points drawn once for every variable name (polynomials of degree d
that differ agree at a random point with a probability below d / 1,000; there are eight points). Each operation is
bounded, and all operations on one formula together: a formula that would exceed a bound has no value here, and neither
has a sum with a part too small for 1,024 bits, such as 10^{500} + \pi. Formulas without a value are equal only if they
are the same.
"""

import functools
import hashlib
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

import mpmath

from podium.tasks.math_answers.formula import Apply, Measured, Node, Number, Symbol

MAX_BITS = 30_000
"""Maximum size of an exact value: 2006! has 19,170 bits."""
PRECISION = 1_024
"""Bits of a value that is not rational."""
TRUSTED = PRECISION - 128
"""Bits of such a value that rounding errors cannot have affected."""
MAX_MAGNITUDE = 4_000
"""Maximum binary logarithm of a function's argument."""
MAX_WORK = 3_000_000
"""Maximum work on the value of one formula, in bits of the results of its operations; about 0.2 s."""
POINTS = 8

_REALS = mpmath.MPContext()
_REALS.prec = PRECISION
_CONSTANTS = frozenset(("e", "i", "pi", "log base"))
_INTEGER_NAMES = frozenset("kmnKMN")
"""Variables that usually are integers; they get integer values."""

_Complex = _REALS.mpc

if TYPE_CHECKING:
    Inexact = complex  # the part of mpmath's untyped interface that is used
else:
    Inexact = _REALS.mpf | _REALS.mpc
Value = Fraction | Inexact
"""An exact, real or complex value."""


class NoValueError(ValueError):
    """The formula has no value: it is too large, divides by zero, or is not a number."""


def same_value(reference: Node, answer: Node) -> bool:
    r"""Whether two formulas are equal; `\log` has the base e in both or the base 10 in both."""
    return reference == answer or any(_same(reference, answer, ten) for ten in (False, True))


def proportional(reference: Node, answer: Node, *, positive: bool = False) -> bool:
    """Whether one formula is the other times a constant other than 0 (a positive one, if asked for)."""
    ratios = list[Value]()
    try:
        for number in range(POINTS):
            above, below = _value(reference, number, False), _value(answer, number, False)
            if above == 0 and below == 0:
                continue
            if above == 0 or below == 0:
                return False
            ratios.append(_divide(above, below))
    except NoValueError:
        return False
    same = bool(ratios) and all(_equal(ratios[0], ratio) for ratio in ratios[1:])
    return same and (not positive or _sign(ratios[0]) > 0)


def constant(node: Node) -> Value | None:
    """The value of a formula without variables; None if it has variables, or has no value."""
    if variables(node):
        return None
    try:
        return _value(node, 0, False)
    except NoValueError:
        return None


def rational(value: Value) -> Fraction | None:
    """A real value as a fraction, exact or rounded to 400 bits, for comparison with a decimal; None if the formula has
    no real value.
    """
    if isinstance(value, Fraction):
        return value
    if isinstance(value, _Complex) or not value or abs(_magnitude(value)) > 200:
        return None
    return Fraction(int(_REALS.floor(value * (1 << 400))), 1 << 400)


@functools.lru_cache(maxsize=512)
def variables(node: Node) -> frozenset[str]:
    """The names in a formula that are not constants."""
    names, left = set[str](), [node]
    while left:
        match left.pop():
            case Symbol(name):
                names.add(name)
            case Apply(name, arguments) as call if name.startswith("function "):
                names.add(repr(call))
            case Apply(arguments=arguments):
                left.extend(arguments)
            case Measured(value=value):
                left.append(value)
            case Number():
                pass
    return frozenset(names - _CONSTANTS)


def _same(reference: Node, answer: Node, log_is_decimal: bool) -> bool:
    """Whether two formulas are equal at all points where both are real, or at all points if too few of them are
    real.
    """
    with_variables = bool(variables(reference) | variables(answer))
    on_reals, others = list[bool](), list[bool]()
    try:
        for number in range(POINTS if with_variables else 1):
            first, second = _value(reference, number, log_is_decimal), _value(answer, number, log_is_decimal)
            real = not isinstance(first, _Complex) and not isinstance(second, _Complex)
            (on_reals if real else others).append(_equal(first, second))
            if real and not on_reals[-1]:
                return False
    except NoValueError:
        return False
    return all(others) if len(on_reals) < 2 else True


@functools.lru_cache(maxsize=512)
def _point(name: str, number: int) -> Fraction:
    """The value of a variable at a point: the same in every formula."""
    draw = random.Random(int.from_bytes(hashlib.sha256(f"{number} {name}".encode()).digest()[:8]))
    if name.partition("_")[0] in _INTEGER_NAMES:
        return Fraction(draw.randrange(3, 60))
    sign = 1 if number % 2 == 0 else draw.choice((1, -1))
    return sign * Fraction(draw.randrange(3, 4_000), draw.choice((101, 211, 307, 401, 503)))


@functools.lru_cache(maxsize=512)
def _cached_value(node: Node, number: int, log_is_decimal: bool) -> Value | None:
    """The value of a formula at a point; None if it has none."""
    try:
        return _simplest(_Evaluation(number, Fraction(10) if log_is_decimal else +_REALS.e).value(node))
    except (NoValueError, ZeroDivisionError, OverflowError, ValueError):
        return None


def _value(node: Node, number: int, log_is_decimal: bool) -> Value:
    """The value of a formula at a point. Raises NoValueError."""
    value = _cached_value(node, number if variables(node) else 0, log_is_decimal)
    if value is None:
        raise NoValueError
    return value


class _Evaluation:
    """The evaluation of one formula at one point, with its budget of work."""

    def __init__(self, point: int, log_base: Value) -> None:
        self._point = point
        self._log_base = log_base
        self._work = 0

    def value(self, formula: Node) -> Value:
        """The formula's value. Raises NoValueError, or an ArithmeticError. Not recursive, because the tree of
        `1+1+...+1` is as deep as the text is long.
        """
        values, left = list[Value](), [(formula, False)]
        while left:
            node, has_arguments = left.pop()
            match node:
                case Number(value=value):
                    values.append(self._spend(value))
                case Symbol(name):
                    values.append(self._symbol(name))
                case Measured(value=inner):
                    left.append((inner, False))
                case Apply(name) if name.startswith("function "):
                    values.append(self._symbol(repr(node)))
                case Apply(name, arguments) if has_arguments:
                    taken = values[len(values) - len(arguments) :]
                    del values[len(values) - len(arguments) :]
                    values.append(self._spend(_apply(name, taken)))
                case Apply(arguments=arguments):
                    left += [(node, True), *((argument, False) for argument in reversed(arguments))]
        return values[0]

    def _symbol(self, name: str) -> Value:
        match name:
            case "e":
                return +_REALS.e
            case "pi":
                return +_REALS.pi
            case "i":
                return _REALS.mpc(0, 1)
            case "log base":
                return self._log_base
            case _:
                return _point(name, self._point)

    def _spend(self, value: Value) -> Value:
        bits = _bits(value) if isinstance(value, Fraction) else 8 * PRECISION
        self._work += 200 + bits
        if bits > MAX_BITS or self._work > MAX_WORK:
            raise NoValueError
        return value


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _inexact(value: Value) -> Inexact:
    """Convert a value to 1,024 bits. Raises NoValueError if an integer does not fit into them."""
    if not isinstance(value, Fraction):
        return value
    for part in (value.numerator, value.denominator):
        if part and (abs(part) // (part & -part)).bit_length() > PRECISION:
            raise NoValueError
    return _REALS.mpf(value.numerator) / value.denominator


def _magnitude(value: Value) -> float:
    """The approximate binary logarithm of a nonzero value."""
    if isinstance(value, Fraction):
        return value.numerator.bit_length() - value.denominator.bit_length()
    return float(_REALS.mag(value))


def _sign(value: Value) -> int:
    """The sign of a real number: 1 or -1; 0 for other values."""
    if isinstance(value, _Complex):
        return 0
    return int(_REALS.sign(value.numerator if isinstance(value, Fraction) else value))


def _small(value: Value) -> Inexact:
    """The value, if it is small enough to be a function's argument. Raises NoValueError otherwise."""
    number = _inexact(value)
    if not _REALS.isfinite(number) or (number != 0 and abs(_magnitude(number)) > MAX_MAGNITUDE):
        raise NoValueError
    return number


def _add(first: Value, second: Value) -> Value:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first + second
    if first == 0 or second == 0:
        return second if first == 0 else first
    if abs(_magnitude(first) - _magnitude(second)) > TRUSTED - 64:
        raise NoValueError  # the smaller part would be lost
    total = _inexact(first) + _inexact(second)
    largest = max(_magnitude(first), _magnitude(second))
    if total == 0 or _magnitude(total) < largest - TRUSTED:
        return Fraction(0)
    return total


def _multiply(first: Value, second: Value) -> Value:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first * second
    return _inexact(first) * _inexact(second)


def _divide(first: Value, second: Value) -> Value:
    if second == 0:
        raise NoValueError
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first / second
    return _inexact(first) / _inexact(second)


def _power(base: Value, exponent: Value) -> Value:
    """A power; an odd root of a negative number is the real one."""
    base, exponent = _simplest(base), _simplest(exponent)
    if base == 0:
        if isinstance(exponent, Fraction) and exponent > 0:
            return Fraction(0)
        raise NoValueError
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        exact = _exact_power(base, exponent)
        if exact is not None:
            return exact
    if isinstance(exponent, Fraction) and _sign(base) < 0 and exponent.denominator % 2:
        size = _power(-base, exponent)
        return -size if exponent.numerator % 2 else size
    if abs(_magnitude(base)) > MAX_MAGNITUDE or _magnitude(exponent) > MAX_MAGNITUDE:
        raise NoValueError
    return _REALS.power(_inexact(base), _inexact(exponent))


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """A rational power that is rational and not too large; otherwise None."""
    root = exponent.denominator
    if root > 1:
        roots = [_exact_root(part, root) for part in (base.numerator, base.denominator)] if base > 0 else [None]
        if None in roots or len(roots) < 2:
            return None
        base = Fraction(roots[0] or 0, roots[1] or 1)
    if abs(base) == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    if _bits(base) * abs(exponent.numerator) > MAX_BITS:
        return None
    return base**exponent.numerator


def _exact_root(value: int, degree: int) -> int | None:
    """The whole root of a positive whole number; None if it has none."""
    if degree == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if degree > value.bit_length():
        return 1 if value == 1 else None
    low, high = 1, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low if low**degree == value else None


def _factorial(value: Value) -> Value:
    value = _simplest(value)
    if isinstance(value, Fraction) and value.denominator == 1 and value < 0:
        raise NoValueError
    if isinstance(value, Fraction) and value.denominator == 1 and value <= 3_000:
        return Fraction(math.factorial(int(value)))
    if _magnitude(value) > 20:
        raise NoValueError
    return _REALS.factorial(_small(value))


def _binomial(above: Value, below: Value) -> Value:
    above, below = _simplest(above), _simplest(below)
    if isinstance(above, Fraction) and isinstance(below, Fraction) and _is_small_binomial(above, below):
        result = Fraction(1)
        for number in range(int(below)):
            result = result * (above - number) / (number + 1)
        return result
    return _divide(_factorial(above), _multiply(_factorial(below), _factorial(_add(above, -below))))


def _is_small_binomial(above: Fraction, below: Fraction) -> bool:
    return below.denominator == 1 and 0 <= below <= 1_000 and abs(above) <= 10_000 and _bits(above) < 64


def _logarithm(value: Value, base: Value) -> Value:
    if value == 0 or base == 0:
        raise NoValueError
    above, below = _REALS.log(_small(value)), _REALS.log(_small(base))
    return _nearby_integer(_divide(above, below))


def _rounded(name: str, value: Value) -> Value:
    value = _simplest(value)
    if name == "abs":
        return abs(value)
    if not isinstance(value, Fraction):
        if isinstance(value, _Complex) or _magnitude(value) > TRUSTED:
            raise NoValueError
        return Fraction(int(_REALS.floor(value) if name == "floor" else _REALS.ceil(value)))
    return Fraction(math.floor(value) if name == "floor" else math.ceil(value))


def _nearby_integer(value: Value) -> Value:
    """The integer that a value equals up to rounding, such as the logarithm of 8 to the base 2."""
    if isinstance(value, (Fraction, _Complex)) or abs(_magnitude(value)) > 64:
        return value
    nearest = Fraction(int(_REALS.nint(value)))
    return nearest if nearest and _equal(value, nearest) else value


def _apply(name: str, values: list[Value]) -> Value:
    """The value of an operation. Raises NoValueError."""
    operation = _OPERATIONS.get((name, len(values)))
    if operation is None:
        raise NoValueError
    return operation(*values)


def _of_small(function: str, value: Value) -> Value:
    """Apply a function of mpmath to a value that is small enough not to cost too much."""
    return getattr(_REALS, function)(_small(value))


def _simplest(value: Value) -> Value:
    """A complex value, as a real one if its imaginary part is only rounding. Raises NoValueError if it is not
    finite.
    """
    if isinstance(value, Fraction):
        return value
    if not _REALS.isfinite(value):
        raise NoValueError
    if isinstance(value, _Complex):
        if value.imag == 0 or (value.real != 0 and _REALS.mag(value.imag) < _REALS.mag(value.real) - TRUSTED):
            return value.real
        if value.real != 0 and _REALS.mag(value.real) < _REALS.mag(value.imag) - TRUSTED:
            return _REALS.mpc(0, value.imag)
    return value


def _equal(first: Value, second: Value) -> bool:
    """Whether two values are equal: exactly if both are rational, else by their relative difference."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    if first == 0 or second == 0:
        return first == 0 and second == 0
    try:
        return _add(first, -second) == 0
    except NoValueError:
        return False


_OPERATIONS: dict[tuple[str, int], Callable[..., Value]] = {
    ("+", 2): _add,
    ("-", 2): lambda first, second: _add(first, -second),
    ("-", 1): lambda value: -value,
    ("*", 2): _multiply,
    ("/", 2): _divide,
    ("frac", 2): _divide,
    ("^", 2): _power,
    ("root", 2): lambda degree, value: _power(value, _divide(Fraction(1), degree)),
    ("!", 1): _factorial,
    ("binom", 2): _binomial,
    ("log", 2): lambda base, value: _logarithm(value, base),
    ("ln", 1): lambda value: _logarithm(value, +_REALS.e),
    ("exp", 1): lambda value: _power(+_REALS.e, value),
    ("degree", 1): lambda value: _multiply(value, _divide(+_REALS.pi, Fraction(180))),
    ("percent", 1): lambda value: _divide(value, Fraction(100)),
    **{(name, 1): functools.partial(_rounded, name) for name in ("abs", "floor", "ceil")},
    **{(name, 1): functools.partial(_of_small, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{(f"arc{name}", 1): functools.partial(_of_small, f"a{name}") for name in ("sin", "cos", "tan")},
    **{(name, 1): functools.partial(_of_small, name) for name in ("sinh", "cosh", "tanh")},
}
