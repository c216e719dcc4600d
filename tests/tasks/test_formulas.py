r"""The grammar of answers, values of formulas, units, and numbers in words. Expected values are by hand."""

from fractions import Fraction

import pytest

from podium.tasks.math_answers.correctness import is_correct
from podium.tasks.math_answers.equality import same_answer
from podium.tasks.math_answers.formula import Apply, Number, Symbol, read_formula
from podium.tasks.math_answers.formula_values import constant, same_value
from podium.tasks.math_answers.number_words import in_figures
from podium.tasks.math_answers.units import read_unit, split_unit

X = Symbol("x")


def number(value: int) -> Number:
    return Number(Fraction(value))


def relation(sign: str, end: int) -> Apply:
    return Apply("chain", (Symbol(sign), X, number(end)))


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("2x", Apply("*", (number(2), X))),
        ("-x^2", Apply("-", (Apply("^", (X, number(2))),))),
        ("1/2x", Apply("*", (Apply("/", (number(1), number(2))), X))),
        ("1\\frac{1}{2}", Apply("+", (number(1), Apply("frac", (number(1), number(2)))))),
        ("\\sin 2x", Apply("sin", (Apply("*", (number(2), X)),))),
        ("\\sin^2 x", Apply("^", (Apply("sin", (X,)), number(2)))),
        ("\\sin^{-1} x", Apply("arcsin", (X,))),
        ("\\log_2 x", Apply("log", (number(2), X))),
        ("sqrt(x)", Apply("root", (number(2), X))),
        ("|x|", Apply("abs", (X,))),
        ("(1,x]", Apply("(]", (number(1), X))),
        ("1, x \\text{ and } 2", Apply("all", (number(1), X, number(2)))),
        ("x > 3 or x < 1", Apply("any", (relation(">", 3), relation("<", 1)))),
        ("\\{1,x\\}", Apply("set", (number(1), X))),
        ("1:x", Apply("ratio", (number(1), X))),
        ("1 < x \\le 3", Apply("chain", (Symbol("< <="), number(1), X, number(3)))),
        ("a_{n+1}", Symbol("a_n+1")),
        ("1,234", number(1234)),
        ("(1,234)", Apply("()", (number(1), number(234)))),
    ],
)  # fmt: skip
def test_a_formula_is_read_as_its_tree(text, tree):
    assert read_formula(text) == tree


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5 6",
        "2 +",
        "(1",
        "1)",
        "\\frac{1}",
        "\\int x dx",
        "5!!",
        "a b c $ # d",
        "x" * 501,
        "+".join("1" * 200),
        "(" * 40,
    ],
)
def test_what_is_outside_of_the_grammar_is_no_formula(text):
    assert read_formula(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2^{-3}", Fraction(1, 8)),
        ("(-8)^{1/3}", -2),
        ("\\sqrt{\\frac{4}{9}}", Fraction(2, 3)),
        ("5!", 120),
        ("\\binom{5}{2}", 10),
        ("\\log_2 8", 3),
        ("\\lfloor -2.5 \\rfloor", -3),
        ("e^{i\\pi}", -1),
        ("\\sin 30^\\circ", Fraction(1, 2)),
        ("\\tan^{-1} 1 - \\frac{\\pi}{4}", 0),
        ("50\\% \\cdot 4", 2),
    ],
)
def test_the_value_of_a_formula(text, value):
    formula, expected = read_formula(text), Number(Fraction(value))
    assert formula is not None
    assert same_value(formula, expected)
    assert not same_value(formula, Number(Fraction(value) + Fraction(1, 10**30)))


@pytest.mark.parametrize("text", ["1/0", "0^0", "\\log 0", "(-1)!", "x", "10^{500}+\\pi", "4000!+1", "\\frac{1}{1-1}"])
def test_a_formula_that_has_no_value(text):
    formula = read_formula(text)
    assert formula is not None
    assert constant(formula) is None


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("x^2-1", "(x-1)(x+1)", True),
        ("x^2-1", "(x-1)^2", False),
        ("|x|", "x", False),
        ("\\ln x^2", "2\\ln x", True),  # where both are real
        ("\\cos n\\pi", "(-1)^n", True),
        ("2y = 4x", "y = 2x", True),
        ("x = x", "y = 2x", False),
        ("-x < -3", "x > 3", True),
        ("-x < 3", "x > 3", False),
        ("1 \\pm \\sqrt 2", "1+\\sqrt 2, 1-\\sqrt 2", True),
        ("x=1, y=2", "(1,2)", True),
        ("x=1, y=2", "(2,1)", False),
        ("6 cm, 8 cm", "60 mm, 80 mm", True),
        ("6 cm, 8 cm", "6 m, 8 m", False),
        ("(2, 3)", "(2, 6/2)", False),  # a calculation
    ],
)
def test_whether_two_formulas_are_equal(first, second, equal):
    expected, found = read_formula(first), read_formula(second)
    assert expected is not None
    assert found is not None
    assert same_answer(expected, found) is equal


@pytest.mark.parametrize(
    ("text", "dimensions", "factor"),
    [
        ("km", {"length": 1}, 1_000),
        ("km/h", {"length": 1, "time": -1}, Fraction(1_000, 3_600)),
        ("kilometers per hour", {"length": 1, "time": -1}, Fraction(1_000, 3_600)),
        ("m/s^2", {"length": 1, "time": -2}, 1),
        ("m s^{-2}", {"length": 1, "time": -2}, 1),
        ("square feet", {"length": 2}, Fraction("0.3048") ** 2),
        ("cm^3", {"length": 3}, Fraction(1, 10**6)),
        ("mL", {"length": 3}, Fraction(1, 10**6)),
        ("cents", {"dollars": 1}, Fraction(1, 100)),
    ],
)
def test_a_unit_has_dimensions_and_a_size(text, dimensions, factor):
    unit = read_unit(text)
    assert unit is not None
    assert dict(unit.dimensions) == dimensions
    assert unit.factor == factor


@pytest.mark.parametrize("text", ["", "apples", "km apples", "/", "^2", "square", "x"])
def test_other_words_are_no_unit(text):
    assert read_unit(text) is None


@pytest.mark.parametrize(
    ("text", "rest"),
    [(" g of sugar", " of sugar"), (" m/s, as", ", as"), ("m", "m"), (" x", " x"), ("cm", ""), (" apples", " apples")],
)
def test_a_letter_is_a_unit_only_behind_a_space(text, rest):
    unit, left = split_unit(text)
    assert left == rest
    assert (unit is None) is (rest == text)


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        ("forty-two apples", "42 apples"),
        ("one hundred and twenty-five", "125"),
        ("Two Thousand five hundred six", "2506"),
        ("a thousand", "1000"),
        ("five or six", "5 or 6"),
        ("two five", "two five"),
        ("someone", "someone"),
        ("a fifth", "a fifth"),
    ],
)
def test_numbers_in_words_are_written_in_figures(words, figures):
    assert in_figures(words) == figures


@pytest.mark.parametrize(
    "text", ["x+" * 99 + "x", "2x" * 99, "x<" * 99 + "x", "\\pm x+" * 66 + "x", "1:" * 99 + "1", "-" * 24 + "x"]
)
def test_the_deepest_formulas_are_compared_far_down_the_stack(text):
    def deep(frames: int) -> bool:
        return deep(frames - 1) if frames else is_correct(f"\\boxed{{{text}}}", "x + 1")

    assert read_formula(text) is not None
    assert not deep(250)
