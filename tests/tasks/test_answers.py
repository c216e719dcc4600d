import json
import random
import re
from pathlib import Path

import pytest

from podium.tasks.math_answers.correctness import is_correct
from podium.tasks.math_answers.final_answer import final_answer
from podium.tasks.math_answers.number_text import read_number

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("first \\boxed{3}, then \\boxed{\\frac{1}{2}} <answer>7</answer>", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed 5", "5"),
        ("\\fbox{6}", "6"),
        ("\\boxed{12", ""),
        ("<answer>3</answer> no, <answer> 42 </answer> #### 5", "42"),
        ("<answer>42", "42"),
        ("<answer>The radius is $r = 3$ cm.</answer>", "r = 3"),
        ("9 * 2 = 18\n#### 18\nBye 3", "18"),
        ("The answer is 18. I hope it is correct, 100 percent.", "18"),
        ("**Answer:** 3.5 apples", "3.5 apples"),
        ("The final answer is: $\\frac{14}{3}$.", "\\frac{14}{3}"),
        ("The answer is $18.", "$18"),
        ("Use \\boxed to mark it. 5", None),
        ("So 3 + 4 = 7", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_box_then_the_tag_then_the_hashes_then_the_phrase(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("reference", "completion"),
    [
        ("18", "It is \\boxed{\\$18.00}"),
        ("1200", "He pays 1,200 dollars."),
        ("-3", "16 - 19 = -3"),
        ("10,\\!080", "\\boxed{10080}"),
        ("\\frac{14}{3}", "The answer is 14/3."),
        ("\\frac{14}{3}", "\\boxed{4\\frac{2}{3}}"),
        ("0.5", "<answer>\\frac{1}{2}</answer>"),
        ("18", "<think>it is 20</think> 18"),
        ("p - q", "p-q"),
        ("p - q", "\\boxed{-q + p}"),
        ("3\\sqrt{13}", "\\boxed{\\sqrt{117}}"),
        ("3\\sqrt{13}", "The answer is 3\u221a13"),
        ("2\\pi", "\\boxed{2\u03c0}"),
        ("2^{10}", "\\boxed{1024}"),
        ("x=5", "\\boxed{5}"),
        ("5", "\\boxed{x = 5}"),
        ("y = 2x + 3", "\\boxed{2x+3}"),
        ("(a+5)(b+2)", "\\boxed{(b+2)(a+5)}"),
        ("1,-2", "\\boxed{-2, 1}"),
        ("(3,4]", "\\boxed{\\left( 3, 4 \\right]}"),
        (
            "\\begin{pmatrix} -1/3 \\\\ 2/3 \\end{pmatrix}",
            "\\boxed{\\begin{pmatrix}-\\frac13\\\\ \\frac23\\end{pmatrix}}",
        ),
        ("\\text{Evelyn}", "\\boxed{evelyn}"),
        ("\\text{(C)}", "\\boxed{C}"),
        ("\\text{even}", "The answer is even."),
        ("52_8", "\\boxed{52_{8}}"),
        ("90^\\circ", "\\boxed{90}"),
        ("x^2", "The answer is x\u00b2."),
        ("12", "\u0661\u0662"),
    ],
)
def test_equal_answers_are_correct_however_they_are_written(reference, completion):
    assert is_correct(completion, reference)


@pytest.mark.parametrize(
    ("reference", "completion"),
    [
        ("200", "1,200"),
        ("3", "-3"),
        ("18", "\\boxed{18"),
        ("18", "\\boxed{}"),
        ("18", "18, so \\boxed{19}"),
        ("5", "\\boxed{5 \\text{ or } 6}"),
        ("5", "<answer>5 or 6</answer>"),
        ("3", "\\boxed{3 million}"),
        ("18", "<think>18</think>"),
        ("52_8", "\\boxed{52}"),
        ("52_8", "\\boxed{52_7}"),
        ("\\text{east}", "\\boxed{seat}"),
        ("\\text{(C)}", "\\boxed{B}"),
        ("p - q", "\\boxed{q - p}"),
        ("(3,4]", "\\boxed{(3,4)}"),
        ("2k", "\\boxed{2}"),
        ("x=5", "\\boxed{6}"),
        ("12", "\u0661\u0663"),
        ("5", ""),
    ],
)
def test_different_answers_are_wrong(reference, completion):
    assert not is_correct(completion, reference)


def solutions(name: str) -> list[str]:
    path = DATA / name / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/{name}")
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()]


def references(name: str) -> list[str]:
    return [solution.rpartition("####")[2].strip() for solution in solutions(name)]


def test_every_gsm8k_answer_equals_itself_and_no_different_number():
    answers = references("gsm8k")
    assert len(answers) == 1319
    forms = ["\\boxed{{{}}}", "So she has {} eggs.", "#### {}", "<answer>${}</answer>", "The answer is {}."]
    assert sum(is_correct(form.format(answer), answer) for answer in answers for form in forms) == 5 * 1319
    shuffled = random.Random(0).sample(answers, len(answers))
    different = [
        other if read_number(other) != read_number(answer) else f"{other}1"
        for answer, other in zip(answers, shuffled, strict=True)
    ]
    pairs = list(zip(answers, different, strict=True))
    assert sum(is_correct(form.format(other), answer) for answer, other in pairs for form in forms) == 0


def test_no_last_calculation_of_a_gsm8k_solution_counts_as_its_result():
    annotation = re.compile(r"<<([^<>=]*[-+*/][^<>=]*)=[^<>]*>>.*?####(.*)", re.DOTALL)
    found = [annotation.search(solution[solution.rfind("<<") :]) for solution in solutions("gsm8k") if "<<" in solution]
    calculations = [(match[1], match[2].strip()) for match in found if match]
    assert len(calculations) > 1_200
    assert [pair for pair in calculations if is_correct(f"\\boxed{{{pair[0]}}}", pair[1])] == []


def test_every_math500_answer_equals_itself_and_none_a_shuffled_other():
    answers = references("math500")
    assert len(answers) == 500
    forms = ["Therefore \\boxed{{{}}}.", "The answer is ${}$.", "So the final answer is {}.", "<answer>${}$</answer>"]
    assert [answer for answer in answers for form in forms if not is_correct(form.format(answer), answer)] == []
    shuffled = random.Random(0).sample(answers, len(answers))
    spelling = re.compile(r"\^\\circ|[{}\s]|d(?=frac)|\\!|\\\$")
    pairs = [
        (answer, other)
        for answer, other in zip(answers, shuffled, strict=True)
        if spelling.sub("", answer) != spelling.sub("", other)
    ]
    assert len(pairs) > 480
    assert [pair for pair in pairs if is_correct(f"\\boxed{{{pair[1]}}}", pair[0])] == []


def test_every_math500_answer_equals_itself_also_by_its_meaning():
    spellings = (("\\frac", "\\dfrac"), ("(", "\\left("), (")", "\\right)"), (" ", "\\, "), ("\\sqrt{", "\\sqrt {"))
    for answer in references("math500"):
        other = answer
        for old, new in spellings:
            other = other.replace(old, new) if "\\left" not in answer and "\\\\" not in answer else other
        assert is_correct(f"\\boxed{{{other}}}", answer), (answer, other)


def test_every_solution_of_math500_and_gsm8k_is_a_right_answer():
    path = DATA / "math500" / "test.jsonl"
    if not path.is_file():
        pytest.skip("needs ../shared/data/math500")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["answer"] for row in rows if not is_correct(row["solution"], row["answer"])] == []
    pairs = zip(solutions("gsm8k"), references("gsm8k"), strict=True)
    assert [answer for solution, answer in pairs if not is_correct(solution, answer)] == []
