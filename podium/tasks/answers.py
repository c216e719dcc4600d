r"""Whether a completion answers a question of mathematics: finds its final answer and compares it with the reference.

The final answer is the first of these that there is: the last `\boxed{}`, the last `<answer>`, the last `####` line,
what follows the last "answer is". A completion that states none may itself be the answer, or end in a number that is.
Most comparisons are of text or numbers and take microseconds; what is left goes to math-verify (`tasks/symbolic.py`).
"""

import re

from podium.tasks import symbolic
from podium.tasks.numbers import TAIL_CHARS, clean_latex, last_number, read_number, same_number

MAX_ANSWER_CHARS = 500
"""A longer final answer is wrong: no reference is as long."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?[0-9][^\s{}$\\]*))")
_PHRASE = re.compile(r"\banswer\W{0,8}(?:is|are)\b[\s:*=]*|\banswer[\s*]{0,4}[:=][\s:*=]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|\**$)|$")
_MATH_SPAN = re.compile(r"\$\$?([^$\s](?:[^$]*[^$\s])?)\$|\\\(([^$]+?)\\\)|\\\[([^$]+?)\\\]")

_MARKS = re.compile(r"\\(?:[()\[\]]|left(?![a-z])|right(?![a-z])|displaystyle)|[$`]|\*\*")
_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textbf|mathrm)\s?\{([^{}]*)\}")
_BRACED_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_ROOT = re.compile(r"(?:\\sqrt|\u221a)\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_SYMBOLS = {"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/"}
_SCRIPT_DIGITS = re.compile("[\u00b2\u00b3]")
_NAME = re.compile(
    r"\\(?:text|mbox|textbf|mathrm)\s?\{[^{}\\0-9]*\}"
    r"|\(?(?!(?:sin|cos|tan|cot|log|exp|sqrt)\b)[A-Za-z]{3,}(?:[\s'-]+[A-Za-z]+)*\)?|\([A-Z]\)|[A-Z]"
)
_IN_BASE = re.compile(r"[0-9A-Za-z]+_\{?[0-9]+\}?")


def is_correct(completion: str, reference: str) -> bool:
    """Whether the final answer of a completion equals the reference, whatever the completion holds."""
    text = completion.rpartition("</think>")[2]
    answer = final_answer(text)
    if answer is not None:
        return same_answer(reference, answer)
    if same_answer(reference, text):
        return True
    number, expected = last_number(text), read_number(reference)
    return number is not None and expected is not None and same_number(expected, number)


def final_answer(text: str) -> str | None:
    """What a text states as its result; None if it states none, empty if it breaks off inside a box."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        start = boxes[-1].end()
        return boxes[-1]["bare"] or _until_closed(text[start : start + MAX_ANSWER_CHARS + 1])
    _, tag, rest = text.rpartition("<answer>")
    if tag:
        return _only_math(rest.partition("</answer>")[0].strip())
    _, hashes, rest = text.rpartition("####")
    if hashes:
        return rest.strip().partition("\n")[0]
    tail = text[-TAIL_CHARS:]
    phrases = list(_PHRASE.finditer(tail))
    if phrases:
        rest = tail[phrases[-1].end() :]
        end = _SENTENCE_END.search(rest)
        return _only_math(rest[: end.start()] if end else rest)
    return None


def same_answer(reference: str, answer: str) -> bool:
    """Whether two answers are equal: as text, as numbers, or as expressions (math-verify)."""
    answer, reference = answer.strip(), reference.strip()
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False
    expected_key, key = _key(reference), _key(answer)
    if expected_key == key:
        return True
    if _NAME.fullmatch(reference):
        return expected_key.lower() == key.lower()
    if _IN_BASE.fullmatch(expected_key) or _IN_BASE.fullmatch(key):
        return False  # numbers in another base are equal as text or not at all: math-verify drops the base
    expected, number = read_number(reference), read_number(answer)
    if expected is not None and number is not None:
        return same_number(expected, number)
    return symbolic.equal(_plain(reference), _plain(answer))


def _until_closed(text: str) -> str:
    """The text up to the brace that closes it; empty if none does."""
    depth = 1
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[: found.start()]
    return ""


def _only_math(text: str) -> str:
    """The one formula in a sentence, or the sentence if it has none or several."""
    spans = _MATH_SPAN.findall(text[: MAX_ANSWER_CHARS + 1])
    return "".join(spans[0]) if len(spans) == 1 else text


def _plain(text: str) -> str:
    """The answer as one LaTeX formula: no delimiters, no bold, no Unicode signs."""
    text = _MARKS.sub("", clean_latex(text))
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    text = _SCRIPT_DIGITS.sub(lambda found: {"\u00b2": "^2", "\u00b3": "^3"}[found[0]], text)
    return _ROOT.sub(r"\\sqrt{\1\2}", text).strip(" .,\n")


def _key(text: str) -> str:
    """What two equal answers have in common as text."""
    key = "".join(_BRACED_SCRIPT.sub(r"\1\2", _TEXT_COMMAND.sub(r"\1", _plain(text))).split())
    return key[1:-1] if len(key) == 3 and key[0] == "(" and key[1].isalpha() else key
