r"""Finds the result that a completion states.

The final answer is the first of these that there is: the last `\boxed{}`, the last `<answer>`, the last `####` line,
what follows the last "answer is". It is found without knowing the reference, and so is the number in it: a completion
has one answer, and cannot be right for two references that differ.
"""

import re

from podium.tasks.numbers import TAIL_CHARS, Number, last_number, read_number

MAX_ANSWER_CHARS = 500
"""A longer final answer is wrong: no reference is as long."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?[0-9][^\s{}$\\]*))")
_PHRASE = re.compile(r"\banswer\W{0,8}(?:is|are)\b[\s:*=]*|\banswer[\s*]{0,4}[:=][\s:*=]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|(?<!\\)[.!?](?=\s|\**$)|$")
_EXPLANATION = re.compile(
    r"(?<=\S)[,;]?\s+(?:since|because|as|so|given|which|where|when|thus|hence|therefore|that is|i\.e\.)\s",
    re.IGNORECASE,
)
_MATH_SPAN = re.compile(r"(?<!\\)\$\$?(?![\s$])((?:[^$\\]|\\.)++)(?<!\s)\$|\\\(([^$]+?)\\\)|\\\[([^$]+?)\\\]")


def answer_text(completion: str) -> str:
    """The part of a completion that may hold the answer: the text after its last `</think>`, or all of it."""
    return completion.rpartition("</think>")[2]


def final_answer(text: str) -> str | None:
    """The result that a text states; None if it states none, empty if it breaks off inside a box."""
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
    """The number that a completion gives as its result; None if its final answer is not one number.

    A completion that states no answer gives the number that it ends in.
    """
    text = answer_text(completion)
    answer = final_answer(text)
    if answer is None:
        return last_number(text)
    return read_number(answer) if len(answer) <= MAX_ANSWER_CHARS else None


def _until_closed(text: str) -> str:
    """The text up to the brace that closes it; empty if none does."""
    depth = 1
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[: found.start()]
    return ""


def _only_math(text: str) -> str:
    """The formula of a sentence that has exactly one, or else the sentence."""
    spans = _MATH_SPAN.findall(text[: MAX_ANSWER_CHARS + 1])
    return "".join(spans[0]) if len(spans) == 1 else text
