import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from podium.algorithms.advantages import (
    Mean,
    RewardParts,
    batch_mean_advantages,
    decoupled_advantages,
    equal_reward_groups,
    greedy_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    maxrl_advantages,
    pass_at_k_advantages,
    penalised_rewards,
    rescaled_advantages,
    token_weights,
    turn_advantages,
    turn_returns,
    whitened_advantages,
)

Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]

GROUP_STD = partial(group_advantages, std="group", std_ddof=1, std_eps=1e-6)
BATCH_STD = partial(group_advantages, std="batch", std_ddof=1, std_eps=1e-6)
NO_STD = partial(group_advantages, std="none", std_ddof=1, std_eps=1e-6)
WHITENED = partial(whitened_advantages, group_baseline=False, std_eps=1e-6)
WHITENED_BASELINE = partial(whitened_advantages, group_baseline=True, std_eps=1e-6)
OTHERS_STD = partial(leave_one_out_advantages, std="group")
ALL = [
    partial(pass_at_k_advantages, k=2),
    OTHERS_STD,
    length_weighted_advantages,
    rescaled_advantages,
    GROUP_STD,
    BATCH_STD,
    NO_STD,
    leave_one_out_advantages,
    maxrl_advantages,
    batch_mean_advantages,
    WHITENED,
    WHITENED_BASELINE,
]
ZERO_SUM_IN_GROUP = [GROUP_STD, BATCH_STD, NO_STD, leave_one_out_advantages, maxrl_advantages]

shapes = st.tuples(st.integers(1, 5), st.integers(2, 6))
rewards_and_lengths = shapes.flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float32, shape, elements=st.integers(0, 8).map(lambda n: n / 8)),
        hnp.arrays(np.int64, shape, elements=st.integers(1, 50)),
    )
)


def random_batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.uniform(0, 1, (5, 4)).astype(np.float32), random.integers(1, 20, (5, 4))


@pytest.mark.parametrize(
    ("advantage", "correct", "wrong"),
    [
        (GROUP_STD, 2.475, -0.354),
        (partial(GROUP_STD, std_ddof=0), 2.646, -0.378),
        (NO_STD, 0.875, -0.125),
        (leave_one_out_advantages, 1.0, -0.143),
        (maxrl_advantages, 7.0, -1.0),
        (batch_mean_advantages, 0.875, -0.125),
        (OTHERS_STD, 1.0, -0.378),
        (length_weighted_advantages, 0.875, -0.125),
        (rescaled_advantages, 0.875, -0.125),
        (partial(pass_at_k_advantages, k=1), 2.646, -0.378),
        (partial(pass_at_k_advantages, k=4), 1.0, -0.143),  # half of all sets have it: 1/2, and 1/2 - C(6, 3) / C(7, 3)
    ],
)
def test_one_correct_completion_of_eight(advantage: Advantage, correct: float, wrong: float) -> None:
    rewards = np.array([[1.0] + [0.0] * 7])
    result = advantage(rewards, np.ones((1, 8)))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, [[correct] + [wrong] * 7], atol=5e-4)


def test_gdpo_is_trl_s_normalize_then_sum() -> None:
    """As GRPOTrainer's multi_objective_aggregation computes it, with our eps; NaN: the part does not apply."""
    random = np.random.default_rng(0)
    values = np.stack([random.uniform(size=(5, 4)), 100 * random.normal(size=(5, 4))], axis=2).astype(np.float32)
    values[1, 2, 1] = np.nan
    weights = np.broadcast_to([1.0, 0.5], values.shape)
    parts = RewardParts(values, np.where(np.isnan(values), 0.0, weights))
    rewards = np.nansum(weights * values, axis=2)
    found = decoupled_advantages(rewards, np.ones((5, 4)), parts=parts, std_ddof=1, std_eps=1e-6)
    wide = values.astype(np.float64)
    normal = (wide - np.nanmean(wide, axis=1, keepdims=True)) / (np.nanstd(wide, axis=1, ddof=1, keepdims=True) + 1e-6)
    summed = np.nansum(normal * [1.0, 0.5], axis=2)
    np.testing.assert_allclose(found, (summed - summed.mean()) / (summed.std(ddof=1) + 1e-6), rtol=1e-5, atol=1e-6)


