import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from podium.config.load import load
from podium.config.schema import TaskConfig
from podium.tasks.games.arithmetic import MAX_PAIRS, Arithmetic
from podium.tasks.registry import make_task
from podium.tasks.task import Prompt, TaskSource

ROOT = Path(__file__).parents[2]


def make(**options) -> Arithmetic:
    return Arithmetic(TaskSource(), **options)


def pairs(prompts: Sequence[Prompt]) -> set[tuple[str, ...]]:
    """Operator and operands of each question, the operands in order of size."""
    expressions = (re.search(r"(\d+) ([-+*]) (\d+)", prompt.question) for prompt in prompts)
    return {(found[2], *sorted((found[1], found[3]))) for found in expressions if found}


def test_one_digit_sums_are_81_of_which_21_are_held_out():
    task = make()
    train, held_out = task.prompts("train"), task.prompts("eval")
    assert (len(train), len(held_out)) == (60, 21)
    questions = {prompt.question for prompt in [*train, *held_out]}
    assert questions == {f"What is {a} + {b}? Answer with only the number." for a in range(1, 10) for b in range(1, 10)}


def test_the_demo_holds_out_at_least_45_sums():
    (config,) = load([ROOT / "configs" / "demo.yaml"], [], {}).config.tasks
    task = make_task(config)
    assert (len(task.prompts("train")), len(task.prompts("eval"))) == (32, 49)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.6, 0.9])
@pytest.mark.parametrize(("digits", "operation"), [(1, "add"), (1, "mul"), (1, "sub"), (2, "add"), (3, "mul")])
def test_no_held_out_question_has_its_mirror_image_in_training(share, digits, operation):
    task = make(digits=digits, operations=[operation], held_out=share)
    train, held_out = task.prompts("train"), task.prompts("eval")
    assert not pairs(train) & pairs(held_out)
    assert abs(len(held_out) - share * (len(train) + len(held_out))) <= 1.5


def test_the_held_out_questions_never_change():
    assert [prompt.id for prompt in make().prompts("eval")[:3]] == RECORDED
    assert make().prompts("eval") == make().prompts("eval")


RECORDED = ["arithmetic/eval/9+5", "arithmetic/eval/2+4", "arithmetic/eval/3+1"]  # a change makes scores incomparable


@pytest.mark.parametrize("digits", [1, 2, 3, 12])
@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_every_answer_is_right_and_no_question_is_in_both_splits(digits, operation):
    task = make(digits=digits, operations=[operation])
    train, held_out = task.prompts("train"), task.prompts("eval")
    assert not {prompt.question for prompt in train} & {prompt.question for prompt in held_out}
    assert len(train) + len(held_out) <= MAX_PAIRS
    assert len({prompt.id for prompt in train}) == len(train)
    for prompt in [*train[:300], *held_out[:300]]:
        found = re.search(r"(\d+) ([-+*]) (\d+)", prompt.question)
        assert found
        a, b = int(found[1]), int(found[3])
        assert int(prompt.answer) == {"+": a + b, "-": a - b, "*": a * b}[found[2]] >= 0
        assert len(found[1]) == digits


def test_operations_are_mixed_in_both_splits():
    task = make(digits=2, operations=["add", "sub", "mul"])
    for split in ("train", "eval"):
        signs = {prompt.question.split()[3] for prompt in task.prompts(split)}
        assert signs == {"+", "-", "*"}


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("12", "12", 1),
        ("12", "7 + 5 = 12.", 1),
        ("12", "**12**", 1),
        ("12", "12.0", 1),
        ("1200", "It is 1,200", 1),
        ("200", "It is 1,200", 0),
        ("-3", "-3", 1),
        ("-3", "\u22123", 1),
        ("3", "-3", 0),
        ("-3", "5-3", 0),
        ("12", "12 or 13", 0),
        ("13", "12 or 13", 0),
        ("12", "7 + 5", 0),
        ("5", "7 + 5", 0),
        ("12", "\\boxed{12} for 3 bags", 1),
        ("12", "\\boxed{7+5}", 0),
        ("12", "twelve", 0),
        ("12", "", 0),
    ],
)
def test_the_number_that_is_stated_or_ends_the_text_decides(answer, completion, reward):
    assert make().grade(Prompt(id="0", question="?", answer=answer), completion) == reward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": 0}, "options.digits: Input should be greater than or equal to 1, got 0"),
        ({"digits": "many"}, "options.digits: Input should be a valid integer, got 'many'"),
        ({"operations": ["add", "div"]}, r"options.operations\[1\]: Input should be 'add', 'sub' or 'mul', got 'div'"),
        ({"operations": []}, "options.operations: .* at least 1 item"),
        ({"held_out": 0.95}, "options.held_out: Input should be less than or equal to 0.9, got 0.95"),
        ({"digit": 2}, "options.digit: unknown option; did you mean 'digits'?"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make_task(TaskConfig(name="arithmetic", options=options))


def test_a_path_is_an_error_because_nothing_is_read():
    with pytest.raises(ValueError, match="the questions are generated, not read"):
        make_task(TaskConfig(name="arithmetic", path="data.jsonl"))
