import subprocess
import sys
from fractions import Fraction

import pytest
from hostile import hostile_texts
from hypothesis import given
from hypothesis import strategies as st

from podium.config.schema import GradingConfig, TaskConfig
from podium.tasks.grading import Grader
from podium.tasks.math_answers import correctness
from podium.tasks.math_answers.equality import same_answer
from podium.tasks.math_answers.formula import Number, read_formula
from podium.tasks.math_answers.formula_values import constant
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Graded, Prompt

REFERENCES = ["18", "-1200", "\\frac{3}{4}", "p - q", "\\text{east}", "(3,4]", "x=5", "3\\sqrt{13}", "0.5", "1+2i"]
LIMIT_S = 3.0  # of the clock: the machine may have other work


def answered(texts: list[str]) -> list[tuple[TaskPrompt, Graded]]:
    return [
        (
            TaskPrompt(
                task=0,
                prompt=Prompt(id=str(i), question="?", answer=REFERENCES[i % len(REFERENCES)]),
                system_prompt=None,
            ),
            Graded(text=text, tokens=tuple(range(len(text)))),
        )
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_hostile_texts_are_graded_within_their_limits(count):
    grader = Grader([TaskConfig(name="gsm8k")], GradingConfig(workers=2, timeout_s=LIMIT_S), max_new_tokens=1024)
    try:
        rewards = grader.grade(answered(hostile_texts(count, seed=0)))
    finally:
        grader.close()
    assert len(rewards) == count
    stopped = sum(reward.timed_out for reward in rewards)
    assert stopped < count // 100
    assert all(reward.parts["correct"] == 0 for reward in rewards if reward.timed_out)


def test_what_a_computer_algebra_system_would_multiply_out_is_graded_like_any_other():
    slow = "\\boxed{(a+b+c+d+x+y)^{40}}"
    texts = ["\\boxed{x+5}", slow, "x + 5", slow, "6"]
    items = [
        (TaskPrompt(task=0, prompt=Prompt(id="0", question="?", answer="x+5"), system_prompt=None), text)
        for text in texts
    ]
    grader = Grader([TaskConfig(name="gsm8k")], GradingConfig(workers=1, timeout_s=LIMIT_S), max_new_tokens=8)
    try:
        rewards = grader.grade([(p, Graded(text=t, tokens=(0,))) for p, t in items])
    finally:
        grader.close()
    assert [reward.total for reward in rewards] == [1, 0, 1, 0, 0]
    assert not any(reward.timed_out for reward in rewards)


AUDITED = r"""
import os, random, signal, sys
import hostile
from podium.tasks.math_answers import correctness as answers

grading = False

def audit(event, arguments):
    global grading
    if grading and event.startswith(("compile", "exec", "open", "import", "os.", "subprocess.", "socket.", "ctypes.")):
        grading = False
        print(f"{event} {arguments!r}"[:500], file=sys.stderr, flush=True)
        os._exit(7)

class Late(BaseException):
    pass

def late(*_):
    raise Late

signal.signal(signal.SIGALRM, late)
for formula in (r"\sin 1+\ln 2+n!+\binom{n}{2}", r"\arctan x^{1/3}"):  # what mpmath imports later
    answers.is_correct(rf"\boxed{{{formula}}}", formula + "+1")
texts = sorted({hostile._code(random.Random(i)) for i in range(200)})
texts += [f"{a}+{b}" for a in texts for b in ("1", "x_{1}")] + hostile.hostile_texts(100, seed=1)
sys.addaudithook(audit)
for text in texts:
    for frame in ("{}", "\\boxed{{{}}}", "${}$"):
        for reference in ("18", "x+5"):
            signal.setitimer(signal.ITIMER_REAL, 1)
            try:
                grading = True
                answers.is_correct(frame.format(text), reference)
            except Late:
                pass
            finally:
                grading = False
                signal.setitimer(signal.ITIMER_REAL, 0)
print("done", len(texts))
"""


def test_no_text_is_executed_or_opens_a_file(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AUDITED],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith("done")
    assert list(tmp_path.iterdir()) == []


UNBOUNDED = [
    "9^{9^{9^{9}}}", "9**9**9**9", "(99!)!", "2^{999999}+1", "e^{e^{e^{e^{10}}}}", "{" * 50 + "1" + "}" * 50,
    "9999999!", "\\sin(10^{9999})", "\\binom{10^9}{5 \\cdot 10^8}", "(1+1/(10^{400}+1))^{10^{5000}}", "10^{500}+\\pi",
]  # fmt: skip


@pytest.mark.parametrize("answer", UNBOUNDED)
def test_what_would_fill_memory_or_time_has_no_value_and_equals_only_itself(answer):
    formula = read_formula(answer)
    assert formula is None or constant(formula) is None
    assert not correctness.is_correct(f"\\boxed{{{answer}}}", "p - q")
    assert not correctness.is_correct(f"\\boxed{{{answer}}}", answer + "+1")
    assert correctness.is_correct(f"\\boxed{{{answer}}}", answer)


PIECES = [
    "\\boxed{", "\\boxed 5, ", "\\boxed{5} or ", "$", "$5$ ", "wait, ", "no, it ", "that is wrong ", "answer is ",
    "not ", "not the ", "n't think that ", "1 ", "1 000 ", "12", "1/", "5,", "5 or ", "\n5", "\\frac{1}{", "(", "{",
    "\\over", "9!", "e^", "\\sqrt{", "2^", "\\pm", "|", "\\{", "x=", "5 km ", "five ", "one hundred ", "--",
    "\\left(", "*", "\t", "a'", "(after ", "3 hours ", "3 hours 30 minutes, or ", "\\text{", "A. ", "(A) ",
    "\u7b54\u6848\u662f", "\u0663", "\u00bd", "0.33", "3\\overline", "<answer>", "</answer> or ", "#### ", "1.", "\\ ",
]  # fmt: skip


@pytest.mark.parametrize("length", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("reference", ["18", "3\\sqrt{13}", "C"])
def test_many_characters_of_anything_are_wrong(reference, length):
    """That takes a second or ten for all of them; if time grew with the square of the length, it would be hours."""
    texts = [piece * (length // len(piece)) for piece in PIECES]
    assert [text[:20] for text in texts if correctness.is_correct(text, reference)] == []
    assert [text[:20] for text in texts if correctness.is_correct(f"The answer is {text}", reference)] == []


@given(st.text(alphabet="0123456789xe!^{}()+-*/\\frac sqrtlogni|,.=<>_pi", max_size=80))
def test_no_text_makes_reading_or_comparing_formulas_fail(text):
    formula = read_formula(text)
    if formula is not None:
        assert same_answer(formula, formula)
        same_answer(formula, Number(Fraction(3)))
        same_answer(Number(Fraction(3)), formula)