def test_gdpo_leaves_out_what_has_no_reward() -> None:
    values = np.array([[[1.0], [0.0], [np.nan]], [[2.0], [2.0], [2.0]]])
    parts = RewardParts(values, np.where(np.isnan(values), 0.0, 1.0))
    lengths = np.array([[3, 3, 0], [3, 3, 3]])
    found = decoupled_advantages(values[:, :, 0], lengths, parts=parts, std_ddof=1, std_eps=1e-6)
    np.testing.assert_allclose(found, [[2**0.5, -(2**0.5), 0], [0, 0, 0]], rtol=1e-5)  # +-0.707 with a deviation of 1/2


def test_the_baseline_of_opo_by_hand() -> None:
    """The mean over tokens: (1 x 10 + 0 x 30) / 40; a completion that is left out has no token."""
    rewards = np.array([[1.0, 0.0, 0.0]])
    found = length_weighted_advantages(rewards, np.array([[10, 30, 0]]))
    np.testing.assert_allclose(found, [[0.75, -0.25, -0.25]], rtol=1e-6)


def test_groups_of_equal_rewards_rescale_the_others() -> None:
    rewards = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    found = rescaled_advantages(rewards, np.ones((3, 2)))
    np.testing.assert_allclose(found, [[1.5, -1.5], [0, 0], [0, 0]])


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_sets(k: int) -> None:
    """Each completion has the mean reward of the sets of k that it is in, minus that of all, in their deviations."""
    random = np.random.default_rng(k)
    rewards = np.concatenate([random.integers(0, 2, (20, 6)), random.uniform(size=(5, 6)).astype(np.float32)])
    found = pass_at_k_advantages(rewards, np.ones(rewards.shape), k=k)
    for row, own in zip(rewards, found, strict=True):
        n, right = len(row), int(row.sum())
        rho = 1 - math.comb(n - right, k) / math.comb(n, k)
        if set(row.tolist()) <= {0, 1} and 0 < rho < 1:  # the paper's formulas
            sigma = math.sqrt(rho * (1 - rho)) + 1e-6
            wrong = (1 - rho - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)) / sigma
            np.testing.assert_allclose(own, np.where(row == 1, (1 - rho) / sigma, wrong), rtol=1e-5)
        sets = list(itertools.combinations(range(6), k))
        paid = np.array([row[list(each)].max() for each in sets])
        if paid.std() == 0:
            np.testing.assert_allclose(own, np.zeros(6), atol=1e-6)
            continue
        means = [paid[[place in each for each in sets]].mean() for place in range(6)]
        np.testing.assert_allclose(own, (np.array(means) - paid.mean()) / paid.std(), rtol=1e-5, atol=1e-5)


def test_the_deviation_of_the_others_by_hand() -> None:
    """Of 1, 0, 0.5 the others of the first have mean 1/4 and variance 1/8, of the second 3/4 and 1/8, ...: 1/2, 1/2."""
    found = OTHERS_STD(np.array([[1.0, 0.0, 0.5]]), np.ones((1, 3)))
    np.testing.assert_allclose(found, [[0.75 * 8**0.5, -0.75 * 8**0.5, 0.0]], rtol=1e-5, atol=1e-7)


def test_batch_std_by_hand() -> None:
    rewards = np.array([[1.0, 0.0], [1.0, 1.0]])  # variance of 1, 0, 1, 1: 3/4 of 1/4, unbiased 1/4
    expected = np.array([[0.5, -0.5], [0.0, 0.0]]) / 0.5
    np.testing.assert_allclose(BATCH_STD(rewards, np.ones((2, 2))), expected, rtol=1e-5)


def test_whitening_by_hand() -> None:
    # Tokens have returns 1, 0, 0, 0: mean 1/4, variance 3/16.
    result = WHITENED(np.array([[1.0, 0.0]]), np.array([[1, 3]]))
    np.testing.assert_allclose(result, [[3**0.5, -(3**-0.5)]], rtol=1e-4)


def naive_group(rewards: np.ndarray, kind: str) -> list[list[float]]:
    rows = []
    flat = [float(r) for row in rewards for r in row]
    batch_mean = sum(flat) / len(flat)
    batch_std = (sum((r - batch_mean) ** 2 for r in flat) / (len(flat) - 1)) ** 0.5
    for row in rewards:
        n = len(row)
        mean = sum(float(r) for r in row) / n
        std = (sum((float(r) - mean) ** 2 for r in row) / (n - 1)) ** 0.5
        others = [(sum(float(x) for x in row) - float(r)) / (n - 1) for r in row]
        rows.append(
            {
                "group": [(float(r) - mean) / (std + 1e-6) for r in row],
                "batch": [(float(r) - mean) / (batch_std + 1e-6) for r in row],
                "none": [float(r) - mean for r in row],
                "others": [float(r) - other for r, other in zip(row, others, strict=True)],
                "maxrl": [(float(r) - mean) / mean for r in row],
                "mean": [float(r) - batch_mean for r in row],
            }[kind]
        )
    return rows


