"""Hints about unknown keys. Packages that know other systems' settings register them; `podium.config` imports none of
these packages.
"""

from collections.abc import Callable

Hint = Callable[[str, str], str | None]
"""(unknown key, config file) -> what to write instead; None if the key is not from the hint's system."""

_hints: list[Hint] = []


def offer(hint: Hint) -> None:
    """Register `hint` for all later errors about unknown keys; registering it twice has no further effect."""
    if hint not in _hints:
        _hints.append(hint)


def hint_for(key: str, file: str) -> str | None:
    """The first hint about an unknown key; None if there is none."""
    return next(filter(None, (hint(key, file) for hint in _hints)), None)
