r"""Extracts the result that a completion states.

The final answer is the first of these that exists: the last `\boxed{}`, the last `<answer>`, the last `####` line, the
text after the last "answer is". It is extracted without knowing the reference, and so is its number: a completion has
one answer, and cannot be right for two different references.
"""

import re

from podium.tasks.forms import read_choice
from podium.tasks.notation import plain_notation
from podium.tasks.numbers import TAIL_CHARS, Number, last_number, read_number
from podium.tasks.quantities import restated_quantity

MAX_ANSWER_CHARS = 500
"""A longer final answer counts as wrong, because no reference is as long."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?[0-9][^\s{}$\\]*))")
_PHRASE = re.compile(r"\banswer\W{0,8}(?:is|are)\b[\s:*=]*|\banswer[\s*]{0,4}[:=][\s:*=]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|(?<!\\)[.!?](?=\s|\**$)|$")
_EXPLANATION = re.compile(
    r"(?<=\S)[,;]?\s+(?:since|because|as|so|given|which|where|when|thus|hence|therefore|that is|i\.e\.)\s",
    re.IGNORECASE,
)
_ASIDE = re.compile(  # 12 apples (after giving 5 away).
    r"\s\((?:after|before|since|because|as|when|once|given|(?:not )?(?:including|counting)|excluding|with|without)\s"
    r"[^()\n]{1,200}\)(?=[\s.!*$]*$)",
    re.IGNORECASE,
)
_MATH_SPAN = re.compile(r"(?<!\\)\$\$?(?![\s$])((?:[^$\\]|\\.)++)(?<!\s)\$|\\\(([^$]+?)\\\)|\\\[([^$]+?)\\\]")


def answer_text(completion: str) -> str:
    """The part of a completion that may hold the answer: the text after its last `</think>`, or all of it."""
    return completion.rpartition("</think>")[2]


def final_answer(text: str) -> str | None:
    """The result that a text states; None if it states none, empty if it ends inside a box."""
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
        return _only_math(_EXPLANATION.split(rest[: end.start()] if end else rest, maxsplit=1)[0])
    return None


def final_number(completion: str) -> Number | None:
    """The number that a completion gives as its result; None if its final answer is not exactly one number.

    A completion that states no answer gives the number at its end.
    """
    text = answer_text(completion)
    answer = final_answer(text)
    if answer is None:
        text = without_aside(text[-TAIL_CHARS:].rstrip())
        restated = restated_quantity(text.rpartition("\n")[2])
        return last_number(text) if restated is None else read_number(restated)
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    answer = without_aside(answer)
    choice = read_choice(plain_notation(answer))
    answer = answer if choice is None else choice.value
    return read_number(restated_quantity(answer) or answer)


def without_aside(text: str) -> str:
    """The text without a remark in brackets at its end that begins as an explanation: `(after giving 5 away)`."""
    return _ASIDE.sub("", text)


def _until_closed(text: str) -> str:
    """The text up to its closing brace; empty if there is none."""
    depth = 1
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[: found.start()]
    return ""


def _only_math(text: str) -> str:
    """The formula in a sentence with exactly one formula; otherwise the whole sentence."""
    spans = _MATH_SPAN.findall(text[: MAX_ANSWER_CHARS + 1])
    return "".join(spans[0]) if len(spans) == 1 else text
