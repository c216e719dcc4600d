"""Imports objects that settings name as `package.module:name`, from any importable module.

Objects of a Python session that no other process can import (a notebook's function, say) are named `session:name`; a
run with such a name can only be continued in a session that passes the object again.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from podium.config.errors import suggestion

SESSION = "session"
_given: dict[str, object] = {}


def is_path(name: str) -> bool:
    """Whether a name is an import path, rather than the name of a built-in."""
    return ":" in name


def imported(path: str, *, what: str, known: Iterable[str] = ()) -> Any:
    """Import the object `package.module:name`; also searches the current folder.

    Args:
        path: the import path.
        what: what the object should be, for messages, such as `a task`.
        known: built-in names that would be valid too, for messages.

    Raises:
        ValueError: it is not an import path, the module or name does not exist, or the module calls `sys.exit`.
    """
    module_name, colon, attribute = path.partition(":")
    if module_name == SESSION:
        if attribute not in _given:
            raise ValueError(
                f"{path!r} was passed by the Python session that started the run; continue the run in that session, "
                "or put the object in a module and name it `module:name`"
            )
        return _given[attribute]
    if not colon:
        own = "your own: write `package.module:name`"
        raise ValueError(f"{path!r} is not {what}; {suggestion(path, known)} ({own})")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that the `podium` command, too, finds a module beside the config
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{path!r}: no module {error.name!r} found; install its package, or start podium in the folder that "
            "contains it"
        ) from error
    except SystemExit as error:
        raise ValueError(
            f"{path!r}: module {module_name} ends the program as it is imported (sys.exit({error.code!r})); put what "
            "it runs as a script under `if __name__ == '__main__':`"
        ) from error
    if not hasattr(module, attribute):
        defined = [key for key, value in vars(module).items() if callable(value)]
        raise ValueError(f"{path!r}: module {module_name} has no {attribute!r}; {suggestion(attribute, defined)}")
    return getattr(module, attribute)


def name_of(thing: object) -> str:
    """The name by which settings refer to an object: its import path, or `session:NAME`."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module and name and module != "__main__" and name.isidentifier():
        with contextlib.suppress(ValueError):
            if imported(f"{module}:{name}", what="an object") is thing:
                return f"{module}:{name}"
    own = (name or type(thing).__name__).rpartition(".")[2].strip("<>")
    label, number = own, 2
    while _given.get(label, thing) is not thing and not _replaces(thing, _given[label]):
        label, number = f"{own}_{number}", number + 1
    _given[label] = thing
    return f"{SESSION}:{label}"


def _replaces(new: object, old: object) -> bool:
    """Whether `new` is a newer version of `old`, because a notebook cell was run again."""
    code = [getattr(each, "__code__", None) for each in (new, old)]
    if code[0] is not None and code[0] == code[1]:
        return True
    place = [(getattr(each, "__module__", None), getattr(each, "__qualname__", "<lambda>")) for each in (new, old)]
    return place[0] == place[1] and "<" not in place[0][1]
