"""Converts texts and values from models, users' code and clients to forms that UTF-8, JSON and pickle can hold.

Text is cleaned where it becomes a message, a tool call or a row of data, so that it can be encoded from there on.
Values are made plain before they leave the process that created them.
"""

import dataclasses
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from typing import SupportsFloat, TypeVar, cast

LEVELS = 64
"""Deepest nesting of a plain value. JSON parsers, templates and pickle allow more levels, each up to a
different depth."""
MOST_ITEMS = 1_000_000
"""Most items of a list or other sequence within a plain value: a range, for example, can be huge."""
LONGEST_TRACEBACK = 20_000
"""Longest traceback to keep, in characters: an error may quote all arguments of a function."""
DIGITS_BITS = 14_000
"""Bits of the largest plain integer: Python does not print integers of more than 4,300 digits (3.32 bits each)."""
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

Value = TypeVar("Value")


def once(pairs: Sequence[tuple[str, Value]]) -> dict[str, Value]:
    """Build a JSON object from its pairs, for `json.loads(object_pairs_hook=once)`. Raises ValueError for a duplicate
    key.
    """
    found: dict[str, Value] = {}
    for name, value in pairs:
        key = clean(name)
        if key in found:
            raise ValueError(f"{key!r} occurs twice in an object; keep one")
        found[key] = value
    return found


def clean(text: str) -> str:
    """Make the text encodable: join surrogate pairs, and replace lone surrogates by U+FFFD."""
    text = text if type(text) is str else str.__str__(text)  # pickling a subclass of str may need its module
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_texts(value: Value) -> Value:
    """The value with all texts in its lists and dicts made clean, keys included; everything else is unchanged."""
    made: object = value
    if isinstance(value, str):
        made = clean(value)
    elif isinstance(value, dict):
        made = {clean_texts(key): clean_texts(item) for key, item in value.items()}
    elif isinstance(value, list):
        made = [clean_texts(item) for item in value]
    return cast(Value, made)


def plain(value: object, levels: int = LEVELS) -> object:
    """Convert a value to what JSON can hold: None, bool, int, float, clean text, lists, and dicts with text as keys.

    Other keys are written as in JSON, or else by `str`. Sets become sorted lists, bytes become text, data classes and
    pydantic models become dicts, arrays become lists, and other objects become their `str`. Non-finite numbers are
    kept.

    Raises:
        ValueError: the value has more than `levels` levels, a sequence of more than a million items, or an integer of
            more than 4,300 digits.
    """
    if value is None or isinstance(value, bool | str):
        return clean(value) if isinstance(value, str) else value
    if isinstance(value, int):
        if value.bit_length() > DIGITS_BITS:
            raise ValueError("the value contains an integer of more than 4,300 digits, which cannot be written")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    return _container(value, levels)


def _container(value: object, levels: int) -> object:
    if levels == 0:
        raise ValueError(f"the value is nested more than {LEVELS} levels deep")
    if isinstance(value, Mapping):
        return {_key(key): plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item, levels - 1) for item in value), key=repr)  # their order differs between processes
    if isinstance(value, Sequence):
        if len(value) > MOST_ITEMS:
            raise ValueError(
                f"the value contains a {type(value).__name__} of {len(value):,} items; {MOST_ITEMS:,} are allowed"
            )
        return [plain(item, levels - 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name), levels - 1) for field in fields}
    for name in ("model_dump", "tolist"):  # pydantic's models; arrays and numbers of numpy and torch
        convert: Callable[[], object] | None = getattr(value, name, None)
        if callable(convert) and not isinstance(value, type):
            return plain(convert(), levels - 1)
    return clean(str(value))


def _key(key: object) -> str:
    if isinstance(key, str):
        return clean(key)
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else clean(str(key))


def copied(value: Value) -> Value:
    """A copy of nested lists and dicts; everything else in the value is shared."""
    made: object = value
    if isinstance(value, dict):
        made = {key: copied(item) for key, item in value.items()}
    elif isinstance(value, list):
        made = [copied(item) for item in value]
    return cast(Value, made)


def number_of(value: object) -> float | None:
    """The value as a float; None if it is not a number (text never is), or not finite in float32, as rewards
    must be.
    """
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST_FLOAT32 else None


def traceback_of(error: BaseException) -> str:
    """The traceback of an error as clean text; a very long one is cut in the middle."""
    return clean(without_middle("".join(traceback.format_exception(error)), LONGEST_TRACEBACK))


def without_middle(text: str, most: int) -> str:
    """The text, or only its beginning and end if it has more than `most` characters (an even number)."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[... {len(text) - most} characters ...]\n{text[-half:]}"


def message_of(error: BaseException) -> str:
    """The message of an exception, preceded by the exception's type if the message is empty or only a key
    (KeyError).
    """
    try:
        text = clean(str(error)).strip()
    except Exception:  # a user's exception may raise when converted to text
        text = ""
    name = type(error).__name__
    if not text:
        return name
    return text if isinstance(error, Exception) and not isinstance(error, LookupError) else f"{name}: {text}"