@pytest.mark.parametrize(
    ("advantage", "kind"),
    [
        (GROUP_STD, "group"),
        (BATCH_STD, "batch"),
        (NO_STD, "none"),
        (leave_one_out_advantages, "others"),
        (maxrl_advantages, "maxrl"),
        (batch_mean_advantages, "mean"),
    ],
)
def test_equals_naive_loops(advantage: Advantage, kind: str) -> None:
    rewards, lengths = random_batch()
    np.testing.assert_allclose(advantage(rewards, lengths), naive_group(rewards, kind), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group_baseline", [False, True])
def test_whitening_equals_whitening_every_token(group_baseline: bool) -> None:
    rewards, lengths = random_batch()
    returns = rewards - rewards.mean(axis=1, keepdims=True) if group_baseline else rewards
    tokens = np.concatenate([[r] * n for r, n in zip(returns.ravel(), lengths.ravel(), strict=True)])
    whitened = (tokens - tokens.mean()) / (tokens.std() + 1e-6)
    firsts = np.cumsum(lengths.ravel()) - lengths.ravel()
    result = whitened_advantages(rewards, lengths, group_baseline=group_baseline, std_eps=1e-6)
    np.testing.assert_allclose(result.ravel(), whitened[firsts], rtol=1e-4, atol=1e-5)


def test_a_greedy_reward_is_subtracted_and_where_it_failed_nothing_is_left() -> None:
    rewards = np.array([[1.0, 0.0], [0.5, np.nan], [1.0, 0.0]])
    found = greedy_advantages(rewards, np.array([[3, 4], [5, 0], [1, 2]]), baselines=np.array([0.25, 1.0, np.nan]))
    np.testing.assert_allclose(found, [[0.75, -0.25], [-0.5, 0.0], [0.0, 0.0]])
    single = greedy_advantages(np.array([[1.0]]), np.array([[3]]), baselines=np.array([0.0]))
    np.testing.assert_array_equal(single, [[1.0]])


def test_a_masked_completion_does_not_move_the_whitening() -> None:
    rewards, lengths = random_batch()
    lengths[2, 3] = 0
    changed = rewards.copy()
    changed[2, 3] = 100.0
    others = lengths > 0
    np.testing.assert_array_equal(WHITENED(rewards, lengths)[others], WHITENED(changed, lengths)[others])


def test_equal_rewards_beside_masked_ones_give_zero_advantage() -> None:
    rewards, lengths = np.array([[0.1, 0.1], [0.1, 0.9]]), np.array([[3, 4], [6, 0]])
    np.testing.assert_array_equal(WHITENED(rewards, lengths), np.zeros((2, 2)))
    np.testing.assert_array_equal(WHITENED(rewards, np.zeros((2, 2))), np.zeros((2, 2)))


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 0.7, 1e6 + 0.1])
@pytest.mark.parametrize("group", [2, 3, 7])
def test_equal_rewards_give_zero_advantage(advantage: Advantage, reward: float, group: int) -> None:
    rewards = np.full((3, group), reward)
    np.testing.assert_array_equal(advantage(rewards, np.full((3, group), 5)), np.zeros((3, group)))


@pytest.mark.parametrize("advantage", ZERO_SUM_IN_GROUP)
def test_a_group_of_equal_rewards_has_zero_advantage_beside_others(advantage: Advantage) -> None:
    rewards = np.array([[0.1, 0.1, 0.1], [0.0, 1.0, 0.5], [0.3, 0.1 + 0.2, 0.3]])
    result = advantage(rewards, np.ones((3, 3)))
    np.testing.assert_array_equal(result[[0, 2]], np.zeros((2, 3)))
    assert result[1, 1] > 0 > result[1, 0]


@pytest.mark.parametrize("advantage", ZERO_SUM_IN_GROUP)
@given(batch=rewards_and_lengths)
def test_advantages_of_a_group_sum_to_zero(advantage: Advantage, batch: tuple[np.ndarray, np.ndarray]) -> None:
    result = advantage(*batch).astype(np.float64)
    scale = max(1.0, np.abs(result).max())
    np.testing.assert_allclose(result.sum(axis=1), 0, atol=1e-5 * scale)


