"""The way out of an unknown name, for error messages: the nearest known name, or the list of all."""

from collections.abc import Iterable

from podium.config.errors import nearest


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: `did you mean 'add'?`, or the list of what there is."""
    names = sorted(known)
    near = nearest(name, names)
    if near:
        return f"did you mean {near!r}?"
    return f"there is {', '.join(names)}" if names else "there is none"
