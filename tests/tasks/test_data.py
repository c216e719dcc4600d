"""Which prompts are drawn: by measured pass rates, retired when solved, tasks by progress."""

from collections import Counter
from typing import Any

import pytest

from podium.config.data import DataConfig
from podium.config.errors import ConfigError
from podium.config.schema import TaskConfig
from podium.files import to_json
from podium.sampling.conversations.carry import Position
from podium.settings import load_settings
from podium.tasks.curriculum import learned_fast, progress
from podium.tasks.mixture import TaskMixture
from podium.tasks.pass_rates import Measured, PassRate, digest_of


def rows(tmp_path, name: str, count: int) -> TaskConfig:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(to_json({"question": f"{name} {n}", "answer": str(n)}) + "\n" for n in range(count)))
    return TaskConfig(name="jsonl", path=str(path))


def data(**changes: Any) -> DataConfig:
    return DataConfig.model_validate(changes)


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ([], None),
        ([0.0, 1.0, 0.5], None),
        ([0.0, 0.25, 0.5, 0.75], 0.5),
        ([1.0, 1.0, 9.0, 0.5, 0.5], 0.5),  # of an odd number the middle one is left out
        ([0.5] * 32, 0.0),
    ],
)
def test_progress_is_how_far_the_newer_half_is_from_the_older(last, found):
    assert progress(last) == found


def test_tasks_are_drawn_by_progress_times_weight():
    rising, still, new = [0.0, 0.0, 0.5, 0.5], [0.25] * 4, [1.0]
    chances = learned_fast([rising, still, new], weights=[1.0, 1.0, 2.0], spread=0.2)
    assert chances == pytest.approx([0.05 + 0.8 / 3, 0.05, 0.1 + 0.8 * 2 / 3])
    assert learned_fast([still, still], weights=[1.0, 3.0], spread=0.2) == pytest.approx([0.25, 0.75])
    assert learned_fast([[], []], weights=[1.0, 3.0], spread=0.2) == pytest.approx([0.25, 0.75])


def test_a_mixture_by_progress_draws_what_its_means_say_and_evaluates_every_task(tmp_path):
    tasks = [rows(tmp_path, "a", 50), rows(tmp_path, "b", 50)]
    mixture = TaskMixture(tasks, seed=3, data=data(progress={"window": 4}))
    assert mixture.labels == ["jsonl", "jsonl-2"]
    mixture.means = {"jsonl": (0.0, 0.0, 0.6, 0.6), "jsonl-2": (0.1, 0.1, 0.3, 0.3)}
    drawn = mixture.next(4000)
    counts = Counter(prompt.task for prompt in drawn)
    assert abs(counts[0] - 4000 * (0.1 + 0.8 * 0.75)) < 120
    assert all(prompt.level == prompt.task for prompt in drawn)
    first = [prompt.prompt.id for prompt in drawn[:50] if prompt.task == 0]
    assert len(first) == len(set(first))  # none is repeated within an epoch
    again = TaskMixture(tasks, seed=3, data=data(progress={"window": 4}))
    assert [again.prompt_at(n, prompt.level) for n, prompt in enumerate(drawn[:99])] == drawn[:99]
    again.cursor, again.means = mixture.cursor, mixture.means
    mixture.learn(drawn[0], 0.9)
    assert mixture.means != again.means
    again.learn(drawn[0], 0.9)
    assert again.next(40) == mixture.next(40)


def test_solved_prompts_are_retired_until_few_are_left(tmp_path):
    mixture = TaskMixture([rows(tmp_path, "a", 6)], seed=0, data=data(retire={"pass_rate": 0.75, "keep": 2}))
    prompts = mixture.next(6)
    mixture.learn(prompts[0], 0.74)
    assert mixture.retired == {}
    for prompt in prompts:
        mixture.learn(prompt, 0.75)
    kept = [prompt for prompt in prompts if not mixture.is_retired(prompt)]
    assert kept == prompts[-2:]
    assert mixture.retired == {"jsonl": tuple(sorted(each.prompt.id for each in prompts[:4]))}
    other = TaskMixture([rows(tmp_path, "a", 6)], seed=0, data=data(retire={"pass_rate": 0.75, "keep": 2}))
    other.retired = mixture.retired
    assert [each for each in prompts if not other.is_retired(each)] == kept
    other.retired = {}
    assert not other.is_retired(prompts[0])


def test_a_position_holds_what_is_retired():
    position = Position(cursor=3, retired={"a": ("x", "y")})
    record = position.record()
    assert record.get("retired") == {"a": ["x", "y"]}
    feed: Any = None
    assert Position.read(record, feed) == position
    assert "retired" not in Position(cursor=3).record()


