"""Compares formulas with math-verify: bounded, quiet, and never raising.

math-verify parses LaTeX with a grammar (antlr) and builds sympy objects; only numbers reach sympy's own parser, which
evaluates Python. Its other parser, for plain expressions, passes whole expressions to sympy's and is not used here.
Parsing and comparing can still take unbounded time and memory, so text that is clearly not an answer is rejected first;
`podium.tasks.grading` enforces hard limits.
"""

import functools
import logging
import re
import warnings
from types import ModuleType

MAX_CHARS = 250
"""Maximum length of a formula: the longest reference in MATH has 60 characters."""
MAX_DEPTH = 6
"""Maximum nesting of brackets; parsing time grows steeply with it."""

_COMMAND = re.compile(r"\\(?:(?:text|mathrm|mbox|begin|end|operatorname)\s?\{[^{}]{0,40}\}|[A-Za-z]+)")
_FUNCTIONS = {"sqrt", "sinh", "cosh", "tanh"}
_WORD = re.compile(r"[A-Za-z]{4,}")
_TOO_LARGE = re.compile(
    r"[0-9]{60}|[0-9]{5,}\s*!|!\s*!|\)\s*!|\}\s*!"  # digits, factorials
    r"|(?:\^|\*\*)\s*[{(]?\s*-?[0-9]{5,}"  # exponents
    r"|[)}\]]\s*(?:\^|\*\*)\s*[{(]?\s*-?[0-9]{3,}"  # of what is in brackets
    r"|(?:\^|\*\*)\s*[{(]?\s*[0-9.]+\s*[})]?\s*(?:\^|\*\*)|(?:(?:\^|\*\*)\s*[{(]?\s*[A-Za-z0-9.]+\s*){3}"  # towers
)
_NOT_MATH = re.compile(r"__|['\"`#@]|[0-9]\s+[0-9]")  # math-verify would read `5 6` as 56
_UNEVALUATED = re.compile(
    r"\\(?:i{0,3}int|oint|sum|prod|lim|det|gcd|lcm)(?![a-z])|zeros|ones|diag|stack|orth|rank|binom\s*\{[0-9]{4}"
)


def load() -> None:
    """Import math-verify (takes a second). Workers do this before the clock of their first answer starts."""
    _library()


@functools.lru_cache(maxsize=4096)
def equal(reference: str, answer: str) -> bool:
    """Whether two formulas (LaTeX without delimiters) are mathematically equal; False if one cannot be parsed.

    Results are cached: completions of a group share their reference, and often their answer.
    """
    if not (_is_formula(reference) and _is_formula(answer)):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside sympy
            expected = _parse(reference)
            found = expected and _parse(answer)
            return bool(found) and _library().verify(expected, found, timeout_seconds=None)
    except Exception:
        return False  # the one tolerated catch: sympy, choking on what a model wrote


@functools.cache
def _library() -> ModuleType:
    """Import math-verify, with its log reduced to errors: it warns that it has no time limit; the grader has one."""
    import math_verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify


@functools.lru_cache(maxsize=1024)
def _parse(formula: str) -> list[object]:
    """The sympy objects that math-verify parses; empty if it cannot."""
    library = _library()
    return library.parse(
        f"${formula}$",
        [library.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # its limits are signals, for main threads only
    )


def _is_formula(text: str) -> bool:
    """Whether a text is short, flat, and free of prose, of unfinished calculations, and of numbers that fill memory."""
    if not text or len(text) > MAX_CHARS or not text.isascii() or not text.isprintable():
        return False
    if _NOT_MATH.search(text) or _TOO_LARGE.search(text) or _UNEVALUATED.search(text):
        return False
    words = _WORD.findall(_COMMAND.sub(" ", text))
    return all(word.lower() in _FUNCTIONS for word in words) and 0 <= _depth(text) <= MAX_DEPTH


def _depth(text: str) -> int:
    """Maximum nesting of brackets; -1 if braces do not match."""
    depth = deepest = braces = 0
    for character in text.replace(r"\{", "(").replace(r"\}", ")"):
        depth += (character in "({[") - (character in ")}]")
        braces += (character == "{") - (character == "}")
        deepest = max(deepest, depth)
        if braces < 0:
            return -1
    return deepest if braces == 0 else -1