@given(batch=rewards_and_lengths)
def test_whitened_tokens_have_mean_0_and_variance_1(batch: tuple[np.ndarray, np.ndarray]) -> None:
    rewards, lengths = batch
    result = WHITENED(rewards, lengths, std_eps=1e-12).astype(np.float64)
    share = lengths / lengths.sum()
    np.testing.assert_allclose((share * result).sum(), 0, atol=1e-4)
    variance = 1.0 if rewards.max() > rewards.min() else 0.0
    np.testing.assert_allclose((share * result**2).sum(), variance, atol=1e-4)


@pytest.mark.parametrize("advantage", ALL)
@given(batch=rewards_and_lengths, seed=st.integers(0, 1000))
def test_order_of_prompts_and_completions_does_not_matter(
    advantage: Advantage, batch: tuple[np.ndarray, np.ndarray], seed: int
) -> None:
    rewards, lengths = batch
    random = np.random.default_rng(seed)
    rows, columns = (random.permutation(n) for n in rewards.shape)
    moved = advantage(rewards[rows][:, columns], lengths[rows][:, columns])
    np.testing.assert_allclose(moved, advantage(rewards, lengths)[rows][:, columns], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("advantage", [GROUP_STD, BATCH_STD, WHITENED, WHITENED_BASELINE])
@given(batch=rewards_and_lengths)
def test_scaled_advantages_ignore_the_unit_of_the_reward(
    advantage: Advantage, batch: tuple[np.ndarray, np.ndarray]
) -> None:
    rewards, lengths = batch
    np.testing.assert_allclose(advantage(4 * rewards + 2, lengths), advantage(rewards, lengths), rtol=1e-3, atol=1e-4)


def test_maxrl_of_an_unsolved_prompt_is_zero() -> None:
    np.testing.assert_array_equal(maxrl_advantages(np.zeros((1, 4)), np.ones((1, 4))), np.zeros((1, 4)))


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(ValueError, match=r"a reward of -0\.5.*dr_grpo"):
        maxrl_advantages(np.array([[1.0, -0.5]]), np.ones((1, 2)))


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_an_error(advantage: Advantage, bad: float) -> None:
    rewards, lengths = random_batch()
    rewards[1, 2] = bad
    with pytest.raises(ValueError, match="reward of prompt 1, completion 2"):
        advantage(rewards, lengths)


@pytest.mark.parametrize("advantage", [*ZERO_SUM_IN_GROUP, WHITENED_BASELINE])
def test_a_group_baseline_needs_two_completions(advantage: Advantage) -> None:
    with pytest.raises(ValueError, match="group_size 1"):
        advantage(np.ones((4, 1)), np.ones((4, 1)))


@pytest.mark.parametrize("advantage", [batch_mean_advantages, WHITENED])
def test_a_batch_baseline_works_with_one_completion_per_prompt(advantage: Advantage) -> None:
    result = advantage(np.array([[1.0], [0.0]]), np.ones((2, 1)))
    assert result[0, 0] > 0 > result[1, 0]


def test_a_batch_of_one_completion_has_no_mean_to_compare_with() -> None:
    with pytest.raises(ValueError, match="batch of 1 completion"):
        batch_mean_advantages(np.ones((1, 1)), np.ones((1, 1)))


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize(
    ("rewards", "lengths"), [(np.ones(4), np.ones(4)), (np.ones((2, 2)), np.ones((2, 3))), (np.ones((0, 2)),) * 2]
)
def test_wrong_shapes_are_errors(advantage: Advantage, rewards: np.ndarray, lengths: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"must both be \[prompts, completions\]"):
        advantage(rewards, lengths)


def test_a_negative_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        WHITENED(np.ones((1, 2)), np.array([[1, -1]]))


def test_equal_reward_groups_are_found_up_to_float32() -> None:
    rewards = np.array([[0.3, 0.1 + 0.2], [0.0, 1.0], [1.0, 1.0]])
    np.testing.assert_array_equal(equal_reward_groups(rewards), [True, False, True])


def test_penalised_rewards_by_hand() -> None:
    result = penalised_rewards(np.array([[1.0, 0.0]]), np.array([[2.0, -1.0]]), 0.1)
    np.testing.assert_allclose(result, [[0.8, 0.1]], rtol=1e-6)


def test_a_kl_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="KL to the reference model is nan"):
        penalised_rewards(np.ones((1, 2)), np.array([[0.0, np.nan]]), 0.1)


