"""Checks the graders and the generated questions of a config's own tasks, with answers whose grade a reader knows."""

import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from podium.certify.check_result import Check
from podium.config.schema import TaskConfig
from podium.tasks.registry import make_task
from podium.tasks.task import Prompt, Task

GENERATED = ("arithmetic", "calculator")
"""Tasks whose questions state what is to be computed."""
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"([0-9]+) ([-+*]) ([0-9]+)")
CHECKED = 300
"""Generated questions of a split whose answers are computed."""
STATED = (
    "{}",
    "The answer is {}.",
    r"So it is \boxed{{{}}}.",
    "12 + 7 is 19, and in the end we get {}",
    "**{}**",
    "{}\n",
)
"""How an answer may be written."""
NUMBERS: Sequence[tuple[str, str, bool]] = (
    ("1234", "1,234", True),
    ("1234", "1234.0", True),
    ("-7", "The answer is minus seven.", True),
    ("7", r"\boxed{8} is wrong, it is \boxed{7}", True),
    ("7", r"It is 7, no wait, \boxed{8}", False),
    ("7", "It is not 7.", False),
    ("7", "The answer is 8. Wait, that is wrong: the answer is 7.", True),
    ("8", "The answer is 8. Wait, that is wrong. I cannot say.", False),
    ("7", "7 or 8", False),
    ("16", r"\boxed{2^4}", False),
    ("5", "The answer is 5 apples.", True),
    ("60", "The answer is 60 km/h.", True),
    ("5000", r"\boxed{5 \times 10^3}", True),
    ("5000", r"\boxed{5 \times 10^4}", False),
    ("1.5", r"\boxed{1\frac{1}{2}}", True),
    ("1.5", r"\boxed{1.4}", False),
    ("50", r"\boxed{50\%}", True),
)
"""A right answer that is a number, an answer to grade, and whether that is right, for all tasks of mathematics."""
FORMULAS: Sequence[tuple[str, str, bool]] = (
    (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}", True),
    (r"\frac{1}{2}", r"\boxed{0.5}", True),
    (r"\frac{1}{3}", r"\boxed{0.33}", False),
    (r"3\sqrt{13}", r"\boxed{\sqrt{117}}", True),
    (r"3\sqrt{13}", r"\boxed{\sqrt{13}}", False),
    (r"x^2-1", r"\boxed{(x-1)(x+1)}", True),
    (r"x^2-1", r"\boxed{(x-1)^2}", False),
    (r"2\pi", r"\boxed{\pi \cdot 2}", True),
    (r"2\pi", r"\boxed{\pi^2}", False),
    (r"(2,3)", r"\boxed{(2, 3)}", True),
    (r"(2,3)", r"\boxed{(3, 2)}", False),
    (r"\{1,2,3\}", r"\boxed{\{3,1,2\}}", True),
    (r"\{1,2,3\}", r"\boxed{\{1,2\}}", False),
    (r"[0,1)", r"\boxed{[0,1)}", True),
    (r"[0,1)", r"\boxed{[0,1]}", False),
    (r"x=2, y=3", r"\boxed{x=2, y=3}", True),
    (r"x=2, y=3", r"\boxed{x=3, y=2}", False),
    (r"\text{even}", r"\boxed{even}", True),
    (r"\text{even}", r"\boxed{odd}", False),
    (r"\text{(C)}", r"\boxed{C}", True),
    (r"\text{(C)}", r"\boxed{B}", False),
    (r"\log_2 9", r"\boxed{2\log_2 3}", True),
    (r"5!", r"\boxed{120}", True),
    (r"|x|", r"\boxed{x}", False),
    (r"2x+4y-3=0", r"\boxed{y = -\frac12 x + \frac34}", True),
)
WORDS: Sequence[tuple[str, str, bool]] = (("Paris", "The answer is paris.", True), ("Paris", "London", False))
ADDS = {
    "question": "",
    "name": "add",
    "tests": [{"arguments": [1, n], "expected": n + 1} for n in range(4)],
}
SUMS_READ = {"question": "", "tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]}
MBPP = {
    "text": "Double it.",
    "code": "def twice(x): ...",
    "test_list": ["assert twice(2) == 4", "assert twice('a') == 'aa'"],
}
HUMAN_EVAL = {
    "prompt": 'from math import floor\n\ndef low(x):\n    """Round down."""\n',
    "entry_point": "low",
    "test": "def check(candidate):\n    assert candidate(2.5) == 2\n    assert candidate(-0.5) == -1\n",
}
CODE: Sequence[tuple[Mapping[str, object], str, float]] = (
    (ADDS, "```python\ndef add(x, y):\n    return x + y\n```", 1.0),
    (ADDS, "First\n```python\ndef add(x, y):\n    return 0\n```\nor\n```python\ndef add(x, y): return x + y\n```", 1.0),
    (ADDS, "```python\ndef add(x, y):\n    return 1 + min(y, 1)\n```", 0.5),
    (ADDS, "```python\ndef add(x, y):\n    return str(x + y)\n```", 0.0),
    (ADDS, "```python\ndef plus(x, y):\n    return x + y\n```", 0.0),
    (SUMS_READ, "```python\nprint(sum(map(int, input().split())))\n```", 1.0),
    (SUMS_READ, "```python\nprint(3)\n```", 0.5),
    (MBPP, "```python\ndef twice(x):\n    return x + x\n```", 1.0),
    (MBPP, "```python\ndef twice(x):\n    return 2 * len(x)\n```", 0.0),
    (HUMAN_EVAL, "```python\ndef low(x):\n    return floor(x)\n```", 1.0),
    (HUMAN_EVAL, "```python\ndef low(x):\n    return int(x)\n```", 0.5),
)
"""A row of a task of code, an answer to grade, and the share of its tests that it passes."""
TABLES: Mapping[str, Sequence[tuple[str, str, bool]]] = {
    "arithmetic": NUMBERS[:1],
    "calculator": NUMBERS[:1],
    "gsm8k": NUMBERS,
    "math": (*NUMBERS, *FORMULAS),
    "math500": (*NUMBERS, *FORMULAS),
    "jsonl": (*NUMBERS, *FORMULAS),
    "chat": WORDS[1:],
}


def grades_check(tasks: Sequence[TaskConfig]) -> Check:
    """Count the wrong grades of the config's tasks, and the generated questions with a wrong answer."""
    known = [(task, make_task(task)) for task in tasks if task.name in TABLES]
    return Check(
        name="grades",
        claim="known answers get their grades, and generated questions have the right answers, in one split each",
        difference=float(sum(_wrong_grades(config, task) for config, task in known) + _wrong_code(tasks))
        + sum(_wrong_questions(config, task) for config, task in known if config.name in GENERATED),
        bar=0,
        after=("environments",),
    )


def _wrong_grades(config: TaskConfig, task: Task) -> int:
    """Number of known answers that the task grades wrongly."""
    table = TABLES[config.name]
    if config.name == "jsonl" and config.options.get("match") == "text":
        table = WORDS
    cases = [*table, *(() if config.name == "chat" or table is WORDS else _stated())]
    return sum(task.grade(_prompt(known), answer) != float(right) for known, answer, right in cases)


def _wrong_code(tasks: Sequence[TaskConfig]) -> int:
    """Number of known answers in code that the config's task of code, if it has one, grades wrongly."""
    found = (make_task(each) for each in tasks if each.name == "code" and each.options.get("reward") != "all")
    task = next(found, None)
    if task is None:
        return 0
    rows = [(Prompt(id="0", question="", answer="", metadata=row), *rest) for row, *rest in CODE]
    return sum(task.grade(prompt, str(answer)) != share for prompt, answer, share in rows)


def _stated() -> Iterator[tuple[str, str, bool]]:
    """Yield whole numbers in every way of stating them, and others near them."""
    numbers = random.Random(0)
    for number in (0, 7, -3, *(numbers.randrange(10, 10**6) for _ in range(6))):
        for form in STATED:
            yield str(number), form.format(number), True
            yield str(number), form.format(number + 1), False
    yield "4", "I do not know.", False


def _prompt(known: str) -> Prompt:
    return Prompt(id="0", question="", answer=known)


def _wrong_questions(config: TaskConfig, task: Task) -> int:
    """Number of generated questions with a wrong answer or grade, or that are in both splits, or twice in one."""
    wrong = 0
    pairs: dict[str, set[tuple[str, ...]]] = {}
    asked: dict[str, set[str]] = {}
    for split in ("train", "eval"):
        prompts = task.prompts(split)
        asked[split] = {each.question for each in prompts}
        found = [EXPRESSION.search(each.question) for each in prompts]
        read = [each.groups() for each in found if each is not None]
        wrong += len(prompts) - len(set(read))
        pairs[split] = {tuple(sorted(each)) if each[1] != "-" else each for each in read}
        for prompt, (a, sign, b) in list(zip(prompts, read, strict=False))[:CHECKED]:
            value = OPERATIONS[sign](int(a), int(b))
            right = prompt.answer == str(value) and task.grade(prompt, f"It is {value}.") == 1.0
            wrong += not right or task.grade(prompt, f"It is {value + 1}.") != 0.0
    wrong += len(asked["train"] & asked["eval"])
    if config.name == "arithmetic":  # neither may the numbers of a question be those of another, turned around
        wrong += len(pairs["train"] & pairs["eval"]) + _wrong_shares(config, {s: len(task.prompts(s)) for s in pairs})
    return wrong


def _wrong_shares(config: TaskConfig, sizes: Mapping[str, int]) -> int:
    """Whether the evaluation has another share of the questions than the config says, by more than a pair."""
    share = float(str(config.options.get("held_out", 0.25)))
    return int(not -0.5 <= sizes["eval"] - share * sum(sizes.values()) <= 1.5)
