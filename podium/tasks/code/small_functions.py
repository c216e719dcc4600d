"""Small functions to write and their expected results: the generated questions of the task `code`."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

DRAWS = 10_000
"""Maximum number of inputs drawn for a function until its tests do not all have the same result."""
TESTS = 8
"""Number of hidden tests per function."""


class Family(NamedTuple):
    """Functions that differ only in a number or a letter."""

    name: str
    parameter: str
    """`values`, a list of whole numbers; `text`, words in lower case; or `number`, a whole number from 0."""
    says: str
    """Describes what the function returns; {n} and {m} stand for the values that differ."""
    expression: str
    choices: Sequence[tuple[object, object]]
    """Pairs for {n} and {m}."""


class SmallFunction(NamedTuple):
    """A function to write."""

    name: str
    question: str
    solution: str
    tests: tuple[tuple[object, object], ...]
    """Pairs of the single argument and the value to return."""


def _each(numbers: Sequence[object]) -> list[tuple[object, object]]:
    return [(number, 0) for number in numbers]


SEVERAL = _each(range(2, 12))
FEW = _each(range(1, 9))
LETTERS = _each("aeilnorst")
PAIRS = [(n, m) for n in range(2, 6) for m in range(n + 1, 8)]
AROUND = _each(range(-6, 7, 2))

FAMILIES = (
    Family("sum_divisible", "values", "the sum of the numbers in `values` that are divisible by {n}",
           "sum(each for each in values if each % {n} == 0)", SEVERAL),
    Family("sum_not_divisible", "values", "the sum of the numbers in `values` that are not divisible by {n}",
           "sum(each for each in values if each % {n} != 0)", SEVERAL),
    Family("count_above", "values", "how many numbers in `values` are greater than {n}",
           "sum(each > {n} for each in values)", AROUND),
    Family("cap", "values", "a list of the numbers in `values`, with {n} in place of each that is greater",
           "[min(each, {n}) for each in values]", AROUND),
    Family("first_above", "values", "the index of the first number in `values` that is greater than {n}, or -1",
           "next((place for place, each in enumerate(values) if each > {n}), -1)", AROUND),
    Family("closest", "values", "the number in `values` that is closest to {n}, the smaller of two, or None",
           "min(values, key=lambda each: (abs(each - {n}), each), default=None)", AROUND),
    Family("split_at", "values", "a tuple of two lists: the numbers in `values` less than {n}, and the others",
           "([each for each in values if each < {n}], [each for each in values if each >= {n}])", AROUND),
    Family("count_pairs", "values", "how many pairs of numbers at different places in `values` have the sum {n}",
           "sum(a + b == {n} for place, a in enumerate(values) for b in values[place + 1 :])", AROUND),
    Family("every_nth", "values", "a list of every number of `values` whose index is divisible by {n}",
           "values[::{n}]", SEVERAL),
    Family("largest", "values", "the {n} largest numbers of `values`, the largest first; all if there are fewer",
           "sorted(values, reverse=True)[:{n}]", FEW),
    Family("chunks", "values", "a list of lists: `values` cut into parts of {n} numbers, the last may be shorter",
           "[values[start : start + {n}] for start in range(0, len(values), {n})]", SEVERAL),
    Family("neighbours", "values", "a list of the sums of each {n} numbers that follow each other in `values`",
           "[sum(values[start : start + {n}]) for start in range(len(values) - {n} + 1)]", SEVERAL[:6]),
    Family("remainders", "values", "a dict from each remainder of division by {n} to how many of `values` have it",
           "{{rest: sum(each % {n} == rest for each in values) for rest in {{each % {n} for each in values}}}}",
           SEVERAL),
    Family("rotate", "values", "a list of the numbers in `values`, rotated to the left by {n} places",
           "[values[(place + {n}) % len(values)] for place in range(len(values))]", FEW),
    Family("without_letter", "text", "`text` without the letter {n}", "text.replace('{n}', '')", LETTERS),
    Family("count_letter", "text", "how often the letter {n} is in `text`", "text.count('{n}')", LETTERS),
    Family("words_with", "text", "a list of the words in `text` that have the letter {n}, in order",
           "[word for word in text.split() if '{n}' in word]", LETTERS),
    Family("up_to_letter", "text", "the part of `text` before its first {n}; all of it if there is none",
           "text.partition('{n}')[0]", LETTERS),
    Family("shift", "text", "`text` with each letter moved on by {n} in the alphabet, after z comes a; spaces stay",
           "''.join(chr((ord(each) - 97 + {n}) % 26 + 97) if each != ' ' else each for each in text)", SEVERAL),
    Family("long_words", "text", "a list of the words in `text` that have more than {n} letters, in order",
           "[word for word in text.split() if len(word) > {n}]", FEW[:5]),
    Family("repeat", "text", "`text` with each character {n} times in a row",
           "''.join(each * {n} for each in text)", SEVERAL),
    Family("word_starts", "text", "the first {n} letters of each word in `text`, joined without spaces",
           "''.join(word[:{n}] for word in text.split())", FEW),
    Family("multiples", "number", "the sum of all whole numbers from 1 to `number` that are divisible by {n} or by {m}",
           "sum(each for each in range(1, number + 1) if each % {n} == 0 or each % {m} == 0)", PAIRS),
    Family("digit_powers", "number", "the sum of the digits of `number`, each to the power of {n}",
           "sum(int(digit) ** {n} for digit in str(number))", FEW),
    Family("power_rest", "number", "the remainder of {n} to the power of `number`, divided by {m}",
           "pow({n}, number, {m})", [(n, 10 * m + 7) for n, m in PAIRS]),
    Family("sum_of_two", "number", "whether `number` is a sum of {n} times and {m} times whole numbers from 0",
           "any((number - {n} * each) % {m} == 0 for each in range(number // {n} + 1))", PAIRS),
)  # fmt: skip
"""All families; their expressions are part of Podium, so they are evaluated without a sandbox."""


def small_functions() -> list[SmallFunction]:
    """All small functions, in an order that mixes the families."""
    made = [_made(family, n, m) for family in FAMILIES for n, m in family.choices]
    random.Random("small functions").shuffle(made)
    return made


def _made(family: Family, n: object, m: object) -> SmallFunction:
    says, expression = family.says.format(n=n, m=m), family.expression.format(n=n, m=m)
    function: Callable[[Any], object] = eval(f"lambda {family.parameter}: {expression}")
    generator = random.Random(f"{family.name} {n} {m}")
    drawn: dict[str, object] = {}
    results: set[str] = set()  # hidden tests have several different results, so that returning a constant is wrong
    for _ in range(DRAWS):
        argument = INPUTS[family.parameter](generator)
        if len(drawn) == TESTS + 1:  # all results have been equal so far
            drawn.popitem()
        drawn[repr(argument)] = argument
        results = {repr(function(each)) for each in list(drawn.values())[1:]}
        if len(drawn) == TESTS + 1 and len(results) > 1:
            break
    assert len(results) > 1, f"{family.name} {n} {m} is constant"
    (example, *hidden) = drawn.values()
    question = (
        f"Write a Python function `{family.name}({family.parameter})` that returns {says}.\n"
        f"For example, {family.name}({example!r}) is {function(example)!r}."
    )
    solution = f"def {family.name}({family.parameter}):\n    return {expression}"
    return SmallFunction(family.name, question, solution, tuple((each, function(each)) for each in hidden))


def _values(generator: random.Random) -> list[int]:
    return [generator.randint(-12, 20) for _ in range(generator.randint(0, 9))]


def _text(generator: random.Random) -> str:
    words = (
        "".join(generator.choices("aeilnorstz", k=generator.randint(1, 7))) for _ in range(generator.randint(1, 5))
    )
    return " ".join(words)


INPUTS: dict[str, Callable[[random.Random], object]] = {
    "values": _values,
    "text": _text,
    "number": lambda generator: generator.randint(0, 120),
}
