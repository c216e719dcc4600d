r"""Normalises notation: one spelling for what models and data sets write in many ways.

Removes markup that only affects appearance (`\left`, `\underline{5}`, `{\bf 5}`, `**5**`); writes dashes, spaces and
signs in ASCII or LaTeX, and every fraction as `\frac{a}{b}`. Values do not change: markup between two digits becomes a
space. Linear in the length of the text; never raises.
"""

import re

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
        "`": " ",
    }
)
_SPLIT_THOUSANDS = re.compile(
    r"(?<=[0-9])(?:,\\!(?:\\,)? ?|\{,\}|(?:\\,|[\u2009\u202f])(?=[0-9]{3}(?![0-9])))(?=[0-9]{3})"
)
_BRACED_COLON = re.compile(r"\{\s*:\s*\}")  # 3{:}45
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
_STYLE = re.compile(rf"\\(?:left|right|displaystyle|textstyle|bf|it|rm)(?![A-Za-z])|{_COLOUR}")

_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")


def plain_notation(text: str) -> str:
    r"""Normalise a text: plain signs and spaces, no styles, and every simple fraction as `\frac{a}{b}`.

    Dollar signs are kept, because only the caller can tell a currency from a delimiter.
    """
    text = _SPLIT_THOUSANDS.sub(",", text).translate(_CHARACTERS)
    text = text.replace(r"\$", "$").replace(r"\%", "%").replace(r"\!", "")
    text = _BRACED_COLON.sub(":", text)
    text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_RAISED_DIGITS)}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{found[0].translate(_LOWERED_DIGITS)}}}", text)
    text = _DELIMITER.sub(" ", _SMALL_SPACE.sub(" ", text))
    for _ in range(2):  # styles may be nested once
        text = _STYLED.sub(lambda found: f" {found[1] or found[2] or found[3] or ''} ", text)
    text = _FRACTION_COMMAND.sub(r"\\frac", _STYLE.sub("", text))
    return _FRACTION.sub(
        lambda found: rf"\frac{{{(found[1] or found[2] or '').strip()}}}{{{(found[3] or found[4] or '').strip()}}}",
        text,
    )
