r"""Whether a completion answers a question of mathematics: compares its final answer with the reference.

If the reference is a number, the answer must be a number: the final answer is read once, and a value that is not
written out (`16-3`, `2^{10}`, `\sqrt{25}`, `26/2`) is wrong, so that no model learns to leave the arithmetic to its
grader. Any other reference is compared according to its kind: a choice, a date, a time, words, or a formula
(`podium.tasks.math_answers.formula`), for which `\sqrt{117}` is as good as `3\sqrt{13}`. Takes bounded time, whatever
the completion holds.
"""

import re

from podium.tasks.math_answers.equality import is_written_out, same_answer
from podium.tasks.math_answers.final_answer import (
    MAX_ANSWER_CHARS,
    YES_NO,
    closing_statement,
    final_answer,
    final_number,
    stated_text,
    without_aside,
)
from podium.tasks.math_answers.forms import (
    Choice,
    is_empty_set,
    number_in_base,
    read_choice,
    read_date,
    read_time,
    same_time,
)
from podium.tasks.math_answers.formula import Node, read_formula
from podium.tasks.math_answers.formula_values import constant, rational
from podium.tasks.math_answers.notation import plain_notation
from podium.tasks.math_answers.number_text import Number, is_evaluated, read_number, rounds_to, same_number
from podium.tasks.math_answers.quantities import read_quantity

_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textbf|textrm|textit|mathrm)\s?\{([^{}]*)\}")
_BRACED_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9\s])")  # not the space of `5 6`
_WORDS = re.compile(
    r"\\(?:text|mbox|textbf|textrm|mathrm)\s?\{[^{}\\0-9]*\}"
    r"|(?!(?:sin|cos|tan|cot|log|exp|sqrt)\b)(?:[^\W\d_]{3,}|[Nn]o|[\u3400-\u9fff]+)(?:[\s'-]+[^\W\d_]+)*"
)
_THREE_LETTERS = re.compile("[a-z]{3}")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")
_POWER_OF_TEN = re.compile(r"\s*[-+]?\s*10\s?\^")
_WHOLE = re.compile(r"\b([A-Za-z])\s*\\in\s*\\mathbb\s*\{?\s*Z")
_FOR_ALL = re.compile(r"(?<=\S)[,\s]*(?:\\text\s?\{\s*)?\bfor (?:all|every|any|each)\b.*$", re.DOTALL)
_LETTER = re.compile(r"\(?([A-J])\)?\.?")
_IN_WORDS = (
    (re.compile(r"([0-9]+) to ([0-9]+)"), r"\1:\2"),
    (
        re.compile(r"(?:the )?(?:limit|value|sum|integral|derivative) does not exist|DNE", re.IGNORECASE),
        "does not exist",
    ),
    (re.compile(r"(?:the set of )?(?:all|any) reals?(?: numbers?)?", re.IGNORECASE), r"\\mathbb{R}"),
)
"""Phrases with the same meaning, and the form in which they are compared."""


def is_correct(completion: str, reference: str) -> bool:
    """Whether the final answer of a completion equals the reference, whatever the completion holds."""
    text = stated_text(completion)
    answer = final_answer(text)
    said = closing_statement(text) if answer is None else without_aside(answer)
    if len(said) > MAX_ANSWER_CHARS:
        return False
    reference = final_answer(reference) or reference if "\\boxed" in reference else reference
    choice = read_choice(plain_notation(reference))
    if choice is not None and choice.value:
        return _is_choice(choice, said)
    expected = _number(reference)
    return same_formula(reference, said) if expected is None else _is_number(expected, final_number(text), said)


def same_formula(reference: str, answer: str) -> bool:
    """Whether an answer equals a reference that is not a number: as text, in another form, or as a formula."""
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return False
    expected, found = _alike(_formula(reference), _formula(answer))
    if _key(expected) == _key(found):
        return True
    letter, choice = _LETTER.fullmatch(_words(reference)), read_choice(found)
    if letter:
        return letter[1].lower() == (choice.label if choice else _words(found).strip("()[]\"'")).lower()
    if choice is not None and choice.value:
        return _same(reference, choice.value)
    decided = _same_form(expected, found)
    if decided is not None:
        return decided
    if _WORDS.fullmatch(reference.strip(" .")):
        yes_no = YES_NO.match(_words(found))
        same = _bare(expected) == _bare(yes_no[1] if yes_no else found)
        if same or not _THREE_LETTERS.fullmatch(reference):
            return same or _same_formulas(read_formula(expected), _read_result(found), words=True)
    return _same_formulas(read_formula(expected), _read_result(found))


