"""Checks, before anything is computed, that a command may write its output file.

A user's file is never replaced, whether it is a file that happens to be called report.html or the answers of an earlier
evaluation. A page that the same command wrote earlier about the same runs is replaced. Imports no jax.
"""

import html
from pathlib import Path

from podium.config.errors import UsageError

HEAD = 4096
"""Bytes at the beginning of a page that contain its mark."""


def check_new(path: Path, option: str) -> None:
    """Raise UsageError unless a new file can be created at `path`, the value of `option`."""
    if path.exists() or path.is_symlink():
        raise UsageError(f"{option} {path}: exists already; name a new file, or delete it")
    _check_folder(path, option)


def check_page(path: Path, option: str, mark: str) -> None:
    """Raise UsageError unless `path` can be created, or is a page with the same `mark`, which may be replaced."""
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
    """The HTML element that records which command wrote a page, and about which runs: `podium report: ID`."""
    return f'<meta name="generator" content="{html.escape(mark, quote=True)}">'


def _check_folder(path: Path, option: str) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: the folder {path.parent} does not exist; create it, or name another")
