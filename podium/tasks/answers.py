r"""Whether a completion answers a question of mathematics: compares its final answer with the reference.

A reference that is a number wants a number: the final answer is read once, and whatever is not written out (`16-3`,
`2^{10}`, `\sqrt{25}`, `26/2`) is wrong, so that no model learns to leave the arithmetic to its grader. Any other
reference (`3\sqrt{13}`, `x^2+1`, `(3,4]`, `\text{east}`) is compared as text, and then by math-verify
(`tasks/symbolic.py`), for which `\sqrt{117}` is as good as `3\sqrt{13}`.
"""

import re

from podium.tasks import symbolic
from podium.tasks.final_answer import MAX_ANSWER_CHARS, answer_text, final_answer, final_number
from podium.tasks.notation import plain_notation
from podium.tasks.numbers import read_number, same_number

_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textbf|mathrm)\s?\{([^{}]*)\}")
_BRACED_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_ROOT = re.compile(r"(?:\\sqrt|\u221a)\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9\s])")  # not the space of `5 6`
_WORD_REFERENCE = re.compile(
    r"\\(?:text|mbox|textbf|mathrm)\s?\{[^{}\\0-9]*\}"
    r"|\(?(?!(?:sin|cos|tan|cot|log|exp|sqrt)\b)[A-Za-z]{3,}(?:[\s'-]+[A-Za-z]+)*\)?|\([A-Z]\)|[A-Z]"
)
_IN_BASE = re.compile(r"[0-9A-Za-z]+_\{?[0-9]+\}?")


def is_correct(completion: str, reference: str) -> bool:
    """Whether the final answer of a completion equals the reference, whatever the completion holds."""
    expected = read_number(reference)
    if expected is not None:
        number = final_number(completion)
        return number is not None and same_number(expected, number)
    text = answer_text(completion)
    answer = final_answer(text)
    return same_formula(reference, text if answer is None else answer)


def same_formula(reference: str, answer: str) -> bool:
    """Whether an answer equals a reference that is not a number: as text, or as a formula (math-verify)."""
    answer, reference = answer.strip(), reference.strip()
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False
    expected_key, key = _key(reference), _key(answer)
    if expected_key == key:
        return True
    if _WORD_REFERENCE.fullmatch(reference):
        return expected_key.lower() == key.lower()
    if _IN_BASE.fullmatch(expected_key) or _IN_BASE.fullmatch(key):
        return False  # numbers in another base are equal as text or not at all: math-verify drops the base
    return symbolic.equal(_formula(reference), _formula(answer))


def _formula(text: str) -> str:
    """The answer as one LaTeX formula, without delimiters."""
    return _ROOT.sub(r"\\sqrt{\1\2}", plain_notation(text).replace("$", " ")).strip(" .,\n")


def _key(text: str) -> str:
    """The text by which two answers are compared: without styles, spaces (but `5 6` is not `56`) and outer brackets."""
    key = _SPACE.sub("", _BRACED_SCRIPT.sub(r"\1\2", _TEXT_COMMAND.sub(r"\1", _formula(text))))
    return key[1:-1] if len(key) == 3 and key[0] == "(" and key[1].isalpha() else key
