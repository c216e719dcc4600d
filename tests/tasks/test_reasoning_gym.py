import sys

import pytest

from podium.config.schema import GradingConfig, TaskConfig
from podium.tasks.grading import Grader
from podium.tasks.mixture import TaskPrompt
from podium.tasks.registry import make_task
from podium.tasks.task import Graded


def config(**options) -> TaskConfig:
    return TaskConfig(name="reasoning_gym", options={"size": 50, "eval_size": 10, **options})


@pytest.fixture
def installed():
    return pytest.importorskip("reasoning_gym", reason="needs the extra gym")


def test_without_the_package_the_error_gives_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'podium-rl\[gym\]'"):
        make_task(config(dataset="chain_sum"))


def test_puzzles_are_the_same_every_time_and_held_out_ones_are_not_trained_on(installed):
    splits = [[make_task(config(dataset="chain_sum")).prompts(split) for split in ("train", "eval")] for _ in range(2)]
    assert splits[0] == splits[1]
    train, held_out = splits[0]
    assert len(held_out) == 10
    assert not {prompt.question for prompt in train} & {prompt.question for prompt in held_out}


def test_the_generators_scorer_grades_in_a_worker(installed):
    task = config(dataset="chain_sum")
    prompt = make_task(task).prompts("eval")[0]
    texts = [f"<think>1</think><answer>{prompt.answer}</answer>", prompt.answer, "<answer>x</answer>", "\x00", ""]
    grader = Grader([task], GradingConfig(workers=1), max_new_tokens=64)
    try:
        rewards = grader.grade(
            [
                (
                    TaskPrompt(task=0, prompt=prompt, system_prompt=None),
                    Graded(text=text, tokens=(0,)),
                )
                for text in texts
            ]
        )
    finally:
        grader.close()
    assert [reward.total == 1 for reward in rewards] == [True, True, False, False, False]
    assert not any(reward.timed_out for reward in rewards)


def test_a_scorer_that_fails_on_the_reference_too_is_a_bug(installed, monkeypatch):
    task = make_task(config(dataset="chain_sum"))
    prompt = task.prompts("eval")[0]

    def score(answer, entry):
        if answer == "odd" or broken:
            raise ZeroDivisionError
        return 1.0

    broken = False
    monkeypatch.setattr(task._eval, "score_answer", score)
    assert task.grade(prompt, "odd") == 0
    broken = True
    with pytest.raises(ZeroDivisionError):
        task.grade(prompt, "odd")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "options.dataset: unknown data set 'chain_sums'; did you mean 'chain_sum'"),
        ({}, "options.dataset: must be set"),
        (
            {"dataset": "chain_sum", "config": {"max_term": 3}},
            "chain_sum has no 'max_term'; did you mean .*'max_terms'",
        ),
        ({"dataset": "chain_sum", "config": {"min_terms": 9, "max_terms": 3}}, "options.config: chain_sum rejects"),
    ],
)
def test_wrong_options_are_errors(installed, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(config(**options))
