"""Errors in settings: the key, its value, the rule, the way out, and where the value was written."""

import dataclasses
import difflib
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One error in the settings."""

    key: str
    """Dotted path of the setting, or the file or argument that could not be read."""
    message: str
    """Value, rule and way out, on one line."""
    origins: tuple[str, ...] = ()
    """Where the values were written: `file:line`, `environment NAME` or `--set key=value`."""
    about: str | None = None
    """Documentation of the setting."""

    def __str__(self) -> str:
        """Several lines: the error, its origins, and the setting's documentation."""
        about = self.about.splitlines() if self.about else ()
        return "\n    ".join((f"{self.key}: {self.message}", *self.origins, *about))


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """Settings that are valid alone but not together, or a value that another part of Podium rejects."""

    keys: tuple[str, ...]
    """Dotted paths of all settings that the rule compares; the error is reported for the first."""
    message: str
    """Values, rule and way out."""
    needs: tuple[str, ...] = ()
    """Other settings that the rule reads; the rule is skipped if one of them is invalid."""
    about: str | None = None
    """Documentation of the setting."""


class UsageError(ValueError):
    """A command line that cannot be executed: an option, file, run or machine in it does not exist."""

    exit_status = 2


class ConfigError(ValueError):
    """Invalid settings: one error with all problems."""

    exit_status = 2

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        """All problems, preceded by their number if there are several."""
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n".join((f"{len(self.problems)} errors in the settings", *map(str, self.problems)))


def raised_here(error: Exception) -> bool:
    """Whether Podium itself raised the error, because of a user's mistake; a ValueError from a library is a bug."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(innermost).is_relative_to(Path(__file__).parents[1])


def wrong(key: str, message: str, *origins: str) -> ConfigError:
    """Make a ConfigError with one problem."""
    return ConfigError([Problem(key=key, message=message, origins=origins)])


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The closest match of a misspelt name, preferring transposed letters; None if nothing is close."""
    near = difflib.get_close_matches(name, list(choices), 5, cutoff)
    return min(near, key=lambda choice: sorted(choice) != sorted(name), default=None)


def not_in(choices: Iterable[str], name: str) -> str:
    """The message for a name that is not among the choices, listing all of them."""
    near = nearest(name, choices)
    return f"expected one of {', '.join(choices)}, got {name!r}" + (f"; did you mean {near}?" if near else "")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `did you mean 'add'?`, or the list of known names."""
    names = sorted(known)
    if near := nearest(name, names):
        return f"did you mean {near!r}?"
    return f"expected one of {', '.join(names)}" if names else "there are none"
