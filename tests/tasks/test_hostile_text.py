import subprocess
import sys
import time

import pytest
from hostile import hostile_texts

from podium.config.schema import GradingConfig, TaskConfig
from podium.tasks import answers
from podium.tasks.grading import Grader
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Graded, Prompt

REFERENCES = ["18", "-1200", "\\frac{3}{4}", "p - q", "\\text{east}", "(3,4]", "x=5", "3\\sqrt{13}", "0.5", "1+2i"]
LIMIT_S = 3.0  # of the clock: the machine may have other work
START_S = 20.0  # generous: what a replaced worker takes to import sympy on a busy machine


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
        start = time.monotonic()
        rewards = grader.grade(answered(hostile_texts(count, seed=0)))
        took_s = time.monotonic() - start
    finally:
        grader.close()
    assert len(rewards) == count
    stopped = sum(reward.timed_out for reward in rewards)
    assert stopped < count // 100
    assert took_s < 120 + stopped * (LIMIT_S + START_S)
    assert all(reward.parts["correct"] == 0 for reward in rewards if reward.timed_out)


def test_the_time_limit_holds_for_each_answer_and_the_others_are_graded():
    slow = "\\boxed{(a+b+c+d+x+y)^{40}}"  # is multiplied out
    texts = ["\\boxed{x+5}", slow, "x + 5", slow, "6"]
    items = [
        (TaskPrompt(task=0, prompt=Prompt(id="0", question="?", answer="x+5"), system_prompt=None), text)
        for text in texts
    ]
    grader = Grader([TaskConfig(name="gsm8k")], GradingConfig(workers=1, timeout_s=1.5), max_new_tokens=8)
    try:
        rewards = grader.grade([(p, Graded(text=t, tokens=(0,))) for p, t in items])
    finally:
        grader.close()
    assert [reward.total for reward in rewards] == [1, 0, 1, 0, 0]
    assert [reward.timed_out for reward in rewards] == [False, True, False, True, False]


AUDITED = r"""
import os, random, re, signal, sys, sysconfig
import sympy.physics.units  # evaluates the names of its units when it is imported
import hostile
from podium.tasks import answers, symbolic

PACKAGES = sysconfig.get_paths()["purelib"]
NUMBER = re.compile(r"\s*(Integer|Float|Rational)\s*\(\s*['\"]?[0-9.e+-]*['\"]?\s*\)\s*")
grading = False

def allowed(event, arguments):
    if event == "compile":  # sympy makes numbers by evaluating them; nothing else may get there
        source = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0])
        own = source == "from sympy import *" or source.startswith("def monomial_")  # templates of sympy
        return own or NUMBER.fullmatch(source)
    if event == "exec":
        return arguments[0].co_filename == "<string>" or arguments[0].co_filename.startswith(PACKAGES)
    if event == "open":
        return arguments[1] == "r" and str(arguments[0]).startswith(PACKAGES)
    return not event.startswith(("os.", "subprocess.", "socket.", "ctypes.", "shutil.")) or event in ("os.listdir",)

def audit(event, arguments):
    global grading
    if grading and not allowed(event, arguments):
        grading = False
        print(f"{event} {arguments!r}"[:500], file=sys.stderr, flush=True)
        os._exit(7)

class Late(BaseException):
    pass

def late(*_):
    raise Late

signal.signal(signal.SIGALRM, late)
symbolic.load()
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
                symbolic._parse.__wrapped__(text[:80])  # also what the guard refuses
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


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^{9}}}", "9**9**9**9", "(99!)!", "2^{999999}", "(x+y+z)^{999}", "{" * 50 + "1" + "}" * 50, "1" * 100],
)
def test_what_would_fill_memory_or_time_is_refused_before_it_is_read(answer, monkeypatch):
    def fail(formula):
        raise AssertionError(f"{formula} was read")

    monkeypatch.setattr(answers.symbolic, "_parse", fail)
    assert not answers.is_correct(f"\\boxed{{{answer}}}", "p - q")
