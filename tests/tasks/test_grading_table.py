"""What counts as the right answer, as a table: completion, reference. `CORRECTED_*` rows were once graded otherwise."""

from fractions import Fraction

import pytest

from podium.config.schema import TaskConfig
from podium.tasks.math_answers.correctness import is_correct
from podium.tasks.registry import make_task
from podium.tasks.task import Prompt

CORRECTED_RIGHT = [
    # currencies
    ("\\boxed{\u00a35}", "5"),
    ("\\boxed{\u20ac5}", "5"),
    ("\\boxed{5\u20ac}", "5"),
    ("\\boxed{\u20b9500}", "500"),
    ("\\boxed{US\\$5}", "5"),
    # units
    ("\\boxed{5 \u00b0C}", "5"),
    ("\\boxed{5^\\circ C}", "5"),
    # powers of ten, both sides of an equation
    ("\\boxed{1.2e3}", "1200"),
    ("\\boxed{5 x 10^3}", "5000"),
    ("\\boxed{5=x}", "5"),
    # styles
    ("\\boxed{{\\bf 5}}", "5"),
    ("\\boxed{\\underline{5}}", "5"),
    ("\\boxed{\\color{red}{5}}", "5"),
    ("\\boxed{{\\color{red} 5}}", "5"),
    ("\\boxed{\\textcolor{red}{\\frac{1}{2}}}", "0.5"),
    # sentences
    ("Answer: 5 (five)", "5"),
    ("The answer is 25 (twenty-five).", "25"),
    ("The answer is 8, since 4+4=8 and 2", "8"),
    ("The answer is 18 dollars, which is 9 eggs at $2 each.", "18"),
    ("The answer is $\\$18.90$.", "18.90"),
    ("The answer is $11,\\! 111$.", "11111"),
]
RIGHT = [
    ("\\boxed{5 \\mathrm{m}^2}", "5"),
    ("\\boxed{5 \\text{ km/h}}", "5"),
    ("\\boxed{5 \\text{ m}}", "5"),
    ("\\boxed{5}", "5"),
    ("\\boxed{$5}", "5"),
    ("\\boxed{\\$5}", "5"),
    ("\\boxed{1,234}", "1234"),
    ("\\boxed{1{,}234}", "1234"),
    ("\\boxed{1\\,234}", "1234"),
    ("\\boxed{x=5}", "5"),
    ("\\boxed{16 - 3 = 13}", "13"),
    ("\\boxed{5 apples}", "5"),
    ("\\boxed{5\\text{ dollars}}", "5"),
    ("\\boxed{5 \\times 10^{3}}", "5000"),
    ("\\boxed{-5}", "-5"),
    ("\\boxed{\u22125}", "-5"),
    ("\\boxed{-\\$5}", "-5"),
    ("\\boxed{1 1/2}", "1.5"),
    ("\\boxed{1\\frac12}", "\\frac{3}{2}"),
    ("\\boxed{\\frac12}", "0.5"),
    ("\\boxed{\\dfrac{1}{2}}", "1/2"),
    ("\\boxed{\\frac{6}{8}}", "\\frac{3}{4}"),
    ("\\boxed{0.3333}", "1/3"),
    ("\\boxed{50\\%}", "50"),
    ("\\boxed{50}", "50\\%"),
    ("\\boxed{50 percent}", "50\\%"),
    ("The answer is 5.", "5"),
    ("The answer is **5**.", "5"),
    ("9 * 2 = 18 dollars\n#### 18", "18"),
    ("So 9 * 2 = 18 dollars every day.", "18"),
    ("5", "5"),
    ("In 2019, 200 were sold.", "200"),
    ("- 4 apples", "4"),
    ("\\boxed{\\sqrt{117}}", "3\\sqrt{13}"),
    ("\\boxed{x^2 - 1}", "(x-1)(x+1)"),
]
CORRECTED_WRONG = [
    # two numbers are not one
    ("\\boxed{1 1/2}", "11/2"),
    ("\\boxed{11/2}", "1 1/2"),
    ("\\boxed{5 6}", "56"),
    ("\\boxed{2**3}", "23"),
    ("\\boxed{5$6}", "56"),
    ("\\boxed{5 6x}", "56x"),
    # a calculation is not its result
    ("\\boxed{16-3}", "13"),
    ("\\boxed{16 - 3}", "13"),
    ("\\boxed{9*2}", "18"),
    ("\\boxed{9 \\times 2}", "18"),
    ("\\boxed{26/2}", "13"),
    ("\\boxed{\\frac{26}{2}}", "13"),
    ("\\boxed{13/1}", "13"),
    ("\\boxed{(3+4)2}", "14"),
    ("\\boxed{2^{10}}", "1024"),
    ("\\boxed{\\sqrt{25}}", "5"),
    ("16-3", "13"),
    ("16-3", "3"),
    ("So she has 16 - 3 eggs.", "3"),
    ("The answer is 16-3.", "13"),
    # one reading
    ("\\boxed{50\\%}", "0.5"),
    ("\\boxed{0.5}", "50\\%"),
    ("12 or 13", "13"),
    ("\\boxed{5 \\text{ million}}", "5"),
    ("It is 5 million.", "5"),
]
WRONG = [
    ("\\boxed{.5*60}", "30"),
    ("\\boxed{-(-5)}", "5"),
    ("\\boxed{5}", "6"),
    ("\\boxed{-5}", "5"),
    ("\\boxed{5 \\text{ or } 6}", "5"),
    ("\\boxed{5 million}", "5"),
    ("\\boxed{5k}", "5"),
    ("\\boxed{5x}", "5"),
    ("\\boxed{5!}", "5"),
    ("\\boxed{f(5)}", "5"),
    ("\\boxed{1,2345}", "12345"),
    ("\\boxed{3,5}", "3.5"),
    ("\\boxed{4 + 5}", "45"),
    ("\\boxed{0.33}", "1/3"),
    ("\\boxed{17.9999}", "18"),
    ("The answer is 8 or 9", "8"),
    ("The answer is not 8", "8"),
    ("\\boxed{5", "5"),
    ("<think>5</think>", "5"),
    ("\\boxed{q-p}", "p-q"),
]


@pytest.mark.parametrize(("completion", "reference"), CORRECTED_RIGHT + RIGHT)
def test_right_answers(completion, reference):
    assert is_correct(completion, reference)


@pytest.mark.parametrize(("completion", "reference"), CORRECTED_WRONG + WRONG)
def test_wrong_answers(completion, reference):
    assert not is_correct(completion, reference)


@pytest.mark.parametrize("task", ["gsm8k", "arithmetic", "math500", "jsonl"])
def test_every_task_with_numbers_reads_them_alike(task):
    grade = make_task(TaskConfig(name=task)).grade
    prompt = Prompt(id="0", question="?", answer="13")
    graded = [
        grade(prompt, text) for text in ("16 - 3 = 13", "\\boxed{13}", "\\boxed{16-3}", "16-3", "\\boxed{\u20ac13}")
    ]
    assert graded == [1, 1, 0, 0, 1]


def test_a_completion_is_right_for_one_number_only():
    completions = [*CORRECTED_RIGHT, *RIGHT, *CORRECTED_WRONG, *WRONG]
    numbers = ["0.5", "3", "5", "6", "11/2", "13", "1.5", "18", "23", "50", "56", "1/2", "5000", "5000000"]
    for completion, _ in completions:
        right = {Fraction(number) for number in numbers if is_correct(completion, number)}
        assert len(right) <= 1, completion
