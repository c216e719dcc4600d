import pytest

from podium.config.schema import TaskConfig
from podium.tasks.rewards import (
    RewardOptions,
    cosine_length_reward,
    format_reward,
    length_reward,
    make_reward,
    repetition_reward,
    tags_reward,
)
from podium.tasks.task import Graded

LIMITS = RewardOptions(max_new_tokens=100, overlong_buffer_tokens=20)
WELL_FORMED = "<think>\nhm </think>\n<answer> 4 </answer>\n"


def graded(text: str = "", num_tokens: int = 1) -> Graded:
    return Graded(text=text, tokens=(0,) * num_tokens)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (WELL_FORMED, 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a</think> so <answer>4</answer>", 0),
        ("Sure. <think>a</think><answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer>!", 0),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("<think><answer></think></answer>", 0),
        ("</think><think></answer><answer>", 0),
        ("<think>a</think><answer>4", 0),
        ("", 0),
    ],
)
def test_format_is_a_thought_and_then_an_answer_and_nothing_else(text, reward):
    assert format_reward(graded(text), LIMITS) == reward


@pytest.mark.parametrize(
    ("text", "reward"), [("", 0), ("<think>", 0.25), ("<think></think>", 0.5), (WELL_FORMED, 1), (WELL_FORMED * 2, 0)]
)
def test_tags_give_a_quarter_for_each_tag_that_occurs_once(text, reward):
    assert tags_reward(graded(text), LIMITS) == reward


@pytest.mark.parametrize(("num_tokens", "reward"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (130, -1)])
def test_length_falls_linearly_over_the_buffer(num_tokens, reward):
    assert length_reward(graded(num_tokens=num_tokens), LIMITS) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("", 0), ("so so", 0), ("a b c", 0), ("a b c d", 0), ("a b c A B C", -0.25), ("a a a a a", -2 / 3)],
)
def test_repetition_is_the_share_of_runs_of_three_words_seen_before(text, reward):
    """Of `a b c a b c` the runs are abc, bca, cab, abc: one of four."""
    assert repetition_reward(graded(text), LIMITS) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("num_tokens", "correct", "reward"),
    [
        (0, 1.0, 1.0),
        (50, 1.0, 0.75),
        (100, 1.0, 0.5),
        (300, 1.0, 0.5),
        (0, 0.0, -1.0),
        (50, 0.5, -0.75),
        (100, 0.0, -0.5),
    ],
)
def test_the_cosine_of_the_length_pays_short_right_answers_and_long_wrong_ones(num_tokens, correct, reward):
    assert cosine_length_reward(graded(num_tokens=num_tokens), LIMITS, correct) == pytest.approx(reward)
    task = TaskConfig(name="t", rewards={"cosine_length": 2.0})
    whole = make_reward(task, graded(num_tokens=num_tokens), LIMITS, correct=correct)
    assert whole.total == pytest.approx(2 * reward)


def test_the_total_is_weighted_and_the_parts_are_not():
    task = TaskConfig(name="t", rewards={"correct": 2.0, "tags": 0.5, "length": 0.0})
    reward = make_reward(task, graded(WELL_FORMED, 90), LIMITS, correct=0.5)
    assert reward.parts == {"correct": 0.5, "tags": 1.0, "length": -0.5}
    assert reward.total == 1.5


def test_correct_is_reported_even_where_it_has_no_weight():
    reward = make_reward(TaskConfig(name="t", rewards={"format": 1.0}), graded(""), LIMITS, correct=1.0)
    assert (reward.total, reward.parts["correct"]) == (0.0, 1.0)
