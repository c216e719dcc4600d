"""What is wrong with settings: the key, its value, the rule, the way out, and where the value was written."""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong with the settings."""

    key: str
    """Dotted path of the setting, or what could not be read at all (a file, an argument)."""
    message: str
    """Value, rule and way out, in one line."""
    origins: tuple[str, ...] = ()
    """Where the values were written: `file:line`, `environment NAME` or `--set key=value`."""
    about: str | None = None
    """What the setting does."""

    def __str__(self) -> str:
        """The problem in lines: what, where, and what the setting is for."""
        about = (self.about,) if self.about else ()
        return "\n    ".join((f"{self.key}: {self.message}", *self.origins, *about))


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """Settings that do not go together, or a value that another part of Podium does not know."""

    keys: tuple[str, ...]
    """Dotted paths of all that the rule compares; the first is to blame."""
    message: str
    """Values, rule and way out."""
    needs: tuple[str, ...] = ()
    """More that the rule reads: while one of these is wrong in itself, the rule says nothing."""
    about: str | None = None
    """What the setting does."""


class ConfigError(ValueError):
    """Settings that cannot be run: everything that is wrong with them, in one error."""

    exit_status = 2

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        """All problems, counted where there are several."""
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n".join((f"{len(self.problems)} errors in the settings", *map(str, self.problems)))


def wrong(key: str, message: str, *origins: str) -> ConfigError:
    """The error of one problem."""
    return ConfigError([Problem(key=key, message=message, origins=origins)])


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most like a misspelt name, transposed letters first; None where none is near."""
    near = difflib.get_close_matches(name, list(choices), 5, cutoff)
    return min(near, key=lambda choice: sorted(choice) != sorted(name), default=None)


def not_in(choices: Iterable[str], name: str) -> str:
    """The message about a name that is not among the choices, which are all listed."""
    near = nearest(name, choices)
    return f"expected one of {', '.join(choices)}, got {name!r}" + (f"; did you mean {near}?" if near else "")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The way out of an unknown name, for the end of a message: `did you mean 'add'?`, or the list of what there is."""
    names = sorted(known)
    if near := nearest(name, names):
        return f"did you mean {near!r}?"
    return f"there is {', '.join(names)}" if names else "there are none"
