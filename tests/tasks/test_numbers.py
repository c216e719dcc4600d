from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.tasks.math_answers.number_text import last_number, read_number, same_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("1,200", 1200),
        ("-1,234,567.50", Fraction(-2469135, 2)),
        ("10,\\!080", 10080),
        ("11,\\! 111,\\! 111,\\! 100", 11111111100),
        ("2{,}200", 2200),
        ("+3", 3),
        ("\u22127", -7),
        ("- 5", -5),
        (".35625", Fraction(35625, 100000)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\frac{35}{9}", Fraction(-35, 9)),
        ("\\dfrac 59", Fraction(5, 9)),
        ("\\frac9{19}", Fraction(9, 19)),
        ("\\frac{270}7\\text{ degrees}", Fraction(270, 7)),
        ("137 \\frac{1}{2}", Fraction(275, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("3/4", Fraction(3, 4)),
        ("\\$18.90", Fraction(189, 10)),
        ("-$5", -5),
        ("$18 per day", 18),
        ("90^\\circ", 90),
        ("864 \\mbox{ inches}^2", 864),
        ("15 cm^2", 15),
        ("5kg", 5),
        ("5.4 \\text{ cents}", Fraction(27, 5)),
        ("x = 5", 5),
        ("16 - 3 = 13", 13),
        ("9 \\times 2 = 18 dollars", 18),
        ("about 60 miles/hour", 60),
        ("3 million", 3_000_000),
        ("\u0661\u0662", 12),
        ("two", 2),
        ("minus forty-two", -42),
    ],
)
def test_an_answer_that_is_a_number_is_read_exactly(text, value):
    number = read_number(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "2k",
        "3R^2",
        "1,-2",
        "3, 5, 7",
        "5 or 6",
        "2 squared",
        "5 x",
        "8 \\pi",
        "3\\sqrt{13}",
        "52_8",
        "(3,4]",
        "5x - 7y + 11z + 4 = 0",
        "y = -2x",
        "1/0",
        "\\frac{1}{0}",
        "9" * 500,
    ],
)
def test_an_answer_that_is_more_or_less_than_a_number_is_none(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("So the total is 1,200 dollars.", 1200),
        ("16-3 = 13", 13),
        ("it is -3", -3),
        ("= - 3", -3),
        ("(-3)", -3),
        ("- 4 apples", 4),
        ("7.5.", Fraction(15, 2)),
        ("18 \u2014 she sells them", 18),
        ("\\( 9 \\times 2 = 18 \\)", 18),
        ("**18** eggs", 18),
        ("of 100, 200 are", 200),
        ("7\nUser 2", 2),
        ("-1,000", -1000),
        ("\u0663", 3),
        ("5 million", 5_000_000),
    ],
)
def test_the_last_number_has_its_sign_and_separators(text, value):
    number = last_number(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    [
        "", "none", "x2", ".", "16-3", "16 - 3", "so 2 * 3 eggs", "18 eggs - 3", "3,5,7", "pages 3\u20135",
        "5 or 6", "y - 4", "5 + 3 = ?",
    ],
)  # fmt: skip
def test_a_text_that_ends_in_no_number_or_in_a_calculation_has_no_last_number(text):
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("50", "50%", True),
        ("0.5", "50%", False),
        ("50%", "0.5", False),
        ("0.5", "0.5%", True),
        ("50\\%", "50", True),
        ("50%", "5%", False),
        ("5", "50%", False),
        ("1/3", "0.3333", True),
        ("2/3", "0.6667", True),
        ("1/3", "0.33", False),
        ("0.5", "1/2", True),
        ("18", "18.00", True),
        ("18", "17.9999", False),
        ("0.3333", "0.3334", False),
    ],
)
def test_numbers_are_equal_exactly_or_by_the_rule_for_rounding_and_percent_is_a_unit(reference, answer, equal):
    expected, number = read_number(reference), read_number(answer)
    assert expected is not None
    assert number is not None
    assert same_number(expected, number) is equal


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_read_back_with_and_without_separators(value):
    for text in (str(value), f"{value:,}", f"the result is {value:,}."):
        number = last_number(text)
        assert number is not None
        assert number.value == value


@given(st.text(max_size=300))
def test_no_text_makes_reading_numbers_fail(text):
    last_number(text)
    read_number(text)
