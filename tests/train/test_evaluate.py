import dataclasses
import itertools
import math

import numpy as np
import pytest
from tiny_runs import make_group

from podium.observe.metrics import evaluation_metrics
from podium.observe.stats import EvaluationStats
from podium.sampling.feed import request_seed
from podium.train.evaluate import Evaluation, task_scores, wilson_interval


def task_metrics(greedy, sampled, *, too_long=0) -> dict[str, float]:
    """The metrics of a task `sums` with these answers, and of so many questions that could not be asked."""
    scores = task_scores(greedy, sampled, questions=len(greedy or sampled) + too_long)
    return evaluation_metrics(EvaluationStats(tasks={"sums": scores}, rollout_s=0.0, reward_s=0.0, step_s=0.0))


def test_wilson_interval_by_hand():
    z2 = 1.959963984540054**2  # 3.8415
    low, high = wilson_interval(0.5, 10)
    half = math.sqrt(z2) * math.sqrt(0.025 + z2 / 400) / (1 + z2 / 10)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_wilson_interval_stays_within_0_and_1_and_is_not_empty_at_the_ends():
    assert wilson_interval(0.0, 8) == pytest.approx((0.0, 0.3244), abs=1e-4)
    assert wilson_interval(1.0, 8) == pytest.approx((0.6756, 1.0), abs=1e-4)


def test_wilson_interval_is_narrow_where_much_was_seen():
    low, high = wilson_interval(0.75, 1319)
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.75 * 0.25 / 1319), rel=1e-2)


def test_sampled_answers_give_avg_and_pass_at_k_by_hand():
    sampled = [make_group([1, 0, 0, 1]), make_group([0, 0, 0, 0]), make_group([0, 1, 0, 0]), make_group([0, 0.5, 0, 0])]
    greedy = [make_group([1]), make_group([0]), make_group([1]), make_group([0])]
    metrics = task_metrics(greedy, sampled)
    assert metrics["eval/sums/avg_at_k"] == 3.5 / 16
    assert metrics["eval/sums/pass_at_k"] == 0.5  # half a point is not a correct answer
    assert (
        metrics["eval/sums/pass_at_k_interval/low"],
        metrics["eval/sums/pass_at_k_interval/high"],
    ) == wilson_interval(0.5, 4)
    assert metrics["eval/sums/accuracy"] == 0.5
    assert metrics["eval/sums/questions"] == 4


def test_pass_at_every_j_is_the_mean_over_all_sets_of_j():
    right = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0.5, 0, 0]])
    metrics = task_metrics([], [make_group(row) for row in right.tolist()])
    for j in range(1, 5):
        sets = list(itertools.combinations(range(4), j))
        expected = np.mean([[any(row[place] == 1 for place in each) for each in sets] for row in right])
        assert metrics[f"eval/sums/pass_at/{j}"] == pytest.approx(expected)
    assert metrics["eval/sums/pass_at/4"] == metrics["eval/sums/pass_at_k"]


def test_accuracy_is_of_the_greedy_answers_and_without_them_of_the_sampled():
    greedy = task_metrics([make_group([1]), make_group([0]), make_group([0])], [])
    assert greedy["eval/sums/accuracy"] == pytest.approx(1 / 3)
    assert "eval/sums/avg_at_k" not in greedy
    sampled = task_metrics([], [make_group([1, 0]), make_group([1, 1])])
    assert sampled["eval/sums/accuracy"] == sampled["eval/sums/avg_at_k"] == 0.75
    assert (sampled["eval/sums/accuracy_interval/low"], sampled["eval/sums/accuracy_interval/high"]) == wilson_interval(
        0.75, 2
    )


def test_lengths_and_truncation_are_of_the_answers_that_accuracy_is_of():
    answers = [
        make_group([1], lengths=[3], finish="stop"),
        make_group([1], lengths=[7], finish="length"),
        make_group([0], lengths=[8], finish="length"),
    ]
    metrics = task_metrics(answers, [make_group([0, 0], lengths=[1, 1])])
    assert (metrics["eval/sums/completion_tokens"], metrics["eval/sums/truncated_fraction"]) == (
        6.0,
        pytest.approx(2 / 3),
    )


def test_questions_that_are_too_long_count_as_wrong_and_are_reported():
    sampled = [make_group([1, 1]), make_group([1, 0])]
    metrics = task_metrics([make_group([1]), make_group([1])], sampled, too_long=2)
    assert (metrics["eval/sums/accuracy"], metrics["eval/accuracy"]) == (0.5, 0.5)
    assert (metrics["eval/sums/avg_at_k"], metrics["eval/sums/pass_at_k"]) == (3 / 8, 0.5)
    assert (metrics["eval/sums/questions"], metrics["eval/sums/too_long"]) == (4, 2)
    interval = metrics["eval/sums/accuracy_interval/low"], metrics["eval/sums/accuracy_interval/high"]
    assert interval == wilson_interval(0.5, 4)


def test_an_answer_that_was_cut_is_right_but_not_completed():
    answers = [make_group([1]), make_group([1], finish="length"), make_group([0]), make_group([0], finish="length")]
    metrics = task_metrics(answers, [])
    assert (metrics["eval/sums/accuracy"], metrics["eval/sums/completed_accuracy"]) == (0.5, 0.25)


def test_of_several_answers_to_a_question_those_that_are_right_and_not_cut_count_as_completed():
    group = make_group([1, 1, 0, 0])
    transcripts = [
        dataclasses.replace(each, finish_reason=finish)
        for each, finish in zip(group.transcripts, ("stop", "length", "stop", "length"), strict=True)
    ]
    both = dataclasses.replace(group, transcripts=transcripts)
    right = dataclasses.replace(group, transcripts=[transcripts[0], transcripts[2], transcripts[1], transcripts[3]])
    for answered, share in ((both, 0.25), (right, 0.5)):
        metrics = task_metrics([], [answered])
        assert (metrics["eval/sums/accuracy"], metrics["eval/sums/completed_accuracy"]) == (0.5, share)


def test_the_first_questions_of_each_task_are_recorded():
    groups = {"one": [make_group([1], seed=n) for n in range(20)], "two": [make_group([0, 1], seed=30)]}
    stats = EvaluationStats(tasks={}, rollout_s=0.0, reward_s=0.0, step_s=0.0)
    records = Evaluation(stats=stats, groups=groups).records(5)
    assert [record["task"] for record in records] == ["one"] * 8 + ["two"]
    assert {(record["step"], record["split"]) for record in records} == {(5, "eval")}
    assert [len(record["completions"]) for record in records] == [1] * 8 + [2]


def test_seeds_of_requests_are_a_function_of_run_purpose_and_place():
    seeds = {
        request_seed(seed, purpose, index)
        for seed in (0, 1)
        for purpose in ("train", "eval gsm8k", "eval math500")
        for index in range(100)
    }
    assert len(seeds) == 600
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(0, "train", 0) == 713466717  # seeds of published runs must not change
