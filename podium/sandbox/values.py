"""Plain values as JSON, with their types: what goes into the sandbox and comes out of it.

Numbers, strings, booleans, None and lists are written as they are; any other value as an object with one key, the name
of its type: `{"tuple": [1, 2]}`. A value of a subclass (a named tuple, an IntEnum) is written as one of its base class.
"""

import datetime
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

LONG = 1 << 1024
"""Integers from here on are written in base 16: reading and writing decimal digits takes quadratic time, and Python
refuses it for more than 4,300 digits."""
TYPES = {each.__name__: each for each in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}
"""Types that are values themselves, as in `of_type(values, int)`."""


class Form(NamedTuple):
    """How values of a type are written."""

    kind: type
    apart: Callable[[Any], object]
    """Splits a value into strings, numbers, values and lists of them."""
    together: Callable[[Any], object]
    """Rebuilds the value from its parts."""


def _pairs(value: dict[Any, Any]) -> list[object]:
    return [[key, each] for key, each in dict.items(value)]


FORMS = {
    form.kind.__name__: form
    for form in (
        Form(tuple, list, tuple),
        Form(set, list, set),
        Form(frozenset, list, frozenset),
        Form(deque, list, deque),
        Form(dict, _pairs, dict),
        Form(OrderedDict, _pairs, OrderedDict),
        Form(Counter, _pairs, lambda pairs: Counter(dict(pairs))),
        Form(defaultdict, _pairs, lambda pairs: defaultdict(None, pairs)),
        Form(type(iter([])), list, iter),
        Form(type({}.keys()), list, lambda keys: dict.fromkeys(keys).keys()),
        Form(type({}.values()), list, lambda values: dict(enumerate(values)).values()),
        Form(type({}.items()), lambda items: [[key, each] for key, each in items], lambda items: dict(items).items()),
        Form(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
        Form(bytes, bytes.hex, bytes.fromhex),
        Form(bytearray, bytearray.hex, bytearray.fromhex),
        Form(range, lambda value: [value.start, value.stop, value.step], lambda ends: range(*ends)),
        Form(Fraction, lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
        Form(Decimal, str, Decimal),
        Form(datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
        Form(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
        Form(datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
        Form(
            datetime.timedelta,
            lambda value: [value.days, value.seconds, value.microseconds],
            lambda parts: datetime.timedelta(*parts),
        ),
        Form(type, lambda value: value.__name__, TYPES.__getitem__),
    )
}
_NAMES = {form.kind: name for name, form in FORMS.items()}
_EXACT: dict[type, Callable[[Any], object]] = {int: int.__pos__, float: float.__pos__, str: str.__str__, list: list}
"""Converts a value of a subclass to the base class, without calling the subclass's methods."""


def written(value: Any, iterators: list[Iterator[object]] | None = None) -> object:
    """A value as JSON.

    Args:
        value: to write.
        iterators: takes the iterators in the value, which are written as their place in this list; None: an iterator
            cannot be written.

    Raises:
        ValueError: a value of this type cannot be written.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -LONG < value < LONG else {"int": hex(value)}
    if kind is list:
        return [written(each, iterators) for each in value]
    if isinstance(value, type) and TYPES.get(value.__name__) is not value:
        raise ValueError(f"the class {value.__name__} cannot be sent")
    for base in kind.__mro__:
        if base in _EXACT:
            return written(_EXACT[base](value), iterators)
        if base in _NAMES:
            name = _NAMES[base]
            return {name: written(FORMS[name].apart(value), iterators)}
    if iterators is not None and isinstance(value, Iterator):
        iterators.append(value)
        return {"iterator": len(iterators) - 1}
    raise ValueError(f"a value of type {kind.__name__} cannot be sent")


def read(value: object, resume: Callable[[int], Iterator[object]] | None = None) -> object:
    """Decode a value that `written` encoded.

    Args:
        value: as written. It may be forged, so its sets and dicts may take time quadratic in their size.
        resume: the iterator at a place in the list; None if iterators are not expected.

    Raises:
        LookupError, ValueError, TypeError or ArithmeticError: `written` cannot have written this.
    """
    if isinstance(value, list):
        return [read(each, resume) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    if name == "int":
        return int(parts, 16)
    if name == "iterator" and resume is not None:
        return resume(parts)
    return FORMS[name].together(read(parts, resume))
