"""Curricula: chances worked by hand, and a sequence of prompts that its state decides."""

import hashlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.config.errors import ConfigError
from podium.config.schema import CurriculumConfig, TaskConfig
from podium.sampling.conversations.carry import Pending, Position
from podium.sampling.feed import EncodedPrompt
from podium.settings import load_settings
from podium.tasks.curriculum import Curriculum, by_success, level_labels, leveled
from podium.tasks.mixture import TaskMixture

LEVELS = [{"largest": 16}, {"largest": 32, "turns": 7}, {}]


def guess(**changes: Any) -> TaskConfig:
    curriculum = {"levels": LEVELS, "window": 4, **changes}
    return TaskConfig.model_validate({"name": "guess", "options": {"size": 50}, "curriculum": curriculum})


def curriculum(means: list[list[float]], **changes: Any) -> Curriculum:
    made = by_success(CurriculumConfig.model_validate({"levels": LEVELS, **changes}), ["a", "b", "c"])
    for label, values in zip("abc", means, strict=True):
        for value in values:
            made.add(label, value)
    return made


@pytest.mark.parametrize(
    ("means", "spread", "chances"),
    [
        ([[], [], []], 0.3, [1 / 3, 1 / 3, 1 / 3]),
        ([[1.0], [0.5], [0.25]], 0.3, [0.1, 0.1 + 0.7 * 4 / 7, 0.1 + 0.7 * 3 / 7]),  # 0 : 1/4 : 3/16
        ([[1.0], [1.0], [0.0]], 0.3, [1 / 3, 1 / 3, 1 / 3]),
        ([[0.75], [], [0.0]], 0.6, [0.2 + 0.4 * 3 / 7, 0.2 + 0.4 * 4 / 7, 0.2]),  # one unknown counts as a half
        ([[0.75], [0.9], [0.0]], 1.0, [1 / 3, 1 / 3, 1 / 3]),
        ([[0.0, 0.0, 1.0, 0.0, 1.0], [1.0], [1.0]], 0.3, [0.8, 0.1, 0.1]),
    ],
)
def test_chances_are_largest_where_half_of_the_answers_are_right(means, spread, chances):
    made = curriculum(means, spread=spread, window=4)
    assert made.chances() == pytest.approx(chances)
    assert sum(made.chances()) == pytest.approx(1)


def test_only_the_last_groups_count_and_the_state_is_all_there_is():
    made = curriculum([[1.0] * 9 + [0.5] * 4, [0.0], []], window=4)
    assert made.means == {"a": (0.5,) * 4, "b": (0.0,), "c": ()}
    other = curriculum([[], [0.3], [0.1]], window=4)
    other.means = made.means
    assert (other.means, other.chances()) == (made.means, made.chances())
    other.means = {}
    assert other.chances() == pytest.approx([1 / 3] * 3)


@given(st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=3, max_size=3), st.floats(0.01, 1), st.floats(0, 1))
def test_each_level_keeps_its_share_of_even_draws(means, spread, uniform):
    made = curriculum(means, spread=spread)
    chances = made.chances()
    assert min(chances) >= spread / 3 - 1e-12 and sum(chances) == pytest.approx(1)
    level = made.level(min(uniform, 1 - 2**-53))
    assert sum(chances[:level]) <= uniform + 1e-9 and uniform <= sum(chances[: level + 1]) + 1e-9


def test_levels_are_drawn_by_their_chances_and_prompts_by_their_options():
    mixture = TaskMixture([guess(), TaskConfig(name="arithmetic")], seed=3)
    assert mixture.labels == ["guess-level1", "guess-level2", "guess-level3", "arithmetic"]
    assert [task.options for task in mixture.levels[:3]] == [{"size": 50, **level} for level in LEVELS]
    mixture.means = {"guess-level1": (1.0,), "guess-level2": (0.5,), "guess-level3": (0.0,)}
    drawn = mixture.next(8000)
    counts = Counter(prompt.level for prompt in drawn)
    assert counts[None] == 4000
    for level, chance in enumerate((0.2 / 3, 0.2 / 3 + 0.8, 0.2 / 3)):
        assert abs(counts[level] - 4000 * chance) < 120
        largest = (16, 32, 64)[level]
        questions = {prompt.prompt.question for prompt in drawn if prompt.level == level}
        assert len(questions) == 1 and f"from 1 to {largest}." in questions.pop()
    assert {prompt.task for prompt in drawn if prompt.level is None} == {3}
    assert list(mixture.eval_prompts(1)) == ["guess", "arithmetic"]
    assert "from 1 to 64." in mixture.eval_prompts(1)["guess"][0].prompt.question
    assert mixture.num_prompts()["guess-level2"] == 50