def _read_result(text: str) -> Node | None:
    r"""The formula; for an equation whose first side is not a formula, its last side: `\int_0^1 x\,dx = \frac12`."""
    left, equals, last = plain_notation(text).rpartition("=")
    return read_formula(text) or (read_formula(last) if equals and is_evaluated(left) else None)


def _alike(expected: str, found: str) -> tuple[str, str]:
    r"""Both formulas, with the same name for an integer variable, and without a condition (`for all x`) that only one
    has.
    """
    names = [_WHOLE.search(formula) for formula in (expected, found)]
    if names[0] and names[1] and not re.search(rf"(?<![A-Za-z]){names[0][1]}(?![A-Za-z])", found):
        found = re.sub(rf"(?<![A-Za-z]){names[1][1]}(?![A-Za-z])", names[0][1], found)
    bare = [_FOR_ALL.sub("", formula) for formula in (expected, found)]
    return (bare[0], bare[1]) if (bare[0] == expected) != (bare[1] == found) else (expected, found)


def _same_formulas(expected: Node | None, found: Node | None, *, words: bool = False) -> bool:
    """Whether both texts are formulas and equal; a word alone (`infinity`) does not count as a formula."""
    if expected is None or found is None or (words and repr(expected).startswith("Symbol(name=' ")):
        return False
    return same_answer(expected, found)


def _number(reference: str) -> Number | None:
    """The reference as a number; None for a date (`June 20`), a number in another base, and a bare power of ten."""
    plain = plain_notation(reference)
    other = read_date(plain) or number_in_base(plain) or _POWER_OF_TEN.match(plain)
    return None if other else read_number(reference)


def _is_number(expected: Number, number: Number | None, said: str) -> bool:
    """Whether an answer equals the reference number, as a number, an irrational formula that rounds to it, or `3 h 30
    min`.
    """
    if number is not None:
        return same_number(expected, number)
    formula = _read_result(said)
    if formula is not None and is_written_out(formula):
        return constant(formula) == expected.value
    if expected.places >= 4:
        value = None if formula is None else constant(formula)
        exact = rational(value) if value is not None and rational(value) != value else None
        return exact is not None and rounds_to(exact, expected.value, expected.places)
    quantity = read_quantity(said) if expected.unit else None
    if expected.unit is None or quantity is None:
        return False
    same_kind = expected.unit.dimensions == quantity.unit.dimensions
    return same_kind and expected.value * expected.unit.factor == quantity.amount


def _is_choice(expected: Choice, answer: str) -> bool:
    """Whether an answer is the letter or the value of a choice; both must be right if it gives both."""
    given = read_choice(plain_notation(answer))
    if given is not None and given.value:
        return given.label == expected.label and _same(expected.value, given.value)
    return same_formula(expected.label, answer) or _same(expected.value, answer)


def _same(expected: str, found: str) -> bool:
    """Whether two values are equal: as numbers where a number is expected, else as formulas."""
    number = _number(expected)
    if number is None:
        return same_formula(expected, found)
    answer = read_number(found)
    return answer is not None and same_number(number, answer)


def _same_form(reference: str, answer: str) -> bool | None:
    """Whether both are equal, for forms other than formulas; None if the reference has none of these forms."""
    if is_empty_set(reference):
        return is_empty_set(answer)
    for read in (number_in_base, read_date):
        expected, found = read(reference), read(answer)
        if expected is not None or found is not None:
            return expected == found
    expected_time = read_time(reference)
    if expected_time is not None:
        time = read_time(answer)
        return time is not None and same_time(expected_time, time)
    expected_quantity, quantity = read_quantity(reference), read_quantity(answer)
    if expected_quantity is not None and quantity is not None:
        return expected_quantity.equals(quantity)
    return None


def _formula(text: str) -> str:
    """The answer as one formula, without delimiters."""
    text = plain_notation(text).replace("$", " ").strip(" .,\n")
    words = _words(text)
    return next((said.sub(formula, words) for said, formula in _IN_WORDS if said.fullmatch(words)), text)


def _key(formula: str) -> str:
    """The text by which two answers are compared: without styles and spaces (but `5 6` is not `56`)."""
    return _SPACE.sub("", _BRACED_SCRIPT.sub(r"\1\2", _TEXT_COMMAND.sub(r"\1", formula)))


def _words(text: str) -> str:
    return " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split()).strip(" .$*")


def _bare(text: str) -> str:
    """Words in lower case, without an article."""
    return _ARTICLE.sub("", _words(text).casefold()).strip(" .,!()")
