"""Hints about keys that are not Podium's. Packages that know other systems offer them; `podium.config` imports none."""

from collections.abc import Callable

Hint = Callable[[str, str], str | None]
"""(unknown key, config file) -> what to write instead; None if the key is not one of that system's."""

_hints: list[Hint] = []


def offer(hint: Hint) -> None:
    """Ask `hint` in every later error about an unknown key; offering it again changes nothing."""
    if hint not in _hints:
        _hints.append(hint)


def hint_for(key: str, file: str) -> str | None:
    """The first hint about an unknown key; None if there is none."""
    return next(filter(None, (hint(key, file) for hint in _hints)), None)
