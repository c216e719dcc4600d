"""Copies of environments for reward functions, which run in the trainer's process.

A copy has the environment's class and those of its attributes that can be pickled; a connection to a server, for
example, is left out.
"""

import contextlib
import pickle
import types
from collections.abc import Mapping


class Copied:
    """Wraps an environment so that it unpickles as a copy in another process."""

    def __init__(self, environment: object) -> None:
        self._environment = environment

    def __reduce__(self) -> tuple[object, ...]:
        kind = type(self._environment)
        values = dict(getattr(self._environment, "__dict__", {}))
        pickled_kind = _pickled(kind)
        if (
            pickled_kind is None
        ):  # a class defined in a function cannot be pickled: keep the values of its properties instead
            names = [name for name in dir(kind) if isinstance(getattr(kind, name), property)]
            for name in names:
                with contextlib.suppress(BaseException):
                    values[name] = getattr(self._environment, name)
        sent = {name: text for name, value in values.items() if (text := _pickled(value)) is not None}
        return _arrived, (pickled_kind, sent)


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except BaseException:  # users' objects may raise anything
        return None


def _arrived(kind: bytes | None, attributes: Mapping[str, bytes]) -> object:
    """Create the copy of an environment."""
    made: object = types.SimpleNamespace()
    if kind is not None:
        with contextlib.suppress(BaseException):
            made = object.__new__(pickle.loads(kind))
    for name, text in attributes.items():
        with contextlib.suppress(BaseException):
            made.__dict__[name] = pickle.loads(text)
    return made