def write(path, task: TaskConfig, right: dict[str, float], **changes: Any):
    prompts = [each.prompt for own in TaskMixture([task], seed=0).train_prompts().values() for each in own]
    measured = Measured(model={"config.json": "x"}, data={"jsonl": digest_of(prompts)}, samples=8, sampling={})
    first = {**measured, **changes}
    lines = [PassRate(task="jsonl", prompt=name, right=each) for name, each in right.items()]
    path.write_text("".join(to_json(line) + "\n" for line in [first, *lines]))
    return prompts


def test_a_filter_keeps_prompts_that_are_solved_sometimes(tmp_path):
    task, path = rows(tmp_path, "a", 5), tmp_path / "rates.jsonl"
    ids = [each.prompt.id for own in TaskMixture([task], seed=0).train_prompts().values() for each in own]
    rates = dict(zip(ids, [0.0, 0.125, 0.5, 0.875, 1.0], strict=True))
    filtering = {"file": str(path), "pass_rate": [0.125, 0.5]}
    write(path, task, rates)
    mixture = TaskMixture([task], seed=0, data=data(filter=filtering))
    assert mixture.num_prompts() == {"jsonl": 2}
    assert {prompt.prompt.id for prompt in mixture.next(10)} == set(ids[1:3])
    assert len(mixture.eval_prompts()["jsonl"]) == 5 if task.eval_path else True
    mixture.data.check_model(lambda: {"config.json": "x"})
    with pytest.raises(ValueError, match=r"measured with another model: config\.json is y here and was x"):
        mixture.data.check_model(lambda: {"config.json": "y"})


@pytest.mark.parametrize(
    ("filtering", "change", "message"),
    [
        ({}, {"missing": True}, "rates.jsonl does not exist; podium filter CONFIG measures and writes it"),
        ({"samples": 4}, {}, "data.filter.samples is 4, and .* has 8 samples of each prompt; set that"),
        ({}, {"data": {"jsonl": "7 prompts with digest 0"}}, "jsonl has 5 prompts with digest .* is of 7 prompts"),
        ({}, {"data": {}}, "is of no task of this name"),
        ({}, {"lacks": True}, "lacks 1 of the 5 prompts of jsonl: measuring was interrupted; podium filter CONFIG"),
        ({"pass_rate": [0.6, 0.9]}, {}, r"data\.filter\.pass_rate \[0\.6, 0\.9\] leaves none of the 5 prompts"),
        ({}, {"model": 3}, "was not written by podium filter"),
    ],
)
def test_pass_rates_of_something_else_are_refused(tmp_path, filtering, change, message):
    task, path = rows(tmp_path, "a", 5), tmp_path / "rates.jsonl"
    missing, lacks = change.pop("missing", False), change.pop("lacks", False)
    prompts = write(path, task, {}, **change)
    write(path, task, {each.id: 0.5 for each in prompts[lacks:]}, **change)
    if missing:
        path.unlink()
    mixture = TaskMixture([task], seed=0, data=data(filter={"file": str(path), **filtering}))
    with pytest.raises(ValueError, match=message):
        mixture.next(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {progress: {}}", r"data\.progress.*there is only one task, and progress decides between several"),
        (
            "data: {filter: {file: f, pass_rate: [0.9, 0.1]}}",
            r"the lower bound, 0\.9, is above the upper bound, 0\.1; swap them",
        ),
        ("data: {filter: {file: f, pass_rate: [0.9]}}", r"data\.filter\.pass_rate"),
        ("data: {filter: {pass_rate: [0.1, 0.9]}}", r"data\.filter\.file"),
        ("data: {retire: {pass_rate: 0.0}}", r"data\.retire\.pass_rate"),
        (
            "data: {retire: {}}\ngroup_size: 1\nalgorithm: {recipe: sft}",
            "recipe sft samples nothing, so no prompt is scored",
        ),
    ],
)
def test_data_settings_that_cannot_be_are_errors(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(f"model: a/b\ntasks: [{{name: arithmetic}}]\n{text}\n")
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_settings([tmp_path / "run.yaml"], [], {})


def test_progress_and_levels_of_a_task_exclude_each_other(tmp_path):
    levels = "{name: guess, curriculum: {levels: [{largest: 16}, {largest: 64}]}}"
    (tmp_path / "run.yaml").write_text(
        f"model: a/b\ntasks: [{{name: arithmetic}}, {levels}]\ndata: {{progress: {{}}}}\n"
    )
    with pytest.raises(ConfigError, match="draws tasks like the levels of a curriculum"):
        load_settings([tmp_path / "run.yaml"], [], {})
