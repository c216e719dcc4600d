"""Escapes control characters in texts from models, their code and data sets, and in errors that quote them. Everything
that Podium prints and did not write itself goes through `printable` or `harmless`.
"""

import logging
import sys
import threading
import traceback
import types
import unicodedata
import warnings

LINE_END = "\u21b5"
_HARMFUL = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories to escape: control, format (text direction), surrogate, private, unassigned, separator."""


def printable(text: str) -> str:
    """Escape everything in the text that could move the cursor, change colours or confuse a terminal; line ends too."""
    return "".join(LINE_END if each == "\n" else _visible(each) for each in text)


def harmless(text: str) -> str:
    """Escape a text like `printable`, but keep its line ends and tabs."""
    return "".join(each if each in "\n\t" else _visible(each) for each in text)


def guard_errors() -> None:
    """From now on, pass warnings and uncaught exceptions through `harmless`: they may quote what a model wrote."""
    if logging.lastResort is not None:  # prints warnings if logging has not been configured
        logging.lastResort.setFormatter(_Harmless())
    sys.excepthook = _print_exception
    threading.excepthook = _print_from_thread
    written = warnings.formatwarning
    warnings.formatwarning = lambda *args, **keywords: harmless(written(*args, **keywords))


class _Harmless(logging.Formatter):
    """Formats log records, tracebacks included, through `harmless`."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _print_exception(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    print(harmless("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _print_from_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit and args.exc_value is not None:
        print(f"Exception in thread {args.thread.name if args.thread else '?'}:", file=sys.stderr)
        _print_exception(args.exc_type, args.exc_value, args.exc_traceback)


def _visible(character: str) -> str:
    if unicodedata.category(character) in _HARMFUL:
        return character.encode("unicode_escape").decode("ascii")
    return character
