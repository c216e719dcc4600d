"""The tool `calculator`: arithmetic by walking Python's syntax tree. It knows numbers and operators, and no names."""

import ast
import math
import operator
from collections.abc import Callable

MAX_CHARACTERS = 200
MAX_DIGITS = 60
"""Maximum digits of a result or an intermediate whole number."""
LARGEST = 10**MAX_DIGITS

SIGNS = str.maketrans({"^": "**", "\u00d7": "*", "\u00f7": "/"})

Number = int | float
BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4).
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; the maximum is {MAX_CHARACTERS}")
    try:
        tree = ast.parse(expression.strip().translate(SIGNS), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    if isinstance(value, float):
        return f"{value:.10g}"
    return str(value)


def _value(node: ast.expr) -> Number:
    """The value of an expression. Raises ValueError for anything except numbers and operators."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _bounded(BINARY[type(op)](_value(left), _value(right)))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are supported")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int):
        if exponent < 0:
            return float(base) ** exponent
        if abs(base) > 1 and exponent * abs(base).bit_length() > 4 * MAX_DIGITS:
            raise ValueError("the result is too large")
        return base**exponent
    result = float(base) ** float(exponent)
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return result


def _bounded(value: Number) -> Number:
    if abs(value) >= LARGEST if isinstance(value, int) else not math.isfinite(value):
        raise ValueError("the result is too large")
    return value