def test_a_prompt_follows_from_the_seed_its_number_and_the_means():
    one, two = (TaskMixture([guess()], seed=3) for _ in range(2))
    for mean in (1.0, 0.25, 0.5, 0.0, 0.75, 0.5):
        (prompt,) = one.next(1)
        one.learn(prompt, mean)
    two.cursor, two.means = one.cursor, one.means
    assert one.next(40) == two.next(40)
    again = TaskMixture([guess()], seed=3)
    assert [again.prompt_at(n, prompt.level) for n, prompt in enumerate(two.next(0) or one.next(0))] == []
    drawn = TaskMixture([guess()], seed=3).next(20)
    assert [again.prompt_at(number, prompt.level) for number, prompt in enumerate(drawn)] == drawn


def test_a_level_repeats_no_prompt_before_the_task_has_drawn_as_many_as_it_has():
    drawn = TaskMixture([guess()], seed=1).next(50)
    for level in range(3):
        ids = [prompt.prompt.id for prompt in drawn if prompt.level == level]
        assert len(ids) == len(set(ids)) > 8


def test_what_is_learned_of_one_task_changes_no_other():
    tasks = [TaskConfig(name="arithmetic"), guess(), guess(window=2)]
    mixture = TaskMixture(tasks, seed=0)
    before = mixture.means
    prompts = {prompt.task: prompt for prompt in mixture.next(200)}
    mixture.learn(prompts[0], 0.25)
    assert mixture.means == before
    mixture.learn(prompts[2], 0.25)
    assert {label: last for label, last in mixture.means.items() if last} == {"guess-level2": (0.25,)}
    mixture.learn(prompts[4], 0.75)
    assert mixture.means["guess-2-level1"] == (0.75,)


def test_without_a_curriculum_prompts_are_those_that_they_were():
    """The hash was made before there were curricula."""
    tasks = [
        TaskConfig(name="arithmetic"),
        TaskConfig(name="guess", weight=2.0),
        TaskConfig(name="calculator", weight=0.5),
    ]
    mixture = TaskMixture(tasks, seed=5)
    ids = [prompt.prompt.id for prompt in mixture.next(300)]
    assert hashlib.sha256(repr(ids).encode()).hexdigest().startswith("c94b4e482501ed1c34447b30")
    assert mixture.labels == ["arithmetic", "guess", "calculator"] and mixture.means == {}
    assert leveled(tasks) == [[task] for task in tasks] and level_labels(tasks) == mixture.labels
    assert Position(cursor=3).record() == {"cursor": 3, "in_flight": []}


def test_a_position_restores_means_and_the_levels_of_prompts_in_flight():
    mixture = TaskMixture([guess()], seed=0)
    means = {"guess-level1": (0.1, 1 / 3), "guess-level2": (), "guess-level3": (2 / 3,)}
    drawn = [EncodedPrompt(prompt=prompt, tokens=(), seed=0, number=n) for n, prompt in enumerate(mixture.next(9))]
    assert {each.prompt.level for each in drawn} == {0, 1, 2}
    pending = tuple(Pending(prompt=each) for each in drawn)
    record = Position(cursor=9, pending=pending, curriculum=means).record()
    asked: list[tuple[int, int | None]] = []
    feed: Any = SimpleNamespace(at=lambda number, level: asked.append((number, level)) or drawn[number])
    read = Position.read(record, feed)
    assert asked == [(number, each.prompt.level) for number, each in enumerate(drawn)]
    assert read == Position(cursor=9, pending=pending, curriculum=means)


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        (
            "{name: guess, curriculum: {levels: [{largest: 16}, {highest: 64}]}}",
            "",
            r"(?s)guess: options.highest: unknown option",
        ),
        ("{name: guess, curriculum: {levels: [{largest: 16}, {largest: 1}]}}", "", r"tasks\.0\.curriculum\.levels"),
        ("{name: guess, curriculum: {levels: [{largest: 16}]}}", "", "at least 2"),
        ("{name: guess, curriculum: {levels: [{}, {}], spread: 0.0}}", "", r"tasks\.0\.curriculum\.spread"),
        (
            "{name: arithmetic, curriculum: {levels: [{digits: 1}, {digits: 2}]}}",
            "group_size: 1\nalgorithm: {recipe: sft}\n",
            "recipe sft samples nothing, so no curriculum level is scored; leave it out",
        ),
    ],
)
def test_curricula_that_cannot_be_are_errors(tmp_path, task, more, message):
    (tmp_path / "run.yaml").write_text(f"model: a/b\ntasks: [{task}]\n{more}")
    with pytest.raises(ConfigError, match=message):
        load_settings([tmp_path / "run.yaml"], [], {})
