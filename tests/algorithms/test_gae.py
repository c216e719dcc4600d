"""A critic's part of PPO: generalised advantages and the value loss, by hand and against formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.algorithms.advantages import (
    VALUES,
    Std,
    TokenScores,
    final_rewards,
    gae,
    gae_advantages,
    value_returns,
)
from podium.algorithms.losses import value_loss

DRAWN, GIVEN = True, False


def scores_of(mask: np.ndarray, values: np.ndarray) -> TokenScores:
    """Tokens with a critic's values."""
    return TokenScores(mask=mask, sampled_logprobs=np.zeros(mask.shape, np.float32), scores={VALUES: values})


def random_tokens(seed: int) -> tuple[np.ndarray, TokenScores]:
    """Rewards and values of episodes with several drawn spans, one of them without any drawn token."""
    random = np.random.default_rng(seed)
    mask = random.uniform(size=(3, 4, 9)) < 0.6
    mask[1, 2] = False
    mask[0, 0] = True
    rewards = random.normal(size=(3, 4)).astype(np.float32)
    rewards[1, 2] = np.nan
    return rewards, scores_of(mask, random.normal(size=mask.shape).astype(np.float32))


def test_advantages_of_one_answer_by_hand():
    """Values 1, 2, 3 and a reward of 4 at the end, gamma 0.5, lambda 0.5."""
    mask = np.ones((1, 3), bool)
    advantages, returns = gae(np.array([[0.0, 0, 4]]), np.array([[1.0, 2, 3]]), mask, gamma=0.5, lam=0.5)
    last = 4 - 3
    second = 0.5 * 3 - 2 + 0.25 * last
    first = 0.5 * 2 - 1 + 0.25 * second
    np.testing.assert_allclose(advantages, [[first, second, last]], atol=1e-15)
    np.testing.assert_allclose(returns, [[first + 1, second + 2, 4]], atol=1e-15)
    np.testing.assert_allclose(advantages, [[-0.0625, -0.25, 1.0]], atol=1e-15)


def test_tokens_of_an_environment_are_skipped():
    """The value before a reply is followed by that of the next drawn token, however long the reply is."""
    mask = np.array([[DRAWN, GIVEN, GIVEN, DRAWN, DRAWN, GIVEN]])
    values = np.array([[1.0, 50, 60, 2, 3, 70]])
    rewards = np.array([[0.0, 0, 0, 0, 4, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    np.testing.assert_allclose(advantages, [[-0.0625, 0, 0, -0.25, 1.0, 0]], atol=1e-15)
    np.testing.assert_allclose(returns, [[0.9375, 0, 0, 1.75, 4, 0]], atol=1e-15)


def test_a_reward_is_at_the_last_drawn_token_and_an_episode_that_failed_has_none():
    mask = np.array([[[DRAWN, GIVEN, DRAWN, GIVEN], [GIVEN, GIVEN, GIVEN, GIVEN], [DRAWN, DRAWN, DRAWN, DRAWN]]])
    found = final_rewards(np.array([[2.0, np.nan, -1.0]]), mask)
    np.testing.assert_array_equal(found, [[[0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, -1]]])


def naive(rewards: np.ndarray, tokens: TokenScores, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns by the definition: the sum over later drawn tokens of (gamma lam)^l delta."""
    advantages, returns = np.zeros(tokens.mask.shape), np.zeros(tokens.mask.shape)
    for n, g in np.ndindex(rewards.shape):
        places = np.flatnonzero(tokens.mask[n, g])
        values = [*tokens.scores[VALUES][n, g, places].astype(np.float64).tolist(), 0.0]
        paid = [0.0] * (len(places) - 1) + [float(rewards[n, g])]
        deltas = [paid[t] + gamma * values[t + 1] - values[t] for t in range(len(places))]
        for t, place in enumerate(places):
            advantages[n, g, place] = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(places)))
            returns[n, g, place] = advantages[n, g, place] + values[t]
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0)])
def test_random_episodes_have_the_advantages_and_returns_of_the_definition(gamma: float, lam: float):
    rewards, tokens = random_tokens(seed=3)
    expected, returns = naive(rewards, tokens, gamma, lam)
    found = gae_advantages(
        rewards, tokens.mask.sum(axis=2), tokens=tokens, gamma=gamma, lam=lam, std="none", std_ddof=1, std_eps=1e-6
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(value_returns(rewards, tokens, gamma=gamma, lam=lam), returns, atol=1e-6)


def test_lambda_1_is_the_reward_minus_the_value():
    rewards, tokens = random_tokens(seed=4)
    found = value_returns(rewards, tokens, gamma=1.0, lam=1.0)
    expected = np.where(tokens.mask, np.nan_to_num(rewards)[:, :, None], 0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
def test_standardised_advantages_are_those_of_verl_and_openrlhf(ddof: int):
    """verl: (A - mean) / sqrt(var + 1e-8) with the unbiased variance; OpenRLHF: the biased one, at least 1e-8."""
    rewards, tokens = random_tokens(seed=5)
    plain, _ = naive(rewards, tokens, 1.0, 0.95)
    drawn = plain[tokens.mask]
    variance = np.sum((drawn - drawn.mean()) ** 2) / (len(drawn) - ddof)
    scale = np.sqrt(variance + 1e-8) if ddof else np.sqrt(max(variance, 1e-8))
    found = gae_advantages(
        rewards, tokens.mask.sum(axis=2), tokens=tokens, gamma=1.0, lam=0.95, std="batch", std_ddof=ddof, std_eps=1e-8
    )
    np.testing.assert_allclose(found, np.where(tokens.mask, (plain - drawn.mean()) / scale, 0), atol=1e-6)


@pytest.mark.parametrize("std", ["none", "batch"])
def test_a_batch_without_drawn_tokens_has_no_advantages(std: Std):
    tokens = scores_of(np.zeros((2, 2, 3), bool), np.ones((2, 2, 3), np.float32))
    lengths = np.zeros((2, 2), np.int64)
    found = gae_advantages(
        np.ones((2, 2)), lengths, tokens=tokens, gamma=1.0, lam=1.0, std=std, std_ddof=1, std_eps=1e-8
    )
    np.testing.assert_array_equal(found, np.zeros((2, 2, 3)))


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_value_loss_and_gradient_are_those_of_verl_and_openrlhf(clip: float | None):
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); its gradient is V - R, or 0 where the clip holds."""
    random = np.random.default_rng(6)
    values, old, returns = random.normal(size=(3, 5, 40)).astype(np.float32)
    wide, kept, target = (x.astype(np.float64) for x in (values, old, returns))
    error, gradient = (wide - target) ** 2, wide - target
    held = np.zeros(error.shape, bool)
    if clip is not None:
        bounded = (np.minimum(np.maximum(wide, kept - clip), kept + clip) - target) ** 2
        held = bounded > error
        error, gradient = np.maximum(error, bounded), np.where(held, 0.0, gradient)
    found = value_loss(jnp.asarray(values), jnp.asarray(old), jnp.asarray(returns), clip=clip)
    own = jax.grad(lambda v: value_loss(v, jnp.asarray(old), jnp.asarray(returns), clip=clip).values.sum())
    np.testing.assert_allclose(found.values, 0.5 * error, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(own(jnp.asarray(values)), gradient, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found.clipped, held)
    assert clip is None or 0 < held.sum() < held.size