def test_token_weights_of_lengths_10_and_100_by_hand() -> None:
    weights = partial(token_weights, lengths=np.array([10, 100]), num_sequences=2, max_new_tokens=128)
    np.testing.assert_allclose(weights("token"), [1 / 110, 1 / 110], rtol=1e-6)
    np.testing.assert_allclose(weights("sequence"), [0.05, 0.005], rtol=1e-6)
    np.testing.assert_allclose(weights("constant"), [1 / 256, 1 / 256], rtol=1e-6)


@pytest.mark.parametrize("mean", ["token", "sequence"])
@given(lengths=hnp.arrays(np.int64, st.integers(1, 20), elements=st.integers(1, 100)))
def test_weights_of_all_tokens_sum_to_one(mean: Mean, lengths: np.ndarray) -> None:
    weights = token_weights(mean, lengths, num_sequences=len(lengths), max_new_tokens=100)
    np.testing.assert_allclose((weights * lengths).sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("mean", ["token", "sequence", "constant"])
def test_a_masked_sequence_has_no_weight(mean: Mean) -> None:
    weights = token_weights(mean, np.array([3, 0]), num_sequences=2, max_new_tokens=4)
    assert weights[0] > 0
    assert weights[1] == 0


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (NO_STD, [2 / 3, -1 / 3, 0, -1 / 3]),
        (GROUP_STD, [1.1547, -0.57735, 0, -0.57735]),  # std of 1, 0, 0 is 0.57735
        (leave_one_out_advantages, [1.0, -0.5, 0, -0.5]),
        (maxrl_advantages, [2.0, -1.0, 0, -1.0]),
    ],
)
def test_a_failed_episode_is_in_no_mean(advantage, expected):
    rewards = np.array([[1.0, 0.0, np.nan, 0.0], [np.nan, 1.0, np.nan, np.nan], [np.nan] * 4], np.float32)
    lengths = np.where(np.isnan(rewards), 0, 7)
    found = advantage(rewards, lengths)
    assert found[0] == pytest.approx(expected, abs=1e-4)
    assert not found[1:].any()
    assert equal_reward_groups(rewards).tolist() == [False, True, True]


@pytest.mark.parametrize("advantage", ALL)
def test_a_failed_episode_changes_no_other_advantage(advantage):
    rewards, lengths = random_batch()
    found = advantage(np.insert(rewards, 2, np.nan, axis=1), np.insert(lengths, 2, 0, axis=1))
    assert np.allclose(np.delete(found, 2, axis=1), advantage(rewards, lengths), atol=1e-6)
    assert not found[:, 2].any()


def test_a_reward_that_is_not_finite_is_an_error_unless_it_failed():
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match="must be finite"):
            GROUP_STD(np.array([[1.0, wrong]]), np.ones((1, 2)))
    with pytest.raises(ValueError, match="must be finite"):
        GROUP_STD(np.array([[1.0, np.inf]]), np.array([[1, 0]]))


def test_a_turn_is_paid_for_what_comes_from_it_on():
    """Three conversations: of two turns, of one, and one that failed; 1 + 0.5 x 4 = 3."""
    found = turn_returns([[(1.0, 4.0), (2.0,), (np.nan,)]], gamma=0.5)
    assert found[0, 0].tolist() == [3.0, 4.0]
    assert found[0, 1, 0] == 2.0 and np.isnan(found[0, 1, 1]) and np.isnan(found[0, 2]).all()


def test_turns_are_compared_with_those_that_reached_them():
    """Turn 1: 3, 2, 1 about 2; turn 2: 4, 1 about 2.5; turn 3 was reached once."""
    returns = np.array([[[3.0, 4.0, 9.0], [2.0, 1.0, np.nan], [1.0, np.nan, np.nan]]])
    lengths = np.where(np.isnan(returns), 0, 5)
    assert turn_advantages(NO_STD, returns, lengths)[0].tolist() == [[1, 1.5, 0], [0, -1.5, 0], [-1, 0, 0]]
    scaled = turn_advantages(GROUP_STD, returns, lengths)[0]  # standard deviations: 1 and 2.1213
    assert scaled[:, 0] == pytest.approx([1, 0, -1], abs=1e-5)
    assert scaled[:2, 1] == pytest.approx([0.70711, -0.70711], abs=1e-5)
    assert turn_advantages(leave_one_out_advantages, returns, lengths)[0, :, 0].tolist() == [1.5, 0, -1.5]
