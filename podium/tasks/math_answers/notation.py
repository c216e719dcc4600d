r"""Normalises notation: a single spelling for notation that models and data sets write in many ways.

Removes markup that only affects appearance (`\left`, `\underline{5}`, `{\bf 5}`, `**5**`); writes digits of any script,
dashes, spaces and signs in ASCII or LaTeX, and every fraction and repeating decimal as `\frac{a}{b}`. Values do not
change: markup between two digits becomes a space. Linear in the length of the text; never raises.
"""

import re
import unicodedata
from fractions import Fraction

MATH_SPAN = re.compile(r"(?<!\\)\$\$?(?![\s$])((?:[^$\\]|\\.)++)(?<!\s)\$|\\\(([^$]+?)\\\)|\\\[([^$]+?)\\\]")
r"""Matches a formula between dollar signs (not currency) or `\(` and `\[` brackets; one of the groups has the text."""

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2012\u2013\u2014\uff0d\ufe63", "-"),
        **dict.fromkeys("\u00a0\u2007\u2009\u202f", " "),
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u00f7": "/",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2248": r"\approx ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u2205": r"\emptyset ",
        "\u222a": r"\cup ",
        "\u2208": r"\in ",
        "\u211d": r"\mathbb{R} ",
        "\u2103": "\u00b0C",
        "\u00b1": r"\pm ",
        "\u2213": r"\mp ",
        "\u03a9": r"\Omega ",
        "\u2126": r"\Omega ",
        "\u2229": r"\cap ",
        "\u2236": ":",
        "\u2026": r"\ldots ",
        "\u3002": ". ",
        "\u3001": ", ",
        "\u2019": "'",
        **{chr(code): f"\\{unicodedata.name(chr(code)).split()[-1].lower()} " for code in range(0x3B1, 0x3CA)},
        "\u03bb": r"\lambda ",
        "\u03c2": r"\sigma ",
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
        "`": " ",
    }
)
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_WIDE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_BESIDE_WIDE = re.compile(f"(?<=[{_WIDE}])(?=[!-~])|(?<=[!-~])(?=[{_WIDE}])")
"""Between Chinese, Japanese or Korean text, which has no spaces, and anything else."""
_ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_VULGAR = {
    character: unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    for character in "\u00bc\u00bd\u00be" + "".join(map(chr, range(0x2150, 0x215F)))
}
_VULGAR_FRACTION = re.compile(f"([0-9]?)\\s?([{''.join(_VULGAR)}])")
_REPEATING = re.compile(r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s?\{?\s?([0-9]{1,20})\s?\}?")
_CONTINUED = re.compile(
    r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20}?)(?:([0-9]{1,6}?)\3{2,20})(?:\.\.\.|\\(?:l|c)?dots(?![A-Za-z]))"
)
_NOT_EQUAL = re.compile(r"\\not\s?=")
_OVER = re.compile(r"\{?\s*(-?(?<![0-9])[0-9]+)\s*\\over\s*([0-9]+)\s*\}?")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,/] )(?<![0-9.,/])[0-9]{1,3}(?:[ ~][0-9]{3})+(?![0-9/]| ?[0-9])")
_SPLIT_THOUSANDS = re.compile(
    r"(?<=[0-9])(?:,\\!(?:\\,)? ?|\{,\}|(?:\\,|[\u2009\u202f])(?=[0-9]{3}(?![0-9])))(?=[0-9]{3})"
)
_BRACED_COLON = re.compile(r"(?:\\text\s?)?\{\s*:\s*\}")  # 3{:}45
_OPEN_LEFT = re.compile(r"(^[\s$]*|\\(?:in|cup|cap)\s*|=\s*|\\left\s?)(?<!\\)\](?=[^\[\]]*[,;])")  # ]2, 3[
_OPEN_RIGHT = re.compile(r"(?:\\right\s?|(?<=[\w\s})]))\[(?=[\s$.]*(?:\\c[ua]p\b|$))")
_ALIGNED = re.compile(
    r"^[\s$]*\\begin\s?\{((?:align|gather)(?:ed)?\*?|cases|split)\}((?:[^\\]|\\(?!begin|end))*+)\\end\s?\{\1\}"
)
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?[\s&]*(=?)")
_SMALL_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~")
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]|(?<![\w)}\]])\*\*|\*\*(?![\w({\\])")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_LOWERED = re.compile("[\u2080-\u2089]+")
_LOWERED_DIGITS = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789")
_RAISED_DIGITS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")

_INSIDE = r"((?:[^{}]|\{[^{}]*+\})*+)\}"
_COLOUR = r"\\(?:text)?color\s?\{[^{}]*\}"
_STYLED = re.compile(
    rf"(?:\\(?:underline|textbf|textit|emph|mathbf|mathit|boldsymbol|bm)|{_COLOUR})\s?\{{{_INSIDE}"  # \underline{5}
    rf"|\{{\s?(?:\\(?:bf|it|rm|bfseries|itshape)(?![A-Za-z])|{_COLOUR}){_INSIDE}"  # {\bf 5}
    rf"|^\s*\{{{_INSIDE}\s*$"  # {5}
)
_STYLE = re.compile(rf"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|bf|it|rm)(?![A-Za-z])|{_COLOUR}")

_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")


def plain_notation(text: str) -> str:
    r"""Normalise a text: plain signs and spaces, no styles, and every simple fraction as `\frac{a}{b}`.

    Dollar signs are kept, because only the caller can tell a currency from a delimiter.
    """
    text = _ALIGNED.sub(lambda found: _ROW_END.sub(_next_row, found[2]).replace("&", " "), text)
    text = _OPEN_RIGHT.sub(")", _OPEN_LEFT.sub(r"\1(", text))
    text = _SPLIT_THOUSANDS.sub(",", text)
    text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_RAISED_DIGITS)}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{found[0].translate(_LOWERED_DIGITS)}}}", text)
    text = _VULGAR_FRACTION.sub(lambda found: f"{found[1]} {_VULGAR[found[2]]}", text)
    text = _ROOT.sub(r"\\sqrt{\1\2}", text).translate(_CHARACTERS)
    text = _OTHER_DIGIT.sub(lambda found: str(unicodedata.digit(found[0])), text)
    text = _BESIDE_WIDE.sub(" ", text)
    text = (
        text.replace(r"\$", "$")
        .replace(r"\%", "%")
        .replace(r"\!", "")
        .replace(r"\colon", ":")
        .replace(r"\degree", "\u00b0")
    )
    text = _NOT_EQUAL.sub(r"\\ne ", text)
    text = _BRACED_COLON.sub(":", text)
    text = _DELIMITER.sub(" ", _SMALL_SPACE.sub(" ", text))
    for _ in range(2):  # styles may be nested once
        text = _STYLED.sub(lambda found: f" {found[1] or found[2] or found[3] or ''} ", text)
    text = _SPACED_THOUSANDS.sub(lambda found: re.sub("[ ~]", "", found[0]), text)
    text = _CONTINUED.sub(_repeating, _REPEATING.sub(_repeating, text))
    text = _FRACTION_COMMAND.sub(r"\\frac", _STYLE.sub("", text))
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    return _FRACTION.sub(
        lambda found: rf"\frac{{{(found[1] or found[2] or '').strip()}}}{{{(found[3] or found[4] or '').strip()}}}",
        text,
    )


def _next_row(found: re.Match[str]) -> str:
    """The separator between two rows of aligned equations: a comma, or nothing if a row continues the previous one."""
    return " = " if found[1] else ", "


def _repeating(found: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction: `0.1\overline{6}` is `\frac{1}{6}`."""
    whole, fixed, period = found.groups()
    value = Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
    value += Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
