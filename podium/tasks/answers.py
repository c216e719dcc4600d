r"""Whether a completion answers a question of mathematics: compares its final answer with the reference.

A reference that is a number wants a number: the final answer is read once, and whatever is not written out (`16-3`,
`2^{10}`, `\sqrt{25}`, `26/2`) is wrong, so that no model learns to leave the arithmetic to its grader. Any other
reference (`3\sqrt{13}`, `x^2+1`, `(3,4]`, `\text{east}`) is compared as text, then in forms that math-verify does not
read (choices, inequalities, no solution, bases, times, amounts, lists with units), and then by math-verify
(`tasks/symbolic.py`), for which `\sqrt{117}` is as good as `3\sqrt{13}`.
"""

import re
from collections import Counter

from podium.tasks import symbolic
from podium.tasks.final_answer import MAX_ANSWER_CHARS, answer_text, final_answer, final_number, without_aside
from podium.tasks.forms import Choice, is_empty_set, number_in_base, read_choice, read_time, same_time
from podium.tasks.intervals import read_set, same_set
from podium.tasks.notation import plain_notation
from podium.tasks.numbers import read_number, same_number
from podium.tasks.quantities import read_list, read_quantity

_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textbf|mathrm)\s?\{([^{}]*)\}")
_BRACED_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_ROOT = re.compile(r"(?:\\sqrt|\u221a)\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9\s])")  # not the space of `5 6`
_WORD_REFERENCE = re.compile(
    r"\\(?:text|mbox|textbf|mathrm)\s?\{[^{}\\0-9]*\}"
    r"|\(?(?!(?:sin|cos|tan|cot|log|exp|sqrt)\b)[A-Za-z]{3,}(?:[\s'-]+[A-Za-z]+)*\)?|\([A-Z]\)|[A-Z]"
)
_LETTER = re.compile(r"[A-J]")
_IN_BASE = re.compile(r"[0-9A-Za-z]+_\{?[0-9]+\}?")


def is_correct(completion: str, reference: str) -> bool:
    """Whether the final answer of a completion equals the reference, whatever the completion holds."""
    text = answer_text(completion)
    answer = final_answer(text)
    choice = read_choice(plain_notation(reference))
    if choice is not None:
        return _is_choice(choice, text if answer is None else answer)
    expected = read_number(reference)
    if expected is not None:
        number = final_number(completion)
        return number is not None and same_number(expected, number)
    return same_formula(reference, text if answer is None else without_aside(answer))


def same_formula(reference: str, answer: str) -> bool:
    """Whether an answer equals a reference that is not a number: as text, in another form, or by math-verify."""
    answer, reference = answer.strip(), reference.strip()
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False
    expected_key, key = _key(reference), _key(answer)
    if expected_key == key:
        return True
    expected, found = _formula(reference), _formula(answer)
    choice = read_choice(found)
    if choice is not None:
        return choice.label == expected_key if _LETTER.fullmatch(expected_key) else _same(reference, choice.value)
    decided = _same_form(expected, found)
    if decided is not None:
        return decided
    if _WORD_REFERENCE.fullmatch(reference):
        return expected_key.lower() == key.lower()
    if _IN_BASE.fullmatch(expected_key) or _IN_BASE.fullmatch(key):
        return False  # numbers in another base are equal as text or not at all: math-verify drops the base
    return symbolic.equal(expected, found)


def _is_choice(expected: Choice, answer: str) -> bool:
    """Whether an answer is the letter or the value of a choice; both must be right where it gives both."""
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    given = read_choice(plain_notation(answer))
    if given is not None:
        return given.label == expected.label and _same(expected.value, given.value)
    return same_formula(expected.label, answer) or _same(expected.value, answer)


def _same(expected: str, found: str) -> bool:
    """Whether two values are equal: as numbers where a number is expected, else as formulas."""
    number = read_number(expected)
    if number is None:
        return same_formula(expected, found)
    answer = read_number(found)
    return answer is not None and same_number(number, answer)


def _same_form(reference: str, answer: str) -> bool | None:
    """Whether both are equal, for forms that math-verify cannot read; None if the reference has none of these forms."""
    if is_empty_set(reference):
        return is_empty_set(answer)
    expected_base = number_in_base(reference)
    if expected_base is not None:
        return expected_base == number_in_base(answer)
    expected_time = read_time(reference)
    if expected_time is not None and ":" in answer:
        time = read_time(answer)
        return time is not None and same_time(expected_time, time)
    for same in (_same_quantity, _same_list, _same_set):
        decided = same(reference, answer)
        if decided is not None:
            return decided
    return None


def _same_quantity(reference: str, answer: str) -> bool | None:
    """Whether two amounts with units are equal; None if one of them is not an amount."""
    expected, found = read_quantity(reference), read_quantity(answer)
    if expected is None or found is None:
        return None
    return (expected.kind, expected.amount) == (found.kind, found.amount)


def _same_list(reference: str, answer: str) -> bool | None:
    """Whether two lists have the same numbers, in any order, and no different units; None if they have no units."""
    expected, found = read_list(reference), read_list(answer)
    if expected is None or found is None or not (expected.unit or found.unit):
        return None
    if expected.unit and found.unit and expected.unit != found.unit:
        return False
    return Counter(number.value for number in expected.numbers) == Counter(number.value for number in found.numbers)


def _same_set(reference: str, answer: str) -> bool | None:
    """Whether two sets of real numbers are equal; None unless one is an inequality or all real numbers."""
    expected, found = read_set(reference), read_set(answer)
    if expected is None or found is None or expected.variable is found.variable is None:
        return None
    return same_set(expected, found, lambda wanted, given: wanted == given or _same(wanted, given))


def _formula(text: str) -> str:
    """The answer as one LaTeX formula, without delimiters."""
    return _ROOT.sub(r"\\sqrt{\1\2}", plain_notation(text).replace("$", " ")).strip(" .,\n")


def _key(text: str) -> str:
    """The text by which two answers are compared: without styles, spaces (but `5 6` is not `56`) and outer brackets."""
    key = _SPACE.sub("", _BRACED_SCRIPT.sub(r"\1\2", _TEXT_COMMAND.sub(r"\1", _formula(text))))
    return key[1:-1] if len(key) == 3 and key[0] == "(" and key[1].isalpha() else key
