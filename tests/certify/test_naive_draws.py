"""What the naive side says of draws and of the order of prompts, by hand."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from podium.certify.naive_draws import (
    NO_CUT,
    Cut,
    after_cut,
    draw_errors,
    environment_seed,
    normal_scores,
    outside,
    prompt_index,
    random_numbers,
    request_seed,
    turn_seed,
)
from podium.certify.naive_mixture import Draw, NaiveMixture
from podium.certify.prompt_order import superfluous

FOUR = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (Cut(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Cut(top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (Cut(min_p=0.6), [4 / 7, 3 / 7, 0, 0]),
        (Cut(top_k=3, top_p=0.75), [4 / 7, 3 / 7, 0, 0]),  # of the three, the first two have 7/9
        (Cut(top_k=9), [0.4, 0.3, 0.2, 0.1]),
        (NO_CUT, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_a_cut_by_hand(cut, expected):
    table, clear = after_cut(FOUR, cut)
    np.testing.assert_allclose(np.exp(table), [expected], atol=1e-12)
    assert clear.all()


def test_a_cut_that_rounding_decides_is_not_clear():
    near = np.log(np.array([[0.4, 0.3 + 1e-6, 0.3 - 1e-6], [0.5, 0.3, 0.2], [0.5, 0.4, 0.1]]))
    assert after_cut(near, Cut(top_k=2))[1].tolist() == [False, True, True]
    assert after_cut(near, Cut(top_p=0.8))[1].tolist() == [True, False, True]
    assert after_cut(near, Cut(min_p=0.8))[1].tolist() == [True, True, False]


def test_the_range_of_numbers_of_a_token_by_hand():
    numbers = np.array([[0.9, 0.69], [0.9, 0.71], [0.0, 0.3]])
    found = outside(np.repeat(FOUR, 3, axis=0), np.array([1, 1, 1]), numbers)
    np.testing.assert_allclose(found, [0.0, 0.01, 0.1], atol=1e-9)
    wide = np.log(np.full((1, 256), 1 / 256))  # two blocks: the first number chooses between them
    np.testing.assert_allclose(outside(wide, np.array([128]), np.array([[0.4, 0.0]])), [0.1], atol=1e-9)
    assert outside(after_cut(FOUR, Cut(top_k=2))[0], np.array([3]), numbers[:1]).tolist() == [1.0]


def test_the_errors_of_draws_are_those_of_their_distribution():
    given = FOUR, Cut(top_k=2), np.array([1]), np.array([np.log(3 / 7) + 0.25]), np.array([[0.5, 0.5]])
    found = draw_errors(*given)
    np.testing.assert_allclose((found.logprobs[0], found.tokens[0]), (0.25, 4 / 7 - 0.5), atol=1e-9)


def test_random_numbers_differ_with_seed_completion_and_position_and_are_even():
    places = np.arange(3000)
    some = random_numbers(np.full(3000, 7), np.zeros(3000, int), places)
    assert some.shape == (3000, 2)
    assert 0 <= some.min() < 0.01 < 0.99 < some.max() < 1
    assert abs(some.mean() - 0.5) < 0.02
    assert len(np.unique(some[:, 0])) > 2990
    for other in (
        random_numbers(np.full(3000, 8), np.zeros(3000, int), places),
        random_numbers(np.full(3000, 7 + 2**32), np.zeros(3000, int), places),
        random_numbers(np.full(3000, 7), np.ones(3000, int), places),
    ):
        assert np.mean(other == some) < 0.01
        assert abs(np.corrcoef(other[:, 0], some[:, 0])[0, 1]) < 0.08


def test_seeds_are_hashes():
    digest = hashlib.sha256(b"3 train 5").digest()
    assert request_seed(3, "train", 5) == int.from_bytes(digest[:4], "little") >> 1
    assert turn_seed(9, 0) == 9
    assert turn_seed(9, 2) == request_seed(9, "turn", 2)


def test_normal_scores_are_those_of_where_a_token_lies():
    found = normal_scores(np.repeat(FOUR, 2, axis=0), np.array([0, 2]), np.array([0.5, 1.0]))
    np.testing.assert_allclose(found, [-0.8416, 1.2816], atol=1e-4)


def test_every_prompt_comes_once_in_an_epoch_and_epochs_differ():
    epochs = [[prompt_index(1, 5 * epoch + place, 5) for place in range(5)] for epoch in range(6)]
    assert all(sorted(each) == [0, 1, 2, 3, 4] for each in epochs)
    assert len({tuple(each) for each in epochs}) > 3


def test_a_mixture_draws_by_weight_and_its_levels_by_what_was_solved():
    mixture = NaiveMixture(1, (3.0, 1.0), [[4], [4, 4]], window=2, spread=0.2)
    draws = [mixture.draw() for _ in range(80)]
    assert abs(sum(each.task == 0 for each in draws) - 60) <= 1
    mixture.learn(Draw(1, 0), 0.0)
    mixture.learn(Draw(2, 0), 0.5)  # the one level is never solved, the other by half: 0.1 and 0.9 of the draws
    later = [mixture.draw() for _ in range(400)]
    share = sum(each.task == 2 for each in later) / sum(each.task > 0 for each in later)
    assert 0.8 < share < 0.97


def test_conversations_of_a_prompt_share_the_seed_of_their_environment_unless_each_has_its_own():
    found = [[environment_seed(5, each, own=own) for each in range(3)] for own in (False, True)]
    by_hand = [int(hashlib.sha256(f"5 environment {n}".encode()).hexdigest()[:8], 16) for n in range(3)]
    swapped = [int.from_bytes(each.to_bytes(4, "big"), "little") >> 1 for each in by_hand]
    assert found == [swapped[:1] * 3, swapped]


def test_a_step_has_no_more_groups_of_unequal_rewards_than_it_trains_on():
    pays = [(0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.0, 0.5)]
    groups = [
        SimpleNamespace(rewards=[SimpleNamespace(total=each, parts={"correct": 1.0}) for each in own]) for own in pays
    ]
    step, training = SimpleNamespace(groups=groups), SimpleNamespace(config=SimpleNamespace(prompts_per_step=2))
    for zero_variance, metric, expected in (("refill", None, 1), ("refill", "correct", 0), ("drop", None, 2)):
        rules = SimpleNamespace(zero_variance=zero_variance, zero_variance_metric=metric)
        assert superfluous(SimpleNamespace(rules=rules), training, step) == expected
