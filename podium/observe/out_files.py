"""Checks, before anything is computed, that a command may write the file that it was given.

A file of the user's is never replaced: neither a table that happens to be called report.html, nor the answers of an
earlier evaluation. A page that the same command wrote about the same thing is replaced. Imports no jax.
"""

import html
from pathlib import Path

from podium.config.errors import UsageError

HEAD = 4096
"""Bytes at the beginning of a page that have its mark."""


def check_new(path: Path, option: str) -> None:
    """Raise UsageError unless a file can be made at `path`, which was given by `option`."""
    if path.exists() or path.is_symlink():
        raise UsageError(f"{option} {path}: exists already; name a new file, or delete it")
    _check_folder(path, option)


def check_page(path: Path, option: str, mark: str) -> None:
    """Raise UsageError unless `path` can be written, or replaced because it is a page with the same `mark`."""
    if not path.exists() and not path.is_symlink():
        return _check_folder(path, option)
    if not path.is_file():
        raise UsageError(f"{option} {path}: is not a file; name a file, such as page.html")
    with path.open("rb") as file:
        head = file.read(HEAD).decode("utf-8", "replace")
    if page_mark(mark) not in head:
        raise UsageError(
            f"{option} {path}: exists already and is not an earlier page of the same {mark.partition(':')[0]};"
            " name a new file, or delete it"
        )


def page_mark(mark: str) -> str:
    """The element of a page's head that says what wrote it, and about what: `podium report: ID`."""
    return f'<meta name="generator" content="{html.escape(mark, quote=True)}">'


def _check_folder(path: Path, option: str) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it, or name another")
