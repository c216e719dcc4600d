"""Makes what models, users' code and clients have written fit for UTF-8, JSON and other processes.

Text is made clean where it becomes a message, a call or a row of data: from there on every text can be encoded. Values
are made plain before they leave the process of the code that made them.
"""

import dataclasses
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from typing import SupportsFloat, TypeVar

LEVELS = 64
"""Deepest nesting of a plain value. JSON parsers, templates and pickles allow more, each up to a different depth."""
MOST_ITEMS = 1_000_000
"""Items of a list, or another sequence, as part of a plain value: a range, say, may have any number."""
LONGEST_TRACEBACK = 20_000
"""Characters of a traceback that are kept: an error may quote all that a function was given."""
DIGITS_BITS = 14_000
"""Bits of the largest plain integer: Python refuses to write more than 4,300 digits, of 3.32 bits each."""
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

Value = TypeVar("Value")


def once(pairs: Sequence[tuple[str, Value]]) -> dict[str, Value]:
    """The object of a JSON text, for `json.loads(object_pairs_hook=once)`. Raises ValueError if it has a key twice."""
    found: dict[str, Value] = {}
    for name, value in pairs:
        key = clean(name)
        if key in found:
            raise ValueError(f"{key!r} is there twice in an object; keep one")
        found[key] = value
    return found


def clean(text: str) -> str:
    """The text as it can be encoded: halves of surrogate pairs are joined, and lone ones become U+FFFD."""
    text = text if type(text) is str else str.__str__(text)  # a subclass may need a module to be unpickled
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_texts(value: Value) -> Value:
    """The value with clean texts wherever it consists of lists and dicts, keys included; all else stays as it is."""
    return _with_clean_texts(value)  # pyright: ignore[reportReturnType]  # of the same type


def _with_clean_texts(value: object) -> object:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_with_clean_texts(key): _with_clean_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_clean_texts(item) for item in value]
    return value


def plain(value: object, levels: int = LEVELS) -> object:
    """The value as JSON can hold it: None, bool, int, float, clean text, lists, and dicts whose keys are text.

    Keys that are no text are written as in JSON, or else as `str` does. Sets become sorted lists, bytes text, data
    classes and pydantic's models dicts, arrays lists, and other objects their `str`. Numbers that are not finite stay.

    Raises:
        ValueError: it has more than `levels` levels, a sequence of more than a million items, or an integer of more
            than 4,300 digits.
    """
    if value is None or isinstance(value, bool | str):
        return clean(value) if isinstance(value, str) else value
    if isinstance(value, int):
        if value.bit_length() > DIGITS_BITS:
            raise ValueError("it contains an integer of more than 4,300 digits, which cannot be written")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    return _container(value, levels)


def _container(value: object, levels: int) -> object:
    if levels == 0:
        raise ValueError(f"it is nested more than {LEVELS} levels deep")
    if isinstance(value, Mapping):
        return {_key(key): plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item, levels - 1) for item in value), key=repr)  # their order differs between processes
    if isinstance(value, Sequence):
        if len(value) > MOST_ITEMS:
            raise ValueError(
                f"it contains a {type(value).__name__} of {len(value):,} items; {MOST_ITEMS:,} are allowed"
            )
        return [plain(item, levels - 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name), levels - 1) for field in fields}
    for name in ("model_dump", "tolist"):  # of pydantic's models, and of numpy's and torch's arrays and numbers
        convert: Callable[[], object] | None = getattr(value, name, None)
        if callable(convert) and not isinstance(value, type):
            return plain(convert(), levels - 1)
    return clean(str(value))


def _key(key: object) -> str:
    if isinstance(key, str):
        return clean(key)
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else clean(str(key))


def copied(value: Value) -> Value:
    """The value with copies of the lists and dicts that it consists of; all else is shared."""
    return _with_copies(value)  # pyright: ignore[reportReturnType]  # of the same type


def _with_copies(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_copies(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_copies(item) for item in value]
    return value


def number_of(value: object) -> float | None:
    """The value as a float; None if it is no number, or not finite in float32, as rewards must be. Text is none."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST_FLOAT32 else None


def traceback_of(error: BaseException) -> str:
    """The traceback of an error as clean text; of a very long one the beginning and the end."""
    return clean(without_middle("".join(traceback.format_exception(error)), LONGEST_TRACEBACK))


def without_middle(text: str, most: int) -> str:
    """The text, or the beginning and the end of one that has more than `most` characters, an even number."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[... {len(text) - most} characters ...]\n{text[-half:]}"


def message_of(error: BaseException) -> str:
    """The message of an exception, preceded by its type if it is empty, and for KeyError, which has only the key."""
    try:
        text = clean(str(error)).strip()
    except Exception:  # an exception of others may fail to describe itself
        text = ""
    name = type(error).__name__
    if not text:
        return name
    return text if isinstance(error, Exception) and not isinstance(error, LookupError) else f"{name}: {text}"
